"""Tiles of a product with few rows: 16-byte loads of weights that become tensor-core fragments, and
sums in one fixed order.

**Order.** K is cut into blocks of neighbouring columns. Block b belongs to piece ``b % pieces``. A
piece is summed by tensor cores, sixteen neighbouring columns at a time, in the order of k. Then the
pieces are added, from the first to the last. A tensor core's sum of sixteen products does not
depend on their order. So the result depends only on the blocks and pieces, which follow from N, the
scales and the dtypes. M, the tile, the number of warps and alignment do not matter.
`linear_kernels` follows the same order with tiles of any size.

**Fragments.** A program has WARPS warps, and each processes PARTS = pieces / WARPS neighbouring
pieces. The 16 rows of an MMA's left side are ``16 / PARTS`` columns of y times PARTS parts, its 8
columns ``8 / PARTS`` rows of act times PARTS parts. Of the pairs of parts that the MMA forms, only
the diagonal is used. With few rows of act, 4 parts waste only idle capacity.

Tiles of weights are ``[4, 8, WARPS, 2, 16 bytes]``, two groups of rows. Triton puts the first two
dimensions, t and g, into the lanes of a warp. A lane's 16 bytes belong to one or two sets of
sixteen columns, and an MMA needs four elements of a set from each of four lanes. So lanes exchange
parts of what they loaded. Tiles of act are loaded in the order in which MMAs need them.

An MMA multiplies sixteen neighbouring columns of a fragment. With 8-bit weights, however, Triton
gives it the elements of 32 columns whose index has bit 1 clear, and the next one those whose index
has bit 1 set (its ``kWidth`` is 4). `fragment_w` and `fragment_x` number columns accordingly. Were
that to change, results would differ in the last bits, and tests that compare batches would fail.
"""

import triton
import triton.language as tl

_TRANSPOSE = tl.constexpr(
    """{ .reg .pred p, q; .reg .b32 s, r, a, b, c, d;
    mov.u32 s, %laneid; and.b32 r, s, 1; setp.ne.u32 p, r, 0; and.b32 r, s, 2; setp.ne.u32 q, r, 0;
    selp.b32 s, $4, $5, p; shfl.sync.bfly.b32 r, s, 1, 31, -1; selp.b32 a, r, $4, p; selp.b32 b, $5, r, p;
    selp.b32 s, $6, $7, p; shfl.sync.bfly.b32 r, s, 1, 31, -1; selp.b32 c, r, $6, p; selp.b32 d, $7, r, p;
    selp.b32 s, a, c, q; shfl.sync.bfly.b32 r, s, 2, 31, -1; selp.b32 $0, r, a, q; selp.b32 $2, c, r, q;
    selp.b32 s, b, d, q; shfl.sync.bfly.b32 r, s, 2, 31, -1; selp.b32 $1, r, b, q; selp.b32 $3, d, r, q; }"""
)
"""Four words of each of four neighbouring lanes, transposed."""

_E4M3_TO_BF16 = tl.constexpr(
    """{ .reg .b16 a, b, c, d, e, f; .reg .b32 h, i; .reg .f32 p, q, r, s;
    mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 h, a; cvt.rn.f16x2.e4m3x2 i, b; mov.b32 {c, d}, h; mov.b32 {e, f}, i;
    cvt.f32.f16 p, c; cvt.f32.f16 q, d; cvt.f32.f16 r, e; cvt.f32.f16 s, f;
    cvt.rn.bf16x2.f32 $0, q, p; cvt.rn.bf16x2.f32 $1, s, r; }"""
)
_E4M3_TO_F16 = tl.constexpr(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
_INT8_TO_BF16 = tl.constexpr(
    """{ .reg .b32 u, v, a, b, s; prmt.b32 u, $2, 0, 0x4140; prmt.b32 v, $2, 0, 0x4342; mov.b32 s, 0x3F803F80;
    and.b32 a, u, 0x007F007F; or.b32 a, a, 0x43004300; and.b32 b, u, 0x00800080; or.b32 b, b, 0xC300C300;
    fma.rn.bf16x2 $0, a, s, b;
    and.b32 a, v, 0x007F007F; or.b32 a, a, 0x43004300; and.b32 b, v, 0x00800080; or.b32 b, b, 0xC300C300;
    fma.rn.bf16x2 $1, a, s, b; }"""
)
"""A code is ``(128 + its low seven bits) - (128, or 256 for a negative one)``: each term is a bfloat16."""
_INT8_TO_F16 = tl.constexpr(
    """{ .reg .b32 u, v, s; mov.b32 s, 0x64806480; xor.b32 u, $2, 0x80808080; prmt.b32 v, u, 0x64646464, 0x5352;
    prmt.b32 u, u, 0x64646464, 0x5150; sub.rn.f16x2 $0, u, s; sub.rn.f16x2 $1, v, s; }"""
)
"""A code plus 128 in the last bits of 1024 is a float16; subtract 1152."""


@triton.jit
def lane_row():
    """g, as a tile."""
    return tl.arange(0, 8)[None, :, None, None, None]


@triton.jit
def lane_k(t, TILE: tl.constexpr):
    """The offset of each lane's first element within a step, from its position ``t`` in a block."""
    PARTS: tl.constexpr = TILE.pieces // TILE.warps
    piece = tl.arange(0, TILE.warps)[None, None, :, None, None] * PARTS + lane_row() % PARTS
    return piece * TILE.block + t


@triton.jit
def load_w(base, row, stride, at, k, MASK: tl.constexpr, TILE: tl.constexpr):
    """One load of the weight rows ``row``, a tile; zero beyond k.

    8-bit weights come as words where rows are aligned, else as bytes.
    """
    first = lane_k(tl.arange(0, 4)[:, None, None, None, None] * TILE.vec, TILE)
    start = row.to(tl.int64) * stride
    if TILE.words:
        inner = first // 4 + tl.arange(0, 4)[None, None, None, None, :]
        places = (base + start).to(tl.pointer_type(tl.int32)) + inner + at // 4
        if MASK:
            return tl.load(places, mask=inner * 4 + at < k, other=0, eviction_policy="evict_first")
        else:
            return tl.load(places, eviction_policy="evict_first")
    else:
        inner = first + tl.arange(0, TILE.vec)[None, None, None, None, :]
        places = base + start + inner + at  # `at` is added last, to become the load's offset
        if MASK:
            return tl.load(places, mask=inner + at < k, other=0, eviction_policy="evict_first")
        else:
            return tl.load(places, eviction_policy="evict_first")


@triton.jit
def load_x(base, row, stride, at, k, MASK: tl.constexpr, TILE: tl.constexpr):
    """The part of the rows ``row``, a tile, that goes with one load of weights, as a tile ``[4, 8,
    WARPS, SETS, 4]``: with tensor cores four elements of each set of sixteen columns.
    """
    SETS: tl.constexpr = TILE.vec // 4
    t = tl.arange(0, 4)[:, None, None, None, None]
    if TILE.dot and SETS == 2:
        t = (t % 2) * 8 + (t // 2) * 4
    else:
        t = t * 4
    sets = tl.arange(0, SETS)[None, None, None, :, None] * 16
    inner = lane_k(t, TILE) + sets + tl.arange(0, 4)[None, None, None, None, :]
    places = base + row.to(tl.int64) * stride + inner + at
    if MASK:
        return tl.load(places, mask=inner + at < k, other=0.0, eviction_policy="evict_last")
    else:
        return tl.load(places, eviction_policy="evict_last")


@triton.jit
def load_at(INDEX: tl.constexpr, TILE: tl.constexpr):
    """Where load INDEX of a program begins: a block takes one or more loads, then come the blocks
    of the other pieces.
    """
    return INDEX // TILE.loads * (TILE.pieces * TILE.block) + INDEX % TILE.loads * (4 * TILE.vec)


@triton.jit
def arrived(tile, PACK: tl.constexpr):
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
def decode(codes, DTYPE: tl.constexpr, WEIGHT: tl.constexpr):
    """8-bit codes as DTYPE, exactly, in any layout."""
    if WEIGHT == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)
    else:  # with float32's exponent bias the value is too small by a factor of 2**120
        code = codes.to(tl.uint8, bitcast=True).to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """Words to their two 16-bit numbers, as a last dimension."""
    low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _decode_words(words, W: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Words of four codes to numbers ``[..., set bit 0, set bit 1, code bit 0, code bit 1]``. Four
    lanes exchange words, so that each has its part of four sets. Which register holds a word is
    the compiler's choice; which lane loaded it follows from the tile's shape.
    """
    even, odd = tl.split(tl.reshape(words, (4, 8, W, 2, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    sets = tl.inline_asm_elementwise(
        _TRANSPOSE,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [first, second, third, fourth],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    tile = tl.join(tl.join(sets[0], sets[1]), tl.join(sets[2], sets[3]))
    pairs = tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [tile], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    return tl.join(_halves(pairs[0], DTYPE), _halves(pairs[1], DTYPE))


@triton.jit
def fragment_w(tile, DTYPE: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """Two groups of 8 rows as an MMA's left side [WARPS, 16, 4 * VEC], decoded."""
    W: tl.constexpr = TILE.warps
    if MATH.weight == "float":
        bits = tl.reshape(tile, (2, 2, 8, W, 2, 2, 2, 2))  # t1 t0 g warp second v2 v1 v0; the set is t1
        return tl.reshape(tl.permute(bits, (3, 4, 2, 0, 6, 5, 1, 7)), (W, 16, 32))
    elif TILE.words:
        if MATH.weight == "int8":
            ASM: tl.constexpr = _INT8_TO_BF16 if DTYPE == tl.bfloat16 else _INT8_TO_F16
        else:
            ASM: tl.constexpr = _E4M3_TO_BF16 if DTYPE == tl.bfloat16 else _E4M3_TO_F16
        bits = _decode_words(tile, W, ASM, DTYPE)  # t g warp second s0 s1 c0 c1
        return tl.reshape(tl.permute(bits, (2, 3, 1, 5, 7, 0, 4, 6)), (W, 16, 64))
    else:
        numbers = decode(tile, DTYPE, MATH.weight)
        bits = tl.reshape(numbers, (2, 2, 8, W, 2, 4, 2, 2))  # s1 s0 g warp second t c1 c0
        return tl.reshape(tl.permute(bits, (3, 4, 2, 0, 6, 5, 1, 7)), (W, 16, 64))


@triton.jit
def fragment_x(tile, TILE: tl.constexpr):
    """A tile of 8 rows of act as an MMA's right side [WARPS, 4 * VEC, 8]."""
    W: tl.constexpr = TILE.warps
    if TILE.vec == 8:
        bits = tl.reshape(tile, (4, 8, W, 2, 2, 2))  # t g warp s0 c1 c0
        return tl.reshape(tl.permute(bits, (2, 3, 4, 0, 5, 1)), (W, 32, 8))
    else:
        bits = tl.reshape(tile, (4, 8, W, 2, 2, 2, 2))  # t g warp s1 s0 c1 c0
        return tl.reshape(tl.permute(bits, (2, 3, 5, 0, 4, 6, 1)), (W, 64, 8))


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
def add_from_left(values, A: tl.constexpr, B: tl.constexpr, COUNT: tl.constexpr):
    """``[A, B, COUNT]`` to ``[A, B]``: the first plus the second, plus the third, and so on."""
    parts = (values,)
    for i in tl.static_range(5):
        if COUNT >> (i + 1) > 0:
            halves = ()
            for j in tl.static_range(1 << i):
                grouped = tl.permute(tl.reshape(parts[j], (A, B, 2, COUNT >> (i + 1))), (0, 1, 3, 2))
                low, high = tl.split(grouped)
                halves = halves + (low, high)
            parts = halves
    total = tl.reshape(parts[0], (A, B)) + 0.0  # no negative zeros
    for j in tl.static_range(1, COUNT):
        total += tl.reshape(parts[j], (A, B))
    return total


@triton.jit
def fold_parts(total, TILE: tl.constexpr):
    """Accumulators ``[WARPS, columns x parts, rows x parts]`` to ``[columns, rows]``."""
    W: tl.constexpr = TILE.warps
    PARTS: tl.constexpr = TILE.pieces // W
    if PARTS == 1:
        pieces = tl.permute(total, (1, 2, 0))
    else:
        part = tl.arange(0, 16) % PARTS
        meant = part[:, None] == (tl.arange(0, 8) % PARTS)[None, :]
        total = tl.where(meant[None, :, :], total, 0.0)
        # one value and zeros: exact in any order
        diagonal = tl.sum(tl.reshape(total, (W, 16, 8 // PARTS, PARTS)), axis=3)
        each = tl.reshape(diagonal, (W, 16 // PARTS, PARTS, 8 // PARTS))
        pieces = tl.reshape(tl.permute(each, (1, 3, 0, 2)), (16 // PARTS, 8 // PARTS, TILE.pieces))
    return add_from_left(pieces, 16 // PARTS, 8 // PARTS, TILE.pieces)


@triton.jit
def fold_products(total, TILE: tl.constexpr):
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
