"""Dot products of weight rows with rows of ``act``: what a GEMV spends its time on.

A sum has 16 lanes. A step adds 32 columns to it, in two fused multiply-adds per lane. After a chunk of K, and before
columns that do not fill a step, it is added to the tile's sums and restarted. The number of weight rows and rows of
``act`` in registers, and the order of chunks, do not affect sums: the order of additions depends only on K and the
dtypes.

The dot-product instructions for bfloat16 (vdpbf16ps) are not used: they flush subnormals, so bytes would depend on the
CPU.

``act`` is converted to float32 beforehand, chunk by chunk of all rows, in the order of the lanes. bfloat16 weights are
split in registers, even columns first. FP8 weights are converted to float16, a chunk of a few rows at a time, as 1/256
of their value; the sum of a chunk is scaled back, which is exact except for products below 2^-118.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from ...formats import E4M3FN
from ...specs.gemv_norm import GemvSpec
from ..sizes import BLOCK, CHUNK, ROW_BLOCKS, SUM, TILE
from .bits import load_row
from .function import Cell, Function
from .loops import LINE, each_block
from .vec import F32, I8, I16, I32, Bool, Float, Int, constant, type_of

VECTOR: Final = 4 * SUM
"""Bytes of a sum."""
_AHEAD: Final = 1024
"""Least number of bytes between a row's reads and their prefetches; the distance is whole chunks."""
_FP8_SCALE: Final = 2.0 ** (15 - E4M3FN.bias)
"""The value of an FP8 code over the float16 with the same sign, exponent and mantissa bits."""
_FP8_NAN: Final = E4M3FN.nan_code
_F16_NAN: Final = 0x7E00


class Shape(NamedTuple):
    """``block`` rows of ``act`` and ``rows`` weight rows are processed together, ``act_rows`` at a time in registers.

    ``panel`` weight rows go through K together, chunk by chunk.
    """

    block: int
    rows: int
    act_rows: int
    panel: int


def shapes(wide: bool) -> list[Shape]:
    """A shape for each of `ROW_BLOCKS`; ``wide``: the CPU has 32 registers that hold a sum each.

    Up to four rows of ``act`` are limited by memory, and reading eight weight rows at a time is fastest. More rows are
    limited by multiply-adds, two per load of 64 bytes: what counts is how often a load is used.
    """
    rows = {1: 8, 2: 8, 4: 4, 6: 4, 8: 3} if wide else {1: 4, 2: 2, 4: 2, 6: 2, 8: 2}
    return [Shape(b, rows[b], b if wide else min(b, 2), 8 if b < 4 else TILE) for b in ROW_BLOCKS]


def is_staged(spec: GemvSpec) -> bool:
    """Whether weights are converted in memory."""
    return spec.weight == E4M3FN.dtype


def expand_act(module: Any, spec: GemvSpec) -> Function:
    """``expand(act, stride, rows, padded, k, target)``: float32 copies of all rows, then rows of zeros.

    ``target`` is [chunk, row, column of the chunk]; the last chunk ends with a whole step.
    """
    f = Function(module, "expand", 6, private=True)
    act, stride, rows, padded, k, target = f.parameters
    paired = spec.weight == torch.bfloat16
    zero = f.index(0)

    def walk(m: Int, row: Int | None) -> None:
        with f.loop(zero, k, CHUNK) as chunk:
            address = target + (chunk * padded + m * CHUNK) * 4

            def body(at: Int, mask: Bool | None) -> None:
                value = f.zeros()[0]
                if row is not None:
                    value = load_row(f, spec.act, row + at * spec.act.itemsize, mask, paired)
                f.store(value.ir, address + (at - chunk) * 4)

            each_block(f, chunk, (chunk + CHUNK).min(k), body)

    with f.loop(zero, rows) as m:
        walk(m, act + m * stride)
    with f.loop(rows, padded) as m:
        walk(m, None)
    f.builder.ret_void()
    return f


def _dot(module: Any, spec: GemvSpec, shape: Shape) -> Function:
    """``dot(weight, stride, last, act, sums, count, fetch, fetch_stride, slow)``: ``count`` columns, in whole steps.

    Weight rows beyond the ``last`` one repeat it. The same number of the weight rows that follow is prefetched,
    from ``fetch`` on, at the pace of the columns or, if ``slow`` is 1, at half that pace.
    """
    f = Function(module, f"dot{shape.block}", 9, private=True)
    weight, stride, last, act, sums, count, fetch, fetch_stride, slow = f.parameters
    staged, size = is_staged(spec), spec.weight.itemsize
    dtype = torch.float16 if staged else spec.weight
    rows = [weight + stride * last.min(r) for r in range(shape.rows)]
    fetched = [fetch + fetch_stride * r for r in range(shape.rows)]

    def halves(address: Int) -> tuple[Float, Float]:
        """A step's columns, in the order of `expand_act`."""
        if dtype == torch.bfloat16:
            return load_row(f, dtype, address, None, True).halves()
        low, high = (load_row(f, dtype, address + i * SUM * dtype.itemsize, None, False, SUM) for i in range(2))
        return low, high

    for first in range(0, shape.block, shape.act_rows):
        zero = Float(f.builder, constant(type_of(F32, SUM), 0.0))
        cells = [[Cell(f, zero) for _ in range(shape.rows)] for _ in range(shape.act_rows)]
        with f.loop(f.index(0), count, BLOCK) as at:
            if first == 0:
                for offset in range(0, BLOCK * size, LINE):
                    for row in fetched:
                        f.prefetch(row + ((at * size >> slow) + offset))
            weights = [halves(row + at * dtype.itemsize) for row in rows]
            for half in range(2):
                for m, line in enumerate(cells):
                    a = f.floats(act + (at + ((first + m) * CHUNK + half * SUM)) * 4, SUM)
                    for cell, w in zip(line, weights, strict=True):
                        cell.set(a.fma(w[half], cell.get()))
        for m, line in enumerate(cells):
            for r, cell in enumerate(line):
                address = sums + ((first + m) * TILE + r) * VECTOR
                total = f.floats(address, SUM)
                value: Float = cell.get()
                f.store((value.fma(_FP8_SCALE, total) if staged else total + value).ir, address)
    f.builder.ret_void()
    return f


def _pad(module: Any, spec: GemvSpec) -> Function:
    """``stage(source, count, target)``: the last weights of a row, padded with zeros to a whole step."""
    f = Function(module, "stage", 3, private=True)
    source, count, target = f.parameters
    element = I32 if spec.weight == torch.float32 else I16
    f.store(f.load(source, element, f.first_lanes(count)), target)
    f.builder.ret_void()
    return f


def _decode(module: Any) -> Function:
    """``stage(source, count, target)``: FP8 codes as float16 numbers, padded with zeros to a whole step.

    NaN codes are rare: a row is searched for them, and converted once more if it has any.
    """
    f = Function(module, "stage", 3, private=True)
    source, count, target = f.parameters
    top = Cell(f, Int(f.builder, constant(type_of(I8, BLOCK), 0)))

    def body(at: Int, mask: Bool | None, nan: bool) -> None:
        codes = Int(f.builder, f.load(source + at, I8, mask))
        words = Int(f.builder, f.builder.sext(codes.ir, type_of(I16, BLOCK)))
        half = (words << 7) & 0xBF80  # the sign is in bits 15 and 14 and belongs in 15 only
        if nan:
            half = (words & _FP8_NAN).eq(_FP8_NAN).where(half.number(_F16_NAN), half)
        else:
            top.set(top.get().max(codes & _FP8_NAN))
        f.store(half.ir, target + at * 2)

    each_block(f, f.index(0), count, lambda at, mask: body(at, mask, False))
    with f.when(top.get().max_lane().eq(_FP8_NAN)):
        each_block(f, f.index(0), count, lambda at, mask: body(at, mask, True))
    f.builder.ret_void()
    return f


def walks(module: Any, spec: GemvSpec, wide: bool) -> dict[int, Function]:
    """For each of `ROW_BLOCKS`, ``walk(weight, stride, rows, act, blocks, k, sums, following)`` for one tile.

    It adds the sums of all ``rows`` weight rows and one or two ``blocks`` of rows of ``act`` to ``sums`` [act row,
    tile column], lane by lane. ``following`` is the address of the next tile's weights.
    """
    stage = _decode(module) if is_staged(spec) else _pad(module, spec)
    return {shape.block: _walk(module, spec, shape, stage) for shape in shapes(wide)}


def _walk(module: Any, spec: GemvSpec, shape: Shape, stage: Function) -> Function:
    dot = _dot(module, spec, shape)
    f = Function(module, f"walk{shape.block}", 8, private=True)
    weight, stride, rows, act, blocks, k, sums, following = f.parameters
    size = spec.weight.itemsize
    staged_stride = CHUNK * 2 if is_staged(spec) else BLOCK * size
    staged = f.allocate(shape.rows * staged_stride)
    zero = f.index(0)
    columns = (k + (CHUNK - 1)) & -CHUNK
    step = -(-_AHEAD // (CHUNK * size)) * CHUNK
    with f.loop(zero, rows, shape.panel) as panel, f.loop(zero, k, CHUNK) as chunk:
        here = weight + panel * stride + chunk * size
        end = (panel + shape.panel).min(rows)
        beyond = (end < rows).where(weight + end * stride, following)
        later = chunk + step
        ahead = (later < columns).where(f.index(step * size), beyond + (later - columns) * size - here)
        count = (k - chunk).min(CHUNK)
        whole = count & -BLOCK
        with f.loop(panel, end, shape.rows) as row:
            last = rows - row - 1
            origin = weight + row * stride + chunk * size

            def add(source: Int, source_stride: Int, at: Int, length: Int) -> None:
                """Add some columns of the chunk. If there are two blocks, each prefetches half of the columns."""
                with f.loop(zero, blocks) as block:
                    acts = act + ((chunk * blocks + block * CHUNK) * shape.block + at) * 4
                    block_sums = sums + (block * (shape.block * TILE) + row) * VECTOR
                    fetch = origin + ahead + block * (CHUNK * size // 2)
                    f.call(dot, source, source_stride, last, acts, block_sums, length, fetch, stride, blocks - 1)

            def expand(at: Int, length: Int) -> None:
                for r in range(shape.rows):
                    f.call(stage, origin + stride * last.min(r) + at * size, length, staged + r * staged_stride)

            if is_staged(spec):
                expand(zero, count)
                add(staged, f.index(staged_stride), zero, (count + (BLOCK - 1)) & -BLOCK)
            else:
                add(origin, stride, zero, whole)
                with f.when(whole < count):
                    expand(whole, count - whole)
                    add(staged, f.index(staged_stride), whole, f.index(BLOCK))
    f.builder.ret_void()
    return f


def fold(sums: list[Float]) -> Float:
    """The lane sums of 16 vectors of 16 lanes as one vector, each in the order of `sum_lanes`."""
    width = sums[0].lanes
    while len(sums) > 1:
        low = [i for i in range(2 * sums[0].lanes) if i % width < width // 2]
        high = [i + width // 2 for i in low]
        sums = [a.shuffle(b, low) + a.shuffle(b, high) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        width //= 2
    return sums[0]
