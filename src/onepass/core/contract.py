"""The declaration of an op, from which everything that must agree with it is derived.

A `Contract` lists tensor arguments (shape by symbol, dtypes, layout), options and outputs. It
determines the torch schema, the code that validates every call and allocates its outputs, which is
also the fake implementation (`onepass.core.check`), sample inputs and bad arguments for
tests, and the tables of docs/ops.md. Conditions and derived sizes are Python expressions over the
argument names. They are compiled into the validation code and printed verbatim in the docs.
"""

from __future__ import annotations

import math
import numbers
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from ..errors import ContractError, Unsupported, renamed
from ..formats import ROUNDINGS

R = TypeVar("R")
Layout = Literal["rows", "dense", "any"]
"""``rows``: last dimension contiguous; ``dense``: contiguous; ``any``: validated by the op's own rules."""

OptionType = Literal["float", "int", "bool", "str", "ScalarType"]
OPTION_TYPES: Final[dict[OptionType, tuple[tuple[type, ...], str]]] = {
    "float": ((float, int), "be a number"),
    "int": ((int,), "be an int"),
    "bool": ((bool,), "be a bool"),
    "str": ((str,), "be a string"),
    "ScalarType": ((torch.dtype,), "be a dtype"),
}
"""The types of each kind of option, and the requirement as error messages phrase it."""


@dataclass(frozen=True)
class Arg:
    """A tensor argument. ``dims`` is its shape, or several of known sizes: alternatives, and those of a list's tensors
    (``"... N | N | ... 1 | ... N/32"``).
    """

    dims: str
    doc: str
    dtypes: tuple[torch.dtype, ...] | str
    optional: bool = False
    many: bool = False
    layout: Layout = "rows"
    sample: Literal["normal", "gamma", "positive", "index"] = "normal"
    mutable: bool = False
    """Whether the op also writes it; only `Contract.in_place` ops may."""
    debugged: bool = False
    """Debug mode reads its values on the host, as it does for indices. Such a call is then not repeated."""
    hint: Callable[[dict[str, Any], Tensor], str] | None = None
    """``hint(known sizes, tensor of the wrong shape)``: advice to append to the error message, or ""."""

    def schema(self, alias: str = "") -> str:
        """The argument's type in a torch schema."""
        written = f"({alias}!)" if self.mutable else ""
        return "Tensor[]" if self.many else f"Tensor{written}{'?' if self.optional else ''}"


@dataclass(frozen=True)
class Option:
    """A non-tensor keyword argument. ``where`` is a condition on its value, e.g. ``"0 <= eps < 1"``."""

    type: OptionType
    default: Any
    doc: str
    choices: tuple[Any, ...] = ()
    where: str = ""
    optional: bool = False
    hint: Callable[[object], str] | None = None
    """``hint(wrong value)``: advice to append to the error message, or ""."""

    @property
    def schema(self) -> str:
        """The option's type in a torch schema."""
        return self.type + ("?" if self.optional else "")

    @property
    def schema_default(self) -> str:
        """The default in a torch schema."""
        if isinstance(self.default, torch.dtype):
            return short(self.default)
        return f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)

    def accepts(self, name: str, value: object) -> bool:
        """Whether ``value`` is legal for this option, which is called ``name`` in its condition."""
        if value is None:
            return self.optional
        if self.type == "float":
            value = plain_number(value)
        if not isinstance(value, OPTION_TYPES[self.type][0]) or (isinstance(value, bool) and self.type != "bool"):
            return False
        if self.type == "float" and isinstance(value, int) and not -(2**1023) < value < 2**1023:
            return False
        if self.choices and value not in self.choices:
            return False
        return not self.where or bool(eval(self.where, {"inf": math.inf, name: value}))


@dataclass(frozen=True)
class Out:
    """An output: present when ``when`` holds, and written to the caller's tensor ``argument`` if given.

    ``*S`` in ``dims`` stands for all sizes of the derived tuple S.
    """

    dims: str
    dtype: str
    doc: str
    argument: str
    when: str = "True"
    make: str = ""
    """An expression that allocates it, if it is not contiguous; the caller's may then have any strides."""


@dataclass(frozen=True)
class Rule:
    """A condition over several arguments. Errors name ``argument`` and what it must do, ``expects``.

    ``={N}`` in ``expects`` becomes the value of N in messages and is left out of the docs.
    """

    condition: str
    argument: str
    expects: str


@dataclass(frozen=True, eq=False)
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
    replaces: dict[str, tuple[str, ...]] | None = None
    """Inputs that each output (by argument name) may alias; None: any of the same dtype, shape and strides."""
    in_place: bool = False
    """The op only exists in the form that writes into the caller's tensors, under the contract's own name."""
    carried: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters of the public function that are not arguments here, and the arguments that each carries."""
    known_as: dict[str, str] = field(default_factory=dict)
    """Public names of the arguments that have another name here; error messages use them."""
    form_of: str = ""
    """The public op that this is another form of; error messages name that op."""

    @cached_property
    def arguments(self) -> Callable[..., Any]:
        """A named tuple of all arguments, options and outputs (by argument name): what a kernel receives."""
        return namedtuple("Arguments", (*self.args, *self.options, *self.out_names))

    @property
    def public_name(self) -> str:
        """The public op's name."""
        return self.form_of or self.name

    @property
    def out_names(self) -> list[str]:
        """The argument names of the outputs."""
        return [out.argument for out in self.outs.values()]

    @property
    def schema(self) -> str:
        """The functional op's torch schema."""
        return f"{self.name}({_declared(self._inputs)}) -> Tensor[]"

    @property
    def out_schema(self) -> str:
        """The schema of the variant that writes into the caller's tensors."""
        outs = [(f"Tensor({chr(97 + i)}!)? {out.argument}", "None") for i, out in enumerate(self.outs.values())]
        return f"{self.name}{'' if self.in_place else '_out'}({_declared([*self._inputs, *outs])}) -> ()"

    @property
    def _inputs(self) -> list[tuple[str, str]]:
        """The declarations and defaults of arguments and options; "" for none."""
        aliases = (chr(97 + len(self.outs) + i) for i in range(len(self.args)))
        tensors = [(f"{a.schema(next(aliases))} {n}", "None" if a.optional else "") for n, a in self.args.items()]
        return tensors + [(f"{o.schema} {n}", o.schema_default) for n, o in self.options.items()]

    def completed(self, function: Callable[..., R], outs: bool, first: int = 0) -> Callable[..., R]:
        """``function`` for torch, which leaves out the last arguments of a call that equal the schema's defaults.

        The first argument of the op, ``outs`` included or not, is that of the function after ``first`` others.
        """
        defaults: list[Any] = [*(None for _ in self.args), *(option.default for option in self.options.values())]
        defaults += [None for _ in self.outs] if outs else []

        def complete(*arguments: Any) -> R:
            return function(*arguments, *defaults[len(arguments) - first :])

        return complete

    def fail(self, argument: str, expects: str, got: str) -> NoReturn:
        """Raise a `ContractError` in the standard format."""
        raise ContractError(f"{self.public_name}: `{self.known_as.get(argument, argument)}` must {expects}, got {got}")

    def blame(self, **tensors: object) -> None:
        """Reject non-tensors and non-strided tensors with an error that names the argument."""
        for name, value in tensors.items():
            many = name not in self.args or self.args[name].many
            for tensor in value if many and isinstance(value, (list, tuple)) else (value,):
                if not isinstance(tensor, Tensor | None):
                    self.fail(name, "be a tensor", describe(tensor))
                if tensor is not None and (tensor.layout is not torch.strided or tensor.is_nested):
                    self.fail(name, "be strided", "a nested tensor" if tensor.is_nested else str(tensor.layout))


@dataclass(frozen=True, eq=False)
class Alias:
    """A second public function of an op, with other names for some of its arguments."""

    name: str
    contract: Contract
    names: dict[str, str]
    """The function's names of the arguments that it calls otherwise."""

    def error(self, error: ContractError | Unsupported) -> ContractError | Unsupported:
        """An error of the op as one of this function."""
        return renamed(error, self.name, self.names)


def _declared(arguments: Sequence[tuple[str, str]]) -> str:
    """The arguments of a schema. Those after which none is required have their defaults."""
    written: list[str] = []
    required = False
    for declaration, default in reversed(arguments):
        required = required or not default
        written.append(declaration if required else f"{declaration}={default}")
    return ", ".join(reversed(written))


def plain_number(value: object) -> object:
    """A real number of another type, such as numpy's, as a float. Other values are returned as they are."""
    if type(value) in (float, int, bool) or not isinstance(value, numbers.Real):
        return value
    try:
        return float(value)
    except OverflowError:  # a fraction beyond the largest float, which no option accepts
        return value


def require_bool(op: str, name: str, value: object) -> None:
    """Reject anything but a bool: a value like "no" would count as true."""
    if not isinstance(value, bool):
        raise ContractError(f"{op}: `{name}` must be a bool, got {describe(value)}")


LONGEST: Final = 80
"""Longest value, in characters, that a message shows in full."""


def describe(value: object) -> str:
    """Describe a rejected value in a message: in full, or by its type and size if that would be long."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {short(value.dtype)} on {value.device}"
    if isinstance(value, torch.dtype):
        return short(value)
    if isinstance(value, int) and value.bit_length() > 4 * LONGEST:  # Python cannot print very long ints
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > LONGEST:
        return f"a string of {len(value)} characters that begins with {value[: LONGEST // 2]!r}"
    if isinstance(value, (list, tuple)):
        brief = len(value) <= LONGEST and not any(isinstance(item, Tensor) for item in value)
        return _brief(value) if brief else _counted(value)
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:  # an array from another library
        return f"a {_type(value)} {list(shape)} of {getattr(value, 'dtype', 'unknown dtype')}"
    if isinstance(value, (dict, set, frozenset, range, bytes)) and len(value) > LONGEST:
        return f"a {_type(value)} of {len(value)} items"
    return _brief(value)


def _brief(value: object) -> str:
    shown = repr(value)
    if len(shown) <= 2 * LONGEST and "\n" not in shown:
        return shown
    return _counted(value) if isinstance(value, (list, tuple)) else f"a {_type(value)}"


def _counted(values: Sequence[object]) -> str:
    kinds = {type(item).__name__ for item in values}
    kind = kinds.pop() if len(kinds) == 1 else "item"
    return f"a {type(values).__name__} of {len(values)} {kind}{'' if len(values) == 1 else 's'}"


def _type(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def short(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


# --- what several contracts share -----------------------------------------------------------------------------------

MAX_COLUMNS: Final = 2**24


def eps(name: str = "eps", groups: tuple[int, ...] = ()) -> Option:
    """A norm's epsilon as an option called ``name``. One of the op's ``groups`` is a misplaced group size."""

    def hint(value: object) -> str:
        return f"; did you mean group_size={value:g}?" if isinstance(value, (int, float)) and value in groups else ""

    return Option(
        "float", 1e-6, "added to the mean of squares", where=f"0 <= {name} < 1", hint=hint if groups else None
    )


def eps_of_k(name: str, other: str) -> Option:
    """The epsilon of k, an option called ``name``, where it is not that of q."""
    return Option("float", None, f"k's {other}; None: q's", where=f"0 <= {name} < 1", optional=True)


WEIGHT_OFFSET: Final = Option("float", 0.0, "added to gamma in float32", where="-3.4e38 <= weight_offset <= 3.4e38")
ROUNDING: Final = Option("str", "once", "where values are rounded", choices=ROUNDINGS)


def columns(symbol: str, argument: str) -> Rule:
    """The rule that limits the number of columns."""
    return Rule(f"0 < {symbol} <= {MAX_COLUMNS}", argument, "have 1 to 2**24 columns")


def output_dtype(allowed: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """Scope for ``dtype_of(out, x)``: the dtype of the caller's output if results may have it, else that of x."""

    def dtype_of(out: Tensor | None, x: Tensor) -> torch.dtype:
        return out.dtype if isinstance(out, Tensor) and out.dtype in allowed else x.dtype

    return {"dtype_of": dtype_of}
