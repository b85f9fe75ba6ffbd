"""The weight stream of a GEMV: 16-byte loads that are tensor-core fragments as loaded, and sums in
one fixed order.

**Pieces.** K is walked in steps, and a step is cut into PIECES pieces of ``4 * VEC`` neighbouring
k: thread (t, g) of a warp loads the VEC elements that fill 16 bytes. Each piece has separate
accumulators, which are added at the end: piece ``4a + b`` of all steps is v[a, b], and the sum is
``((v0b+v1b) + (v2b+v3b))`` over a, then likewise over b. That is the whole order of summation: it
does not depend on M, the tile, the number of warps, or alignment.

**Fragments.** A program has WARPS warps, and each processes PARTS = PIECES / WARPS neighbouring
pieces. The 16 rows of an MMA's left side are ``16 / PARTS`` columns of y times PARTS parts, its 8
columns ``8 / PARTS`` rows of act times PARTS parts. Of the pairs of parts that the MMA forms, only
the diagonal is used. With few rows of act, 4 parts waste only idle capacity, and one load of a warp
reads 256 adjacent bytes of a weight row. With many rows, 16 warps of one part each read act least
often.

Tiles are ``[4, 8, WARPS, VEC]``: Triton puts t and g into the lanes of a warp and VEC into one
16-byte load, so that reshaping them into fragments moves no data. Only speed depends on this.
"""

import triton
import triton.language as tl

PIECES = tl.constexpr(16)


@triton.jit
def lane_row():
    """g, as a tile."""
    return tl.arange(0, 8)[None, :, None, None]


@triton.jit
def lane_k(part, VEC: tl.constexpr, WARPS: tl.constexpr):
    """The offset of each element of a tile within a step: warp, part, t, element."""
    PARTS: tl.constexpr = PIECES // WARPS
    warp = tl.arange(0, WARPS)[None, None, :, None] * (4 * VEC * PARTS)
    t = tl.arange(0, 4)[:, None, None, None] * VEC
    return warp + part * (4 * VEC) + t + tl.arange(0, VEC)[None, None, None, :]


@triton.jit
def load_tile(base, row, limit, stride, at, k, TILE: tl.constexpr, POLICY: tl.constexpr):
    """Load one step of the rows ``row`` (a tile, clamped below ``limit``); zero beyond k."""
    inner = lane_k(lane_row() % (PIECES // TILE.warps), TILE.vec, TILE.warps)
    start = base + tl.minimum(row, limit - 1).to(tl.int64) * stride
    places = start + inner + at  # `at` is added last, to become the load's offset
    if TILE.mask:
        return tl.load(places, mask=inner + at < k, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(places, eviction_policy=POLICY)


@triton.jit
def arrived(tile, PACK: tl.constexpr):
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
def decode(tile, DTYPE: tl.constexpr, FP8: tl.constexpr, HARDWARE: tl.constexpr):
    """e4m3fn codes as DTYPE, exactly; other weights unchanged."""
    if not FP8:
        return tile
    elif HARDWARE:
        return tile.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:  # with float32's exponent bias the value is too small by a factor of 2**120
        code = tile.to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)


@triton.jit
def fragment_w(first, second, VEC: tl.constexpr, WARPS: tl.constexpr):
    """Two tiles of 8 rows as an MMA's left side [WARPS, 16, 4 * VEC]."""
    both = tl.reshape(tl.join(first, second), (4, 8, WARPS, VEC // 4, 4, 2))  # t, g, warp, high, low, second
    return tl.reshape(tl.permute(both, (2, 5, 1, 3, 0, 4)), (WARPS, 16, 4 * VEC))


@triton.jit
def fragment_x(tile, VEC: tl.constexpr, WARPS: tl.constexpr):
    """A tile of 8 rows as an MMA's right side [WARPS, 4 * VEC, 8]."""
    parts = tl.reshape(tile, (4, 8, WARPS, VEC // 4, 4))
    return tl.reshape(tl.permute(parts, (2, 3, 0, 4, 1)), (WARPS, 4 * VEC, 8))


@triton.jit
def add_pairs(values):
    """Add the two elements of the last dimension."""
    even, odd = tl.split(values)
    return even + odd


@triton.jit
def add_four(values, A: tl.constexpr, B: tl.constexpr):
    """``[A, B, 4]`` to ``[A, B]`` as ``(v0 + v1) + (v2 + v3)``."""
    return add_pairs(add_pairs(tl.reshape(values, (A, B, 2, 2))))


@triton.jit
def add_pieces(values, A: tl.constexpr, B: tl.constexpr):
    """``[A, B, PIECES]`` to ``[A, B]`` in the order above."""
    square = tl.permute(tl.reshape(values, (A * B, 4, 4)), (0, 2, 1))
    by_column = add_four(square, A * B, 4)
    return add_four(tl.reshape(by_column, (A, B, 4)), A, B)


@triton.jit
def fold_parts(total, WARPS: tl.constexpr):
    """Accumulators ``[WARPS, columns x parts, rows x parts]`` to ``[columns, rows]``."""
    PARTS: tl.constexpr = PIECES // WARPS
    if PARTS == 1:
        pieces = tl.permute(total + 0.0, (1, 2, 0))  # no negative zeros, as below
    else:
        part = tl.arange(0, 16) % PARTS
        meant = part[:, None] == (tl.arange(0, 8) % PARTS)[None, :]
        total = tl.where(meant[None, :, :], total, 0.0)
        # one value and zeros: exact in any order
        diagonal = tl.sum(tl.reshape(total, (WARPS, 16, 8 // PARTS, PARTS)), axis=3)
        each = tl.reshape(diagonal, (WARPS, 16 // PARTS, PARTS, 8 // PARTS))
        pieces = tl.reshape(tl.permute(each, (1, 3, 0, 2)), (16 // PARTS, 8 // PARTS, PIECES))
    return add_pieces(pieces, 16 // PARTS, 8 // PARTS)


@triton.jit
def fold_products(total, WARPS: tl.constexpr):
    """Products ``[4, columns x parts, WARPS, 4]`` to ``[columns, 1]``: elements, t, pieces."""
    PARTS: tl.constexpr = PIECES // WARPS
    total = tl.permute(total, (1, 2, 0, 3))
    total = add_four(tl.reshape(total, (8 * WARPS, 4, 4)), 8 * WARPS, 4)
    total = add_four(tl.reshape(total, (8, WARPS, 4)), 8, WARPS)
    each = tl.permute(tl.reshape(total, (8 // PARTS, PARTS, WARPS)), (0, 2, 1))
    return add_pieces(tl.reshape(each, (8 // PARTS, 1, PIECES)), 8 // PARTS, 1)
