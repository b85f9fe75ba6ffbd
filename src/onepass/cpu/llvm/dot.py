"""Dot products of weight rows with rows of ``act``: what a GEMV and a linear layer spend their time on.

A sum has 16 lanes. A step adds 32 columns to it, in two fused multiply-adds per lane. After a chunk of K, and before
columns that do not fill a step, it is added to the tile's sums and restarted. The number of weight rows and rows of
``act`` in registers, and the order of chunks, do not affect sums: the order of additions depends only on K and the
dtypes.

The dot-product instructions for bfloat16 (vdpbf16ps) are not used: they flush subnormals, so bytes would depend on the
CPU.

``act`` is converted to float32 beforehand, chunk by chunk of all rows, in the order of the lanes. bfloat16 weights are
split in registers, even columns first. FP8 weights are converted to 1/256 of their value; the sum of a chunk is scaled
back, which is exact except for products below 2^-118. They are looked up in registers (`lookup`) where a CPU can, or
converted to float16 in memory, a chunk of a few rows at a time. int8 weights are converted in registers.

With a scale per block of weights the sum is restarted at every block of K and added to the tile's sums as one fused
multiply-add with the block's scale, lane by lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import torch

from ...formats import E4M3FN, SCALE_BLOCK, WeightScale
from ..sizes import BLOCK, CHUNK, MAX_BLOCKS, ROW_BLOCKS, SUM, TILE
from . import lookup
from .bits import load_row, load_scalar
from .emit import F32, I8, I16, I32, Bool, Cell, Float, Function, Int, Module, constant, type_of
from .loops import LINE, each_block

VECTOR: Final = 4 * SUM
"""Bytes of a sum."""
_PANEL: Final = 12
"""Weight rows that go through K together, chunk by chunk. Twice as many do not fit the first cache level, and four
rows of x took 1.4 times as long."""
_AHEAD: Final = 2048
"""Least number of bytes between a row's reads and their prefetches. The distance is whole chunks. The lines go to the
second cache level only. In the first they evict each other, and a row of x took up to 1.3 times as long."""
_FP8_SCALE: Final = 2.0 ** (15 - E4M3FN.bias)
"""The value of an FP8 code over the float16 with the same sign, exponent and mantissa bits."""
_FP8_NAN: Final = E4M3FN.nan_code
_F16_NAN: Final = 0x7E00
_LOOKED_UP: Final = 4
"""Rows of ``act`` up to which FP8 codes are looked up. With eight, that took 1.13 times as long as float16 in memory."""
_SCALES: Final = CHUNK // SCALE_BLOCK
"""Scales of a weight row's chunk, if blocks have scales."""
_ELEMENT: Final = {torch.float32: I32, torch.float16: I16, torch.bfloat16: I16, torch.int8: I8, E4M3FN.dtype: I8}


class Product(NamedTuple):
    """What shapes the code of a product: the dtypes, and how weights are scaled."""

    act: torch.dtype
    weight: torch.dtype
    scale: WeightScale

    @property
    def is_paired(self) -> bool:
        """Whether the even columns of a step come first in the copy of ``act``."""
        return self.weight == torch.bfloat16

    @property
    def is_fp8(self) -> bool:
        """Whether weights are FP8 codes. Their products are added as 1/256 of their value."""
        return self.weight == E4M3FN.dtype

    @property
    def block_scale(self) -> torch.dtype | None:
        """The dtype of scales per block."""
        return {"block": torch.float32, "ue8m0_block": torch.float8_e8m0fnu}.get(self.scale)


class Shape(NamedTuple):
    """``block`` rows of ``act`` and ``rows`` weight rows are processed together, ``act_rows`` at a time in registers."""

    block: int
    rows: int
    act_rows: int


def shapes(wide: bool) -> list[Shape]:
    """A shape for each of `ROW_BLOCKS`; ``wide``: the CPU has 32 registers that hold a sum each.

    Up to four rows of ``act`` are limited by memory. More rows are limited by multiply-adds, two per load of 64 bytes:
    what counts is how often a load is used.
    """
    rows = {1: 12, 2: 6, 4: 4, 6: 4, 8: 3} if wide else {1: 6, 2: 3, 4: 2, 6: 2, 8: 2}
    return [Shape(b, rows[b], b if wide else min(b, 2)) for b in ROW_BLOCKS]


def copied(act: Int, padded: Int, row: Int, chunk: Int) -> Int:
    """Where a chunk of a row is in the float32 copy of ``padded`` rows of ``act``: [chunk, row, column of the chunk]."""
    return act + (chunk * padded + row * CHUNK) * 4


def expand_act(module: Module, product: Product) -> Function:
    """``expand(act, stride, rows, padded, k, target)``: float32 copies of all rows, then rows of zeros.

    The last chunk ends with a whole step.
    """
    f = Function(module, "expand", 6, private=True)
    act, stride, rows, padded, k, target = f.parameters
    zero = f.index(0)

    def walk(m: Int, row: Int | None) -> None:
        def value(at: Int, mask: Bool | None) -> Float:
            if row is None:
                return f.zeros()[0]
            return load_row(f, product.act, row + at * product.act.itemsize, mask, product.is_paired)

        copy_row(f, k, target, padded, m, value)

    with f.loop(zero, rows) as m:
        walk(m, act + m * stride)
    with f.loop(rows, padded) as m:
        walk(m, None)
    f.builder.ret_void()
    return f


def copy_row(f: Function, k: Int, target: Int, padded: Int, m: Int, value: Callable[[Int, Bool | None], Float]) -> None:
    """Write row ``m`` of the float32 copy. ``value(at, mask)`` is a block of it, in the order of `Product.is_paired`."""
    with f.loop(f.index(0), k, CHUNK) as chunk:
        address = copied(target, padded, m, chunk)

        def body(at: Int, mask: Bool | None) -> None:
            f.store(value(at, mask).ir, address + (at - chunk) * 4)

        each_block(f, chunk, (chunk + CHUNK).min(k), body)


class _Dot:
    """Emits ``dot(weight, stride, last, act, sums, count, fetch, fetch_stride, slow, scales, begun)``.

    It adds ``count`` columns, in whole steps, to the tile's sums, or replaces these if ``begun`` is 0. Weight rows
    beyond the ``last`` one repeat it. The same number of the weight rows that follow is prefetched, from ``fetch`` on,
    at the pace of the columns or ``2**slow`` times slower.
    """

    def __init__(self, module: Module, product: Product, shape: Shape) -> None:
        self.f = Function(module, f"dot{shape.block}", 11, private=True)
        (
            weight,
            stride,
            last,
            self.act,
            self.sums,
            self.count,
            fetch,
            fetch_stride,
            self.slow,
            self.scales,
            self.begun,
        ) = self.f.parameters
        self.product, self.shape, self.looked_up = product, shape, _looks_up(module, product, shape)
        self.dtype = torch.float16 if product.is_fp8 else product.weight
        self.rows = [weight + stride * last.min(r) for r in range(shape.rows)]
        self.fetched = [fetch + fetch_stride * r for r in range(shape.rows)]

    def emit(self) -> Function:
        """The function."""
        f = self.f
        for first in range(0, self.shape.block, self.shape.act_rows):
            if self.product.block_scale is None:
                self._settle(first, self._partial(first, f.index(0), self.count), None, self.begun)
                continue
            with f.loop(f.index(0), self.count, SCALE_BLOCK) as begin:
                cells = self._partial(first, begin, (begin + SCALE_BLOCK).min(self.count))
                at = self.scales + begin // SCALE_BLOCK * 4
                scale = [
                    load_scalar(f, torch.float32, at + r * (_SCALES * 4)).splat(SUM) for r in range(self.shape.rows)
                ]
                self._settle(first, cells, scale, self.begun + begin)
        f.builder.ret_void()
        return f

    def _partial(self, first: int, begin: Int, end: Int) -> list[list[Cell]]:
        """Sums over a range of columns."""
        f = self.f
        zero = Float(f.builder, constant(type_of(F32, SUM), 0.0))
        cells = [[Cell(f, zero) for _ in range(self.shape.rows)] for _ in range(self.shape.act_rows)]
        if self.looked_up:
            most = end - ((end - begin) & (lookup.WIDTH - 1))
            with f.loop(begin, most, lookup.WIDTH) as at:
                self._look_up(cells, first, at, True)
            with f.when(most < end):
                self._look_up(cells, first, most, False)
            return cells
        with f.loop(begin, end, BLOCK) as at:
            if first == 0:
                self._prefetch(at, BLOCK)
            weights = [self._halves(row + at * self.dtype.itemsize) for row in self.rows]
            for half in range(2):
                for m, line in enumerate(cells):
                    a = self._acts(first + m, at, half)
                    for cell, w in zip(line, weights, strict=True):
                        cell.set(a.fma(w[half], cell.get()))
        return cells

    def _look_up(self, cells: list[list[Cell]], first: int, at: Int, whole: bool) -> None:
        """Add `lookup.WIDTH` columns, or a step. Numbers are split where they are used, which saves registers."""
        if first == 0:
            self._prefetch(at, lookup.WIDTH)
        parts = range(4 if whole else 2)

        def number(words: Sequence[Int], part: int) -> Float:
            pair = words[part // 2]
            return (pair & 0xFFFF0000 if part % 2 else pair << 16).float()

        if self.shape.act_rows == 1:  # there are many weight rows: one is done before the next is loaded
            mine = [self._acts(first, at, part) for part in parts]
            for row, cell in zip(self.rows, cells[0], strict=True):
                words = lookup.numbers(self.f, row + at, 1 / _FP8_SCALE, whole)
                for part in parts:
                    cell.set(mine[part].fma(number(words, part), cell.get()))
            return
        several = [lookup.numbers(self.f, row + at, 1 / _FP8_SCALE, whole) for row in self.rows]
        for part in parts:
            weights = [number(words, part) for words in several]
            for m, line in enumerate(cells):
                a = self._acts(first + m, at, part)
                for cell, w in zip(line, weights, strict=True):
                    cell.set(a.fma(w, cell.get()))

    def _settle(self, first: int, cells: list[list[Cell]], scale: list[Float] | None, begun: Int) -> None:
        """Add the sums to the tile's, or to 0."""
        f, is_fp8 = self.f, self.product.is_fp8
        zero = Float(f.builder, constant(type_of(F32, SUM), 0.0))
        fresh = begun.eq(0).splat(SUM)
        for m, line in enumerate(cells):
            for r, cell in enumerate(line):
                address = self.sums + ((first + m) * TILE + r) * VECTOR
                total = fresh.where(zero, f.floats(address, SUM))
                value: Float = cell.get()
                if scale is not None:
                    total = (value * _FP8_SCALE if is_fp8 else value).fma(scale[r], total)
                else:
                    total = value.fma(_FP8_SCALE, total) if is_fp8 else total + value
                f.store(total.ir, address)

    def _halves(self, address: Int) -> tuple[Float, Float]:
        """A step's weights, in the order of the copy of ``act``."""
        f, dtype = self.f, self.dtype
        if self.product.is_paired:
            return load_row(f, dtype, address, None, True).halves()
        low, high = (load_row(f, dtype, address + i * SUM * dtype.itemsize, None, False, SUM) for i in range(2))
        return low, high

    def _acts(self, row: int, at: Int, part: int) -> Float:
        """`SUM` columns of a row of ``act``: the given part of those from ``at`` on."""
        return self.f.floats(self.act + (at + (row * CHUNK + part * SUM)) * 4, SUM)

    def _prefetch(self, at: Int, columns: int) -> None:
        size = self.product.weight.itemsize
        for offset in range(0, columns * size, LINE):
            for row in self.fetched:
                self.f.prefetch(row + ((at * size >> self.slow) + offset), level=2)


def _looks_up(module: Module, product: Product, shape: Shape) -> bool:
    """Whether FP8 weights are converted in registers. The sums of more rows leave too few for that."""
    return product.is_fp8 and lookup.FEATURE in module.features and shape.act_rows <= _LOOKED_UP


def _pad(module: Module, product: Product) -> Function:
    """``stage(source, count, target)``: the last weights of a row, padded with zeros to a whole step."""
    f = Function(module, "stage", 3, private=True)
    source, count, target = f.parameters
    f.store(f.load(source, _ELEMENT[product.weight], f.first_lanes(count)), target)
    f.builder.ret_void()
    return f


def _copy(module: Module) -> Function:
    """``copy(source, count, target)``: FP8 codes, padded with zeros to a whole step."""
    f = Function(module, "copy", 3, private=True)
    source, count, target = f.parameters
    each_block(f, f.index(0), count, lambda at, mask: f.store(f.load(source + at, I8, mask), target + at))
    f.builder.ret_void()
    return f


def _decode(module: Module) -> Function:
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


def walks(module: Module, product: Product, wide: bool) -> dict[int, Function]:
    """For each of `ROW_BLOCKS`, ``walk(weight, stride, rows, act, blocks, k, sums, following, scale, scale_stride, column)``.

    It writes the sums of all ``rows`` weight rows of a tile and up to `MAX_BLOCKS` ``blocks`` of rows of ``act`` to
    ``sums`` [act row, tile column], lane by lane. What columns beyond ``rows`` hold is arbitrary. ``following`` is the
    address of the next tile's weights. ``column`` is the tile's first weight row, which selects the scales of its blocks.
    """
    stage = _decode(module) if product.is_fp8 else _pad(module, product)
    stages = {False: stage, True: _copy(module) if product.is_fp8 else stage}
    return {s.block: _walk(module, product, s, stages[_looks_up(module, product, s)]) for s in shapes(wide)}


def _walk(module: Module, product: Product, shape: Shape, stage: Function) -> Function:
    dot = _Dot(module, product, shape).emit()
    f = Function(module, f"walk{shape.block}", 11, private=True)
    weight, stride, rows, act, blocks, k, sums, following, scale, scale_stride, column = f.parameters
    size = product.weight.itemsize
    looked_up = _looks_up(module, product, shape)
    staged_stride = CHUNK * (1 if looked_up else 2) if product.is_fp8 else BLOCK * size
    staged = f.allocate(_PANEL * staged_stride)
    scales = f.allocate(_PANEL * _SCALES * 4) if product.block_scale is not None else f.index(0)
    zero = f.index(0)
    slow = _share(f, blocks)
    columns = (k + (CHUNK - 1)) & -CHUNK
    step = -(-_AHEAD // (CHUNK * size)) * CHUNK
    with f.loop(zero, rows, _PANEL) as panel, f.loop(zero, k, CHUNK) as chunk:
        here = weight + panel * stride + chunk * size
        end = (panel + _PANEL).min(rows)
        beyond = (end < rows).where(weight + end * stride, following)
        later = chunk + step
        ahead = (later < columns).where(f.index(step * size), beyond + (later - columns) * size - here)
        count = (k - chunk).min(CHUNK)
        whole = count & -BLOCK
        with f.loop(zero, blocks) as block, f.loop(panel, end, shape.rows) as row:
            last = rows - row - 1
            origin = weight + row * stride + chunk * size
            own = staged + (row - panel) * staged_stride
            own_scales = scales + (row - panel) * (_SCALES * 4)

            def add(source: Int, source_stride: Int, at: Int, length: Int) -> None:
                """Add some columns of the chunk. Every block of rows prefetches its share of the columns."""
                acts = copied(act, blocks * shape.block, block * shape.block, chunk) + at * 4
                block_sums = sums + (block * (shape.block * TILE) + row) * VECTOR
                fetch = origin + ahead + block * (f.index(CHUNK * size) >> slow)
                place = (last, acts, block_sums, length, fetch, stride, slow, own_scales)
                f.call(dot, source, source_stride, *place, chunk + at)

            def expand(at: Int, length: Int) -> None:
                for r in range(shape.rows):
                    f.call(stage, origin + stride * last.min(r) + at * size, length, own + r * staged_stride)

            with f.when(block.eq(0)):
                if product.block_scale is not None:
                    place = scale + chunk // SCALE_BLOCK * product.block_scale.itemsize
                    weight_rows = (column + row + last.min(r) for r in range(shape.rows))
                    _store_scales(f, product.block_scale, place, scale_stride, weight_rows, count, own_scales)
                if product.is_fp8:  # looked up where it is, unless the last step has to be padded
                    with f.when((whole < count) if looked_up else count > 0):
                        expand(zero, count)
            if product.is_fp8:
                steps = (count + (BLOCK - 1)) & -BLOCK
                if looked_up:
                    with f.choice(whole < count) as (padded, plain):
                        with padded:
                            add(own, f.index(staged_stride), zero, steps)
                        with plain:
                            add(origin, stride, zero, count)
                else:
                    add(own, f.index(staged_stride), zero, steps)
            else:
                add(origin, stride, zero, whole)
                with f.when(whole < count):
                    expand(whole, count - whole)
                    add(own, f.index(staged_stride), whole, f.index(BLOCK))
    f.builder.ret_void()
    return f


def _share(f: Function, blocks: Int) -> Int:
    """The binary logarithm of ``blocks``, rounded up: by so many bits each of them prefetches less."""
    zero = slow = f.index(0)
    for power in range(1, MAX_BLOCKS.bit_length()):
        slow = slow + (blocks < (1 << power)).where(zero, f.index(1))
    return slow


def _store_scales(
    f: Function, dtype: torch.dtype, place: Int, stride: Int, rows: Iterable[Int], count: Int, target: Int
) -> None:
    """Write the scales of ``count`` columns of some weight rows to ``target``, as float32 [row, block]."""
    mask = f.first_lanes((count + (SCALE_BLOCK - 1)) // SCALE_BLOCK, _SCALES)
    for r, row in enumerate(rows):  # one at a time: each is computed where it is used
        value = load_row(f, dtype, place + row // SCALE_BLOCK * (stride * dtype.itemsize), mask, False, _SCALES)
        f.store(value.ir, target + r * (_SCALES * 4))


def tile_sums(f: Function, sums: Int, m: Int, first: int) -> Float:
    """The sums of row ``m`` for `SUM` columns of the tile from ``first`` on; 0 beyond `TILE`."""
    vectors = [Float(f.builder, constant(type_of(F32, SUM), 0.0))] * SUM
    for n in range(min(SUM, TILE - first)):
        vectors[n] = f.floats(sums + (m * TILE + (first + n)) * VECTOR, SUM)
    return fold(vectors)


def column_scale(f: Function, kind: WeightScale, scale: Int, column: Int, lanes: Bool) -> Float | None:
    """What sums of `SUM` columns are multiplied by, if rows of weight or all weights have a scale."""
    if kind == "tensor":
        return load_scalar(f, torch.float32, scale).splat(SUM)
    return load_row(f, torch.float32, scale + column * 4, lanes, False, SUM) if kind == "row" else None


def fold(sums: list[Float]) -> Float:
    """The lane sums of 16 vectors of 16 lanes as one vector, each in the order of `sum_lanes`."""
    width = sums[0].lanes
    while len(sums) > 1:
        low = [i for i in range(2 * sums[0].lanes) if i % width < width // 2]
        high = [i + width // 2 for i in low]
        sums = [a.shuffle(b, low) + a.shuffle(b, high) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        width //= 2
    return sums[0]
