"""Writes a prologue as a Triton device function that loads its own operands."""

import linecache
from functools import cache
from typing import Any, Final

import triton
import triton.language as tl

from ..formats import Fp8Format
from ..prologues import Dialect, Operand, Prologue
from .lib.row import load_operand

_GENERATED: Final = "<onepass Triton prologue "


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
    """The larger of two numbers; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """The smaller of two numbers; NaN if either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


DIALECT: Final[Dialect] = {
    "const": "tl.full([], {0}, tl.float32)",
    "neg": "{0} * -1.0",  # Triton computes -x as 0 - x, which is 0, not -0, where x is 0
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


@triton.jit
def decode(codes, BIAS: tl.constexpr, NAN: tl.constexpr, HARDWARE: tl.constexpr):
    """fp8 codes as float32, exactly; subnormals are the difference of two normal numbers."""
    if HARDWARE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.int32)
        size = wide & 0x7F
        least = tl.full([], (128 - BIAS) << 23, tl.int32)
        small = ((size << 20) + least).to(tl.float32, bitcast=True) - least.to(tl.float32, bitcast=True)
        large = ((size << 20) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
        bits = tl.where(size < 8, small, large).to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)
        if NAN == 0x7F:
            bits = tl.where(size == NAN, 0x7FC00000, bits)
        else:
            bits = tl.where(wide == NAN, 0x7FC00000, bits)
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_groups(pointer, start, columns, mask, GROUP: tl.constexpr):
    """One value per GROUP columns of a tile in column order. The load is too small to affect the
    layout of the row's tile.
    """
    ROWS: tl.constexpr = start.shape[0]
    COUNT: tl.constexpr = columns.shape[0] // GROUP
    groups = tl.min(tl.reshape(columns, (COUNT, GROUP)), axis=1) // GROUP
    wanted = tl.broadcast_to(mask, (ROWS, COUNT * GROUP)).to(tl.int32)
    present = tl.max(tl.reshape(wanted, (ROWS, COUNT, GROUP)), axis=2) > 0
    values = tl.load(pointer + start[:, None] + groups[None, :], mask=present, other=0.0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(values[:, :, None], (ROWS, COUNT, GROUP)), (ROWS, COUNT * GROUP))


def generated_sources() -> dict[str, str]:
    """The source of every prologue that has been written in this process, by name."""
    entries = {
        name: entry for name, entry in linecache.cache.items() if name.startswith(_GENERATED) and len(entry) == 4
    }
    return {name[len(_GENERATED) : -1]: "".join(entry[2]) for name, entry in entries.items()}


@cache
def device_function(
    prologue: Prologue,
    operands: tuple[Operand, ...],
    width: int = 0,
    x: Fp8Format | None = None,
    hardware: bool = False,
) -> Any:
    """The jitted ``fused(h, operands, starts, columns, mask)`` of a prologue with these operands.

    ``width`` is the number of columns of a tile in column order, or 0 if tiles are in another
    order. If ``x`` is given, ``h`` holds codes of that format.
    """
    value = f"decode(h, {x.bias}, {x.nan_code}, {hardware})" if x is not None else "h"
    lines = [
        "def fused(h, operands, starts, columns, mask):",
        f"    {prologue.parameters[0]} = {value}",
    ]
    for index, operand in enumerate(operands):
        place, size = f"operands[{index}].at, starts[{index}]", operand.group
        if not size:
            loaded = f"load_operand({place}, columns, mask, '{operand.kind}')"
        elif size <= width:
            loaded = f"load_groups({place}, columns, mask, {size})"
        else:  # one load per column, of its group's value
            loaded = f"load_operand({place}, columns // {size}, mask, 'full')"
        lines.append(f"    {prologue.parameters[index + 1]} = {loaded}")
    body = prologue.source("fused", DIALECT).splitlines()[1:]
    source = "\n".join([*lines, *body]) + "\n"
    kinds = "-".join(f"{operand.kind}{operand.group or ''}" for operand in operands)
    name = f"{prologue.key} {x.name if x else ''} {kinds} {width}"
    scope: dict[str, Any] = {"tl": tl, "load_operand": load_operand, "__name__": __name__}
    scope.update(tanh=tanh, larger=larger, smaller=smaller, decode=decode, load_groups=load_groups)
    filename = f"{_GENERATED}{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), scope)
    return triton.jit(scope["fused"])
