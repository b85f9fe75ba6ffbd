"""The weight stream of a GEMV: 16-byte loads that are tensor-core fragments as they come, and sums in one fixed order.

**Parts.** K is walked in steps. A step gives each of WARPS warps PARTS pieces of ``4 * VEC`` neighbouring k: thread
(t, g) of a warp loads the VEC elements 16 bytes hold. Each (warp, part) has accumulators of its own; in the end parts are
added as ``((w0+w1) + (w2+w3))``, then ``((p0+p1) + (p2+p3))``. That is the whole order of summation: it knows nothing of M, of
the tile, or of alignment.

**Fragments.** The 16 rows of an MMA's left side are 4 columns of y times 4 parts, so that one load of a warp reads 256
neighbouring bytes of a weight row; its 8 columns are 2 rows of act times 4 parts. Of the 4 x 4 pairs of parts that the MMA
forms, only the diagonal is meant.

Tiles are ``[4, 8, WARPS, VEC]``: Triton puts t and g into the lanes of a warp and VEC into one 16-byte load, which makes
the reshapes into fragments free of any data movement. Nothing but speed depends on its doing so.
"""

import triton
import triton.language as tl

WARPS = tl.constexpr(4)
PARTS = tl.constexpr(4)


@triton.jit
def lane_row():
    """g, as a tile."""
    return tl.arange(0, 8)[None, :, None, None]


@triton.jit
def lane_k(part, VEC: tl.constexpr):
    """Where in a step each element of a tile lies: warp, part, t, element."""
    warp = tl.arange(0, WARPS)[None, None, :, None] * (4 * VEC * PARTS)
    t = tl.arange(0, 4)[:, None, None, None] * VEC
    return warp + part * (4 * VEC) + t + tl.arange(0, VEC)[None, None, None, :]


@triton.jit
def load_tile(base, row, limit, stride, at, k, part, VEC: tl.constexpr, MASK: tl.constexpr, POLICY: tl.constexpr):
    """Rows ``row`` (a tile of them, held below ``limit``) at one step; zero beyond k."""
    inner = lane_k(part, VEC)
    places = (
        base + tl.minimum(row, limit - 1).to(tl.int64) * stride + inner + at
    )  # at last: it becomes the load's offset
    if MASK:
        return tl.load(places, mask=inner + at < k, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(places, eviction_policy=POLICY)


@triton.jit
def arrived(tile, PACK: tl.constexpr):
    """Wait for a load, by a branch on its value that is never taken in earnest.

    What is asked of memory all at once queues up, and everything else waits behind it: the previous kernel's counter, its
    result, this kernel's act. So a prefetch goes out in portions.
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
    """e4m3fn codes as DTYPE, exactly; other weights as they are."""
    if not FP8:
        return tile
    elif HARDWARE:
        return tile.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:  # as a float32 of exponent bias 127 the code is 2**120 too small
        code = tile.to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)


@triton.jit
def fragment_w(first, second, VEC: tl.constexpr):
    """Two tiles of 8 rows as an MMA's left side [WARPS, 16, 4 * VEC]."""
    both = tl.reshape(tl.join(first, second), (4, 8, WARPS, VEC // 4, 4, 2))  # t, g, warp, high, low, second
    return tl.reshape(tl.permute(both, (2, 5, 1, 3, 0, 4)), (WARPS, 16, 4 * VEC))


@triton.jit
def fragment_x(tile, VEC: tl.constexpr):
    """A tile of 8 rows as an MMA's right side [WARPS, 4 * VEC, 8]."""
    parts = tl.reshape(tile, (4, 8, WARPS, VEC // 4, 4))
    return tl.reshape(tl.permute(parts, (2, 3, 0, 4, 1)), (WARPS, 4 * VEC, 8))


@triton.jit
def add_pairs(values):
    """Neighbours along the last dimension, of size 2, added."""
    even, odd = tl.split(values)
    return even + odd


@triton.jit
def add_four(values, A: tl.constexpr, B: tl.constexpr):
    """``[A, B, 4]`` to ``[A, B]`` as ``(v0 + v1) + (v2 + v3)``."""
    return add_pairs(add_pairs(tl.reshape(values, (A, B, 2, 2))))


@triton.jit
def add_warps(total):
    """``[WARPS, A, B]`` to ``[A, B]``."""
    return add_four(tl.permute(total, (1, 2, 0)), total.shape[1], total.shape[2])


@triton.jit
def fold_parts(total):
    """Accumulators ``[WARPS, 4 columns x 4 parts, 2 rows x 4 parts]`` to ``[4 columns, 2 rows]``."""
    part = tl.arange(0, 16) % PARTS
    meant = part[:, None] == (tl.arange(0, 8) % PARTS)[None, :]
    total = tl.where(meant[None, :, :], total, 0.0)
    diagonal = tl.sum(tl.reshape(total, (WARPS, 16, 2, PARTS)), axis=3)  # one value and zeros: exact in any order
    each = add_warps(diagonal)  # [16, 2]
    each = tl.reshape(each, (4, PARTS, 2))
    return add_four(tl.permute(each, (0, 2, 1)), 4, 2)


@triton.jit
def fold_products(total):
    """Products ``[4, 2 columns x 4 parts, WARPS, 4]`` to ``[2 columns, 1]``: elements, t, warps, parts."""
    total = tl.permute(total, (1, 2, 0, 3))
    total = add_four(tl.reshape(total, (8 * WARPS, 4, 4)), 8 * WARPS, 4)
    total = add_four(tl.reshape(total, (8, WARPS, 4)), 8, WARPS)
    total = add_four(tl.reshape(total, (2, PARTS, WARPS)), 2, PARTS)
    return add_four(tl.reshape(total, (2, 1, PARTS)), 2, 1)
