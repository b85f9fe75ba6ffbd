"""A prologue's program as vector code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...prologues import Prologue
from . import math_functions
from .vec import LANES, Float

_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "neg": operator.neg,
    "not": operator.invert,
    "where": lambda condition, a, b: condition.where(a, b),
    "exp": math_functions.exp,
    "log": math_functions.log,
    "sqrt": Float.sqrt,
    "rsqrt": math_functions.rsqrt,
    "tanh": math_functions.tanh,
    "sigmoid": math_functions.sigmoid,
    "abs": abs,
    "maximum": math_functions.maximum,
    "minimum": math_functions.minimum,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": Float.eq,
    "ne": Float.ne,
    "and": operator.and_,
    "or": operator.or_,
}


def apply(prologue: Prologue, x: Float, operands: Sequence[Float]) -> Float:
    """Emit ``prologue(x, *operands)``; an operand may be a scalar, which stands for every column."""
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
