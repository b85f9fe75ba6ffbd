"""The weight stream of a GEMV with 16-bit act: 16-byte loads that are tensor-core fragments as loaded.

**Order.** K is walked in steps, and a step is cut into PIECES pieces of ``4 * VEC`` neighboring k. Each
piece has its own accumulators, which tensor cores add to 16 columns at a time. With a scale per block of weights, a
step's products start at zero and are added to the piece in one fused multiply-add. At the end piece ``4b + a`` of all
steps is v[b, a], and the sum is ``(vb0 + vb1) + (vb2 + vb3)`` over a, then likewise over b. The order does not depend on
M, the tile, the number of warps or programs, or alignment.

**Fragments.** A program has WARPS warps, and each processes PARTS = PIECES / WARPS neighboring
pieces. The 16 rows of an MMA's left side are ``16 / PARTS`` columns of y times PARTS parts, its 8
columns ``8 / PARTS`` rows of act times PARTS parts. Of the pairs of parts that the MMA forms, only
the diagonal is used. With few rows of act, 4 parts waste only idle capacity, and one load of a warp
reads 256 adjacent bytes of a weight row. With many rows, 16 warps of one part each read act least
often.

**Split-K.** Every program reads all rows of act, so with many rows act costs as much traffic between L2 and the
multiprocessors as the weights. With ``TILE.split`` of 4, four programs share 4 times as many columns. Each sums one b,
and whoever reads their sums adds them. ``share`` is the b of a program, or -1 if it sums all pieces itself.

Tiles are ``[4, 8, WARPS, VEC]``: Triton puts t and g into the lanes of a warp and VEC into one
16-byte load, so that reshaping them into fragments moves no data. 8-bit weights are decoded there; they come with two
loads of act. Only speed depends on this. An MMA of 16 *neighboring* k, which `linear` needs, would cost an exchange
between lanes here.
"""

import triton
import triton.language as tl

from .codes import decode, decode_words
from .pdl import wait
from .product import SCALED, has_blocks, scale_value
from .reduce import add_four
from .trace import stamp

PIECES = tl.constexpr(16)
HALF = tl.constexpr(8)
"""16-bit numbers of a 16-byte load."""


@triton.jit
def _lane_row():
    """g, as a tile."""
    return tl.arange(0, 8)[None, :, None, None]


@triton.jit
def _piece(warp, part, share, TILE: tl.constexpr):
    """The piece that a warp's ``part`` sums."""
    if TILE.split > 1:
        return warp % 4 + 4 * tl.where(share < 0, warp // 4, share)
    else:
        return warp * (PIECES // TILE.warps) + part


@triton.jit
def _first_column(warp, share, TILE: tl.constexpr):
    """The first of a warp's columns in its program."""
    if TILE.split > 1:
        return tl.where(share < 0, 0, warp // 4 * TILE.columns)
    else:
        return warp * 0


@triton.jit
def _load_tile(
    base, row, limit, stride, at, k, share, FIRST: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """Load elements FIRST to FIRST + COUNT of each thread's share of one step of the rows ``row`` (a tile, clamped below
    ``limit``); zero beyond k.
    """
    part = _lane_row() % (PIECES // TILE.warps)
    piece = _piece(tl.arange(0, TILE.warps)[None, None, :, None], part, share, TILE)
    t = tl.arange(0, 4)[:, None, None, None] * TILE.vec
    inner = piece * (4 * TILE.vec) + t + FIRST + tl.arange(0, COUNT)[None, None, None, :]
    start = base + tl.minimum(row, limit - 1).to(tl.int64) * stride
    places = start + inner + at  # `at` is added last, to become the load's offset
    if TILE.mask:
        return tl.load(places, mask=inner + at < k, other=0, eviction_policy=POLICY)
    else:
        return tl.load(places, eviction_policy=POLICY)


@triton.jit
def _arrived(tile, PACK: tl.constexpr):
    """Wait for a load, by a branch on its value that is practically never taken.

    Requests issued all at once queue up, and everything else waits behind them: the previous
    kernel's counter, its result, this kernel's act. So a prefetch is issued in portions.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.u32 p, $1, 0x7FC1DEAD; @p nanosleep.u32 1; mov.u32 $0, $1; }",
        "=r,r",
        [tile],
        dtype=tile.dtype,
        is_pure=False,
        pack=PACK,
    )


@triton.jit
def _load_weights(weight, at, k, share, WT: tl.constexpr, TILE: tl.constexpr):
    """One step of the weights; ``weight`` is their address, first row, row limit and stride."""
    PARTS: tl.constexpr = PIECES // TILE.warps
    base, row0, limit, stride = weight
    first = row0 + _first_column(tl.arange(0, TILE.warps)[None, None, :, None], share, TILE)
    tiles = ()
    for i in tl.static_range(WT):
        row = first + i * (8 // PARTS) + _lane_row() // PARTS
        tiles = tiles + (_load_tile(base, row, limit, stride, at, k, share, 0, TILE.vec, TILE, "evict_first"),)
    return tiles


@triton.jit
def _load_act(act, at, k, share, XT: tl.constexpr, TILE: tl.constexpr):
    """One step of the program's rows of act; ``act`` is the address, the number of rows and the
    stride.
    """
    PARTS: tl.constexpr = PIECES // TILE.warps
    base, m, stride = act
    tiles = ()
    for i in tl.static_range(XT):
        row = i * (8 // PARTS) + _lane_row() // PARTS
        for h in tl.static_range(TILE.vec // HALF):
            tiles = tiles + (_load_tile(base, row, m, stride, at, k, share, h * HALF, HALF, TILE, "evict_last"),)
    return tiles


@triton.jit
def _load_scales(weight, scale, at, k, share, WT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """The scales of one step of the weights, by row of each MMA's left side; ``scale`` is the address and the stride."""
    scales = ()
    if has_blocks(MATH.scaled):
        PARTS: tl.constexpr = PIECES // TILE.warps
        warp = tl.arange(0, TILE.warps)[:, None]
        row = tl.arange(0, 16)[None, :]
        piece = _piece(warp, row % PARTS, share, TILE)
        block = tl.minimum(at + piece * (4 * TILE.vec), k - 1) // SCALED
        for i in tl.static_range(WT // 2):
            column = weight[1] + _first_column(warp, share, TILE) + (i * 16 + row) // PARTS
            start = scale[0] + (tl.minimum(column, weight[2] - 1) // SCALED).to(tl.int64) * scale[1]
            scales = scales + (tl.load(start + block),)
    return scales


@triton.jit
def _decoded(tile, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """8-bit weights in act's dtype."""
    if MATH.weight == "float":
        return tile
    elif MATH.regroups:
        return decode_words(tile, DTYPE, MATH.weight)
    else:
        return decode(tile, DTYPE, MATH.weight)


@triton.jit
def _halves(tile, TILE: tl.constexpr):
    """A tile of weights as tiles of `HALF` elements per thread."""
    if TILE.vec == HALF:
        return (tile,)
    else:
        pairs = tl.permute(tl.reshape(tile, (4, 8, TILE.warps, 2, HALF)), (0, 1, 2, 4, 3))
        low, high = tl.split(pairs)
        return (low, high)


@triton.jit
def _fragment_w(first, second, RUN: tl.constexpr, WARPS: tl.constexpr):
    """Two tiles of 8 rows as an MMA's left side [WARPS, 16, 4 * HALF]. A thread has RUN neighbors of each row."""
    both = tl.reshape(tl.join(first, second), (4, 8, WARPS, HALF // RUN, RUN, 2))  # t, g, warp, high, low, second
    return tl.reshape(tl.permute(both, (2, 5, 1, 3, 0, 4)), (WARPS, 16, 4 * HALF))


@triton.jit
def _fragment_x(tile, RUN: tl.constexpr, WARPS: tl.constexpr):
    """A tile of 8 rows as an MMA's right side [WARPS, 4 * HALF, 8]."""
    parts = tl.reshape(tile, (4, 8, WARPS, HALF // RUN, RUN))
    return tl.reshape(tl.permute(parts, (2, 3, 0, 4, 1)), (WARPS, 4 * HALF, 8))


@triton.jit
def _multiply(ws, xs, scales, totals, WT: tl.constexpr, XT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """Add one step's products to the accumulators."""
    HALVES: tl.constexpr = TILE.vec // HALF
    # as Triton arranges them: other runs need an exchange between lanes
    RUN: tl.constexpr = 4 if MATH.weight == "float" else 8
    sums = ()
    for i in tl.static_range(WT // 2):
        first = _halves(_decoded(ws[2 * i], xs[0].dtype, MATH), TILE)
        second = _halves(_decoded(ws[2 * i + 1], xs[0].dtype, MATH), TILE)
        for j in tl.static_range(XT):
            total = totals[i * XT + j]
            added = total
            if has_blocks(MATH.scaled):
                added = tl.zeros((TILE.warps, 16, 8), tl.float32)
            for h in tl.static_range(HALVES):
                left = _fragment_w(first[h], second[h], RUN, TILE.warps)
                right = _fragment_x(xs[j * HALVES + h], RUN, TILE.warps)
                if not MATH.hw_rounding:  # the interpreter multiplies bfloat16 as integers
                    left, right = left.to(tl.float32), right.to(tl.float32)
                added = tl.dot(left, right, added)
            if has_blocks(MATH.scaled):
                s = scale_value(scales[i], MATH.scaled)
                added = tl.fma(added, tl.broadcast_to(s[:, :, None], (TILE.warps, 16, 8)), total)
            sums = sums + (added,)
    return sums


@triton.jit
def stream_fragments(
    act, weight, scale, k, share, trace, block,
    WT: tl.constexpr, XT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Accumulators over all of k. The first weights are requested before the previous kernel has
    ended.

    Steps are unrolled: a value that is still being loaded must not be carried around a loop, where
    the compiler would move its halves and so wait for them. Very long K is walked in unrolled
    stretches.
    """
    STEP: tl.constexpr = PIECES * 4 * TILE.vec
    STEPS: tl.constexpr = TILE.steps
    DEPTH: tl.constexpr = TILE.depth
    ws = ()
    ss = ()
    for s in tl.static_range(DEPTH):
        if TILE.pace > 0 and s >= TILE.pace:
            _arrived(ws[s - TILE.pace][WT - 1], MATH.pack)
        ws = ws + (_load_weights(weight, s * STEP, k, share, WT, TILE),)
        ss = ss + (_load_scales(weight, scale, s * STEP, k, share, WT, TILE, MATH),)
    wait(MATH.pdl)
    stamp(trace, block, 1, block, MATH.traced)
    totals = ()
    for _ in tl.static_range(WT // 2 * XT):
        totals = totals + (tl.zeros((TILE.warps, 16, 8), tl.float32),)
    xs = ()
    for s in tl.static_range(TILE.ahead):
        xs = xs + (_load_act(act, s * STEP, k, share, XT, TILE),)
    for s in tl.static_range(STEPS):
        if s + DEPTH < STEPS:
            ws = ws + (_load_weights(weight, (s + DEPTH) * STEP, k, share, WT, TILE),)
            ss = ss + (_load_scales(weight, scale, (s + DEPTH) * STEP, k, share, WT, TILE, MATH),)
        if s + TILE.ahead < STEPS:
            xs = xs + (_load_act(act, (s + TILE.ahead) * STEP, k, share, XT, TILE),)
        totals = _multiply(ws[s], xs[s], ss[s], totals, WT, XT, TILE, MATH)
    if TILE.long:
        for begin in tl.range(STEPS * STEP, k, STEPS * STEP, num_stages=1):
            more = ()
            scales = ()
            for s in tl.static_range(DEPTH):
                more = more + (_load_weights(weight, begin + s * STEP, k, share, WT, TILE),)
                scales = scales + (_load_scales(weight, scale, begin + s * STEP, k, share, WT, TILE, MATH),)
            for s in tl.static_range(STEPS):
                if s + DEPTH < STEPS:
                    more = more + (_load_weights(weight, begin + (s + DEPTH) * STEP, k, share, WT, TILE),)
                    at = begin + (s + DEPTH) * STEP
                    scales = scales + (_load_scales(weight, scale, at, k, share, WT, TILE, MATH),)
                x = _load_act(act, begin + s * STEP, k, share, XT, TILE)
                totals = _multiply(more[s], x, scales[s], totals, WT, XT, TILE, MATH)
    return totals


@triton.jit
def _add_pieces(values, A: tl.constexpr, B: tl.constexpr):
    """``[A, B, PIECES]`` to ``[A, B]`` in the order above."""
    return add_four(add_four(tl.reshape(values, (A * B * 4, 1, 4)), A * B * 4, 1), A, B)


@triton.jit
def fold_fragments(total, TILE: tl.constexpr):
    """Accumulators ``[WARPS, columns x parts, rows x parts]`` to ``[columns, rows]``."""
    PARTS: tl.constexpr = PIECES // TILE.warps
    if PARTS == 1:
        pieces = tl.permute(total + 0.0, (1, 2, 0))  # no negative zeros, as below
    else:
        part = tl.arange(0, 16) % PARTS
        meant = part[:, None] == (tl.arange(0, 8) % PARTS)[None, :]
        total = tl.where(meant[None, :, :], total, 0.0)
        # one value and zeros: exact in any order
        diagonal = tl.sum(tl.reshape(total, (TILE.warps, 16, 8 // PARTS, PARTS)), axis=3)
        each = tl.reshape(diagonal, (TILE.warps, 16 // PARTS, PARTS, 8 // PARTS))
        pieces = tl.reshape(tl.permute(each, (1, 3, 0, 2)), (16 // PARTS, 8 // PARTS, PIECES))
    return _add_pieces(pieces, 16 // PARTS, 8 // PARTS)


@triton.jit
def fold_shares(total):
    """Accumulators ``[16, columns, rows]`` to the sums over a, ``[4, columns, rows]``: of each b, or of a program's columns."""
    pieces = tl.permute(tl.reshape(total + 0.0, (4, 4, 16, 8)), (0, 2, 3, 1))
    return tl.reshape(add_four(tl.reshape(pieces, (4 * 16, 8, 4)), 4 * 16, 8), (4, 16, 8))


@triton.jit
def add_shares(sums):
    """`fold_shares` of all b, ``[4, columns, rows]`` to ``[columns, rows]``."""
    return add_four(tl.permute(sums, (1, 2, 0)), 16, 8)
