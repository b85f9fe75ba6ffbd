"""The forms of all ops that tests of bad input start from: calls of public functions, and those that torch dispatches."""

from __future__ import annotations

from itertools import chain

from onepass.core import op as registration
from tests.inputs import Build, Form, names, with_outputs
from tests.ops import each

PUBLIC: list[Form] = [*chain(*each("inputs", "FORMS"))]
_BUILDS: dict[str, Build] = {name: build for builds in each("inputs", "BY_CONTRACT") for name, build in builds.items()}


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
