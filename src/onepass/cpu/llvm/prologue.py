"""A prologue's program as vector code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...prologues import Prologue
from . import math_functions
from .emit import LANES, Bool, Float

_FUNCTIONS: Final = ("exp", "log", "rsqrt", "tanh", "sigmoid", "maximum", "minimum")
_OPERATORS: Final = ("neg", "add", "sub", "mul", "lt", "le", "gt", "ge")
_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    **{name: getattr(operator, name) for name in _OPERATORS},
    **{name: getattr(math_functions, name) for name in _FUNCTIONS},
    "div": operator.truediv,
    "not": operator.invert,
    "and": operator.and_,
    "or": operator.or_,
    "abs": abs,
    "sqrt": Float.sqrt,
    "eq": Float.eq,
    "ne": Float.ne,
    "where": Bool.where,
}


def apply(prologue: Prologue, x: Float, operands: Sequence[Float]) -> Float:
    """Emit ``prologue(x, *operands)``; a scalar operand applies to every column."""
    values: dict[str, Any] = dict(zip(prologue.parameters, (x, *operands), strict=True))
    for instruction in prologue.program:
        if instruction.op == "const":
            values[instruction.name] = x.number(_number(instruction.args[0]))
        else:
            arguments = [values[a] for a in instruction.args]
            values[instruction.name] = _OPERATIONS[instruction.op](*arguments)
    result: Float = values[prologue.result]
    return result.splat(LANES)


def _number(text: str) -> float:
    """A constant's repr: ``1.5`` or ``float('inf')``."""
    return float(text.removeprefix("float('").removesuffix("')"))
