"""One declaration of an op, from which everything that must agree with it is made.

A `Contract` lists tensor arguments (shape by symbol, dtypes, layout), options and outputs. From it come the torch
schema, the straight-line checker and allocator that runs at every call and is also the fake implementation
(`Contract.prepare`), sample inputs and argument mutations for tests (`onepass.samples`), the bytes an ideal kernel moves,
and the tables of docs/ops.md. Conditions and derived sizes are Python expressions over the argument names, so that
they are compiled into that checker and printed in the docs as they stand.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

import torch
from torch import Tensor

from .errors import ContractError

Layout = Literal["rows", "dense", "any"]
"""``rows``: last dimension contiguous; ``dense``: contiguous; ``any``: checked by the op's own rules."""

OptionType = Literal["float", "int", "bool", "str", "ScalarType"]
_PYTHON_TYPES: Final[dict[OptionType, str]] = {
    "float": "(float, int)",
    "int": "int",
    "bool": "bool",
    "str": "str",
    "ScalarType": "torch.dtype",
}


@dataclass(frozen=True)
class Arg:
    """A tensor argument. ``dims`` is one shape, or several for a list of tensors (``"... N | N | ... 1"``)."""

    dims: str
    doc: str
    dtypes: tuple[torch.dtype, ...] | str
    optional: bool = False
    many: bool = False
    layout: Layout = "rows"
    sample: Literal["normal", "gamma", "positive"] = "normal"

    @property
    def schema(self) -> str:
        return "Tensor[]" if self.many else "Tensor?" if self.optional else "Tensor"


@dataclass(frozen=True)
class Option:
    """A keyword that is no tensor. ``where`` is a condition on its own value, e.g. ``"0 <= eps < inf"``."""

    type: OptionType
    default: Any
    doc: str
    choices: tuple[Any, ...] = ()
    where: str = ""
    optional: bool = False

    @property
    def schema(self) -> str:
        return self.type + ("?" if self.optional else "")


@dataclass(frozen=True)
class Out:
    """An output: present when ``when`` holds, in the caller's tensor ``argument`` where one is given."""

    dims: str
    dtype: str
    doc: str
    argument: str
    when: str = "True"
    column: str = "False"
    """Condition under which the last dimension is the slowest: stored as [last, ...]."""


@dataclass(frozen=True)
class Rule:
    """A condition over several arguments; ``argument`` is the one to blame, ``expects`` what it must be."""

    condition: str
    argument: str
    expects: str


@dataclass(frozen=True)
class Contract:
    """The whole declaration of one op; see the module docstring."""

    name: str
    args: dict[str, Arg]
    options: dict[str, Option]
    outs: dict[str, Out]
    rounding: str
    sizes: dict[str, str] = field(default_factory=dict)
    """Sizes derived from others, in order: ``{"G": "N // group_size if group_size else 1"}``."""
    rules: tuple[Rule, ...] = ()
    scope: dict[str, Any] = field(default_factory=dict)
    """Functions that the expressions above call, by name."""

    def __post_init__(self) -> None:
        prepare, present = _compile(self)
        object.__setattr__(self, "prepare", prepare)
        object.__setattr__(self, "present", present)

    present: Callable[..., tuple[bool, ...]] = field(init=False, repr=False, compare=False)
    """``present(*args, *options)``: which outputs such a call has."""
    prepare: Callable[..., tuple[Tensor | None, ...]] = field(init=False, repr=False, compare=False)
    """``prepare(*args, *options, *outs)`` checks everything and returns the outputs, allocating those that are None."""

    @property
    def schema(self) -> str:
        """The functional op's torch schema."""
        inputs = [f"{a.schema} {n}" for n, a in self.args.items()] + [f"{o.schema} {n}" for n, o in self.options.items()]
        return f"{self.name}({', '.join(inputs)}) -> Tensor[]"

    @property
    def out_schema(self) -> str:
        """The schema of the variant that writes into the caller's tensors."""
        head = self.schema.removesuffix(") -> Tensor[]").replace(self.name, f"{self.name}_out", 1)
        outs = [f"Tensor({chr(97 + i)}!)? {out.argument}" for i, out in enumerate(self.outs.values())]
        return f"{head}, {', '.join(outs)}) -> ()"

    def fail(self, argument: str, expects: str, got: str) -> NoReturn:
        """Raise the error every refusal has the form of."""
        raise ContractError(f"{self.name}: `{argument}` must {expects}, got {got}")


def describe(value: object) -> str:
    """How a message shows a value it refuses."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {short(value.dtype)} on {value.device}"
    if isinstance(value, torch.dtype):
        return short(value)
    return repr(value)


def short(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def moved_bytes(tensors: Sequence[Tensor | None]) -> int:
    """Bytes an ideal kernel moves: every input read once, every output written once."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


# --- the generated checker ------------------------------------------------------------------------------------------


class _Writer:
    """Collects the lines of one generated function and the objects it refers to."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {
            "torch": torch,
            "Tensor": Tensor,
            "inf": math.inf,
            "empty": torch.empty,
            "empty_like": torch.empty_like,
            "contiguous": torch.contiguous_format,
            "is_grad_enabled": torch.is_grad_enabled,
            "fail": contract.fail,
            "describe": describe,
            "short": short,
            "fail_shape": self._fail_shape,
            "fail_dtype": self._fail_dtype,
            "fail_grad": self._fail_grad,
            **contract.scope,
        }
        self.symbols: set[str] = set()
        self.shapes: dict[str, str] = {}

    def __call__(self, line: str, depth: int = 1) -> None:
        self.lines.append("    " * depth + line)

    def constant(self, value: object, hint: str) -> str:
        name = f"_{hint}"
        self.scope[name] = value
        return name

    def _fail_shape(self, argument: str, dims: str, known: dict[str, object], got: Tensor) -> NoReturn:
        mentioned = [d for d in dims.replace("|", " ").split() if d in known]
        with_ = ", ".join(f"{d}={list(v) if isinstance(v, tuple) else v}" for d in mentioned if (v := known[d]) is not None)
        self.contract.fail(argument, f"have shape [{dims.replace(' ', ', ')}]" + (f" with {with_}" if with_ else ""), str(list(got.shape)))

    def _fail_grad(self, **tensors: Tensor | None) -> NoReturn:
        name = next(n for n, t in tensors.items() if t is not None and t.requires_grad)
        self.contract.fail(
            name, "need no gradient (there is no backward: use torch.inference_mode(), no_grad() or detach())", "requires_grad=True"
        )

    def _fail_dtype(self, argument: str, allowed: Sequence[torch.dtype], got: torch.dtype) -> NoReturn:
        self.contract.fail(argument, f"have dtype {' or '.join(dict.fromkeys(short(d) for d in allowed))}", short(got))


def _shape(dims: str) -> str:
    return "(" + "".join(("*lead" if d == "..." else d) + ", " for d in dims.split()) + ")"


def _known(write: _Writer) -> str:
    pairs = [f"'...': tuple(lead)" if s == "lead" else f"'{s}': {s}" for s in sorted(write.symbols)]
    return "{" + ", ".join(pairs) + "}"


def _bind_shape(write: _Writer, name: str, dims: str, depth: int) -> None:
    """Check a shape, binding the symbols it is the first to mention; no symbols at all means one element."""
    tokens = dims.split()
    if not tokens:
        write(f"if {name}.numel() != 1:", depth)
        write(f"    fail('{name}', 'have one element', str(list({name}.shape)))", depth)
        return
    fresh = [("lead" if t == "..." else t) for t in tokens if not t.isdigit()]
    if all(s in write.symbols for s in fresh):
        same = write.shapes.get(dims)
        write(f"if {name}.shape != {same or _shape(dims)}:", depth)
        write(f"    fail_shape('{name}', '{dims}', {_known(write)}, {name})", depth)
        return
    tail = [t for t in tokens if t != "..."]
    count = f"{name}.dim() < {len(tail)}" if "..." in tokens else f"{name}.dim() != {len(tail)}"
    write(f"if {count}:", depth)
    write(f"    fail_shape('{name}', '{dims}', {_known(write)}, {name})", depth)
    shape = f"{name}_shape"
    write(f"{shape} = {name}.shape", depth)
    write.shapes[dims] = shape
    if "..." in tokens:
        write(f"lead = {shape}[:-{len(tail)}]", depth)
        write.symbols.add("lead")
    for index, symbol in enumerate(tail):
        write(f"{symbol} = {shape}[{index - len(tail)}]", depth)
        write.symbols.add(symbol)


def _check_tensor(write: _Writer, name: str, arg: Arg, depth: int) -> None:
    write(f"if not isinstance({name}, Tensor):", depth)
    write(f"    fail('{name}', 'be a tensor', describe({name}))", depth)
    allowed = arg.dtypes if isinstance(arg.dtypes, str) else write.constant(arg.dtypes, f"dtypes_{name}")
    write(f"if {name}.dtype not in {allowed}:", depth)
    write(f"    fail_dtype('{name}', {allowed}, {name}.dtype)", depth)
    if "device" in write.symbols:
        write(f"if {name}.device != device:", depth)
        write(f"    fail('{name}', f'be on {{device}}', str({name}.device))", depth)
    else:
        write(f"device = {name}.device", depth)
        write.symbols.add("device")
    write.symbols.discard("device")
    _bind_shape(write, name, arg.dims, depth)
    write.symbols.add("device")
    _check_layout(write, name, arg.layout, arg.dims, depth)


def _check_layout(write: _Writer, name: str, layout: Layout, dims: str, depth: int) -> None:
    if layout == "dense":
        write(f"if not {name}.is_contiguous():", depth)
        write(f"    fail('{name}', 'be contiguous', f'strides {{{name}.stride()}}')", depth)
    elif layout == "rows" and dims.split()[-1] != "1":
        write(f"if {name}.stride(-1) != 1 and {name}.shape[-1] != 1:", depth)
        write(f"    fail('{name}', 'have a contiguous last dimension', f'strides {{{name}.stride()}}')", depth)


def _check_many(write: _Writer, name: str, arg: Arg) -> None:
    """A list of tensors, each of one of several shapes."""
    allowed = write.constant(arg.dtypes, f"dtypes_{name}")
    shapes = ", ".join(_shape(d) for d in arg.dims.split("|"))
    write(f"if {name}:")
    write(f"    shapes = ({shapes})")
    write(f"    for item in {name}:")
    write(f"if not isinstance(item, Tensor):", 3)
    write(f"    fail('{name}', 'hold tensors', describe(item))", 3)
    write(f"if item.dtype not in {allowed}:", 3)
    write(f"    fail_dtype('{name}', {allowed}, item.dtype)", 3)
    write("if item.device != device:", 3)
    write(f"    fail('{name}', f'be on {{device}}', str(item.device))", 3)
    write("if tuple(item.shape) not in [tuple(s) for s in shapes]:", 3)
    write.symbols.discard("device")
    write(f"    fail_shape('{name}', '{arg.dims}', {_known(write)}, item)", 3)
    write.symbols.add("device")
    write("if item.stride(-1) != 1 and item.shape[-1] != 1:", 3)
    write(f"    fail('{name}', 'have a contiguous last dimension', f'strides {{item.stride()}}')", 3)


def _check_option(write: _Writer, name: str, option: Option) -> None:
    guard = f"{name} is not None and " if option.optional else ""
    conditions = [f"isinstance({name}, {_PYTHON_TYPES[option.type]})"]
    expects = [{"float": "be a number", "int": "be an int", "bool": "be a bool", "str": "be a string", "ScalarType": "be a dtype"}[option.type]]
    if option.type in ("float", "int"):
        conditions.append(f"not isinstance({name}, bool)")
    if option.choices:
        conditions = [f"{name} in {write.constant(option.choices, 'choices_' + name)}"]
        expects = ["be " + " or ".join(describe(c) for c in option.choices)]
    if option.where:
        conditions.append(f"({option.where})")
        expects.append(f"satisfy {option.where}")
    if option.type == "float" and not option.choices:
        # a plain float is by far the commonest: test it first, and only once
        conditions[:2] = [f"(type({name}) is float or {' and '.join(conditions[:2])})"]
    write(f"if {guard}not ({' and '.join(conditions)}):")
    write(f"    fail('{name}', {' and '.join(expects)!r}, describe({name}))")


def _allocate(write: _Writer, name: str, out: Out) -> None:
    depth = 1
    if out.when != "True":
        write(f"if not ({out.when}):")
        write(f"    if {out.argument} is not None:")
        write(f"        fail('{out.argument}', 'be None unless {out.when.replace(chr(39), chr(34))}', describe({out.argument}))")
        write(f"elif {out.argument} is None:")
    else:
        write(f"if {out.argument} is None:")
    same = write.shapes.get(out.dims)
    if same:
        source = same.removesuffix("_shape")
        write(f"{out.argument} = empty_like({source}, dtype={out.dtype}, memory_format=contiguous)", depth + 1)
    else:
        sizes = ", ".join("*lead" if d == "..." else d for d in out.dims.split())
        plain = f"empty({sizes}, dtype={out.dtype}, device=device)"
        if out.column != "False":
            *rest, last = sizes.split(", ")
            plain = f"empty({last}, {', '.join(rest)}, dtype={out.dtype}, device=device).movedim(0, -1) if {out.column} else {plain}"
        write(f"{out.argument} = {plain}", depth + 1)
    write("else:")
    layout: Layout = "any" if out.column != "False" else "rows"
    _check_tensor(write, out.argument, Arg(out.dims, out.doc, f"({out.dtype},)", layout=layout), depth + 1)


def _compile(contract: Contract) -> tuple[Callable[..., tuple[Tensor | None, ...]], Callable[..., tuple[bool, ...]]]:
    """Write and compile ``prepare``, one straight line of checks, then the outputs; and ``present``."""
    write = _Writer(contract)
    parameters = [*contract.args, *contract.options, *(out.argument + "=None" for out in contract.outs.values())]
    write(f"def prepare({', '.join(parameters)}):", 0)
    for name, option in contract.options.items():
        _check_option(write, name, option)
    for name, arg in contract.args.items():
        if arg.many:
            _check_many(write, name, arg)
        elif arg.optional:
            write(f"if {name} is not None:")
            _check_tensor(write, name, arg, 2)
        else:
            _check_tensor(write, name, arg, 1)
    for symbol, expression in contract.sizes.items():
        write(f"{symbol} = {expression}")
        write.symbols.add(symbol)
    for rule in contract.rules:
        write(f"if not ({rule.condition}):")
        write(f"    fail('{rule.argument}', {rule.expects!r}, describe({rule.argument}))")
    singles = [n for n, a in contract.args.items() if not a.many]
    grads = [f"{n}.requires_grad" if not contract.args[n].optional else f"({n} is not None and {n}.requires_grad)" for n in singles]
    write(f"if is_grad_enabled() and ({' or '.join(grads)}):")
    write(f"    fail_grad({', '.join(f'{n}={n}' for n in singles)})")
    for name, out in contract.outs.items():
        _allocate(write, name, out)
    write(f"return {', '.join(out.argument for out in contract.outs.values())},")
    write(f"def present({', '.join([*contract.args, *contract.options])}):", 0)
    write(f"return {', '.join(out.when for out in contract.outs.values())},")
    source = "\n".join(write.lines) + "\n"
    filename = f"<onepass contract {contract.name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), write.scope)
    return write.scope["prepare"], write.scope["present"]
