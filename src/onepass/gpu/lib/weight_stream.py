"""Products of few float32 rows with a tile of weight rows: loads far ahead, then multiply and add.

Constants: ``TILE`` is a `gpu.product_tile.StreamTile`, and ``MATH`` says what is computed.

**Order.** K is cut into blocks of neighbouring columns. Block b belongs to piece ``b % pieces``. A thread adds
the products of its columns in the order of k. `fold` adds the threads' sums, then the pieces. The result
depends only on the blocks and pieces, which follow from the scales. M, the tile and alignment do not matter.

A program has WARPS warps, and each processes PARTS = pieces / WARPS neighbouring pieces. Tiles are
``[4, 8, WARPS, 1, VEC]``; Triton puts the first two dimensions into the lanes of a warp.

With a scale per block of weights, the sum of each block starts at zero and is added to its piece's
total in one fused multiply-add. With a norm, act is normed as it is loaded: `rms_norm`'s result,
rounded, as if it had been stored.
"""

import triton
import triton.language as tl

from .codes import decode
from .numbers import cast, convert
from .product import SCALED, has_blocks, scale_value
from .reduce import add_four
from .row import factor


@triton.jit
def _lane_row():
    """The place of a lane in its group of eight, as a tile."""
    return tl.arange(0, 8)[None, :, None, None, None]


@triton.jit
def _lane_k(t, TILE: tl.constexpr):
    """The offset of each lane's first element within a step, from its place ``t`` in a block."""
    PARTS: tl.constexpr = TILE.pieces // TILE.warps
    piece = tl.arange(0, TILE.warps)[None, None, :, None, None] * PARTS + _lane_row() % PARTS
    return piece * TILE.block + t


@triton.jit
def _load_w(base, row, stride, at, k, MASK: tl.constexpr, TILE: tl.constexpr):
    """One load of the weight rows ``row``, a tile; zero beyond k."""
    first = _lane_k(tl.arange(0, 4)[:, None, None, None, None] * TILE.vec, TILE)
    start = row.to(tl.int64) * stride
    inner = first + tl.arange(0, TILE.vec)[None, None, None, None, :]
    places = base + start + inner + at  # `at` is added last, to become the load's offset
    if MASK:
        return tl.load(places, mask=inner + at < k, other=0, eviction_policy="evict_first")
    else:
        return tl.load(places, eviction_policy="evict_first")


@triton.jit
def _load_x(base, row, stride, at, k, MASK: tl.constexpr, TILE: tl.constexpr):
    """The part of the rows ``row``, a tile, that goes with one load of weights."""
    t = tl.arange(0, 4)[:, None, None, None, None] * TILE.vec
    inner = _lane_k(t, TILE) + tl.arange(0, TILE.vec)[None, None, None, None, :]
    places = base + row.to(tl.int64) * stride + inner + at
    if MASK:
        return tl.load(places, mask=inner + at < k, other=0.0, eviction_policy="evict_last")
    else:
        return tl.load(places, eviction_policy="evict_last")


@triton.jit
def _load_at(INDEX: tl.constexpr, TILE: tl.constexpr):
    """Where load INDEX of a program begins: a block takes one or more loads, then come the blocks
    of the other pieces.
    """
    return INDEX // TILE.loads * (TILE.pieces * TILE.block) + INDEX % TILE.loads * (4 * TILE.vec)


@triton.jit
def _arrived(tile, PACK: tl.constexpr):
    """Wait for a load, by an instruction that its value practically never enables. (A branch would
    make the compiler guard every later exchange between lanes.)

    Requests issued all at once queue up, and everything else waits behind them: the previous
    kernel's counter, its result, this kernel's act. So a prefetch is issued in portions.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b64 a; mov.b64 a, 0; setp.eq.u32 p, $1, 0x7FC1DEAD; @p prefetch.global.L2 [a]; mov.u32 $0, $1; }",
        "=r,r",
        [tile],
        dtype=tile.dtype,
        is_pure=False,
        pack=PACK,
    )


@triton.jit
def _weight_row(weight, i, second, g, TILE: tl.constexpr):
    """The row of lane g in tile i. With an activation, ``second`` is 1 in the second half of the weights.

    ``weight`` is the address, the tile's first row, the row limit, the stride, and the offset of
    the second half.
    """
    PARTS: tl.constexpr = TILE.pieces // TILE.warps
    row = tl.minimum(weight[1] + i * (8 // PARTS) + g // PARTS, weight[2] - 1)
    return row + second * weight[4]


@triton.jit
def _load_weights(weight, begin, k, S: tl.constexpr, WT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """Load S of each tile of weights."""
    MASK: tl.constexpr = TILE.mask and (TILE.long or S >= TILE.steps - TILE.loads)
    tiles = ()
    for i in tl.static_range(WT):
        if MATH.gated:
            row = _weight_row(weight, i // 2, i % 2, _lane_row(), TILE)
        else:
            row = _weight_row(weight, i, 0, _lane_row(), TILE)
        tiles = tiles + (_load_w(weight[0], row, weight[3], begin + _load_at(S, TILE), k, MASK, TILE),)
    return tiles


@triton.jit
def act_row(j):
    """The row of act of each lane in tile j."""
    return j + _lane_row() * 0


@triton.jit
def _load_act(act, norm, begin, k, S: tl.constexpr, XT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """The program's rows of act for load S of weights; then gamma and the rows of the residual.

    ``act`` is the address, the number of rows and the stride; ``norm`` gamma, weight_offset, the
    residual, its stride and the reciprocal roots.
    """
    at = begin + _load_at(S, TILE)
    MASK: tl.constexpr = TILE.mask and (TILE.long or S >= TILE.steps - TILE.loads)
    rows = ()
    for j in tl.static_range(XT):
        rows = rows + (_load_x(act[0], tl.minimum(act_row(j), act[1] - 1), act[2], at, k, MASK, TILE),)
    if MATH.normed:
        rows = rows + (_load_x(norm[0], _lane_row() * 0, 0, at, k, MASK, TILE),)
    if MATH.residual:
        for j in tl.static_range(XT):
            rows = rows + (_load_x(norm[2], tl.minimum(act_row(j), act[1] - 1), norm[3], at, k, MASK, TILE),)
    return rows


@triton.jit
def add_residual(x, r, MATH: tl.constexpr):
    """``x + residual`` in float32, rounded to the residual's dtype where the norm is of that."""
    h = x.to(tl.float32) + r.to(tl.float32)
    if MATH.round_sum:
        return cast(h, r.dtype, MATH.hw_rounding).to(tl.float32)
    else:
        return h


@triton.jit
def norm_tile(h, rs, g, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """``(h * rs) * g`` rounded to DTYPE; "hf" rounds the first product too."""
    if MATH.hf:
        return cast(convert(h * rs, DTYPE, MATH.hw_rounding) * g, DTYPE, MATH.hw_rounding)
    else:
        return cast((h * rs) * g, DTYPE, MATH.hw_rounding)


@triton.jit
def _act(rows, norm, j, DTYPE: tl.constexpr, XT: tl.constexpr, MATH: tl.constexpr):
    """A tile of act as it is multiplied: loaded, or the norm of what was loaded."""
    if MATH.residual:
        h = add_residual(rows[j], rows[XT + j + 1 if MATH.normed else XT + j], MATH)
    else:
        h = rows[j]
    if MATH.normed:
        return norm_tile(h.to(tl.float32), norm[4][j], factor(rows[XT], norm[1], MATH), DTYPE, MATH)
    elif MATH.residual:
        return cast(h, DTYPE, MATH.hw_rounding)
    else:
        return h


@triton.jit
def _multiply(
    ws, xs, norm, sums, DTYPE: tl.constexpr, WT: tl.constexpr, XT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr
):
    """Add the products of one load to ``sums``."""
    W: tl.constexpr = TILE.warps
    acts = ()
    for j in tl.static_range(XT):
        acts = acts + (tl.reshape(_act(xs, norm, j, DTYPE, XT, MATH).to(tl.float32), (4, 8, W, 4)),)
    added = ()
    for i in tl.static_range(WT):
        w = ws[i].to(tl.float32) if MATH.weight == "float" else decode(ws[i], tl.float32, MATH.weight)
        w = tl.reshape(w, (4, 8, W, 4))
        for j in tl.static_range(XT):
            added = added + (tl.fma(w, acts[j], sums[i * XT + j]),)
    return added


@triton.jit
def _zeros(COUNT: tl.constexpr, TILE: tl.constexpr):
    totals = ()
    for _ in tl.static_range(COUNT):
        totals = totals + (tl.zeros((4, 8, TILE.warps, TILE.vec), tl.float32),)
    return totals


@triton.jit
def _add_block(
    sums, totals, weight, scale, at, k, WT: tl.constexpr, XT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr
):
    """``totals + sums * scale`` of the block of each piece that ends here."""
    PARTS: tl.constexpr = TILE.pieces // TILE.warps
    columns = tl.cdiv(k, TILE.block)
    added = ()
    r = tl.arange(0, 8)[None, :, None, None]
    piece = tl.arange(0, TILE.warps)[None, None, :, None] * PARTS + r % PARTS
    block = tl.minimum(at // TILE.block + piece, columns - 1)
    for i in tl.static_range(WT):
        if MATH.gated:
            row = _weight_row(weight, i // 2, i % 2, r, TILE)
        else:
            row = _weight_row(weight, i, 0, r, TILE)
        s = scale_value(tl.load(scale[0] + (row // SCALED).to(tl.int64) * scale[1] + block), MATH.scaled)
        for j in tl.static_range(XT):
            added = added + (tl.fma(sums[i * XT + j], s + tl.zeros_like(sums[0]), totals[i * XT + j]),)
    return added


@triton.jit
def _stretch(
    ws, act, norm, weight, scale, begin, k, totals,
    DTYPE: tl.constexpr, WT: tl.constexpr, XT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Add ``steps`` loads from ``begin`` on, of which ``ws`` are on their way."""
    BLOCKS: tl.constexpr = has_blocks(MATH.scaled)
    xs = ()
    for s in tl.static_range(TILE.ahead):
        xs = xs + (_load_act(act, norm, begin, k, s, XT, TILE, MATH),)
    sums = totals
    for s in tl.static_range(TILE.steps):
        if s + TILE.depth < TILE.steps:
            ws = ws + (_load_weights(weight, begin, k, s + TILE.depth, WT, TILE, MATH),)
        if s + TILE.ahead < TILE.steps:
            xs = xs + (_load_act(act, norm, begin, k, s + TILE.ahead, XT, TILE, MATH),)
        if BLOCKS and s % TILE.loads == 0:
            sums = _zeros(WT * XT, TILE)
        sums = _multiply(ws[s], xs[s], norm, sums, DTYPE, WT, XT, TILE, MATH)
        if BLOCKS and s % TILE.loads == TILE.loads - 1:
            at = begin + _load_at(s - TILE.loads + 1, TILE)
            totals = _add_block(sums, totals, weight, scale, at, k, WT, XT, TILE, MATH)
    if BLOCKS:
        return totals
    else:
        return sums


@triton.jit
def first_weights(weight, k, WT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """Request the first weights; the previous kernel may still be running."""
    ws = ()
    for s in tl.static_range(TILE.depth):
        if TILE.pace > 0 and s >= TILE.pace:
            _arrived(ws[s - TILE.pace][WT - 1], MATH.pack)
        ws = ws + (_load_weights(weight, 0, k, s, WT, TILE, MATH),)
    return ws


@triton.jit
def stream(
    ws, act, norm, weight, scale, k,
    DTYPE: tl.constexpr, WT: tl.constexpr, XT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Accumulators over all of k, from the loads of `first_weights` on.

    Loads are unrolled: the compiler would delay those of a loop to its end. Long K is walked in
    unrolled stretches.
    """
    STRETCH: tl.constexpr = TILE.steps // TILE.loads * (TILE.pieces * TILE.block)
    totals = _zeros(WT * XT, TILE)
    totals = _stretch(ws, act, norm, weight, scale, 0, k, totals, DTYPE, WT, XT, TILE, MATH)
    if TILE.long:
        for begin in tl.range(STRETCH, k, STRETCH, num_stages=1):
            more = ()
            for s in tl.static_range(TILE.depth):
                more = more + (_load_weights(weight, begin, k, s, WT, TILE, MATH),)
            totals = _stretch(more, act, norm, weight, scale, begin, k, totals, DTYPE, WT, XT, TILE, MATH)
    return totals


@triton.jit
def fold(total, TILE: tl.constexpr):
    """Products ``[4, columns x parts, WARPS, 4]`` to ``[columns, 1]``: elements, t, pieces."""
    W: tl.constexpr = TILE.warps
    PARTS: tl.constexpr = TILE.pieces // W
    total = tl.permute(total, (1, 2, 0, 3))
    total = add_four(tl.reshape(total, (8 * W, 4, 4)), 8 * W, 4)
    total = add_four(tl.reshape(total, (8, W, 4)), 8, W)
    each = tl.permute(tl.reshape(total, (8 // PARTS, PARTS, W)), (0, 2, 1))
    square = tl.permute(tl.reshape(each, (8 // PARTS, 4, 4)), (0, 2, 1))
    by_column = add_four(square, 8 // PARTS, 4)
    return add_four(tl.reshape(by_column, (8 // PARTS, 1, 4)), 8 // PARTS, 1)
