"""A prologue's Python function evaluated as Python evaluates it, and random functions to evaluate.

The lowered program plays no part here: the function that the user wrote is called for one element at a time, so that
``if``, ``and``, ``or`` and ``not`` mean what they mean in Python.
"""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

import torch
from torch import Tensor

from onepass import prologues

_count = itertools.count()


class _Number(Tensor):
    """One element. ``a += b`` binds ``a`` to another number; on tensors it would change all that share memory with a."""

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self + other

    def __isub__(self, other: Any) -> Any:  # type: ignore[misc]
        return self - other

    def __imul__(self, other: Any) -> Any:  # type: ignore[misc]
        return self * other

    def __itruediv__(self, other: Any) -> Any:  # type: ignore[misc]
        return self / other

    def __rtruediv__(self, other: Any) -> Any:
        """A true division; torch multiplies by the reciprocal."""
        return torch.full_like(self, other) / self


def direct(function: Callable[..., Any], *tensors: Tensor) -> Tensor:
    """``function`` applied to every element of broadcast tensors of one dtype."""
    dtype = tensors[0].dtype
    shaped = torch.broadcast_tensors(*tensors)
    elements = zip(*(t.reshape(-1).as_subclass(_Number).unbind() for t in shaped), strict=True)
    found = [torch.as_tensor(function(*element)).as_subclass(Tensor).to(dtype) for element in elements]
    return torch.stack(found).view(shaped[0].shape)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal, including the sign of zero, except that any NaN equals any other."""
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}[a.dtype]
    return a.dtype == b.dtype and bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def define(source: str, **names: Any) -> Callable[..., Any]:
    """The function ``f`` defined by a source that `inspect` can read, as in a notebook cell."""
    filename = f"<test cell {next(_count)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    scope: dict[str, Any] = {"F": prologues, "math": math, "__name__": "cell", **names}
    exec(compile(source, filename, "exec"), scope)
    function: Callable[..., Any] = scope["f"]
    return function


NAMES: Final = (
    "x", "y", "torch", "tl", "tanh", "exp", "larger", "smaller", "where", "mask", "columns", "h", "q0", "at0", "v0", "v1",
    "p0", "p1", "p4", "fused", "load_operand", "evaluate", "self", "F_", "e", "pi",
)  # fmt: skip
"""Names for parameters and locals, including some that generated code uses too."""
_NUMBERS: Final = ("0.0", "1.0", "2", "0.5", "-3.0", "0.125", "-1", "16.0", "HALF", "math.inf")
_EXACT: Final = (("abs", 1),)
_OTHERS: Final = (
    ("F.sqrt", 1),
    ("F.maximum", 2),
    ("F.minimum", 2),
    ("F.exp", 1),
    ("F.log", 1),
    ("F.rsqrt", 1),
    ("F.tanh", 1),
    ("F.sigmoid", 1),
    ("F.silu", 1),
)


class _Body:
    """Draws statements. ``exact``: only operations that have the same bits everywhere.

    `maximum` has not, as the larger of 0 and -0 is either, nor has torch's `sqrt`, which may be an ulp off.
    """

    def __init__(self, r: Random, exact: bool) -> None:
        self.r = r
        self.helpers = _EXACT if exact else _EXACT + _OTHERS
        self.names = r.sample(NAMES, len(NAMES))
        self.parameters = [self.names.pop() for _ in range(r.randint(1, 4))]
        self.numbers = list(self.parameters)
        self.conditions: list[str] = []

    def number(self, depth: int) -> str:
        """An expression that contains a variable: Python evaluates arithmetic on numbers alone in float64."""
        r = self.r
        way = r.randrange(8) if depth else 0
        if way < 2:
            return r.choice(self.numbers)
        if way < 4:
            return f"({self.number(depth - 1)} {r.choice('+-*/')} {self.any_number(depth - 1)})"
        if way == 4:
            return f"({self.any_number(depth - 1)} {r.choice('+-*/')} {self.number(depth - 1)})"
        if way == 5:
            return f"(-{self.number(depth - 1)})"
        if way == 6:
            name, arity = r.choice(self.helpers)
            arguments = [self.number(depth - 1), *(self.any_number(depth - 1) for _ in range(arity - 1))]
            return f"{name}({', '.join(r.sample(arguments, arity))})"
        test, a, b = self.condition(depth - 1), self.number(depth - 1), self.number(depth - 1)
        return f"F.where({test}, {a}, {b})" if r.random() < 0.4 else f"({a} if {test} else {b})"

    def any_number(self, depth: int) -> str:
        return self.r.choice(_NUMBERS) if self.r.random() < 0.4 else self.number(depth)

    def condition(self, depth: int) -> str:
        r = self.r
        way = r.randrange(6) if depth else 0
        if way == 5 and self.conditions:
            return r.choice(self.conditions)
        if way == 3:
            return f"({self.condition(depth - 1)} {r.choice(('and', 'or'))} {self.condition(depth - 1)})"
        if way == 4:
            return f"(not {self.condition(depth - 1)})"
        terms = [self.number(0), self.any_number(0), self.number(0)][: r.choice((2, 2, 3))]
        ops = [r.choice(("<", "<=", ">", ">=", "==", "!=")) for _ in terms[1:]]
        return "(" + terms[0] + "".join(f" {op} {term}" for op, term in zip(ops, terms[1:], strict=True)) + ")"

    def statement(self) -> str:
        r = self.r
        way = r.randrange(9)
        if way == 8:
            name, text = r.choice([self.names[-1], *self.conditions]), self.condition(2)
            self._bound(name, self.conditions)
            return f"{name} = {text}"
        if way == 7 and len(self.numbers) > 1:
            names = r.sample(self.numbers, 2)
            return f"{names[0]}, {names[1]} = {names[1]}, {self.number(1)}"
        if way in (4, 5):
            return f"{r.choice(self.numbers)} {r.choice('+-*/')}= {self.any_number(2)}"
        name, text = r.choice([self.names[-1], *self.numbers]), self.number(3)
        self._bound(name, self.numbers)
        if way == 6:
            return f"{name} = {r.choice(self.numbers)} = {text}"
        return f"{name}: float = {text}" if way == 3 else f"{name} = {text}"

    def _bound(self, name: str, among: list[str]) -> None:
        if name not in among:
            among.append(name)
            self.names.remove(name)


def random_source(seed: int, exact: bool = False) -> tuple[str, int]:
    """The source of a random function ``f`` and its number of parameters."""
    body = _Body(Random(seed), exact)
    lines = [f"    {body.statement()}\n" for _ in range(body.r.randint(0, 7))]
    result = f"    return {body.number(3)}\n"
    return f"def f({', '.join(body.parameters)}):\n" + "".join(lines) + result, len(body.parameters)


def elements(count: int, dtype: torch.dtype, seed: int) -> Iterator[Tensor]:
    """Tensors with repeated values, so that comparisons meet equal ones: eighths, zeros of both signs, infinity, NaN."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, math.nan, 0.5, 16.0])
    for _ in range(count):
        values = torch.randint(-40, 41, (32,), generator=generator) / 8
        places = torch.randperm(32, generator=generator)[:8]
        values[places] = special
        yield values.to(dtype)
