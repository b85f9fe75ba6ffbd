"""Products of 16-bit rows: tiles of weights and of x pass through shared memory in the order of K.

**Order.** K is cut into ``pieces`` neighbouring pieces of equal length, a multiple of ``grain``; the
last ones may be shorter or empty. Tensor cores add the products of a piece sixteen columns at a time,
in the order of k. With a scale per block, the sum of each block starts at zero and is added to its piece
in one fused multiply-add. Then the pieces are added, from the first to the last. The result depends only
on the number of pieces and the grain, which follow from N, the dtype of the weights and the kind of their
scales. M, the tile, the number of warps and alignment do not matter.

A *cube* computes all pieces at the same time, as a batched product. It keeps every multiprocessor busy
when there are few columns. A *flat* tile walks along all of K and adds its sums to a total at the end
of each piece. `descriptor_product` is a flat tile that the copy engine loads, `piece_product` one piece of it.

**Static weights.** The first step of weights is requested before the previous kernel has ended, and x after it.

``TILE`` is a `gpu.product_tile.PieceTile`.
"""

import triton
import triton.language as tl

from .codes import decode, decode_fragments, decode_words, regroup, regrouped
from .pdl import waited
from .reduce import add_from_left

SCALED = tl.constexpr(128)
"""Weight rows that share a scale, and columns of K."""


@triton.jit
def piece_length(k, TILE: tl.constexpr):
    """Columns of each piece but the last ones."""
    return tl.cdiv(tl.cdiv(k, TILE.pieces), TILE.grain) * TILE.grain


@triton.constexpr_function
def has_blocks(scaled):
    """Whether each block of weights has a scale."""
    return scaled in ("block", "ue8m0_block")


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
def _operand(values, MATH: tl.constexpr):
    """The interpreter multiplies bfloat16 as integers."""
    if MATH.hw_rounding:
        return values
    else:
        return values.to(tl.float32)


@triton.jit
def _codes(weight, MATH: tl.constexpr):
    """The address of 8-bit weights as that of bytes."""
    if MATH.weight == "float":
        return weight
    else:
        return weight.to(tl.pointer_type(tl.int8))


@triton.jit
def _weights(w, DTYPE: tl.constexpr, REGROUPS: tl.constexpr, MATH: tl.constexpr):
    """Loaded weights as a product's left side."""
    if MATH.weight == "float":
        return _operand(w, MATH)
    elif not MATH.regroups:
        return _operand(decode(w, DTYPE, MATH.weight), MATH)
    elif REGROUPS:
        return decode_fragments(w, DTYPE, MATH.weight)
    else:
        return decode_words(w, DTYPE, MATH.weight)


@triton.jit
def _load_step(w_at, x_at, at, inside, rows, TILE: tl.constexpr, MATH: tl.constexpr):
    """The step at column ``at``, where ``inside``: weights, which leave the cache first, and ``rows`` of x."""
    if TILE.mask:
        nothing: tl.constexpr = 0.0 if MATH.weight == "float" else 0
        w = tl.load(w_at + at, mask=inside, other=nothing, eviction_policy="evict_first")
        rows = rows & inside
    else:
        w = tl.load(w_at + at, eviction_policy="evict_first")
    if TILE.static:
        at += waited(at, MATH.pdl)
    return w, tl.load(x_at + at, mask=rows, other=0.0)


@triton.jit
def _cube_product(
    x, weight, scale, column, row, m, k, x_stride, weight_stride, scale_stride,
    TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = has_blocks(MATH.scaled)
    CODES: tl.constexpr = MATH.weight != "float" and MATH.regroups
    length = piece_length(k, TILE)
    first = tl.arange(0, TILE.pieces)[:, None, None] * length
    inner = tl.arange(0, TILE.step)[None, None, :]
    if CODES and not TILE.aligned:
        inner = regrouped(inner)
    w_at = _codes(weight, MATH) + column.to(tl.int64)[None, :, None] * weight_stride + first + inner
    x_at = x + row.to(tl.int64)[None, :, None] * x_stride + first + inner
    if BLOCKS:
        block = tl.arange(0, TILE.pieces)[:, None] * (length // SCALED)
        s_at = scale + (column // SCALED).to(tl.int64)[None, :] * scale_stride
    rows = (row < m)[None, :, None]
    sums = tl.zeros((TILE.pieces, TILE.columns, TILE.rows), tl.float32)
    for at in tl.range(0, length, TILE.step, num_stages=TILE.stages):
        inside = (inner < length - at) & (first + inner < k - at)
        w, v = _load_step(w_at, x_at, at, inside, rows, TILE, MATH)
        if CODES and TILE.aligned:
            v = regroup(v)
        w = _weights(w, x.dtype.element_ty, TILE.aligned, MATH)
        if BLOCKS:
            each = tl.minimum(block + at // SCALED, tl.cdiv(k, SCALED) - 1)
            s = scale_value(tl.load(s_at + each), MATH.scaled)
            s = tl.broadcast_to(s[:, :, None], (TILE.pieces, TILE.columns, TILE.rows))
            sums = tl.fma(tl.dot(w, tl.permute(_operand(v, MATH), (0, 2, 1))), s, sums)
        else:
            sums = tl.dot(w, tl.permute(_operand(v, MATH), (0, 2, 1)), sums)
    return add_from_left(tl.permute(sums, (1, 2, 0)), TILE.columns, TILE.rows, TILE.pieces)


@triton.jit
def _zeros(SIDES: tl.constexpr, TILE: tl.constexpr):
    """The first sums of each side: ``[columns / SIDES, rows]`` if weights come first, otherwise the transpose."""
    WIDE: tl.constexpr = TILE.columns // SIDES
    HIGH: tl.constexpr = WIDE if TILE.weights_first else TILE.rows
    BROAD: tl.constexpr = TILE.rows if TILE.weights_first else WIDE
    sums = ()
    for _ in tl.static_range(SIDES):
        sums = sums + (tl.zeros((HIGH, BROAD), tl.float32),)
    return sums


@triton.jit
def _add_products(w, v, scales, at, k, sums, TILE: tl.constexpr, MATH: tl.constexpr):
    """``sums`` and the products of a flat tile's step at column ``at`` of K.

    ``scales``: with a scale per block, where those of the first block of K are.
    """
    left, right = (w, v) if TILE.weights_first else (v, w)
    if has_blocks(MATH.scaled):
        s = scale_value(tl.load(scales + tl.minimum(at, k - 1) // SCALED), MATH.scaled)
        s = tl.broadcast_to(tl.expand_dims(s, 1 if TILE.weights_first else 0), sums.shape)
        return tl.fma(tl.dot(left, tl.trans(right)), s, sums)
    else:
        return tl.dot(left, tl.trans(right), sums)


@triton.jit
def _flat_product(
    x, weight, scale, column, row, m, k, x_stride, weight_stride, scale_stride,
    TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    length = piece_length(k, TILE)
    inner = tl.arange(0, TILE.step)[None, :]
    w_at = _codes(weight, MATH) + column.to(tl.int64)[:, None] * weight_stride + inner
    x_at = x + row.to(tl.int64)[:, None] * x_stride + inner
    scales = None
    if has_blocks(MATH.scaled):
        scales = scale + (column // SCALED).to(tl.int64) * scale_stride
    rows = (row < m)[:, None]
    total = _zeros(1, TILE)[0]
    sums = _zeros(1, TILE)[0]
    left = length
    for at in tl.range(0, TILE.pieces * length, TILE.step, num_stages=TILE.stages):
        w, v = _load_step(w_at, x_at, at, inner < k - at, rows, TILE, MATH)
        w = _weights(w, x.dtype.element_ty, False, MATH)
        sums = _add_products(w, _operand(v, MATH), scales, at, k, sums, TILE, MATH)
        if TILE.pieces > 1:
            left -= TILE.step
            if left == 0:
                total += sums
                sums = _zeros(1, TILE)[0]
                left = length
    if TILE.pieces == 1:
        total = sums
    if not TILE.weights_first:
        total = tl.trans(total)
    return total


@triton.jit
def product(x, weight, scale, column, row, m, k, strides, TILE: tl.constexpr, MATH: tl.constexpr):
    """The sums ``[columns, rows]`` over k of the weight rows ``column`` times the rows ``row`` of x.

    ``strides`` are those of x, weight and scale. Rows of x from m on are not read. Every ``column`` must exist.
    """
    if TILE.kind == "cube":
        return _cube_product(x, weight, scale, column, row, m, k, strides[0], strides[1], strides[2], TILE, MATH)
    else:
        return _flat_product(x, weight, scale, column, row, m, k, strides[0], strides[1], strides[2], TILE, MATH)


@triton.jit
def _add_step(
    x, weight, scales, row0, columns, at, k, sums, SIDES: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr
):
    """`_add_products` of each side, loaded by the copy engine."""
    v = _operand(x.load([row0, at]), MATH)
    added = ()
    for s in tl.static_range(SIDES):
        w = _operand(weight.load([columns[s], at]), MATH)
        added = added + (_add_products(w, v, scales[s], at, k, sums[s], TILE, MATH),)
    return added


@triton.jit
def descriptor_product(
    x, weight, scale, row0, columns, n, k, scale_stride, SIDES: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr
):
    """Like `product`, from the descriptors of both matrices. ``columns`` holds the first column of each side.

    The sums of each side are ``[columns / SIDES, rows]``. The copy engine writes zeros for what lies
    beyond either matrix; weight has n rows. With a scale per block, a step is a block.
    """
    length = piece_length(k, TILE)
    scales = (None,) * SIDES
    if has_blocks(MATH.scaled):
        scales = ()
        for s in tl.static_range(SIDES):
            column = tl.minimum(columns[s] + tl.arange(0, TILE.columns // SIDES), n - 1)
            scales = scales + (scale + (column // SCALED).to(tl.int64) * scale_stride,)
    totals = _zeros(SIDES, TILE)
    sums = _zeros(SIDES, TILE)
    left = length
    for at in tl.range(0, TILE.pieces * length, TILE.step, num_stages=TILE.stages):
        sums = _add_step(x, weight, scales, row0, columns, at, k, sums, SIDES, TILE, MATH)
        if TILE.pieces > 1:
            left -= TILE.step
            if left == 0:
                ended = ()
                for s in tl.static_range(SIDES):
                    ended = ended + (totals[s] + sums[s],)
                totals = ended
                sums = _zeros(SIDES, TILE)
                left = length
    if TILE.pieces == 1:
        totals = sums
    found = ()
    for s in tl.static_range(SIDES):
        found = found + (totals[s] if TILE.weights_first else tl.trans(totals[s]),)
    return found


@triton.jit
def piece_product(x, weight, row0, columns, k, piece, SIDES: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """The sums of one piece, as `descriptor_product` has them before it adds them to a total."""
    length = piece_length(k, TILE)
    sums = _zeros(SIDES, TILE)
    for at in tl.range(piece * length, (piece + 1) * length, TILE.step, num_stages=TILE.stages):
        sums = _add_step(x, weight, (None,) * SIDES, row0, columns, at, k, sums, SIDES, TILE, MATH)
    return sums
