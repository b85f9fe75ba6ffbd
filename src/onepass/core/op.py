"""Registers ops with torch.library: schemas, CPU and CUDA implementations, fakes.

An op is registered from its `Contract` and a function ``kernel(spec_cache, arguments)``, which
receives validated arguments and allocated outputs as the contract's named tuple. ``spec_cache``
belongs to one combination of options; kernels keep the specs of such calls there. The fake
implementation is the generated validation and allocation alone. Plain eager calls bypass the
dispatcher, which with many arguments costs more than the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ..errors import Unsupported
from . import call, native
from . import check as validation
from .check import NEGATED, refuse_gradient, validation_of
from .contract import Contract
from .memory import check_outputs, lie_apart, may_write

_library = torch.library.Library("onepass", "DEF")
PLAIN = frozenset({Tensor, Parameter, type(None)})

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_tracing: Callable[[], object] = torch._C._get_tracing_state
_compiling: Callable[[], bool] = torch.compiler.is_compiling

Outputs = tuple[Tensor | None, ...]
Kernel = Callable[[dict[Any, Any], Any], None]

_ops: Final[list[Op]] = []


def write_eager_entries() -> None:
    """Generate every op's eager entry now. Generating one after a compiler has traced a call would cause a retrace."""
    for op in _ops:
        op.write_eager_entry()


def generated_sources(op: str) -> dict[str, str]:
    """The code generated for a public op, by title: validation and eager calls of each of its forms."""
    write_eager_entries()
    found: dict[str, str] = {}
    for name, contract in validation.contracts.items():
        if contract.public_name == op:
            found[f"validation of {name}"] = validation.generated_source(name)
            found[f"eager call of {name}"] = call.generated_source(name)
    return {title: source for title, source in found.items() if source}


class Op:
    """A registered op; ``call`` takes every argument of the contract, then the caller's outputs (None: allocate)."""

    def __init__(self, contract: Contract, kernel: Kernel) -> None:
        self.contract = contract
        # generated now: a compiler that traces a call must not trace the generator
        self._prepare, self._present = validation_of(contract)
        self.functional, self.out = _define(contract, kernel)
        self._kernel = kernel
        self.table: Any = None
        """The calls that are repeated in C; None before the first call, or if Python makes them all."""
        self.repeat: Callable[..., Any] | None = None
        """The table's `repeat`: with the arguments of ``call``, the outputs if the call is known, else None. Functions
        that must cost little try it first, unless a compiler traces them."""
        self.call: Callable[..., Outputs] = self._first_call
        _ops.append(self)

    def _first_call(self, *arguments: Any) -> Outputs:
        """Generate the eager entry when it is first needed, which keeps the import fast; compilers never need it."""
        if _watched():
            count = len(self.contract.args) + len(self.contract.options)
            return self._dispatch(arguments[:count], arguments[count:])
        self.write_eager_entry()
        return self.call(*arguments)

    def write_eager_entry(self) -> None:
        """Generate the function for plain eager calls and assign it to ``call``, once."""
        if self.call == self._first_call:
            self.table = native.table(self.contract)
            self.repeat = None if self.table is None else self.table.repeat
            self.call = call.compile_call(
                self.contract,
                self._kernel,
                watched=_watched,
                special=_special,
                dispatch=self._dispatch,
                memory=partial(check_memory, self.contract),
                table=self.table,
            )

    def _dispatch(self, inputs: tuple[Any, ...], given: Outputs) -> Outputs:
        """Make the call through torch's dispatcher, so that modes, tracers and transforms see it."""
        for name, value in zip(self.contract.args, inputs, strict=False):
            if isinstance(value, Tensor):
                _refuse_distributed(self.contract, name, value)
                if value.device.type not in ("cpu", "cuda", "meta"):
                    raise Unsupported(
                        f"{self.contract.public_name}: `{name}` is on {value.device}; only cpu and cuda have kernels"
                    )
        present = self._present(*inputs)
        if self.functional is not None and all(out is None for out in given):
            made, count = self.functional(*inputs), 0
            results: list[Tensor | None] = []
            for here in present:  # a tracer's results have no length
                results.append(made[count] if here else None)
                count += bool(here)
            return tuple(results)
        if any(stands_in(value) for value in (*inputs, *given)):
            for out, here, tensor in zip(self.contract.out_names, present, given, strict=True):
                if here and tensor is None:
                    self.contract.fail(out, "be given if another output is, while torch.fx traces", "None")
            outputs = given
        else:
            outputs = self._prepare(*inputs, *given)
        self.out(*inputs, *outputs)
        return outputs


def check_memory(contract: Contract, inputs: tuple[Any, ...], outputs: Outputs) -> None:
    """Reject outputs of the caller that overlap one another or partially overlap an input."""
    read: list[Tensor] = []
    written = [t for t in outputs if t is not None]
    for arg, value in zip(contract.args.values(), inputs, strict=False):
        if isinstance(value, Tensor):
            (written if arg.mutable else read).append(value)
        elif value:
            read += value
    if may_write(written) and lie_apart(read, written):
        return
    named: list[tuple[str, Tensor]] = []
    by_name = [(o.argument, t) for o, t in zip(contract.outs.values(), outputs, strict=True) if t is not None]
    for (name, arg), value in zip(contract.args.items(), inputs, strict=False):
        if isinstance(value, Tensor):
            (by_name if arg.mutable else named).append((name, value))
        elif value:
            named += [(name, item) for item in value]
    for name, tensor in by_name:
        if not may_write([tensor]):
            ways = "call under torch.inference_mode(), or clone it outside"
            contract.fail(name, f"not be an inference tensor outside inference mode ({ways})", "one")
    check_outputs(contract.public_name, named, by_name, contract.replaces)


def plain(*values: object) -> bool:
    """Whether a call with these tensors is a plain eager one on a supported device, so that memory can be inspected."""
    return not _watched() and not _special(*values)


def _watched() -> bool:
    """Whether a dispatch mode, function transform, tracer or compiler must see the call."""
    # first, because a compiler can trace this test but not the others
    return (
        _compiling()
        or bool(_dispatch_modes())
        or _transforms() is not None
        or _tracing() is not None
        or forward_ad._current_level >= 0
    )


def _special(*values: object) -> bool:
    """Whether one of these is a tensor subclass (fake, distributed, ...), on a device without kernels, or a tracer's."""
    for value in values:
        if isinstance(value, Tensor):
            if type(value) not in PLAIN or not (value.is_cpu or value.is_cuda):
                return True
        elif isinstance(value, (list, tuple)):
            if _special(*value):
                return True
        elif stands_in(value):
            return True
    return False


def stands_in(value: object) -> bool:
    """Whether this stands in for a tensor while torch.fx traces: it is none, but receives torch's functions."""
    if _compiling():  # torch.compile has tensors, and that of torch 2.11 cannot trace what follows
        return False
    return hasattr(type(value), "__torch_function__") and not isinstance(value, Tensor)


def _refuse_distributed(contract: Contract, name: str, tensor: Tensor) -> None:
    """Reject a DTensor: torch knows no rule by which these ops are sharded."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        raise Unsupported(
            f"{contract.public_name}: `{name}` is a DTensor; onepass.dist norms rows that are sharded, and "
            f"{name}.to_local() is this rank's part"
        )


def _named(contract: Contract, arguments: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a call, those of lists too, with the names of their arguments."""
    names = (*contract.args, *contract.options, *contract.out_names)
    for name, value in zip(names, arguments, strict=False):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor):
                yield name, tensor


def _refuse_gradients(contract: Contract, arguments: tuple[Any, ...]) -> None:
    """Reject calls that would need a derivative, backward or forward, of this op."""
    for name, tensor in _named(contract, arguments):
        _refuse_distributed(contract, name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            refuse_gradient(contract, name)
        level = forward_ad._current_level
        if level >= 0 and forward_ad.unpack_dual(tensor, level=level).tangent is not None:
            refuse_gradient(contract, name, "a tensor with a tangent")


def _refuse_negated(contract: Contract, *arguments: Any) -> NoReturn:
    """Reject negated views where tensors are written: torch's own step for them does not know optional outputs."""
    contract.fail(next(name for name, tensor in _named(contract, arguments) if tensor.is_neg()), *NEGATED)


def _refuse_vmap(contract: Contract, *arguments: Any) -> NoReturn:
    raise Unsupported(
        f"{contract.public_name}: torch.vmap is not supported; leading dimensions are batch dimensions already, "
        "so pass the whole batch"
    )


def _above_mutation(contract: Contract, name: str) -> Callable[..., Any]:
    """The step of ``onepass::<name>`` that tells autograd which tensors were written."""
    mutable = [i for i, arg in enumerate(contract.args.values()) if arg.mutable]
    first = len(contract.args) + len(contract.options)
    mutable += range(first, first + len(contract.outs))

    def step(keys: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            getattr(torch.ops.onepass, name).default.redispatch(
                keys & torch._C._after_ADInplaceOrView_keyset, *arguments
            )
        increment_version([arguments[i] for i in mutable if arguments[i] is not None])

    return step


def _above_autograd(contract: Contract, name: str) -> Callable[..., Any]:
    """The autograd step of ``onepass::<name>``: it computes no gradient, so it rejects calls that need one."""

    def step(keys: Any, *arguments: Any) -> Any:
        _refuse_gradients(contract, arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.onepass, name).default.redispatch(
                keys & torch._C._after_autograd_keyset, *arguments
            )

    return step


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an op of onepass that has no contract: an internal one, whose caller looks at its arguments."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"onepass::{name}", fake, lib=_library)


def _define(contract: Contract, kernel: Kernel) -> tuple[Any, Any]:
    """Define ``onepass::<name>`` and ``onepass::<name>_out``; for in-place ops only the latter, as ``<name>``."""
    prepare, arguments_of, count = validation_of(contract).prepare, contract.arguments, len(contract.outs)

    def run(*inputs: Any) -> list[Tensor]:
        outputs = prepare(*inputs)
        kernel({}, arguments_of(*inputs, *outputs))
        return [out for out in outputs if out is not None]

    def fake(*inputs: Any) -> list[Tensor]:
        return [out for out in prepare(*inputs) if out is not None]

    def run_out(*arguments: Any) -> None:
        inputs = arguments[:-count]
        outputs = prepare(*arguments)
        check_memory(contract, inputs, outputs)
        kernel({}, arguments_of(*inputs, *outputs))

    def fake_out(*arguments: Any) -> None:
        prepare(*arguments)

    forms: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [(contract.out_schema, run_out, fake_out)]
    if not contract.in_place:
        forms.append((contract.schema, run, fake))
    defined: list[Any] = []
    for schema, implementation, meta in forms:
        name = schema.split("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        outs = implementation is run_out
        for key in ("CPU", "CUDA"):
            _library.impl(name, contract.completed(implementation, outs), key)
        _library.impl(name, _above_autograd(contract, name), "Autograd", with_keyset=True)
        _library.impl(name, partial(_refuse_vmap, contract), "FuncTorchBatched")
        if implementation is run_out:
            step = contract.completed(_above_mutation(contract, name), outs, first=1)
            _library.impl(name, partial(_refuse_negated, contract), "Negative")
            _library.impl(name, step, "ADInplaceOrView", with_keyset=True)
        torch.library.register_fake(f"onepass::{name}", contract.completed(meta, outs), lib=_library)
        defined.append(getattr(torch.ops.onepass, name).default)
    return (None, defined[0]) if contract.in_place else (defined[1], defined[0])
