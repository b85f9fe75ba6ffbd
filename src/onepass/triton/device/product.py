"""Products with 16-bit weights: tiles of weights and of x pass through shared memory in the order of K.

**Order.** K is cut into ``pieces`` neighbouring pieces of equal length, a multiple of `GRAIN`; the
last ones may be shorter or empty. Tensor cores add the products of a piece sixteen columns at a time,
in the order of k. Then the pieces are added, from the first to the last. The result depends only on
the number of pieces, which follows from N. M, the tile, the number of warps and alignment do not
matter.

A *cube* computes all pieces at the same time, as a batched product. It keeps every multiprocessor busy
when there are few columns. A *flat* tile walks along all of K and adds its sums to a total at the end
of each piece. `descriptor_product` is a flat tile that the copy engine loads.

``TILE`` is a `product_config.PieceTile`.
"""

import triton
import triton.language as tl

from .fragments import add_from_left

GRAIN = tl.constexpr(64)
"""Columns by which the pieces of K grow."""


@triton.jit
def piece_length(k, PIECES: tl.constexpr):
    """Columns of each piece but the last ones."""
    return tl.cdiv(tl.cdiv(k, PIECES), GRAIN) * GRAIN


@triton.jit
def _operand(values, MATH: tl.constexpr):
    """The interpreter multiplies bfloat16 as integers."""
    if MATH.hw_rounding:
        return values
    else:
        return values.to(tl.float32)


@triton.jit
def _cube_product(x, weight, column, row, m, k, x_stride, weight_stride, TILE: tl.constexpr, MATH: tl.constexpr):
    length = piece_length(k, TILE.pieces)
    first = tl.arange(0, TILE.pieces)[:, None, None] * length
    inner = tl.arange(0, TILE.step)[None, None, :]
    w_at = weight + column.to(tl.int64)[None, :, None] * weight_stride + first + inner
    x_at = x + row.to(tl.int64)[None, :, None] * x_stride + first + inner
    rows = (row < m)[None, :, None]
    sums = tl.zeros((TILE.pieces, TILE.columns, TILE.rows), tl.float32)
    for at in tl.range(0, length, TILE.step, num_stages=TILE.stages):
        if TILE.mask:
            inside = (inner < length - at) & (first + inner < k - at)
            w = tl.load(w_at + at, mask=inside, other=0.0, eviction_policy="evict_first")
            v = tl.load(x_at + at, mask=rows & inside, other=0.0)
        else:
            w = tl.load(w_at + at, eviction_policy="evict_first")
            v = tl.load(x_at + at, mask=rows, other=0.0)
        sums = tl.dot(_operand(w, MATH), tl.permute(_operand(v, MATH), (0, 2, 1)), sums)
    return add_from_left(tl.permute(sums, (1, 2, 0)), TILE.columns, TILE.rows, TILE.pieces)


@triton.jit
def _flat_product(x, weight, column, row, m, k, x_stride, weight_stride, TILE: tl.constexpr, MATH: tl.constexpr):
    length = piece_length(k, TILE.pieces)
    inner = tl.arange(0, TILE.step)[None, :]
    w_at = weight + column.to(tl.int64)[:, None] * weight_stride + inner
    x_at = x + row.to(tl.int64)[:, None] * x_stride + inner
    rows = (row < m)[:, None]
    HIGH: tl.constexpr = TILE.columns if TILE.weights_first else TILE.rows
    BROAD: tl.constexpr = TILE.rows if TILE.weights_first else TILE.columns
    total = tl.zeros((HIGH, BROAD), tl.float32)
    sums = tl.zeros((HIGH, BROAD), tl.float32)
    left = length
    for at in tl.range(0, TILE.pieces * length, TILE.step, num_stages=TILE.stages):
        if TILE.mask:
            w = tl.load(w_at + at, mask=inner < k - at, other=0.0, eviction_policy="evict_first")
            v = tl.load(x_at + at, mask=rows & (inner < k - at), other=0.0)
        else:
            w = tl.load(w_at + at, eviction_policy="evict_first")
            v = tl.load(x_at + at, mask=rows, other=0.0)
        if TILE.weights_first:
            sums = tl.dot(_operand(w, MATH), tl.trans(_operand(v, MATH)), sums)
        else:
            sums = tl.dot(_operand(v, MATH), tl.trans(_operand(w, MATH)), sums)
        if TILE.pieces > 1:
            left -= TILE.step
            if left == 0:
                total += sums
                sums = tl.zeros((HIGH, BROAD), tl.float32)
                left = length
    if TILE.pieces == 1:
        total = sums
    if not TILE.weights_first:
        total = tl.trans(total)
    return total


@triton.jit
def product(x, weight, column, row, m, k, x_stride, weight_stride, TILE: tl.constexpr, MATH: tl.constexpr):
    """The sums ``[columns, rows]`` over k of the weight rows ``column`` times the rows ``row`` of x.

    Rows of x from m on are not read. Every ``column`` must exist.
    """
    if TILE.kind == "cube":
        return _cube_product(x, weight, column, row, m, k, x_stride, weight_stride, TILE, MATH)
    else:
        return _flat_product(x, weight, column, row, m, k, x_stride, weight_stride, TILE, MATH)


@triton.jit
def descriptor_product(x, weight, row0, columns, k, SIDES: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """Like `product`, from the descriptors of both matrices. ``columns`` holds the first column of each side.

    The sums of each side are ``[columns / SIDES, rows]``. The copy engine writes zeros for what lies
    beyond either matrix.
    """
    length = piece_length(k, TILE.pieces)
    HIGH: tl.constexpr = TILE.columns // SIDES if TILE.weights_first else TILE.rows
    BROAD: tl.constexpr = TILE.rows if TILE.weights_first else TILE.columns // SIDES
    totals = ()
    sums = ()
    for _ in tl.static_range(SIDES):
        totals = totals + (tl.zeros((HIGH, BROAD), tl.float32),)
        sums = sums + (tl.zeros((HIGH, BROAD), tl.float32),)
    left = length
    for at in tl.range(0, TILE.pieces * length, TILE.step, num_stages=TILE.stages):
        v = _operand(x.load([row0, at]), MATH)
        added = ()
        for s in tl.static_range(SIDES):
            w = _operand(weight.load([columns[s], at]), MATH)
            if TILE.weights_first:
                added = added + (tl.dot(w, v.T, sums[s]),)
            else:
                added = added + (tl.dot(v, w.T, sums[s]),)
        sums = added
        if TILE.pieces > 1:
            left -= TILE.step
            if left == 0:
                ended = ()
                zeros = ()
                for s in tl.static_range(SIDES):
                    ended = ended + (totals[s] + sums[s],)
                    zeros = zeros + (tl.zeros((HIGH, BROAD), tl.float32),)
                totals = ended
                sums = zeros
                left = length
    if TILE.pieces == 1:
        totals = sums
    found = ()
    for s in tl.static_range(SIDES):
        found = found + (totals[s] if TILE.weights_first else tl.trans(totals[s]),)
    return found
