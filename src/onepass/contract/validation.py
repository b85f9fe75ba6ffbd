"""Writes the code that checks a call and allocates its outputs: straight lines of Python, made once from a `Contract`.

Interpreting a declaration at every call would cost more than the kernels; what is generated here costs what the same
checks written by hand would. The text of each function is kept for tracebacks.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from .declaration import Arg, Contract, Layout, Option, OptionType, Out, describe, short

_TYPES: Final[dict[OptionType, tuple[str, str]]] = {
    "float": ("(float, int)", "be a number"),
    "int": ("int", "be an int"),
    "bool": ("bool", "be a bool"),
    "str": ("str", "be a string"),
    "ScalarType": ("torch.dtype", "be a dtype"),
}
"""What a value must be an instance of, and how a message says it."""
NEGATED: Final = "'hold its values as they are (resolve_neg)', 'a negated view'"
"""What is expected instead of such a view, and what came."""


class Writer:
    """Collects the lines of one generated function and the objects it refers to."""

    def __init__(self, contract: Contract, eager: bool = False) -> None:
        self.contract = contract
        self.eager = eager  # what comes through the dispatcher is no such view, and a compiler cannot ask
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
            "blame": contract.blame,
            **contract.scope,
        }
        self.indent = 0
        self.symbols: set[str] = set()
        first: dict[str, Arg] = {}
        again = {d for a in contract.args.values() for d in a.dims.split() if first.setdefault(d, a) is not a}
        self.absent = {d for d in again if d.isidentifier() and first[d].optional}
        """Symbols that are None where the optional argument that comes first with them is: another binds them then."""
        self.shapes: dict[str, str] = {}

    def __call__(self, line: str, depth: int = 1) -> None:
        """Write a line."""
        self.lines.append("    " * (self.indent + depth) + line)

    def constant(self, value: object, hint: str) -> str:
        """The name under which generated code finds ``value``."""
        name = f"_{hint}"
        self.scope[name] = value
        return name

    def _fail_shape(self, argument: str, dims: str, known: dict[str, object], got: Tensor, index: str = "") -> NoReturn:
        """``index`` says which tensor of a list it is. ``N/32`` is a size, of which N is known."""
        shapes = " or ".join(f"[{', '.join(shape.split())}]" for shape in dims.split("|"))
        tokens = (d.split("/")[0] for d in dims.replace("|", " ").split())
        mentioned = dict.fromkeys(d for d in tokens if d in known)
        with_ = ", ".join(
            f"{d}={list(v) if isinstance(v, tuple) else v}" for d in mentioned if (v := known[d]) is not None
        )
        arg = self.contract.args.get(argument)
        hint = arg.hint(known, got) if arg is not None and arg.hint is not None else ""
        self.contract.fail(
            argument,
            f"have shape {shapes}" + (f" with {with_}" if with_ else ""),
            str(list(got.shape)) + index + (f"; {hint}" if hint else ""),
        )

    def _fail_grad(self, **tensors: Tensor | Sequence[Tensor] | None) -> NoReturn:
        refuse_gradient(self.contract, next(name for name, value in tensors.items() if _needs_grad(value)))

    def _fail_dtype(self, argument: str, allowed: Sequence[torch.dtype], got: torch.dtype) -> NoReturn:
        self.contract.fail(argument, f"have dtype {' or '.join(dict.fromkeys(short(d) for d in allowed))}", short(got))


def refuse_gradient(contract: Contract, argument: str, got: str = "requires_grad=True") -> NoReturn:
    """There is no backward: better an error than a result that has silently lost its gradient."""
    ways = "use torch.inference_mode(), no_grad() or detach()"
    contract.fail(argument, f"need no gradient (there is no backward: {ways})", got)


def _needs_grad(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_needs_grad(item) for item in value)
    return isinstance(value, Tensor) and value.requires_grad


def _shape(dims: str) -> str:
    """As an expression; ``N/32`` is a size that no tensor has where 32 does not divide N."""
    sizes = []
    for token in dims.split():
        whole, _, by = token.partition("/")
        sizes.append(
            "*lead" if token == "..." else f"({whole} // {by} if {whole} % {by} == 0 else -1)" if by else token
        )
    return "(" + "".join(f"{size}, " for size in sizes) + ")"


def _known(write: Writer) -> str:
    pairs = ["'...': tuple(lead)" if s == "lead" else f"'{s}': {s}" for s in sorted(write.symbols)]
    return "{" + ", ".join(pairs) + "}"


def _bind_shape(write: Writer, name: str, dims: str, depth: int) -> None:
    """Check a shape, binding the symbols it is the first to mention; no symbols at all means one element."""
    tokens = dims.split()
    if not tokens:
        write(f"if {name}.numel() != 1:", depth)
        write(f"    fail('{name}', 'have one element', str(list({name}.shape)))", depth)
        return
    fresh = [("lead" if t == "..." else t) for t in tokens if not t.isdigit()]
    if all(s in write.symbols and s not in write.absent for s in fresh):
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
    known: list[str] = []
    parts = [("lead", f"{shape}[:-{len(tail)}]")] if "..." in tokens else []
    parts += [(symbol, f"{shape}[{index - len(tail)}]") for index, symbol in enumerate(tail)]
    for symbol, part in parts:
        if symbol in write.symbols or symbol.isdigit():
            if symbol in write.absent:
                write(f"{symbol} = {part} if {symbol} is None else {symbol}", depth)
            known.append(f"{part} != {symbol}")
        else:
            write(f"{symbol} = {part}", depth)
            write.symbols.add(symbol)
    if known:
        write(f"if {' or '.join(known)}:", depth)
        write(f"    fail_shape('{name}', '{dims}', {_known(write)}, {name})", depth)


def _check_tensor(write: Writer, name: str, arg: Arg, depth: int) -> None:
    write(f"if not isinstance({name}, Tensor):", depth)
    write(f"    fail('{name}', 'be a tensor', describe({name}))", depth)
    allowed = arg.dtypes if isinstance(arg.dtypes, str) else write.constant(arg.dtypes, f"dtypes_{name}")
    write(f"if {name}.dtype not in {allowed}:", depth)
    write(f"    fail_dtype('{name}', {allowed}, {name}.dtype)", depth)
    if "device" in write.symbols:
        write(f"if not (on_cpu and {name}.is_cpu) and {name}.device != device:", depth)  # a flag is read sooner
        write(f"    fail('{name}', f'be on {{device}}', str({name}.device))", depth)
    else:
        write(f"device, on_cpu = {name}.device, {name}.is_cpu", depth)
        write.symbols.add("device")
    write.symbols.discard("device")
    _bind_shape(write, name, arg.dims, depth)
    write.symbols.add("device")
    _check_layout(write, name, arg.layout, arg.dims, depth)
    if write.eager and arg.layout != "dense" and arg.sample != "index":
        # a view that torch negates when it reads it: its elements lie two apart, which only one column may
        last = (arg.dims.split() or ["1"])[-1]
        guard = "" if arg.layout == "any" or last == "1" else f"{last} == 1 and "
        write(f"if {guard}{name}.is_neg():", depth)
        write(f"    fail('{name}', {NEGATED})", depth)


def _check_layout(write: Writer, name: str, layout: Layout, dims: str, depth: int) -> None:
    if layout == "dense":
        write(f"if not {name}.is_contiguous():", depth)
        write(f"    fail('{name}', 'be contiguous', f'strides {{{name}.stride()}}')", depth)
    elif layout == "rows" and dims.split()[-1] != "1":
        write(f"if {name}.stride(-1) != 1 and {name}.shape[-1] != 1:", depth)
        write(f"    fail('{name}', 'have a contiguous last dimension', f'strides {{{name}.stride()}}')", depth)


def check_list_lines(write: Writer, name: str) -> None:
    """That a list of tensors is one."""
    write(f"if not isinstance({name}, (list, tuple)):")
    write(f"    fail('{name}', 'be a list of tensors', describe({name}))")


def _check_many(write: Writer, name: str, arg: Arg) -> None:
    """A list of tensors, each of one of several shapes."""
    allowed = write.constant(arg.dtypes, f"dtypes_{name}")
    shapes = ", ".join(_shape(d) for d in arg.dims.split("|"))
    check_list_lines(write, name)
    write(f"if {name}:")
    write(f"    shapes = ({shapes})")
    write(f"    for index, item in enumerate({name}):")
    write("if not isinstance(item, Tensor):", 3)
    write(f"    fail('{name}', 'hold tensors', describe(item))", 3)
    write(f"if item.dtype not in {allowed}:", 3)
    write(f"    fail_dtype('{name}', {allowed}, item.dtype)", 3)
    write("if item.device != device:", 3)
    write(f"    fail('{name}', f'be on {{device}}', str(item.device))", 3)
    write("if tuple(item.shape) not in [tuple(s) for s in shapes]:", 3)
    write.symbols.discard("device")
    write(f"    fail_shape('{name}', '{arg.dims}', {_known(write)}, item, f' at index {{index}}')", 3)
    write.symbols.add("device")
    write("if item.stride(-1) != 1 and item.shape[-1] != 1:", 3)
    write(f"    fail('{name}', 'have a contiguous last dimension', f'strides {{item.stride()}}')", 3)
    if write.eager:
        write("if item.is_neg():", 3)
        write(f"    fail('{name}', {NEGATED})", 3)


def check_option_lines(write: Writer, name: str, option: Option) -> None:
    """An option's type, choices and range."""
    guard = f"{name} is not None and " if option.optional else ""
    kind, expected = _TYPES[option.type]
    conditions, expects = [f"isinstance({name}, {kind})"], [expected]
    if option.type in ("float", "int"):
        conditions.append(f"not isinstance({name}, bool)")
    if option.type == "float":
        # an int beyond all floats compares with them as if it were one
        conditions[1] += f" and (isinstance({name}, float) or -(2**1023) < {name} < 2**1023)"
    if option.choices:
        conditions = [conditions[0], f"{name} in {write.constant(option.choices, 'choices_' + name)}"]
        expects = ["be " + " or ".join(describe(c) for c in option.choices)]
    if option.where:
        conditions.append(f"({option.where})")
        expects.append(f"satisfy {option.where}")
    if option.type == "float" and not option.choices:
        # a plain float is by far the commonest: test it first, and only once
        conditions[:2] = [f"(type({name}) is float or {' and '.join(conditions[:2])})"]
    write(f"if {guard}not ({' and '.join(conditions)}):")
    write(f"    fail('{name}', {' and '.join(expects)!r}, describe({name}))")


def _allocate(write: Writer, out: Out) -> None:
    depth = 1
    if out.when != "True":
        write(f"if not ({out.when}):")
        write(f"    if {out.argument} is not None:")
        write(
            f"        fail('{out.argument}', 'be None unless {out.when.replace(chr(39), chr(34))}', describe({out.argument}))"
        )
        write(f"elif {out.argument} is None:")
    else:
        write(f"if {out.argument} is None:")
    same = write.shapes.get(out.dims)
    if same:
        source = same.removesuffix("_shape")
        # naming the memory format costs 1.2 us, so it is named only where it changes anything
        kept = f"empty_like({source}, dtype={out.dtype})"
        write(
            f"{out.argument} = {kept} if {source}.is_contiguous() else {kept[:-1]}, memory_format=contiguous)",
            depth + 1,
        )
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
    write(f"if {out.argument}.requires_grad and is_grad_enabled():", depth + 1)
    write(f"    fail_grad({out.argument}={out.argument})", depth + 1)


def write_body(write: Writer, contract: Contract, options: bool) -> None:
    """The checks in a straight line, then the outputs."""
    if options:
        for name, option in contract.options.items():
            check_option_lines(write, name, option)
    for name, arg in contract.args.items():
        if arg.many:
            _check_many(write, name, arg)
        elif arg.optional:
            fresh = [d for d in arg.dims.split() if d.isidentifier() and d not in write.symbols]
            if fresh:
                write(f"{' = '.join(fresh)} = None")
            write(f"if {name} is not None:")
            _check_tensor(write, name, arg, 2)
        else:
            _check_tensor(write, name, arg, 1)
    for symbol, expression in contract.sizes.items():
        write(f"{symbol} = {expression}")
        write.symbols.add(symbol)
    for rule in contract.rules:
        write(f"if not ({rule.condition}):")
        write(f"    fail('{rule.argument}', f{rule.expects!r}, describe({rule.argument}))")
    grads = [
        f"({name} and any([t.requires_grad for t in {name}]))"
        if arg.many
        else f"({name} is not None and {name}.requires_grad)"
        if arg.optional
        else f"{name}.requires_grad"
        for name, arg in contract.args.items()
    ]
    write(f"if is_grad_enabled() and ({' or '.join(grads)}):")
    write(f"    fail_grad({', '.join(f'{n}={n}' for n in contract.args)})")
    for out in contract.outs.values():
        _allocate(write, out)


def run_source(source: str, label: str, scope: dict[str, Any]) -> None:
    """Execute generated source under a name that tracebacks can show."""
    filename = f"<onepass {label}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), scope)


def compile_prepare(
    contract: Contract,
) -> tuple[Callable[..., tuple[Tensor | None, ...]], Callable[..., tuple[bool, ...]]]:
    """Write and compile ``prepare`` and ``present``."""
    write = Writer(contract)
    inputs = ", ".join([*contract.args, *contract.options])
    outs = [out.argument for out in contract.outs.values()]
    write(f"def prepare({inputs}, {', '.join(out + '=None' for out in outs)}):", 0)
    write_body(write, contract, options=True)
    write(f"return {', '.join(outs)},")
    write(f"def present({inputs}):", 0)
    write(f"return {', '.join(out.when for out in contract.outs.values())},")
    run_source("\n".join(write.lines) + "\n", f"contract {contract.name}", write.scope)
    return write.scope["prepare"], write.scope["present"]
