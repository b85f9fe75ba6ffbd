"""One declaration of an op, from which everything that must agree with it is made.

A `Contract` lists tensor arguments (shape by symbol, dtypes, layout), options and outputs. From it come the torch
schema, the straight-line checker and allocator that runs at every call and is also the fake implementation
(`Contract.prepare`, written by `onepass.contract.validation`), sample inputs and argument mutations for tests (`onepass.testing.samples`),
the bytes an ideal kernel moves, and the tables of docs/ops.md. Conditions and derived sizes are Python expressions over
the argument names, so that they are compiled into that checker and printed in the docs as they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, NoReturn

import torch
from torch import Tensor

from ..errors import ContractError

Layout = Literal["rows", "dense", "any"]
"""``rows``: last dimension contiguous; ``dense``: contiguous; ``any``: checked by the op's own rules."""

OptionType = Literal["float", "int", "bool", "str", "ScalarType"]


@dataclass(frozen=True)
class Arg:
    """A tensor argument. ``dims`` is one shape, or several for a list of tensors (``"... N | N | ... 1 | ... N/32"``)."""

    dims: str
    doc: str
    dtypes: tuple[torch.dtype, ...] | str
    optional: bool = False
    many: bool = False
    layout: Layout = "rows"
    sample: Literal["normal", "gamma", "positive", "index"] = "normal"
    mutable: bool = False
    """Also written: only in an op that is `Contract.in_place`."""
    debugged: bool = False
    """Its values are read on the host when debugging, as those of an index are; such a call is not replayed then."""
    hint: Callable[[dict[str, Any], Tensor], str] | None = None
    """From the sizes known so far and a tensor of the wrong shape to advice that ends the message, or ""."""

    def schema(self, alias: str = "") -> str:
        """Its type in a torch schema."""
        written = f"({alias}!)" if self.mutable else ""
        return "Tensor[]" if self.many else f"Tensor{written}{'?' if self.optional else ''}"


@dataclass(frozen=True)
class Option:
    """A keyword that is no tensor. ``where`` is a condition on its own value, e.g. ``"0 <= eps <= 3.4e38"``."""

    type: OptionType
    default: Any
    doc: str
    choices: tuple[Any, ...] = ()
    where: str = ""
    optional: bool = False

    @property
    def schema(self) -> str:
        """Its type in a torch schema."""
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
    """A condition over several arguments; ``argument`` is the one to blame, ``expects`` what it must be.

    ``={N}`` in ``expects`` is the value of N in messages and nothing in the docs.
    """

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
    replaces: dict[str, tuple[str, ...]] | None = None
    """Inputs that each output may be, by the outputs' argument names; None: any of its dtype, shape and strides."""
    in_place: bool = False
    """There is only the form that writes into the caller's tensors, under the contract's own name."""
    carried: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters of the public function that are not named here, and the names that each carries."""
    known_as: dict[str, str] = field(default_factory=dict)
    """The public function's names of arguments that have another name here: messages use them."""

    @cached_property
    def _generated(self) -> tuple[Callable[..., tuple[Tensor | None, ...]], Callable[..., tuple[bool, ...]]]:
        from .validation import compile_prepare

        return compile_prepare(self)

    @property
    def prepare(self) -> Callable[..., tuple[Tensor | None, ...]]:
        """``prepare(*args, *options, *outs)`` checks everything and returns the outputs, allocating those that are None."""
        return self._generated[0]

    @property
    def present(self) -> Callable[..., tuple[bool, ...]]:
        """``present(*args, *options)``: which outputs such a call has."""
        return self._generated[1]

    @property
    def schema(self) -> str:
        """The functional op's torch schema."""
        return f"{self.name}({', '.join(self._inputs)}) -> Tensor[]"

    @property
    def out_schema(self) -> str:
        """The schema of the variant that writes into the caller's tensors."""
        outs = [f"Tensor({chr(97 + i)}!)? {out.argument}" for i, out in enumerate(self.outs.values())]
        return f"{self.name}{'' if self.in_place else '_out'}({', '.join([*self._inputs, *outs])}) -> ()"

    @property
    def _inputs(self) -> list[str]:
        aliases = (chr(97 + len(self.outs) + i) for i in range(len(self.args)))
        tensors = [f"{a.schema(next(aliases))} {n}" for n, a in self.args.items()]
        return tensors + [f"{o.schema} {n}" for n, o in self.options.items()]

    def fail(self, argument: str, expects: str, got: str) -> NoReturn:
        """Raise the error every refusal has the form of."""
        raise ContractError(f"{self.name}: `{self.known_as.get(argument, argument)}` must {expects}, got {got}")

    def blame(self, **tensors: Any) -> None:
        """Refuse what is no tensor, or one without strides or memory of its own: torch's errors name nothing."""
        for name, value in tensors.items():
            many = isinstance(value, (list, tuple)) and (name not in self.args or self.args[name].many)
            for tensor in value if many else (value,):
                if not isinstance(tensor, Tensor | None):
                    self.fail(name, "be a tensor", describe(tensor))
                if tensor is not None and (tensor.layout is not torch.strided or tensor.is_nested):
                    self.fail(name, "be strided", "a nested tensor" if tensor.is_nested else str(tensor.layout))


def require_bool(op: str, name: str, value: object) -> None:
    """Refuse what is no bool: "no" and 0 have a truth that callers may not mean."""
    if not isinstance(value, bool):
        raise ContractError(f"{op}: `{name}` must be a bool, got {describe(value)}")


LONGEST: Final = 80
"""Characters of a value that a message shows as it is."""


def describe(value: object) -> str:
    """How a message shows a value it refuses: as it is, or by its type and size where that would be long."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {short(value.dtype)} on {value.device}"
    if isinstance(value, torch.dtype):
        return short(value)
    if isinstance(value, int) and value.bit_length() > 4 * LONGEST:  # Python refuses to print the longest
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > LONGEST:
        return f"a string of {len(value)} characters that begins with {value[: LONGEST // 2]!r}"
    if isinstance(value, (list, tuple)):
        few = len(value) <= LONGEST and not any(isinstance(item, Tensor) for item in value)
        return _brief(value) if few else _counted(value)
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:  # an array of another library
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


def moved_bytes(tensors: Sequence[Tensor | None]) -> int:
    """Bytes an ideal kernel moves: every input read once, every output written once."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
