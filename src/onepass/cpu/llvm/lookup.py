"""FP8 codes as numbers by table, 64 at a time: for CPUs that look bytes up in 128 (AVX512-VBMI).

A number of an 8-bit format fits the upper half of a float32. Two tables have the bytes of these halves for negative
codes, subnormals and NaN included. NaN has no sign. So a number is negative if both its code and its entry are, which is
one logic instruction of three operands.

On Zen 4 a comparison takes the place of a multiply-add. Two lookups in two registers run beside 16 multiply-adds, but
eight take the place of eight.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from llvmlite import ir

from ...formats import E4M3FN
from .emit import I8, I32, Function, Int, constant, declare

WIDTH: Final = 64
"""Codes that are converted at a time."""
_BYTES: Final = ir.VectorType(I8, WIDTH)
_LANES: Final = WIDTH // 4
FEATURE: Final = "avx512vbmi"
_NAN: Final = E4M3FN.nan_code & 0x7F


def _tables(scale: float) -> tuple[list[int], list[int]]:
    """The lower and upper bytes of ``scale`` times each number, as bfloat16. The sign bit is 1, except that of NaN."""
    codes = torch.arange(128, dtype=torch.uint8).view(E4M3FN.dtype)
    halves = (codes.float() * -scale).to(torch.bfloat16).view(torch.int16).tolist()
    halves[_NAN] = 0x7FC0  # as the other kernels decode it
    return [half & 0xFF for half in halves], [half >> 8 & 0xFF for half in halves]


def _order() -> list[int]:
    """Where each byte comes from, so that lane ``l`` of the results has the columns l, l + 16, l + 32 and l + 48."""
    places = [0] * WIDTH
    for lane in range(_LANES):
        quarter, place = divmod(lane, 4)
        for part in range(4):
            places[16 * quarter + 8 * (part // 2) + 2 * place + part % 2] = lane + _LANES * part
    return places


def numbers(f: Function, address: Int, scale: float, whole: bool = True) -> list[Int]:
    """64 columns, or with ``whole=False`` 32, as words of two bfloat16 numbers of ``scale`` times their value.

    A word has columns 16 apart: the lower half of lane ``l`` of the first vector is column l and the upper half column
    l + 16; the second vector has the columns from 32 on.
    """
    builder = f.builder
    if whole:
        codes = f.load(address, I8, lanes=WIDTH)
    else:
        few = f.load(address, I8, lanes=WIDTH // 2)
        lanes = ir.Constant(ir.VectorType(I32, WIDTH), [*range(WIDTH // 2)] * 2)
        codes = builder.shuffle_vector(few, few, lanes)
    order = ir.Constant(_BYTES, _order())
    codes = builder.call(declare(builder, "llvm.x86.avx512.permvar.qi.512", _BYTES, [_BYTES, _BYTES]), [codes, order])
    low, high = (_found(builder, codes, table) for table in _tables(scale))
    high = builder.and_(high, builder.or_(codes, constant(_BYTES, 0x7F)))
    words = []
    for half in range(2 if whole else 1):
        pairs = [
            lane
            for start in range(8 * half, WIDTH, 16)
            for byte in range(8)
            for lane in (start + byte, start + byte + WIDTH)
        ]
        mixed = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, WIDTH), pairs))
        words.append(Int(builder, builder.bitcast(mixed, ir.VectorType(I32, _LANES))))
    return words


def _found(builder: ir.IRBuilder, codes: ir.Value, table: list[int]) -> Any:
    """The entries of a table of 128 bytes; the sign of a code is ignored."""
    function = declare(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, [_BYTES] * 3)
    first, second = (ir.Constant(_BYTES, table[start : start + WIDTH]) for start in (0, WIDTH))
    return builder.call(function, [first, codes, second])
