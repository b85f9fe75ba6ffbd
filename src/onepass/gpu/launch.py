"""Launches the kernels of all ops: turns the parameters of a validated call into a kernel's arguments and runs it on a
GPU or in Triton's interpreter.

An op declares its parameters once, as a NamedTuple whose fields are annotated with their kinds: `Pointer`, `Matrix`,
`I32`, `I64`, `F32`, or a NamedTuple of these, or of a call's tensors. Its function ``pack`` fills them. A kernel takes the
parameters that it names. Its other arguments are constants. The declaration and the constants determine a build's
signature.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import methodcaller
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from triton import JITFunction

from ..core.backend import SomeCall
from ..core.layout import Strides
from . import compile as compiler
from .chip import INTERPRETER, Chip, current_chip
from .compile import POINTERS, Build, Kinds, Launcher

SHORT_NAMES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float8_e8m0fnu: "e8m0",
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2: "e5m2",
    torch.uint8: "u8",
    torch.int8: "int8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint32: "u32",
}
"""Dtypes in the names of builds."""
_SMALLEST_NORMAL: Final = torch.finfo(torch.float32).tiny
_DESCRIPTOR: Final = "tensordesc"

chips: Final[dict[int, Chip]] = {}
"""The chip of each device used so far."""


# --- parameters ------------------------------------------------------------------------------------------------------

Pointer = Annotated[Tensor | None, "*"]
"""An address. Its type follows from the dtype that a build gives the tensor."""
Matrix = Annotated[Tensor, "[]"]
"""A descriptor of a matrix, from which the copy engine loads blocks."""
I32 = Annotated[int, "i32"]
I64 = Annotated[int, "i64"]
F32 = Annotated[float, "fp32"]


class Sizes(NamedTuple):
    """Annotates a NamedTuple of numbers: the first ``sizes`` are of 32 bits, the others strides of 64."""

    sizes: int


class Rows(NamedTuple):
    """A tensor of rows: its address and the strides of up to three leading dimensions."""

    at: Pointer
    s0: I64
    s1: I64
    s2: I64


ABSENT: Final = Rows(None, 0, 0, 0)
"""The parameter for a tensor that a call does not have."""


def rows(tensor: Tensor | None, strides: Strides) -> Rows:
    """A tensor of rows as a parameter."""
    return ABSENT if tensor is None else Rows(tensor, *strides)


@cache
def kinds_of(annotation: Any) -> Any:
    """The `Kinds` of a parameter, nested like it.

    ``Annotated[tuple[X, ...], n]`` is n parameters X. A tensor without a mark is a `Pointer`.
    """
    if annotation in (Tensor, Tensor | None):
        return "*"
    if get_origin(annotation) is Annotated:
        base, mark = get_args(annotation)
        if isinstance(mark, Sizes):
            return _like(base, ["i32"] * mark.sizes + ["i64"] * (len(base._fields) - mark.sizes))
        if isinstance(mark, int):
            return (kinds_of(get_args(base)[0]),) * mark
        return str(mark)
    hints = get_type_hints(annotation, include_extras=True)
    return _like(annotation, [kinds_of(hints[name]) for name in annotation._fields])


def _like(kind: type, items: Sequence[Any]) -> Any:
    """A tuple of a class: a NamedTuple, or a plain one."""
    return kind._make(items) if hasattr(kind, "_make") else tuple(items)


def _tree(value: Kinds, change: Callable[[str, str], str], name: str) -> Kinds:
    """``value`` with every leaf changed."""
    if isinstance(value, str):
        return change(name, value)
    changed: Kinds = _like(type(value), [_tree(item, change, each) for each, item in _items(name, value)])
    return changed


def _items(name: str, value: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The items of a tuple with their names."""
    fields: Sequence[object] = getattr(value, "_fields", range(len(value)))
    return ((f"{name}.{field}", item) for field, item in zip(fields, value, strict=True))


def make_build(
    parameters: type[tuple[object, ...]],
    name: str,
    kernel: JITFunction,
    chip: Chip,
    *,
    dtypes: Mapping[str, torch.dtype | None],
    constants: Mapping[str, object],
    unused: Mapping[str, float | None],
    divisible: Mapping[str, int],
    warps: int,
    registers: int = 0,
    blocks: Mapping[str, tuple[int, int]] | None = None,
) -> Build:
    """The `Build` of a configuration of a kernel that takes ``parameters``.

    ``dtypes`` are those of pointers, None for an absent tensor, whose strides are then 0. ``unused`` leaves are constants
    with the given values. ``blocks`` are the sizes that descriptors load. Products are never contracted into sums,
    because contraction would depend on the layout.
    """
    fixed: dict[str, object] = {}

    def kind(leaf: str, entry: str) -> str:
        tensor = leaf.removesuffix(".at")
        if leaf in unused:
            fixed[leaf] = unused[leaf]
        elif entry == "[]":
            dtype, block = dtypes[leaf], (blocks or {})[leaf]
            assert dtype is not None
            return f"{_DESCRIPTOR}<{POINTERS[dtype][1:]}[{block[0]},{block[1]}]>"
        elif entry == "*":
            dtype = dtypes[tensor]
            if dtype is not None:
                return POINTERS[dtype]
            fixed[leaf] = None
        elif "." in leaf and dtypes.get(leaf.rpartition(".")[0], torch.int8) is None:
            fixed[leaf] = 0
        else:
            return entry
        return "constexpr"

    def constant(leaf: str, value: object) -> Kinds:
        """Plain tuples are leaves."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            kinds: Kinds = _like(type(value), [constant(each, item) for each, item in _items(leaf, value)])
            return kinds
        fixed[leaf] = value
        return "constexpr"

    table: dict[str, Kinds] = kinds_of(parameters)._asdict()
    signature = tuple(
        (each, _tree(table[each], kind, each) if each in table else constant(each, constants[each]))
        for each in kernel.arg_names
    )
    present = {leaf for leaf in divisible if leaf not in fixed and leaf.partition(".")[0] in kernel.arg_names}
    runtime = tuple((leaf, by) for leaf, by in divisible.items() if leaf in present)
    facts = (signature, tuple(fixed.items()), runtime)
    return Build(name, kernel, *facts, warps, chip.has_pdl, registers, contracts=False)


# --- arguments -------------------------------------------------------------------------------------------------------

Change = Callable[[Any], object]
"""Makes an argument of a parameter."""


class Arguments:
    """``arguments(parameters)``: a build's arguments, nested as in its signature.

    Constants come from the build. Tensors become addresses or, where Triton interprets the kernel, views, with
    NamedTuples, because the interpreter finds fields by name.
    """

    def __init__(self, build: Build, parameters: type[tuple[object, ...]], interpreted: bool = False) -> None:
        self._constants = dict(build.constants)
        self._interpreted = interpreted
        places = {name: index for index, name in enumerate(kinds_of(parameters)._fields)}
        self._fixed: list[object] = [None] * len(build.signature)
        self._changes: list[tuple[int, int, Change]] = []
        for at, (name, kind) in enumerate(build.signature):
            change = self._change(name, kind)
            if change is None:
                self._fixed[at] = self._constant(name, kind)
            else:
                self._changes.append((at, places[name], change))

    def __call__(self, parameters: tuple[object, ...]) -> tuple[object, ...]:
        """The arguments of one launch."""
        arguments = self._fixed.copy()
        for at, place, change in self._changes:
            arguments[at] = change(parameters[place])
        return tuple(arguments)

    def _constant(self, name: str, kind: Kinds) -> object:
        if isinstance(kind, str):
            return self._constants[name]
        return _like(type(kind), [self._constant(each, item) for each, item in _items(name, kind)])

    def _change(self, name: str, kind: Kinds) -> Change | None:
        """How a parameter of this kind becomes an argument; None if it is constant."""
        if isinstance(kind, str):
            return None if name in self._constants else self._leaf(kind)
        changes = [(i, self._change(each, item)) for i, (each, item) in enumerate(_items(name, kind))]
        if all(change is None for _, change in changes):
            return None
        plain = [i for i, change in changes if change is _same]
        changing = [(i, change) for i, change in changes if change is not None and change is not _same]
        fixed = [
            None if change is not None else self._constant(each, item)
            for (each, item), (_, change) in zip(_items(name, kind), changes, strict=True)
        ]
        make = partial(_like, type(kind)) if self._interpreted else tuple
        return partial(_nested, make, fixed, plain, changing)

    def _leaf(self, kind: str) -> Change:
        if kind.startswith("*"):
            return _view if self._interpreted else methodcaller("data_ptr")
        if kind.startswith(_DESCRIPTOR):
            return partial(_descriptor, [int(size) for size in kind[kind.index("[") + 1 : kind.index("]")].split(",")])
        return _number if self._interpreted and kind == "fp32" else _same


def _nested(
    make: Callable[[list[object]], object],
    fixed: list[object],
    plain: list[int],
    changing: list[tuple[int, Change]],
    value: tuple[object, ...],
) -> object:
    """A tuple's constants, its plain items, and the others changed."""
    items = fixed.copy()
    for i in plain:
        items[i] = value[i]
    for i, change in changing:
        items[i] = change(value[i])
    return make(items)


def _same(value: float) -> float:
    return value


def _descriptor(block: list[int], tensor: Tensor) -> object:
    """A descriptor of a matrix whose rows start on 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if tensor.shape[0] == 1:  # the stride of a single row means nothing, and may not be a multiple of 16 bytes
        tensor = tensor.as_strided(tensor.shape, (-(-tensor.shape[1] // 8) * 8, 1))
    return TensorDescriptor.from_tensor(tensor, block)


def _view(tensor: Tensor) -> Tensor:
    """A tensor for the interpreter, which reads 8-bit floats as bytes."""
    return tensor.view(torch.uint8) if POINTERS[tensor.dtype] == "*u8" else tensor


def _number(value: float) -> object:
    """A number as float32. The interpreter would treat a subnormal Python float as float64."""
    if value == 0.0 or abs(value) >= _SMALLEST_NORMAL:
        return value
    import numpy  # not needed on a GPU
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(numpy.array([value], numpy.float32), tl.float32), tl.float32)


# --- launches --------------------------------------------------------------------------------------------------------

Spec = TypeVar("Spec", bound=Hashable)
Call = TypeVar("Call", bound=SomeCall[Any])
Facts = TypeVar("Facts", bound=Hashable)
Config = TypeVar("Config")


class Plan(NamedTuple, Generic[Config]):
    """A loaded kernel, its configuration and what makes its arguments of parameters."""

    config: Config
    launcher: Launcher
    arguments: Arguments


class GpuKernels(Generic[Spec, Call, Facts, Config]):
    """The kernels of an op, defined by functions of its module.

    ``facts(call, chip)`` returns the properties of sizes and addresses that select the machine code, ``configure(spec,
    facts, chip)`` the configuration, and ``build(spec, facts, config, chip)`` the `Build`. ``grid(call, config)`` returns
    the number of programs and any further numbers. With this tuple, ``pack(call, config, programs)`` returns
    ``parameters``.
    """

    def __init__(
        self,
        parameters: type[tuple[object, ...]],
        facts: Callable[[Call, Chip], Facts],
        configure: Callable[[Spec, Facts, Chip], Config],
        build: Callable[[Spec, Facts, Config, Chip], Build],
        grid: Callable[[Call, Config], tuple[int, ...]],
        pack: Callable[[Call, Config, tuple[int, ...]], tuple[object, ...]],
    ) -> None:
        self.parameters = parameters
        self.facts, self.configure, self.build, self.grid, self.pack = facts, configure, build, grid, pack
        self.plans: dict[tuple[Spec, int, Facts], Plan[Config]] = {}

    def builds(self, chip: Chip, call: Call) -> list[Build]:
        """The builds that `launch` would run on ``chip``."""
        facts = self.facts(call, chip)
        return [self.build(call.spec, facts, self.configure(call.spec, facts, chip), chip)]

    def launch(self, call: Call) -> None:
        """Run a validated call on the current stream, or in Triton's interpreter on CPU tensors."""
        device = call.device
        if device < 0:
            self.interpret(call)
            return
        chip = chip_of(device)
        facts = self.facts(call, chip)
        key = (call.spec, device, facts)
        plan = self.plans.get(key)
        if plan is None:
            config = self.configure(call.spec, facts, chip)
            build = self.build(call.spec, facts, config, chip)
            plan = self.plans[key] = Plan(config, compiler.load(build, device), Arguments(build, self.parameters))
        programs = self.grid(call, plan.config)
        plan.launcher(programs[0], plan.arguments(self.pack(call, plan.config, programs)))

    def interpret(self, call: Call) -> None:
        """Run a call in Triton's interpreter."""
        facts = self.facts(call, INTERPRETER)
        config = self.configure(call.spec, facts, INTERPRETER)
        build = self.build(call.spec, facts, config, INTERPRETER)
        programs = self.grid(call, config)
        arguments = Arguments(build, self.parameters, interpreted=True)
        build.kernel[programs[:1]](*arguments(self.pack(call, config, programs)))


def chip_of(device: int) -> Chip:
    """The chip of a device; -1 is the interpreter."""
    if device < 0:
        return INTERPRETER
    return chips.get(device) or chips.setdefault(device, current_chip(device))
