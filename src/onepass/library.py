"""The only file that touches torch.library: schemas, CPU and CUDA implementations, fakes.

An op is registered from its `Contract` and one ``kernel`` function that is handed checked arguments and allocated
outputs. torch's dispatcher is the backend registry; the fake implementation is the checker and allocator alone.
Plain eager calls skip the dispatcher, which with many arguments costs more than the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .contract import Contract
from .errors import Unsupported
from .memory import check_outputs

_library = torch.library.Library("onepass", "DEF")
_PLAIN = frozenset({Tensor, Parameter, type(None)})

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_tracing: Callable[[], object] = torch._C._get_tracing_state
_compiling: Callable[[], bool] = torch.compiler.is_compiling

Outputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Op:
    """A registered op; ``call`` it with every argument of the contract, then the caller's outputs (None: allocate)."""

    contract: Contract
    kernel: Callable[..., None]
    functional: Any
    out: Any

    def call(self, *arguments: Any) -> Outputs:
        """Check, allocate and run; through the dispatcher where a mode, transform, trace or compiler is watching."""
        contract = self.contract
        count = len(contract.outs)
        inputs, given = arguments[:-count], arguments[-count:]
        if _compiling() or _dispatch_modes() or not _plain(arguments[: len(contract.args)]) or not _plain(given) or _watched():
            return self._dispatch(inputs, given)
        outputs = contract.prepare(*arguments)
        if given != (None,) * count:
            _check_memory(contract, inputs, outputs)
        self.kernel(*inputs, *outputs)
        return outputs

    def _dispatch(self, inputs: tuple[Any, ...], given: Outputs) -> Outputs:
        if all(out is None for out in given):
            made = iter(self.functional(*inputs))
            present = self.contract.present(*inputs)
            return tuple(next(made) if here else None for here in present)
        outputs = self.contract.prepare(*inputs, *given)
        self.out(*inputs, *outputs)
        return outputs


def _plain(arguments: tuple[Any, ...]) -> bool:
    """Whether every tensor here is an ordinary one, no subclass (fake, distributed, ...); non-tensors are judged later."""
    for argument in arguments:
        kind = type(argument)
        if kind not in _PLAIN:
            if kind is list or kind is tuple:
                if argument and not _plain(tuple(argument)):
                    return False
            elif isinstance(argument, Tensor):
                return False
    return True


def _watched() -> bool:
    """Whether a function transform or a tracer must see the call."""
    return _transforms() is not None or _tracing() is not None


def _check_memory(contract: Contract, inputs: tuple[Any, ...], outputs: Outputs) -> None:
    named: dict[str, object] = {}
    for name, value in zip(contract.args, inputs, strict=False):
        named.update({name: value} if not contract.args[name].many else {f"{name}[{i}]": v for i, v in enumerate(value)})
    check_outputs(contract.name, named, {o.argument: t for o, t in zip(contract.outs.values(), outputs, strict=True)})


def backend(device: torch.device) -> str:
    """``"triton"`` or ``"cpu"`` for a tensor's device."""
    if device.type == "cuda":
        return "triton"
    if device.type == "cpu":
        return "cpu"
    raise Unsupported(f"onepass runs on cpu and cuda tensors, not on {device.type}")


def register(contract: Contract, kernel: Callable[..., None]) -> Op:
    """Define ``onepass::<name>`` and ``onepass::<name>_out`` from one contract and one kernel."""
    count = len(contract.outs)

    def run(*inputs: Any) -> list[Tensor]:
        outputs = contract.prepare(*inputs)
        kernel(*inputs, *outputs)
        return [out for out in outputs if out is not None]

    def fake(*inputs: Any) -> list[Tensor]:
        return [out for out in contract.prepare(*inputs) if out is not None]

    def run_out(*arguments: Any) -> None:
        inputs = arguments[:-count]
        outputs = contract.prepare(*arguments)
        _check_memory(contract, inputs, outputs)
        kernel(*inputs, *outputs)

    def fake_out(*arguments: Any) -> None:
        contract.prepare(*arguments)

    for schema, implementation, meta in ((contract.schema, run, fake), (contract.out_schema, run_out, fake_out)):
        name = schema.split("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        for key in ("CPU", "CUDA"):
            _library.impl(name, implementation, key)
        torch.library.register_fake(f"onepass::{name}", meta, lib=_library)
    ops = torch.ops.onepass
    return Op(contract, kernel, getattr(ops, contract.name).default, getattr(ops, f"{contract.name}_out").default)
