"""Products of few rows of act with a tile of weight rows: loads far ahead, then multiply and add.

Constants: ``TILE`` is a `product_config.StreamTile`, and ``MATH`` says what is computed. The order
of additions is that of `fragments`.

With a scale per block of weights, the sum of each block starts at zero and is added to its piece's
total in one fused multiply-add. With a norm, act is normed as it is loaded: `rms_norm`'s result,
rounded, as if it had been stored.
"""

import triton
import triton.language as tl

from .fragments import (
    arrived,
    decode,
    fold_parts,
    fold_products,
    fragment_w,
    fragment_x,
    lane_row,
    load_at,
    load_w,
    load_x,
)
from .numbers import cast, convert
from .row import factor

SCALED = tl.constexpr(128)
"""Weight rows that share a scale."""


@triton.jit
def scale_value(scale, KIND: tl.constexpr):
    """A stored scale as float32; e8m0 codes are exponents, 255 is NaN, and 0 is 2**-127."""
    if KIND == "ue8m0_block":
        code = scale.to(tl.int32)
        bits = tl.where(code == 0, 0x400000, tl.where(code == 255, 0x7FC00000, code << 23))
        return bits.to(tl.float32, bitcast=True)
    else:
        return scale


@triton.jit
def _weight_row(weight, i, second, g, TILE: tl.constexpr, MATH: tl.constexpr):
    """The row of lane g in tile i, of its second group of rows where ``second`` is 1. With an
    activation that group is of the second half of the weights.

    ``weight`` is the address, the tile's first row, the row limit, the stride, and the offset of
    the second half.
    """
    PARTS: tl.constexpr = TILE.pieces // TILE.warps
    if MATH.gated:
        return tl.minimum(weight[1] + i * (8 // PARTS) + g // PARTS, weight[2] - 1) + second * weight[4]
    elif TILE.dot:
        return tl.minimum(weight[1] + (2 * i + second) * (8 // PARTS) + g // PARTS, weight[2] - 1)
    else:
        return tl.minimum(weight[1] + i * (8 // PARTS) + g // PARTS, weight[2] - 1)


@triton.jit
def _load_weights(weight, begin, k, S: tl.constexpr, WT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """Load S of each tile of weights."""
    MASK: tl.constexpr = TILE.mask and (TILE.long or S >= TILE.steps - TILE.loads)
    tiles = ()
    for i in tl.static_range(WT):
        if TILE.dot:
            row = _weight_row(weight, i, tl.arange(0, 2)[None, None, None, :, None], lane_row(), TILE, MATH)
        elif MATH.gated:
            row = _weight_row(weight, i // 2, i % 2, lane_row(), TILE, MATH)
        else:
            row = _weight_row(weight, i, 0, lane_row(), TILE, MATH)
        tiles = tiles + (load_w(weight[0], row, weight[3], begin + load_at(S, TILE), k, MASK, TILE),)
    return tiles


@triton.jit
def act_row(j, TILE: tl.constexpr):
    """The row of act of each lane in tile j."""
    if TILE.dot:
        return j * (8 // (TILE.pieces // TILE.warps)) + lane_row() // (TILE.pieces // TILE.warps)
    else:
        return j + lane_row() * 0


@triton.jit
def _load_act(act, norm, begin, k, S: tl.constexpr, XT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """The program's rows of act for load S of weights; then gamma and the rows of the residual.

    ``act`` is the address, the number of rows and the stride; ``norm`` gamma, weight_offset, the
    residual, its stride and the reciprocal roots.
    """
    at = begin + load_at(S, TILE)
    MASK: tl.constexpr = TILE.mask and (TILE.long or S >= TILE.steps - TILE.loads)
    rows = ()
    for j in tl.static_range(XT):
        rows = rows + (load_x(act[0], tl.minimum(act_row(j, TILE), act[1] - 1), act[2], at, k, MASK, TILE),)
    if MATH.normed:
        rows = rows + (load_x(norm[0], lane_row() * 0, 0, at, k, MASK, TILE),)
    if MATH.residual:
        for j in tl.static_range(XT):
            rows = rows + (load_x(norm[2], tl.minimum(act_row(j, TILE), act[1] - 1), norm[3], at, k, MASK, TILE),)
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
        x = _act(xs, norm, j, DTYPE, XT, MATH)
        if not TILE.dot:
            acts = acts + (tl.reshape(x.to(tl.float32), (4, 8, W, 4)),)
        elif MATH.hw_rounding:
            acts = acts + (fragment_x(x, TILE),)
        else:  # the interpreter multiplies bfloat16 as integers
            acts = acts + (fragment_x(x, TILE).to(tl.float32),)
    added = ()
    for i in tl.static_range(WT):
        if TILE.dot:
            w = fragment_w(ws[i], DTYPE, TILE, MATH)
            if not MATH.hw_rounding:
                w = w.to(tl.float32)
        else:
            w = ws[i].to(tl.float32) if MATH.weight == "float" else decode(ws[i], tl.float32, MATH.weight)
            w = tl.reshape(w, (4, 8, W, 4))
        for j in tl.static_range(XT):
            if TILE.dot:
                added = added + (tl.dot(w, acts[j], sums[i * XT + j]),)
            else:
                added = added + (tl.fma(w, acts[j], sums[i * XT + j]),)
    return added


@triton.jit
def _zeros(COUNT: tl.constexpr, TILE: tl.constexpr):
    totals = ()
    for _ in tl.static_range(COUNT):
        if TILE.dot:
            totals = totals + (tl.zeros((TILE.warps, 16, 8), tl.float32),)
        else:
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
    if TILE.dot:
        r = tl.arange(0, 16)[None, :, None]
        piece = tl.arange(0, TILE.warps)[:, None, None] * PARTS + r % PARTS
    else:
        r = tl.arange(0, 8)[None, :, None, None]
        piece = tl.arange(0, TILE.warps)[None, None, :, None] * PARTS + r % PARTS
    block = tl.minimum(at // TILE.block + piece, columns - 1)
    for i in tl.static_range(WT):
        if TILE.dot:
            row = _weight_row(weight, i, r // 8, r % 8, TILE, MATH)
        elif MATH.gated:
            row = _weight_row(weight, i // 2, i % 2, r, TILE, MATH)
        else:
            row = _weight_row(weight, i, 0, r, TILE, MATH)
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
    BLOCKS: tl.constexpr = MATH.scaled == "block" or MATH.scaled == "ue8m0_block"
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
            at = begin + load_at(s - TILE.loads + 1, TILE)
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
            arrived(ws[s - TILE.pace][WT - 1], MATH.pack)
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
    """An accumulator to columns and rows of y."""
    if TILE.dot:
        return fold_parts(total, TILE)
    else:
        return fold_products(total, TILE)
