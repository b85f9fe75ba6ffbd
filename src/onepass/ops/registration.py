"""The only file that touches torch.library: schemas, CPU and CUDA implementations, fakes.

An op is registered from its `Contract` and one ``kernel`` function that is handed checked arguments and allocated
outputs. torch's dispatcher is the backend registry; the fake implementation is the checker and allocator alone.
Plain eager calls skip the dispatcher, which with many arguments costs more than the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..contract.declaration import Contract
from ..contract.validation import refuse_gradient
from ..errors import Unsupported
from ..fastpath.call import compile_call
from ..fastpath.memory import check_outputs, lie_apart

_library = torch.library.Library("onepass", "DEF")
PLAIN = frozenset({Tensor, Parameter, type(None)})

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_tracing: Callable[[], object] = torch._C._get_tracing_state
_compiling: Callable[[], bool] = torch.compiler.is_compiling

Outputs = tuple[Tensor | None, ...]


_ops: list[Op] = []


def write_eager_entries() -> None:
    """Write every op's eager entry now. One that appears after a compiler has traced a call would make it trace again."""
    for op in _ops:
        op.write_eager_entry()


class Op:
    """A registered op; ``call`` it with every argument of the contract, then the caller's outputs (None: allocate)."""

    def __init__(self, contract: Contract, kernel: Callable[..., None]) -> None:
        self.contract = contract
        _ = contract.prepare  # made now: a compiler that traces a call must not meet the making
        self.functional, self.out = _define(contract, kernel)
        self._kernel = kernel
        self.call: Callable[..., Outputs] = self._first_call
        _ops.append(self)

    def _first_call(self, *arguments: Any) -> Outputs:
        """Write the eager entry when it is first needed, which keeps the import short; a compiler never needs it."""
        if _watched():
            count = len(self.contract.args) + len(self.contract.options)
            return self._dispatch(arguments[:count], arguments[count:])
        self.write_eager_entry()
        return self.call(*arguments)

    def write_eager_entry(self) -> None:
        """Make ``call`` the function that plain eager calls take, if it is not yet."""
        if self.call == self._first_call:
            self.call = compile_call(
                self.contract,
                self._kernel,
                watched=_watched,
                special=_special,
                dispatch=self._dispatch,
                memory=self._check_memory,
            )

    def _dispatch(self, inputs: tuple[Any, ...], given: Outputs) -> Outputs:
        """The same through torch's dispatcher, for whatever is watching there."""
        for name, value in zip(self.contract.args, inputs, strict=False):
            if isinstance(value, Tensor) and value.device.type not in ("cpu", "cuda", "meta"):
                raise Unsupported(
                    f"{self.contract.name}: `{name}` is on {value.device}; there are kernels for cpu and cuda"
                )
        if self.functional is not None and all(out is None for out in given):
            made = iter(self.functional(*inputs))
            present = self.contract.present(*inputs)
            return tuple(next(made) if here else None for here in present)
        outputs = self.contract.prepare(*inputs, *given)
        self.out(*inputs, *outputs)
        return outputs

    def _check_memory(self, inputs: tuple[Any, ...], outputs: Outputs) -> None:
        check_memory(self.contract, inputs, outputs)


def check_memory(contract: Contract, inputs: tuple[Any, ...], outputs: Outputs) -> None:
    """Refuse outputs of the caller's that overlap an input in part, or one another."""
    if lie_apart((*inputs, *outputs)):
        return
    named: list[tuple[str, Tensor]] = []
    written = [(o.argument, t) for o, t in zip(contract.outs.values(), outputs, strict=True) if t is not None]
    for (name, arg), value in zip(contract.args.items(), inputs, strict=False):
        if isinstance(value, Tensor):
            (written if arg.mutable else named).append((name, value))
        elif value:
            named += [(name, item) for item in value]
    check_outputs(contract.name, named, written, contract.replaces)


def plain(*values: object) -> bool:
    """Whether a call with these tensors is an eager one on a device that has kernels: addresses can be looked at."""
    return not _watched() and not _special(*values)


def _watched() -> bool:
    """Whether a dispatch mode, function transform, tracer or compiler must see the call."""
    # the compiler first: it knows this answer and cannot look into the others
    return (
        _compiling()
        or bool(_dispatch_modes())
        or _transforms() is not None
        or _tracing() is not None
        or forward_ad._current_level >= 0
    )


def _special(*values: object) -> bool:
    """Whether one of these is a tensor of a subclass (fake, distributed, ...) or on a device that has no kernels."""
    for value in values:
        if isinstance(value, Tensor):
            if type(value) not in PLAIN or not (value.is_cpu or value.is_cuda):
                return True
        elif isinstance(value, (list, tuple)) and _special(*value):
            return True
    return False


def _refuse_gradients(contract: Contract, arguments: tuple[Any, ...]) -> None:
    """Refuse what would need a derivative, backward or forward, of this op."""
    names = (*contract.args, *contract.options, *(out.argument for out in contract.outs.values()))
    for name, value in zip(names, arguments, strict=False):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            if tensor.requires_grad and torch.is_grad_enabled():
                refuse_gradient(contract, name)
            level = forward_ad._current_level
            if level >= 0 and forward_ad.unpack_dual(tensor, level=level).tangent is not None:
                refuse_gradient(contract, name, "a tensor with a tangent")


def _above_autograd(contract: Contract, name: str) -> Callable[..., Any]:
    """The dispatcher's autograd step of ``onepass::<name>``: it computes no gradient, so it lets none be lost."""

    def step(keys: Any, *arguments: Any) -> Any:
        _refuse_gradients(contract, arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.onepass, name).default.redispatch(
                keys & torch._C._after_autograd_keyset, *arguments
            )

    return step


def _define(contract: Contract, kernel: Callable[..., None]) -> tuple[Any, Any]:
    """Define ``onepass::<name>`` and ``onepass::<name>_out`` (in place: the latter, as ``<name>``) from one contract and kernel."""
    count = len(contract.outs)

    def run(*inputs: Any) -> list[Tensor]:
        outputs = contract.prepare(*inputs)
        kernel({}, *inputs, *outputs)
        return [out for out in outputs if out is not None]

    def fake(*inputs: Any) -> list[Tensor]:
        return [out for out in contract.prepare(*inputs) if out is not None]

    def run_out(*arguments: Any) -> None:
        inputs = arguments[:-count]
        outputs = contract.prepare(*arguments)
        check_memory(contract, inputs, outputs)
        kernel({}, *inputs, *outputs)

    def fake_out(*arguments: Any) -> None:
        contract.prepare(*arguments)

    forms: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [(contract.out_schema, run_out, fake_out)]
    if not contract.in_place:
        forms.append((contract.schema, run, fake))
    for schema, implementation, meta in forms:
        name = schema.split("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        for key in ("CPU", "CUDA"):
            _library.impl(name, implementation, key)
        _library.impl(name, _above_autograd(contract, name), "Autograd", with_keyset=True)
        torch.library.register_fake(f"onepass::{name}", meta, lib=_library)
    ops = torch.ops.onepass
    if contract.in_place:
        return None, getattr(ops, contract.name).default
    return getattr(ops, contract.name).default, getattr(ops, f"{contract.name}_out").default
