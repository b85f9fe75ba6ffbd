"""Device functions over a tile of rows, ``[ROWS, BLOCK]``; every row kernel is made of these.

Where rows lie on 16 bytes a thread loads neighbouring columns at once. Where they do not, loads are of single columns, and what a
warp loads would be scattered over the row: so such a tile holds its columns *permuted* (`tile_columns`), such that each warp
owns one piece of the row, which it can add up by itself.
"""

import triton
import triton.language as tl

from .numbers import cast, convert


@triton.jit
def tile_columns(BLOCK: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr):
    """The column each tile position holds: natural order, or warp by warp where loads are scalar (LANES is not 0)."""
    position = tl.arange(0, BLOCK)
    if LANES == 0:
        return position
    else:
        warp = position // LANES % WARPS
        register = position // (LANES * WARPS)
        return warp * (BLOCK // WARPS) + register * LANES + position % LANES


@triton.jit
def column_order(tile, ROWS: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr):
    """The tile with its columns back in natural order: another view of it, nothing moves."""
    if LANES == 0:
        return tile
    else:
        split = tl.reshape(tile, (ROWS, BLOCK // (WARPS * LANES), WARPS, LANES))
        return tl.reshape(tl.permute(split, (0, 2, 1, 3)), (ROWS, BLOCK))


@triton.jit
def chunk_mask(columns, n, present, LAST: tl.constexpr):
    """Which places of a chunk of rows exist: all columns but those beyond the last chunk's end."""
    if LAST:
        return present[:, None] & (columns < n)[None, :]
    else:
        return present[:, None]


@triton.jit
def row_start(row, n1, n2, s0, s1, s2, LEVELS: tl.constexpr):
    """Where rows begin, in elements (int64): three-level strides, or one."""
    if LEVELS == 1:
        return row * s0
    else:
        inner = row // n2
        return (inner // n1) * s0 + (inner % n1) * s1 + (row % n2) * s2


@triton.jit
def load_operand(pointer, start, columns, mask, KIND: tl.constexpr):
    """A prologue's tensor as float32: the whole row, one value a column, or one value a row."""
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
def normalize(h, rs, g, DTYPE: tl.constexpr, HF: tl.constexpr, EXACT: tl.constexpr):
    """``(h * rs) * g``; "hf" rounds both products to DTYPE."""
    if HF:
        return convert(convert(h * rs[:, None], DTYPE, EXACT) * g, DTYPE, EXACT)
    else:
        return (h * rs[:, None]) * g


@triton.jit
def factor(weight, weight_offset, OFFSET: tl.constexpr):
    """``gamma + weight_offset`` in float32; nothing is added where the offset is zero."""
    if OFFSET:
        return weight.to(tl.float32) + weight_offset
    else:
        return weight.to(tl.float32)


@triton.jit
def store(pointer, start, columns, mask, values, EXACT: tl.constexpr):
    """Round ``values`` to the pointer's dtype and store them."""
    tl.store(pointer + start[:, None] + columns[None, :], cast(values, pointer.dtype.element_ty, EXACT), mask=mask)
