"""Prints a prologue as a Triton device function that loads its own operands."""

import linecache
from functools import cache
from typing import Any, Final

import triton
import triton.language as tl

from ..prologues import Dialect, Prologue
from ._row import load_operand


@triton.jit
def tanh(x):
    """Odd polynomial below 0.625, exponentials above."""
    z = x * x
    p = (
        ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1
    ) * z - 3.33332819422e-1
    small = p * z * x + x
    large = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0.0, -large, large))


@triton.jit
def larger(a, b):
    """The larger; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """The smaller; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


DIALECT: Final[Dialect] = {
    "const": "tl.full([], {0}, tl.float32)",
    "neg": "{0} * -1.0",  # Triton takes -x for 0 - x, which is 0 where x is 0, not -0
    "not": "~{0}",
    "where": "tl.where({0}, {1}, {2})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "tanh": "tanh({0})",
    "sigmoid": "tl.sigmoid({0})",
    "abs": "tl.abs({0})",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "tl.div_rn({0}, {1})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
}


@cache
def device_function(prologue: Prologue, kinds: tuple[str, ...]) -> Any:
    """The jitted ``fused(h, q0, at0, ..., columns, mask)`` of a prologue whose operands are of these kinds."""
    lines = ["def fused(h, q0, at0, q1, at1, q2, at2, q3, at3, columns, mask):", f"    {prologue.parameters[0]} = h"]
    for index, kind in enumerate(kinds):
        lines.append(
            f"    {prologue.parameters[index + 1]} = load_operand(q{index}, at{index}, columns, mask, '{kind}')"
        )
    body = prologue.source("fused", DIALECT).splitlines()[1:]
    source = "\n".join([*lines, *body]) + "\n"
    filename = f"<onepass prologue {prologue.key} {'-'.join(kinds)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    scope: dict[str, Any] = {"tl": tl, "load_operand": load_operand, "__name__": __name__}
    scope.update(tanh=tanh, larger=larger, smaller=smaller)
    exec(compile(source, filename, "exec"), scope)
    return triton.jit(scope["fused"])
