"""Generates the code that validates a call and allocates its outputs from the op's `Contract`.

Interpreting the declaration at every call would cost more than the kernels do. The generated code
is straight-line Python, as fast as hand-written checks. Its source is registered with `linecache`,
so tracebacks show it, and `generated_source` returns it.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from textwrap import dedent
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from .contract import OPTION_TYPES, Arg, Contract, Layout, Option, Out, describe, plain_number, short

NEGATED: Final = ("not be a negated view (call resolve_neg)", "one")
"""What errors say of a negated view."""


class Writer:
    """Collects the lines of one generated function and the objects it refers to."""

    def __init__(self, contract: Contract, eager: bool = False) -> None:
        self.contract = contract
        self.eager = eager  # the dispatcher resolves negated views, and compilers cannot test for them
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
            "plain_number": plain_number,
            "NEGATED": NEGATED,
            "short": short,
            "fail_shape": self._fail_shape,
            "fail_dtype": self._fail_dtype,
            "fail_grad": self._fail_grad,
            "blame": contract.blame,
            **contract.scope,
        }
        self.indent = 0
        self.knows_device = False
        self.symbols: set[str] = set()
        first: dict[str, Arg] = {}
        again = {d for a in contract.args.values() for d in a.dims.split() if first.setdefault(d, a) is not a}
        self.absent = {d for d in again if d.isidentifier() and first[d].optional}
        """Symbols that an optional argument mentions first: None if it is absent, until another argument binds them."""
        self.shapes: dict[str, str] = {}

    def __call__(self, text: str, depth: int = 1) -> None:
        """Append a line, or an indented block that begins with a line break."""
        lines = dedent(text).strip().splitlines() if text[0] == "\n" else [text]
        self.lines += ["    " * (self.indent + depth) + line for line in lines]

    def constant(self, value: object, hint: str) -> str:
        """Return the name under which generated code finds ``value``."""
        name = f"_{hint}"
        self.scope[name] = value
        return name

    def _fail_shape(
        self, argument: str, dims: str, symbols: dict[str, object], got: Tensor, index: str = ""
    ) -> NoReturn:
        """``index`` identifies one tensor of a list. In ``N/32`` the known symbol is N."""
        shapes = " or ".join(f"[{', '.join(shape.split())}]" for shape in dims.split("|")).replace("[*S]", "S")
        tokens = (d.split("/")[0].removeprefix("*") for d in dims.replace("|", " ").split())
        mentioned = dict.fromkeys(d for d in tokens if d in symbols)
        with_ = ", ".join(
            f"{d}={list(v) if isinstance(v, tuple) else v}" for d in mentioned if (v := symbols[d]) is not None
        )
        arg = self.contract.args.get(argument)
        hint = arg.hint(symbols, got) if arg is not None and arg.hint is not None else ""
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
    """Raise: there is no backward, and an error is better than a silently lost gradient."""
    ways = "use torch.inference_mode(), no_grad() or detach()"
    contract.fail(argument, f"not require a gradient (there is no backward: {ways})", got)


def _needs_grad(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_needs_grad(item) for item in value)
    return isinstance(value, Tensor) and value.requires_grad


def _shape(dims: str) -> str:
    """The shape as an expression. ``N/32`` becomes -1, which no tensor has, if 32 does not divide N."""
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
    """Validate a shape and bind the symbols it mentions first; a shape without symbols means one element."""
    tokens = dims.split()
    if "|" in tokens:
        unlike = [f"{name}.shape != {_shape(d)}" if d.strip() else f"{name}.numel() != 1" for d in dims.split("|")]
        write(f"if {' and '.join(unlike)}:", depth)
        write(f"    fail_shape('{name}', '{dims}', {_known(write)}, {name})", depth)
        return
    if not tokens:
        write(f"if {name}.numel() != 1:", depth)
        write(f"    fail('{name}', 'have one element', str(list({name}.shape)))", depth)
        return
    fresh = [("lead" if t == "..." else t.removeprefix("*")) for t in tokens if not t.isdigit()]
    if all(s in write.symbols and s not in write.absent for s in fresh):
        same = write.shapes.get(dims)
        write(f"if {name}.shape != {same or _shape(dims)}:", depth)
        write(f"    fail_shape('{name}', '{dims}', {_known(write)}, {name})", depth)
        return
    tail = [t for t in tokens if t != "..."]
    shape = write.shapes[dims] = f"{name}_shape"
    write(
        f"""
        if {name}.dim() {"<" if "..." in tokens else "!="} {len(tail)}:
            fail_shape('{name}', '{dims}', {_known(write)}, {name})
        {shape} = {name}.shape
        """,
        depth,
    )
    differences: list[str] = []
    parts = [("lead", f"{shape}[:-{len(tail)}]")] if "..." in tokens else []
    parts += [(symbol, f"{shape}[{index - len(tail)}]") for index, symbol in enumerate(tail)]
    for symbol, part in parts:
        if symbol in write.symbols or symbol.isdigit():
            if symbol in write.absent:
                write(f"{symbol} = {part} if {symbol} is None else {symbol}", depth)
            differences.append(f"{part} != {symbol}")
        else:
            write(f"{symbol} = {part}", depth)
            write.symbols.add(symbol)
    if differences:
        write(f"if {' or '.join(differences)}:", depth)
        write(f"    fail_shape('{name}', '{dims}', {_known(write)}, {name})", depth)


def _check_tensor(write: Writer, name: str, arg: Arg, depth: int) -> None:
    allowed = arg.dtypes if isinstance(arg.dtypes, str) else write.constant(arg.dtypes, f"dtypes_{name}")
    write(
        f"""
        if not isinstance({name}, Tensor):
            fail('{name}', 'be a tensor', describe({name}))
        if {name}.dtype not in {allowed}:
            fail_dtype('{name}', {allowed}, {name}.dtype)
        """,
        depth,
    )
    if write.knows_device:  # is_cpu is a flag, which is faster to read than the device
        write(f"if not (on_cpu and {name}.is_cpu) and {name}.device != device:", depth)
        write(f"    fail('{name}', f'be on {{device}}', str({name}.device))", depth)
    else:
        write(f"device, on_cpu = {name}.device, {name}.is_cpu", depth)
        write.knows_device = True
    _bind_shape(write, name, arg.dims, depth)
    if arg.layout == "dense":
        write(f"if not {name}.is_contiguous():", depth)
        write(f"    fail('{name}', 'be contiguous', f'strides {{{name}.stride()}}')", depth)
    last = (arg.dims.split() or ["1"])[-1]
    if arg.layout == "rows" and last != "1":
        write(f"if {name}.stride(-1) != 1 and {name}.shape[-1] != 1:", depth)
        write(f"    fail('{name}', 'have a contiguous last dimension', f'strides {{{name}.stride()}}')", depth)
    if write.eager:  # torch negates such a view when it reads it
        write(f"if {name}.is_neg():", depth)
        write(f"    fail('{name}', *NEGATED)", depth)


def _check_many(write: Writer, name: str, arg: Arg) -> None:
    """Validate a list of tensors, each with one of several shapes."""
    allowed = write.constant(arg.dtypes, f"dtypes_{name}")
    shapes = ", ".join(_shape(d) for d in arg.dims.split("|"))
    write(f"""
        if not isinstance({name}, (list, tuple)):
            fail('{name}', 'be a list of tensors', describe({name}))
        if {name}:
            shapes = [{shapes}]
            for index, item in enumerate({name}):
                if not isinstance(item, Tensor):
                    fail('{name}', 'hold tensors', describe(item))
                if item.dtype not in {allowed}:
                    fail_dtype('{name}', {allowed}, item.dtype)
                if item.device != device:
                    fail('{name}', f'be on {{device}}', str(item.device))
                if tuple(item.shape) not in shapes:
                    fail_shape('{name}', '{arg.dims}', {_known(write)}, item, f' at index {{index}}')
                if item.stride(-1) != 1 and item.shape[-1] != 1:
                    fail('{name}', 'have a contiguous last dimension', f'strides {{item.stride()}}')
        """)
    if write.eager:
        write("if item.is_neg():", 3)
        write(f"    fail('{name}', *NEGATED)", 3)


def check_option_lines(write: Writer, name: str, option: Option) -> None:
    """Validate an option's type, choices and range."""
    guard = f"{name} is not None and " if option.optional else ""
    types, expected = OPTION_TYPES[option.type]
    kind = write.constant(types[0] if len(types) == 1 else types, f"type_{option.type}")
    conditions, expects = [f"isinstance({name}, {kind})"], [expected]
    if option.type in ("float", "int"):
        conditions.append(f"not isinstance({name}, bool)")
    if option.type == "float":
        write(f"if type({name}) is not float:")
        write(f"    {name} = plain_number({name})")
        # an int beyond the largest float still compares with floats
        conditions[1] += f" and (isinstance({name}, float) or -(2**1023) < {name} < 2**1023)"
    if option.choices:
        conditions = [conditions[0], f"{name} in {write.constant(option.choices, 'choices_' + name)}"]
        expects = ["be " + " or ".join(describe(c) for c in option.choices)]
    if option.where:
        conditions.append(f"({option.where})")
        expects.append(f"satisfy {option.where}")
    if option.type == "float" and not option.choices:
        # a plain float is the common case: test it first, and only once
        conditions[:2] = [f"(type({name}) is float or {' and '.join(conditions[:2])})"]
    write(f"if {guard}not ({' and '.join(conditions)}):")
    hint = "" if option.hint is None else f" + {write.constant(option.hint, f'hint_{name}')}({name})"
    write(f"    fail('{name}', {' and '.join(expects)!r}, describe({name}){hint})")


def _allocate(write: Writer, out: Out) -> None:
    name = out.argument
    if out.when != "True":
        unless = out.when.replace("'", '"')
        write(f"""
            if not ({out.when}):
                if {name} is not None:
                    fail('{name}', 'be None unless {unless}', describe({name}))
            elif {name} is None:
            """)
    else:
        write(f"if {name} is None:")
    same = write.shapes.get(out.dims)
    if out.make:
        write(f"{name} = {out.make}", 2)
    elif same:
        source = same.removesuffix("_shape")
        # passing a memory format costs 1.2 us, so it is passed only where it matters
        like = f"empty_like({source}, dtype={out.dtype})"
        write(f"{name} = {like} if {source}.is_contiguous() else {like[:-1]}, memory_format=contiguous)", 2)
    else:
        sizes = ", ".join("*lead" if d == "..." else d for d in out.dims.split())
        write(f"{name} = empty({sizes}, dtype={out.dtype}, device=device)", 2)
    write("else:")
    layout: Layout = "any" if out.make else "rows"
    _check_tensor(write, name, Arg(out.dims, out.doc, f"({out.dtype},)", layout=layout), 2)
    write(f"if {name}.requires_grad and is_grad_enabled():", 2)
    write(f"    fail_grad({name}={name})", 2)


def needs_grad(name: str, arg: Arg | None) -> str:
    """The expression that tests whether an argument, or an output if ``arg`` is None, requires a gradient."""
    if arg is not None and arg.many:
        return f"({name} and any([t.requires_grad for t in {name}]))"
    may_be_absent = arg is None or arg.optional
    return f"({name} is not None and {name}.requires_grad)" if may_be_absent else f"{name}.requires_grad"


def write_body(write: Writer, contract: Contract) -> None:
    """Write all checks, then the allocation of outputs."""
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
    write(f"if is_grad_enabled() and ({' or '.join(needs_grad(*item) for item in contract.args.items())}):")
    write(f"    fail_grad({', '.join(f'{n}={n}' for n in contract.args)})")
    for out in contract.outs.values():
        _allocate(write, out)


class Validation(NamedTuple):
    """The functions generated from one contract."""

    prepare: Callable[..., tuple[Tensor | None, ...]]
    """``prepare(*args, *options, *outs)`` validates everything and returns the outputs, allocating those that are None."""
    present: Callable[..., tuple[bool, ...]]
    """``present(*args, *options)`` returns which outputs such a call has."""


class EagerValidation(NamedTuple):
    """The same for plain eager calls."""

    prepare: Callable[..., tuple[Tensor | None, ...]]
    """Also rejects negated views, which compilers cannot test for and the dispatcher resolves."""
    check_options: Callable[..., None]
    """Validates the options alone."""
    models: Mapping[int, int]
    """The positions, among tensors and outputs, of outputs that are allocated like a tensor, and of that tensor."""


contracts: Final[dict[str, Contract]] = {}
"""Contracts for which code was generated, by name."""


@cache
def validation_of(contract: Contract) -> Validation:
    """Generate ``prepare`` and ``present``, once per contract."""
    write = Writer(contract)
    _write_prepare(write, contract)
    write(f"def present({', '.join([*contract.args, *contract.options])}):", 0)
    write(f"return {', '.join(out.when for out in contract.outs.values())},")
    run_source(write.lines, f"validation of {contract.name}", write.scope)
    contracts[contract.name] = contract
    return Validation(write.scope["prepare"], write.scope["present"])


@cache
def eager_validation_of(contract: Contract) -> EagerValidation:
    """Generate the validation of eager calls, at the first one."""
    write = Writer(contract, eager=True)
    _write_prepare(write, contract)
    write(f"def check_options({', '.join(contract.options)}):", 0)
    for name, option in contract.options.items():
        check_option_lines(write, name, option)
    write("return")
    run_source(write.lines, f"eager validation of {contract.name}", write.scope)
    positions = {name: i for i, name in enumerate(contract.args)}
    models: dict[int, int] = {}
    for i, out in enumerate(contract.outs.values(), start=len(contract.args)):
        shape = write.shapes.get(out.dims, "").removesuffix("_shape")
        if shape in positions:
            models[i] = positions[shape]
    return EagerValidation(write.scope["prepare"], write.scope["check_options"], models)


def _write_prepare(write: Writer, contract: Contract) -> None:
    inputs, outs = ", ".join([*contract.args, *contract.options]), contract.out_names
    write(f"def prepare({inputs}, {', '.join(out + '=None' for out in outs)}):", 0)
    write_body(write, contract)
    write(f"return {', '.join(outs)},")


def run_source(lines: Sequence[str], label: str, scope: dict[str, Any]) -> None:
    """Execute generated source under a file name that tracebacks can show."""
    source, filename = "\n".join(lines) + "\n", f"<onepass {label}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), scope)


def generated_sources(op_name: str) -> dict[str, str]:
    """The validation code that was generated for the contract of that name, by title."""
    titles = (f"validation of {op_name}", f"eager validation of {op_name}")
    sources = {title: "".join(linecache.getlines(f"<onepass {title}>")) for title in titles}
    return {title: source for title, source in sources.items() if source}
