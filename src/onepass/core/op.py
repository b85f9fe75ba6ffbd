"""An op: how an eager call goes, and what torch's dispatcher knows of it.

An `Op` consists of a `Contract` and a function ``kernel(specs, arguments)``, which receives validated
arguments and allocated outputs as the contract's named tuple. ``specs`` is a dictionary that belongs to
one combination of options; kernels keep the specs of such calls there. `Op.__call__` is the whole way
of a plain eager call: it bypasses the dispatcher, which with many arguments costs more than the kernel.
For everything else (compilers, modes, tracers, transforms) the op is registered with torch.library; its
fake implementation is the generated validation and allocation alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ..errors import Unsupported
from . import check, native, recording
from .backend import PACKAGE
from .check import NEGATED, refuse_gradient, validation_of
from .contract import Contract, describe, plain_number
from .memory import check_outputs, lie_apart, may_write

if TYPE_CHECKING:
    from ._native import Table

NAMESPACE: Final = PACKAGE.replace(".", "_")
"""Where ops are registered: ``torch.ops.onepass``. Each copy of the package that Hugging Face kernels loads has its own."""
_library = torch.library.Library(NAMESPACE, "DEF")
PLAIN = frozenset({Tensor, Parameter, type(None)})
MAX_REMEMBERED: Final = 4096
"""Combinations of options for which an op keeps specs."""

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_tracing: Callable[[], object] = torch._C._get_tracing_state
_compiling: Callable[[], bool] = torch.compiler.is_compiling

Outputs = tuple[Tensor | None, ...]
Kernel = Callable[[dict[Any, Any], Any], None]

ops: Final[list[Op]] = []
"""All registered ops."""


def generated_sources(op: str) -> dict[str, str]:
    """The validation code generated for a public op, by title: of each of its forms, for compilers and for eager calls."""
    sources: dict[str, str] = {}
    for name, contract in check.contracts.items():
        if contract.public_name == op:
            check.eager_validation_of(contract)
            sources |= check.generated_sources(name)
    return sources


class Op:
    """A registered op, called with every argument of the contract and then the caller's outputs (None: allocate)."""

    def __init__(self, contract: Contract, kernel: Kernel) -> None:
        self.contract = contract
        self._kernel = kernel
        # generated now: a compiler that traces a call must not trace the generator
        self._prepare, self._present = validation_of(contract)
        self._tensors = len(contract.args)
        self._inputs = len(contract.args) + len(contract.options)
        self._lists = [(i, name) for i, (name, arg) in enumerate(contract.args.items()) if arg.many]
        floats = [option.type == "float" for option in contract.options.values()]
        self._floats = [i for i, is_float in enumerate(floats, start=len(contract.args)) if is_float]
        self._mutable = [i for i, arg in enumerate(contract.args.values()) if arg.mutable]
        self.specs: dict[Hashable, dict[Any, Any]] = {}
        """What kernels keep for each combination of options; at most `MAX_REMEMBERED`."""
        self._loaded = False
        self.table: Table | None = None
        """The calls that are repeated in C; None before the first call, or if Python makes them all."""
        self.repeat: Callable[..., Any] = self._first_repeat
        """With the arguments of a call: its outputs if C makes it, else None. Functions that must cost little try this
        before `__call__`, unless a compiler traces them."""
        self.functional, self.out = self._define()

    def __call__(self, *arguments: Any) -> Outputs:
        """Make a call, in C if it is like an earlier one, through torch's dispatcher if something must see it."""
        answer: object = None
        # a compiler can trace the first test alone
        if not _compiling() and (table := self.table or self.load_table()) is not None:
            answer = table.call(*arguments)
            if type(answer) is tuple:
                return answer
        try:
            return self._call(arguments, answer)
        except RuntimeError:
            self.contract.blame(**dict(_named_arguments(self.contract, arguments)))
            check.eager_validation_of(self.contract).check_options(*arguments[self._tensors : self._inputs])
            raise
        except (AttributeError, TypeError):  # a value is not what the code assumed
            self._prepare(*arguments)
            raise

    def _call(self, arguments: tuple[Any, ...], answer: object) -> Outputs:
        """Make a call that C did not, as an event of torch's profiler if that is active."""
        for i, name in self._lists:
            if not isinstance(arguments[i], (list, tuple)):
                self.contract.fail(name, "be a list of tensors", describe(arguments[i]))
        inputs, outs = arguments[: self._inputs], arguments[self._inputs :]
        if _watched() or _special(*inputs[: self._tensors], *outs):
            return self._dispatch(inputs, outs)
        for i in self._floats:
            if type(arguments[i]) is not float and (number := plain_number(arguments[i])) is not arguments[i]:
                return self(*arguments[:i], number, *arguments[i + 1 :])
        if not profiler._is_profiler_enabled:
            return self._run(arguments, answer)
        with recording.Event(f"onepass::{self.contract.name}", [t for t in arguments if isinstance(t, Tensor)]):
            return self._run(arguments, answer)

    def _run(self, arguments: tuple[Any, ...], answer: object) -> Outputs:
        """Validate, allocate and launch a plain eager call; record it for the table if its answer was to do so."""
        inputs, outs = arguments[: self._inputs], arguments[self._inputs :]
        tensors, options = inputs[: self._tensors], inputs[self._tensors :]
        written = [t for t in (*[inputs[i] for i in self._mutable], *outs) if t is not None]
        validation = check.eager_validation_of(self.contract)
        outputs = validation.prepare(*arguments)
        if written:
            self._check_memory(inputs, outputs)
        specs = self.specs.get(options)
        if specs is None:
            if len(self.specs) >= MAX_REMEMBERED:
                self.specs.clear()
            specs = self.specs[options] = {}
        run = partial(self._kernel, specs, self.contract.arguments(*inputs, *outputs))
        if self.table is not None and answer == native.RECORD:
            native.remember(self.table, run, arguments, (*tensors, *outs), (*tensors, *outputs), validation.models)
        else:
            run()
        increment_version(written)
        return outputs

    def _check_memory(self, inputs: Sequence[Any], outputs: Outputs) -> None:
        check_memory(self.contract, inputs, outputs)

    def load_table(self) -> Table | None:
        """Load the C extension when an op is first called, which keeps the import fast."""
        if not self._loaded:
            # atomic: threads that get here together take the same table, and no lock can be held across a fork
            table: Table | None = self.__dict__.setdefault("_own_table", native.table(self.contract))
            self.table = table
            self.repeat = _nothing if table is None else table.repeat
            self._loaded = True
        return self.table

    def _first_repeat(self, *arguments: object) -> Any:
        self.load_table()
        return self.repeat(*arguments)

    def _dispatch(self, inputs: tuple[Any, ...], outs: Outputs) -> Outputs:
        """Make the call through torch's dispatcher, so that modes, tracers and transforms see it."""
        for name, value in zip(self.contract.args, inputs, strict=False):
            if isinstance(value, Tensor):
                _refuse_distributed(self.contract, name, value)
                if value.device.type not in ("cpu", "cuda", "meta"):
                    raise Unsupported(
                        f"{self.contract.public_name}: `{name}` is on {value.device}; only cpu and cuda have kernels"
                    )
        present = self._present(*inputs)
        if self.functional is not None and all(out is None for out in outs):
            results, count = self.functional(*inputs), 0
            outputs: list[Tensor | None] = []
            for here in present:  # a tracer's results have no length
                outputs.append(results[count] if here else None)
                count += bool(here)
            return tuple(outputs)
        if any(stands_in(value) for value in (*inputs, *outs)):
            for out, here, tensor in zip(self.contract.out_names, present, outs, strict=True):
                if here and tensor is None:
                    self.contract.fail(out, "be given if another output is, while torch.fx traces", "None")
            written = outs
        else:
            written = self._prepare(*inputs, *outs)
        self.out(*inputs, *written)
        return written

    def _define(self) -> tuple[Any, Any]:
        """Register the op with torch's dispatcher: the function that allocates (not of in-place ops) and the one that writes."""
        ops.append(self)
        return _define(self.contract, self._kernel)


def _nothing(*arguments: object) -> None:
    """The answer to every call where Python makes them all."""


def _named_arguments(contract: Contract, arguments: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The tensor arguments and outputs of a call, with their names."""
    first = len(contract.args) + len(contract.options)
    yield from zip(contract.args, arguments, strict=False)
    yield from zip(contract.out_names, arguments[first:], strict=True)


def check_memory(contract: Contract, inputs: Sequence[Any], outputs: Outputs) -> None:
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
        if value is None:
            continue
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


def _named(contract: Contract, arguments: Sequence[object]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a call, those of lists too, with the names of their arguments."""
    names = (*contract.args, *contract.options, *contract.out_names)
    for name, value in zip(names, arguments, strict=False):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor):
                yield name, tensor


def _refuse_gradients(contract: Contract, arguments: Sequence[object]) -> None:
    """Reject calls that would need a derivative, backward or forward, of this op."""
    for name, tensor in _named(contract, arguments):
        _refuse_distributed(contract, name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            refuse_gradient(contract, name)
        level = forward_ad._current_level
        if level >= 0 and forward_ad.unpack_dual(tensor, level=level).tangent is not None:
            refuse_gradient(contract, name, "a tensor with a tangent")


def _refuse_negated(contract: Contract, *arguments: object) -> NoReturn:
    """Reject negated views where tensors are written: torch's own step for them does not know optional outputs."""
    contract.fail(next(name for name, tensor in _named(contract, arguments) if tensor.is_neg()), *NEGATED)


def _refuse_vmap(contract: Contract, *arguments: object) -> NoReturn:
    raise Unsupported(
        f"{contract.public_name}: torch.vmap is not supported; leading dimensions are batch dimensions already, "
        "so pass the whole batch"
    )


def _above_mutation(contract: Contract, name: str) -> Callable[..., Any]:
    """The step of ``onepass::<name>`` that tells autograd which tensors were written."""
    mutable = [i for i, arg in enumerate(contract.args.values()) if arg.mutable]
    first = len(contract.args) + len(contract.options)
    mutable += range(first, first + len(contract.outs))

    def step(keys: torch._C.DispatchKeySet, *arguments: Tensor | None) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            getattr(getattr(torch.ops, NAMESPACE), name).default.redispatch(
                keys & torch._C._after_ADInplaceOrView_keyset, *arguments
            )
        increment_version([tensor for i in mutable if (tensor := arguments[i]) is not None])

    return step


def _above_autograd(contract: Contract, name: str) -> Callable[..., Any]:
    """The autograd step of ``onepass::<name>``: it computes no gradient, so it rejects calls that need one."""

    def step(keys: torch._C.DispatchKeySet, *arguments: object) -> object:
        _refuse_gradients(contract, arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(getattr(torch.ops, NAMESPACE), name).default.redispatch(
                keys & torch._C._after_autograd_keyset, *arguments
            )

    return step


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Define an op of onepass; returns its name. One without a contract is internal, and its caller looks at its arguments."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return name


def _define(contract: Contract, kernel: Kernel) -> tuple[Any, Any]:
    """Define ``onepass::<name>`` and ``onepass::<name>_out``; for in-place ops only the latter, as ``<name>``."""
    prepare, arguments_of, count = validation_of(contract).prepare, contract.arguments, len(contract.outs)

    def run(*inputs: object) -> list[Tensor]:
        outputs = prepare(*inputs)
        kernel({}, arguments_of(*inputs, *outputs))
        return [out for out in outputs if out is not None]

    def fake(*inputs: object) -> list[Tensor]:
        return [out for out in prepare(*inputs) if out is not None]

    def run_out(*arguments: object) -> None:
        inputs = arguments[:-count]
        outputs = prepare(*arguments)
        check_memory(contract, inputs, outputs)
        kernel({}, arguments_of(*inputs, *outputs))

    def fake_out(*arguments: object) -> None:
        prepare(*arguments)

    forms: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [(contract.out_schema, run_out, fake_out)]
    if not contract.in_place:
        forms.append((contract.schema, run, fake))
    defined: list[Any] = []
    for schema, implementation, meta in forms:
        outs = implementation is run_out
        name = define(schema, contract.completed(implementation, outs), contract.completed(meta, outs))
        _library.impl(name, _above_autograd(contract, name), "Autograd", with_keyset=True)
        _library.impl(name, partial(_refuse_vmap, contract), "FuncTorchBatched")
        if outs:
            step = contract.completed(_above_mutation(contract, name), outs, first=1)
            _library.impl(name, partial(_refuse_negated, contract), "Negative")
            _library.impl(name, step, "ADInplaceOrView", with_keyset=True)
        defined.append(getattr(getattr(torch.ops, NAMESPACE), name).default)
    return (None, defined[0]) if contract.in_place else (defined[1], defined[0])
