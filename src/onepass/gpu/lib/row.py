"""Device functions over a tile of rows, ``[rows, chunk]``; every row kernel consists of these.

``TILE`` is a `ops.rms_norm.gpu_tile.RowConfig`. Where rows are 16-byte aligned, a thread loads adjacent
columns at once. Otherwise it loads single columns, and the columns of a warp would be scattered
over the row. Such a tile therefore holds its columns *permuted* (`tile_columns`), so that each warp
owns one piece of the row, which it can sum by itself.
"""

import triton
import triton.language as tl

from .numbers import cast, convert


@triton.jit
def tile_columns(TILE: tl.constexpr):
    """The column of each position: in order, or warp by warp where loads are scalar."""
    position = tl.arange(0, TILE.chunk)
    if TILE.lanes == 0:
        return position
    else:
        warp = position // TILE.lanes % TILE.warps
        register = position // (TILE.lanes * TILE.warps)
        return warp * (TILE.chunk // TILE.warps) + register * TILE.lanes + position % TILE.lanes


@triton.jit
def column_order(tile, TILE: tl.constexpr):
    """The tile with its columns back in natural order; this changes the view and moves no data."""
    if TILE.lanes == 0:
        return tile
    else:
        split = tl.reshape(tile, (TILE.rows, TILE.chunk // (TILE.warps * TILE.lanes), TILE.warps, TILE.lanes))
        return tl.reshape(tl.permute(split, (0, 2, 1, 3)), (TILE.rows, TILE.chunk))


@triton.jit
def chunk_mask(columns, n, present, LAST: tl.constexpr):
    """Which elements of a chunk of rows exist; only the last chunk may end early."""
    if LAST:
        return present[:, None] & (columns < n)[None, :]
    else:
        return present[:, None]


@triton.jit
def row_start(row, shape, tensor, LEVELS: tl.constexpr):
    """Where rows of a `gpu.launch.Rows` begin, in elements (int64): by one stride or three."""
    if LEVELS == 1:
        return row * tensor.s0
    else:
        inner = row // shape.n2
        return (inner // shape.n1) * tensor.s0 + (inner % shape.n1) * tensor.s1 + (row % shape.n2) * tensor.s2


@triton.jit
def scale_start(row, shape, scale, LEVELS: tl.constexpr, QUANT: tl.constexpr):
    """Where the scales of rows begin: by strides, or in tiles of 128 rows and 4 groups."""
    if QUANT.packing == "128x4":
        tiles = (shape.n // QUANT.group + 3) // 4
        return row // 128 * (tiles.to(tl.int64) * 512) + row % 32 * 16 + row % 128 // 32 * 4
    else:
        return row_start(row, shape, scale, LEVELS)


@triton.jit
def load_operand(pointer, start, columns, mask, KIND: tl.constexpr):
    """A prologue's tensor as float32: the whole row, one value per column, or one value per row."""
    if KIND == "full":
        return tl.load(pointer + start[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    elif KIND == "column":
        return tl.load(pointer + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        present = tl.max(mask.to(tl.int32), axis=1) > 0
        return tl.load(pointer + start, mask=present, other=0.0).to(tl.float32)[:, None]


@triton.jit
def reciprocal_root(v):
    """``1/sqrt(v)``; NaN when v is not finite, 0 when it is 0, so that zero rows stay zero."""
    rs = tl.where(v > 0.0, tl.rsqrt(v), 0.0)
    return tl.where(v < float("inf"), rs, float("nan"))


@triton.jit
def reciprocal_rms(sum_of_squares, n, eps):
    """`reciprocal_root` of ``sum/n + eps``."""
    return reciprocal_root(tl.div_rn(sum_of_squares, tl.full(sum_of_squares.shape, n, tl.float32)) + eps)


@triton.jit
def magnitude(values):
    """|values| as integers: ordered as the floats are, with NaN above everything."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def normalize(h, rs, g, DTYPE: tl.constexpr, HF: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """``(h * rs) * g``; "hf" rounds both products to DTYPE."""
    if HF:
        return convert(convert(h * rs[:, None], DTYPE, HW_ROUNDING) * g, DTYPE, HW_ROUNDING)
    else:
        return (h * rs[:, None]) * g


@triton.jit
def quantized_norm(h, rs, g, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """The norm that is quantized: `normalize`, or that rounded once, as it would be stored."""
    y = normalize(h, rs, g, DTYPE, MATH.hf, MATH.hw_rounding)
    if MATH.stored:
        return convert(y, DTYPE, MATH.hw_rounding)
    else:
        return y


@triton.jit
def factor(weight, weight_offset, MATH: tl.constexpr):
    """``gamma + weight_offset`` in float32; nothing is added where the offset is zero.

    LLVM turns the float32 product of a float16 and a bfloat16, rounded to float16, into a product
    of two float16 numbers, although float16 lacks bfloat16's range. Shifting the bits hides from
    LLVM that the number is a bfloat16.
    """
    if MATH.offset:
        return weight.to(tl.float32) + weight_offset
    elif MATH.shift_gamma:
        return (weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return weight.to(tl.float32)


@triton.jit
def store(pointer, start, columns, mask, values, HW_ROUNDING: tl.constexpr):
    """Round ``values`` to the pointer's dtype and store them."""
    tl.store(
        pointer + start[:, None] + columns[None, :], cast(values, pointer.dtype.element_ty, HW_ROUNDING), mask=mask
    )


# --- rows in chunks, and their gamma: one for all rows, one for each row, or none --------------------------------------


@triton.jit
def weight_factor(weight, weight_offset, MATH: tl.constexpr):
    """`factor` of a loaded gamma, or 1 without one."""
    if MATH.weightless:
        return 1.0
    else:
        return factor(weight, weight_offset, MATH)


@triton.jit
def load_chunks(pointer, start, inner, n, present, TILE: tl.constexpr, POLICY: tl.constexpr):
    """The chunks of a tile of rows, unconverted."""
    chunks = ()
    for c in tl.static_range(TILE.count):
        columns = c * TILE.chunk + inner
        addresses = pointer + start[:, None] + columns[None, :]
        if TILE.rows == 1 and (TILE.whole or c < TILE.count - 1):
            chunks = chunks + (tl.load(addresses, eviction_policy=POLICY),)
        else:
            mask = chunk_mask(columns, n, present, c == TILE.count - 1)
            chunks = chunks + (tl.load(addresses, mask=mask, other=0.0, eviction_policy=POLICY),)
    return chunks


@triton.jit
def load_weights(gamma, row_gamma, row, shape, inner, present, TILE: tl.constexpr):
    """The chunks of gamma: of each row, of all rows, or 1."""
    n = shape.n
    if row_gamma.at is not None:
        start = row_start(row, shape, row_gamma, TILE.levels)
        return load_chunks(row_gamma.at, start, inner, n, present, TILE, "")
    else:
        return load_columns(gamma, inner, n, TILE)


@triton.jit
def load_columns(pointer, inner, n, TILE: tl.constexpr):
    """The chunks of numbers that all rows share; 1 without any."""
    chunks = ()
    for c in tl.static_range(TILE.count):
        columns = c * TILE.chunk + inner
        if pointer is None:
            chunks = chunks + (1.0,)
        elif c == TILE.count - 1 and not TILE.whole:
            chunks = chunks + (tl.load(pointer + columns[None, :], mask=(columns < n)[None, :], other=0.0),)
        else:
            chunks = chunks + (tl.load(pointer + columns[None, :]),)
    return chunks


@triton.jit
def load_g(gamma, row_gamma, row, shape, columns, mask, weight_offset, MATH: tl.constexpr, LEVELS: tl.constexpr):
    """`weight_factor` of some columns of one row."""
    if row_gamma.at is not None:
        start = row_start(row, shape, row_gamma, LEVELS)
        weight = tl.load(row_gamma.at + start[:, None] + columns[None, :], mask=mask, other=0.0)
    elif gamma is not None:
        weight = tl.load(gamma + columns[None, :], mask=mask, other=0.0)
    else:
        weight = 1.0
    return weight_factor(weight, weight_offset, MATH)
