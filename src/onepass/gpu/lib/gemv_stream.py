"""The weight stream of a GEMV with 16-bit weights: 16-byte loads that are tensor-core fragments as loaded.

**Order.** K is walked in steps, and a step is cut into PIECES pieces of ``4 * VEC`` neighboring k. Each
piece has its own accumulators, which tensor cores add to 16 columns at a time. At the end piece ``4a + b``
of all steps is v[a, b], and the sum is ``(v0b + v1b) + (v2b + v3b)`` over a, then likewise over b. The
order does not depend on M, the tile, the number of warps, or alignment.

**Fragments.** A program has WARPS warps, and each processes PARTS = PIECES / WARPS neighboring
pieces. The 16 rows of an MMA's left side are ``16 / PARTS`` columns of y times PARTS parts, its 8
columns ``8 / PARTS`` rows of act times PARTS parts. Of the pairs of parts that the MMA forms, only
the diagonal is used. With few rows of act, 4 parts waste only idle capacity, and one load of a warp
reads 256 adjacent bytes of a weight row. With many rows, 16 warps of one part each read act least
often.

Tiles are ``[4, 8, WARPS, VEC]``: Triton puts t and g into the lanes of a warp and VEC into one
16-byte load, so that reshaping them into fragments moves no data. Only speed depends on this. An MMA
of 16 *neighboring* k, which `linear` needs, would cost an exchange between lanes here.
"""

import triton
import triton.language as tl

from .pdl import wait
from .reduce import add_four
from .trace import stamp

PIECES = tl.constexpr(16)


@triton.jit
def _lane_row():
    """g, as a tile."""
    return tl.arange(0, 8)[None, :, None, None]


@triton.jit
def _lane_k(part, VEC: tl.constexpr, WARPS: tl.constexpr):
    """The offset of each element of a tile within a step: warp, part, t, element."""
    PARTS: tl.constexpr = PIECES // WARPS
    warp = tl.arange(0, WARPS)[None, None, :, None] * (4 * VEC * PARTS)
    t = tl.arange(0, 4)[:, None, None, None] * VEC
    return warp + part * (4 * VEC) + t + tl.arange(0, VEC)[None, None, None, :]


@triton.jit
def _load_tile(base, row, limit, stride, at, k, TILE: tl.constexpr, POLICY: tl.constexpr):
    """Load one step of the rows ``row`` (a tile, clamped below ``limit``); zero beyond k."""
    inner = _lane_k(_lane_row() % (PIECES // TILE.warps), TILE.vec, TILE.warps)
    start = base + tl.minimum(row, limit - 1).to(tl.int64) * stride
    places = start + inner + at  # `at` is added last, to become the load's offset
    if TILE.mask:
        return tl.load(places, mask=inner + at < k, other=0.0, eviction_policy=POLICY)
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
def _load_weights(weight, at, k, WT: tl.constexpr, TILE: tl.constexpr):
    """One step of the weights; ``weight`` is their address, first row, row limit and stride."""
    PARTS: tl.constexpr = PIECES // TILE.warps
    base, row0, limit, stride = weight
    tiles = ()
    for i in tl.static_range(WT):
        row = row0 + i * (8 // PARTS) + _lane_row() // PARTS
        tiles = tiles + (_load_tile(base, row, limit, stride, at, k, TILE, "evict_first"),)
    return tiles


@triton.jit
def _load_act(act, at, k, XT: tl.constexpr, TILE: tl.constexpr):
    """One step of the program's rows of act; ``act`` is the address, the number of rows and the
    stride.
    """
    PARTS: tl.constexpr = PIECES // TILE.warps
    base, m, stride = act
    tiles = ()
    for i in tl.static_range(XT):
        row = i * (8 // PARTS) + _lane_row() // PARTS
        tiles = tiles + (_load_tile(base, row, m, stride, at, k, TILE, "evict_last"),)
    return tiles


@triton.jit
def _fragment_w(first, second, VEC: tl.constexpr, WARPS: tl.constexpr):
    """Two tiles of 8 rows as an MMA's left side [WARPS, 16, 4 * VEC]."""
    both = tl.reshape(tl.join(first, second), (4, 8, WARPS, VEC // 4, 4, 2))  # t, g, warp, high, low, second
    return tl.reshape(tl.permute(both, (2, 5, 1, 3, 0, 4)), (WARPS, 16, 4 * VEC))


@triton.jit
def _fragment_x(tile, VEC: tl.constexpr, WARPS: tl.constexpr):
    """A tile of 8 rows as an MMA's right side [WARPS, 4 * VEC, 8]."""
    parts = tl.reshape(tile, (4, 8, WARPS, VEC // 4, 4))
    return tl.reshape(tl.permute(parts, (2, 3, 0, 4, 1)), (WARPS, 4 * VEC, 8))


@triton.jit
def _multiply(ws, xs, totals, WT: tl.constexpr, XT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """Add one step's products to the accumulators."""
    sums = ()
    for i in tl.static_range(WT // 2):
        left = _fragment_w(ws[2 * i], ws[2 * i + 1], TILE.vec, TILE.warps)
        for j in tl.static_range(XT):
            right = _fragment_x(xs[j], TILE.vec, TILE.warps)
            if not MATH.hw_rounding:  # the interpreter multiplies bfloat16 as integers
                left, right = left.to(tl.float32), right.to(tl.float32)
            sums = sums + (tl.dot(left, right, totals[i * XT + j]),)
    return sums


@triton.jit
def stream_fragments(
    act, weight, k, trace, block, WT: tl.constexpr, XT: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr
):
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
    for s in tl.static_range(DEPTH):
        if TILE.pace > 0 and s >= TILE.pace:
            _arrived(ws[s - TILE.pace][WT - 1], MATH.pack)
        ws = ws + (_load_weights(weight, s * STEP, k, WT, TILE),)
    wait(MATH.pdl)
    stamp(trace, block, 1, block, MATH.traced)
    totals = ()
    for _ in tl.static_range(WT // 2 * XT):
        totals = totals + (tl.zeros((TILE.warps, 16, 8), tl.float32),)
    xs = ()
    for s in tl.static_range(TILE.ahead):
        xs = xs + (_load_act(act, s * STEP, k, XT, TILE),)
    for s in tl.static_range(STEPS):
        if s + DEPTH < STEPS:
            ws = ws + (_load_weights(weight, (s + DEPTH) * STEP, k, WT, TILE),)
        if s + TILE.ahead < STEPS:
            xs = xs + (_load_act(act, (s + TILE.ahead) * STEP, k, XT, TILE),)
        totals = _multiply(ws[s], xs[s], totals, WT, XT, TILE, MATH)
    if TILE.long:
        for begin in tl.range(STEPS * STEP, k, STEPS * STEP, num_stages=1):
            more = ()
            for s in tl.static_range(DEPTH):
                more = more + (_load_weights(weight, begin + s * STEP, k, WT, TILE),)
            for s in tl.static_range(STEPS):
                if s + DEPTH < STEPS:
                    more = more + (_load_weights(weight, begin + (s + DEPTH) * STEP, k, WT, TILE),)
                x = _load_act(act, begin + s * STEP, k, XT, TILE)
                totals = _multiply(more[s], x, totals, WT, XT, TILE, MATH)
    return totals


@triton.jit
def _add_pieces(values, A: tl.constexpr, B: tl.constexpr):
    """``[A, B, PIECES]`` to ``[A, B]`` in the order above."""
    square = tl.permute(tl.reshape(values, (A * B, 4, 4)), (0, 2, 1))
    by_column = add_four(square, A * B, 4)
    return add_four(tl.reshape(by_column, (A, B, 4)), A, B)


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
