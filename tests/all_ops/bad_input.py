"""The forms of all ops that tests of bad input start from: calls of public functions, and those that torch dispatches."""

from __future__ import annotations

from onepass.core import op as registration
from tests.gemv_norm import inputs as gemv_norm
from tests.inputs import Build, Form, names, with_outputs
from tests.linear import inputs as linear
from tests.mla_cache import inputs as mla_cache
from tests.qk_cache import inputs as qk_cache
from tests.qk_norm import inputs as qk_norm
from tests.rms_norm import inputs as rms_norm

PUBLIC: list[Form] = [
    *rms_norm.FORMS,
    *gemv_norm.FORMS,
    *linear.FORMS,
    *qk_norm.FORMS,
    *mla_cache.FORMS,
    *qk_cache.FORMS,
]
_BUILDS: dict[str, Build] = {
    **rms_norm.BY_CONTRACT,
    **gemv_norm.BY_CONTRACT,
    **linear.BY_CONTRACT,
    **qk_norm.BY_CONTRACT,
    **mla_cache.BY_CONTRACT,
    **qk_cache.BY_CONTRACT,
}


def _dispatched(op: registration.Op) -> Form:
    contract, build = op.contract, _BUILDS[op.contract.name]
    return Form(
        f"torch.ops.{contract.name}",
        contract.public_name,
        contract,
        lambda device: with_outputs(contract, build(device)),
        lambda values: op.out(*[values[name] for name in names(contract)]),
        fixed=tuple(contract.options),
        tensors_only=True,
        volatile=("trace", "units"),
    )


DISPATCHED: list[Form] = [_dispatched(op) for op in registration.ops]
