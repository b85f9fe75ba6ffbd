"""Launches the kernels of all families: packs a validated Call into kernel arguments and runs it on
a GPU or in Triton's interpreter.

A family states its parameters once, in a table: each leaf is a type and a Python expression over
the fields of the family's Call, such as ``"i64 strides[0][1]"``. A pointer (``"* x"``) gets its
type from the dtype that a build gives it. ``"[] x"`` is a descriptor of a matrix, from which the copy
engine loads blocks. Parameters that are not in the table are constants. The
table and the constants determine a build's signature and the function that packs its arguments.
"""

import linecache
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from . import compile as compiler
from .chip import INTERPRETER, Chip, current_chip
from .compile import POINTERS, Build

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
_GENERATED: Final = "<onepass "
_DESCRIPTOR: Final = "tensordesc"

chips: Final[dict[int, Chip]] = {}
"""The chip of each device used so far."""


class Rows(NamedTuple):
    """A tensor of rows: its address and the strides of up to three leading dimensions."""

    at: Any
    s0: Any
    s1: Any
    s2: Any


def rows(tensor: str, strides: str) -> Rows:
    """The table entry of a tensor of rows."""
    return Rows(f"* {tensor}", f"i64 {strides}[0]", f"i64 {strides}[1]", f"i64 {strides}[2]")


def generate(name: str, source: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Execute generated code in ``scope``; tracebacks and `generated_sources` show its text."""
    filename = f"{_GENERATED}{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), scope)
    return scope


def generated_sources() -> dict[str, str]:
    """The text of all code that onepass has generated in this process, by name."""
    entries = {
        name: entry for name, entry in linecache.cache.items() if name.startswith(_GENERATED) and len(entry) == 4
    }
    return {name[len(_GENERATED) : -1]: "".join(entry[2]) for name, entry in entries.items()}


def _tree(value: Any, change: Callable[[str, Any], Any], name: str, plain: bool = True) -> Any:
    """``value`` with every leaf changed; plain tuples are leaves unless ``plain``."""
    fields = getattr(value, "_fields", None)
    if not isinstance(value, tuple) or (fields is None and not plain):
        return change(name, value)
    names = fields or range(len(value))
    items = [_tree(item, change, f"{name}.{field}", plain) for field, item in zip(names, value, strict=True)]
    return type(value)(*items) if fields else tuple(items)


class Plan(NamedTuple):
    """A loaded kernel, its configuration and the function that packs its arguments."""

    config: Any
    launcher: Any
    pack: Callable[[Any, Any], tuple[Any, ...]]


class Family:
    """A kernel family, defined by functions of its module.

    ``facts(call, chip)`` returns the properties of sizes and addresses that select the machine
    code, ``configure(spec, facts, chip)`` the configuration, and ``build(spec, facts, config,
    chip)`` the `Build`. ``grid(call, config)`` returns the number of programs and any further
    numbers. Table expressions can use this tuple as ``programs`` and the configuration as
    ``config``. ``device`` names the field of a call whose tensor determines the device.
    """

    def __init__(
        self,
        call: Any,
        table: Mapping[str, Any],
        facts: Callable[[Any, Chip], Hashable],
        configure: Callable[[Any, Any, Chip], Any],
        build: Callable[[Any, Any, Any, Chip], Build],
        grid: Callable[[Any, Any], tuple[Any, ...]],
        device: str,
    ) -> None:
        self.fields: tuple[str, ...] = call._fields
        self.table = table
        self.facts, self.configure, self.build, self.grid = facts, configure, build, grid
        self._device = self.fields.index(device)
        self.plans: dict[tuple[Any, ...], Plan] = {}

    def builds(self, chip: Chip, call: Any) -> list[Build]:
        """The builds that `launch` would run on ``chip``."""
        facts = self.facts(call, chip)
        return [self.build(call.spec, facts, self.configure(call.spec, facts, chip), chip)]

    def launch(self, call: Any) -> None:
        """Run a validated call on the current stream, or in Triton's interpreter on CPU tensors."""
        device = call[self._device].get_device()
        if device < 0:
            self._interpret(call)
            return
        chip = chips.get(device) or chips.setdefault(device, current_chip(device))
        facts = self.facts(call, chip)
        key = (call[0], device, facts)
        plan = self.plans.get(key)
        if plan is None:
            config = self.configure(call.spec, facts, chip)
            build = self.build(call.spec, facts, config, chip)
            plan = self.plans[key] = Plan(config, compiler.load(build, device), self._packer(build, config))
        programs = self.grid(call, plan.config)
        plan.launcher(programs[0], plan.pack(call, programs))

    def _interpret(self, call: Any) -> None:
        facts = self.facts(call, INTERPRETER)
        config = self.configure(call.spec, facts, INTERPRETER)
        build = self.build(call.spec, facts, config, INTERPRETER)
        programs = self.grid(call, config)
        build.kernel[programs[:1]](*self._packer(build, config, interpreted=True)(call, programs))

    def _packer(self, build: Build, config: Any, interpreted: bool = False) -> Callable[[Any, Any], tuple[Any, ...]]:
        """``pack(call, programs)``: the kernel's arguments, nested as in its signature."""
        constants = dict(build.constants)
        blocks = {name: _block(kind) for name, kind in build.signature if str(kind).startswith(_DESCRIPTOR)}
        scope: dict[str, Any] = {"config": config, "view": _view, "number": _number, "descriptor": _descriptor}

        def expression(name: str, entry: str) -> str:
            if name in constants:
                return repr(constants[name])
            kind, _, value = entry.partition(" ")
            if kind == "*":
                return f"view({value})" if interpreted else f"{value}.data_ptr()"
            if kind == "[]":
                return f"descriptor({value}, {blocks[name]})"
            return f"number({value})" if interpreted and kind == "fp32" else f"({value})"

        def written(tree: Any) -> str:
            if not isinstance(tree, tuple):
                return str(tree)
            items = f"({' '.join(f'{written(item)},' for item in tree)})"
            if not interpreted or not hasattr(tree, "_fields"):
                return items
            scope[type(tree).__name__] = type(tree)  # the interpreter finds fields by name
            return f"{type(tree).__name__}{items}"

        arguments = []
        for name, kind in build.signature:
            if name in self.table:
                arguments.append(written(_tree(self.table[name], expression, name)))
            else:
                scope[name] = _tree(kind, lambda leaf, _: constants[leaf], name)
                arguments.append(name)
        source = f"def pack(call, programs):\n    {', '.join(self.fields)} = call\n    return (\n"
        source += "".join(f"        {argument},\n" for argument in arguments) + "    )\n"
        where = "interpreter" if interpreted else "launch"
        pack: Callable[[Any, Any], tuple[Any, ...]] = generate(f"{where} {build.name}", source, scope)["pack"]
        return pack

    def make_build(
        self,
        name: str,
        kernel: Any,
        chip: Chip,
        dtypes: Mapping[str, torch.dtype | None],
        constants: Mapping[str, Any],
        unused: Mapping[str, Any],
        divisible: Mapping[str, int],
        warps: int,
        registers: int,
        blocks: Mapping[str, tuple[int, int]] | None = None,
    ) -> Build:
        """The `Build` of a configuration.

        ``dtypes`` are those of the table's pointers, None for an absent tensor, whose strides are
        then 0. ``unused`` leaves are constants with the given values. ``blocks`` are the sizes that
        descriptors load. Products are never contracted
        into sums, because contraction would depend on the layout.
        """
        fixed: dict[str, Any] = {}

        def kind(leaf: str, entry: str) -> str:
            tensor = leaf.removesuffix(".at")
            if leaf in unused:
                fixed[leaf] = unused[leaf]
            elif entry.startswith("["):
                dtype, block = dtypes[leaf], (blocks or {})[leaf]
                assert dtype is not None
                return f"{_DESCRIPTOR}<{POINTERS[dtype][1:]}[{block[0]},{block[1]}]>"
            elif entry.startswith("*"):
                dtype = dtypes[tensor]
                if dtype is not None:
                    return POINTERS[dtype]
                fixed[leaf] = None
            elif "." in leaf and dtypes.get(leaf.rpartition(".")[0], torch.int8) is None:
                fixed[leaf] = 0
            else:
                return entry.partition(" ")[0]
            return "constexpr"

        def constant(leaf: str, value: Any) -> str:
            fixed[leaf] = value
            return "constexpr"

        signature = tuple(
            (each, _tree(self.table[each], kind, each))
            if each in self.table
            else (each, _tree(constants[each], constant, each, plain=False))
            for each in kernel.arg_names
        )
        present = {leaf for leaf in divisible if leaf not in fixed and leaf.partition(".")[0] in kernel.arg_names}
        runtime = tuple((leaf, by) for leaf, by in divisible.items() if leaf in present)
        facts = (signature, tuple(fixed.items()), runtime)
        return Build(name, kernel, *facts, warps, chip.has_pdl, registers, contracts=False)


def arguments_by_name(build: Build, arguments: Any) -> dict[str, Any]:
    """Packed arguments by the names of their leaves."""
    found = compiler.flat(build.shape, tuple(arguments))
    return {name: value for (name, _, _), value in zip(build.leaves(), found, strict=True)}


def _block(kind: str) -> list[int]:
    """The sizes that a descriptor of this type loads."""
    return [int(size) for size in kind[kind.index("[") + 1 : kind.index("]")].split(",")]


def _descriptor(tensor: Tensor, block: list[int]) -> Any:
    """A descriptor of a matrix whose rows start on 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if tensor.shape[0] == 1:  # the stride of a single row means nothing, and may not be a multiple of 16 bytes
        tensor = tensor.as_strided(tensor.shape, (-(-tensor.shape[1] // 8) * 8, 1))
    return TensorDescriptor.from_tensor(tensor, block)


def _view(tensor: Tensor) -> Tensor:
    """A tensor for the interpreter, which reads 8-bit floats as bytes."""
    return tensor.view(torch.uint8) if POINTERS[tensor.dtype] == "*u8" else tensor


def _number(value: float) -> Any:
    """A number as float32. The interpreter would treat a subnormal Python float as float64."""
    if value == 0.0 or abs(value) >= _SMALLEST_NORMAL:
        return value
    import numpy  # not needed on a GPU
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(numpy.array([value], numpy.float32), tl.float32), tl.float32)
