"""One scale per group of columns: every group's largest value, its scale and its codes.

There are two implementations with identical results. `store_groups` processes one tile at a time,
and every thread of a group computes its scale with the same two divisions. `store_groups_by_lane`
first finds the largest values of all chunks of a row and assigns each chunk to different lanes, so
that a thread divides for one chunk instead of all. It exchanges values between lanes with PTX, and
relies on a group's columns lying in neighbouring lanes, where their loads put them. A test reads
the compiler's output to check that nothing moves them.
"""

import triton
import triton.language as tl

from .chunks import weight_factor
from .numbers import (
    applied_scale,
    cast,
    divisor,
    e4m3_code,
    encode,
    make_e4m3_scale,
    make_scale,
    quotient,
    scaled,
    store_scale,
)
from .row import column_order, magnitude, quantized_norm, row_start


@triton.jit
def _scales(amax, row_factor, limits, QUANT: tl.constexpr, DTYPE: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """The scales of groups with these largest values, and their numerator: the row's factor, or 1
    if it is already applied.
    """
    if QUANT.normed:
        numerator = tl.where(row_factor == row_factor, 1.0, row_factor)
    else:
        amax *= row_factor
        numerator = row_factor
    if QUANT.e4m3:
        return make_e4m3_scale(amax, limits, QUANT), numerator
    else:
        return make_scale(amax, limits[0], limits[1], QUANT, DTYPE, HW_ROUNDING), numerator


@triton.jit
def scale_start(row, shape, scale, LEVELS: tl.constexpr, QUANT: tl.constexpr):
    """Where the scales of rows begin: by strides, or in tiles of 128 rows and 4 groups."""
    if QUANT.packing == "128x4":
        tiles = (shape.n // QUANT.group + 3) // 4
        return row // 128 * (tiles.to(tl.int64) * 512) + row % 32 * 16 + row % 128 // 32 * 4
    else:
        return row_start(row, shape, scale, LEVELS)


@triton.jit
def _offset(group, step, QUANT: tl.constexpr):
    """Where the scales of groups are, counted from the first of their row."""
    if QUANT.packing == "128x4":
        return group // 4 * 512 + group % 4
    elif QUANT.packing == "words":
        return group // 4 * step + group % 4
    else:
        return group * step


@triton.jit
def pad_scales(scale, scale_at, step, n, present, QUANT: tl.constexpr):
    """Zeros for the groups that rows lack to a multiple of four, where four share a word or tile."""
    if QUANT.packing != "":
        group = n // QUANT.group + tl.arange(0, 4)
        inside = present[:, None] & (group < (n // QUANT.group + 3) // 4 * 4)[None, :]
        places = scale + scale_at[:, None] + _offset(group.to(tl.int64)[None, :], step, QUANT)
        tl.store(places, tl.zeros(inside.shape, tl.uint8), mask=inside)


@triton.jit
def _store_codes(pointer, start, values, first, n, present, TILE: tl.constexpr, QUANT: tl.constexpr):
    """Encode and store a tile whose columns are in order."""
    if QUANT.bits == 4:
        low, high = tl.split(tl.reshape(encode(values, QUANT), (TILE.rows, TILE.chunk // 2, 2)))
        columns = first // 2 + tl.arange(0, TILE.chunk // 2)
        mask = present[:, None] & (columns < n // 2)[None, :]
        q = (low | (high << 4)).to(tl.uint8)
    else:
        columns = first + tl.arange(0, TILE.chunk)
        mask = present[:, None] & (columns < n)[None, :]
        q = encode(values, QUANT)
    tl.store(pointer + start[:, None] + columns[None, :], q, mask=mask)


@triton.jit
def _group_factor(numerator, s, DIVIDE: tl.constexpr):
    """What the values of a group are multiplied by, or with DIVIDE divided by."""
    if DIVIDE:
        return divisor(s)
    else:
        return quotient(numerator, s)


@triton.jit
def store_groups(
    values, rs, limits, out, first, n, present, TILE: tl.constexpr, QUANT: tl.constexpr, HW_ROUNDING: tl.constexpr
):
    """Quantize a tile (columns ``first`` onwards) by groups of columns; store codes and scales.

    ``limits`` are the upper bound of amax, the least scale and, if any, what multiplies all
    scales. ``out`` holds the address of the
    codes, where their rows begin, the same for the scales, and the stride from one group's scale to
    the next.
    """
    codes, codes_at, scale, scale_at, step = out
    GROUPS: tl.constexpr = TILE.chunk // QUANT.group
    grouped = tl.reshape(column_order(values, TILE), (TILE.rows, GROUPS, QUANT.group))
    amax = tl.max(magnitude(grouped), axis=2).to(tl.float32, bitcast=True)  # [rows, GROUPS]
    # the row's factor in the layout of amax, where a thread holds one group at a time and divides
    # once for it
    if TILE.rows == 1:
        row_factor = tl.zeros_like(amax) + tl.sum(rs, axis=0)
    else:
        row_factor = tl.max(tl.zeros_like(grouped) + rs[:, None, None], axis=2)
    s, numerator = _scales(amax, row_factor, limits, QUANT, scale.dtype.element_ty, HW_ROUNDING)
    group = first // QUANT.group + tl.arange(0, GROUPS)
    inside = present[:, None] & (group < n // QUANT.group)[None, :]
    places = scale_at[:, None] + _offset(group.to(tl.int64)[None, :], step, QUANT)
    store_scale(scale, places, inside, s, QUANT, HW_ROUNDING)
    k = _group_factor(numerator, applied_scale(s, limits, QUANT.overall), QUANT.divide)
    quantized = tl.reshape(scaled(grouped, k[:, :, None], QUANT.divide), (TILE.rows, TILE.chunk))
    _store_codes(codes, codes_at, quantized, first, n, present, TILE, QUANT)


@triton.constexpr_function
def slots(count):
    """``count`` rounded up to a power of two: the number of parts of a group's lanes."""
    return 1 << (count - 1).bit_length()


@triton.constexpr_function
def _maxima_to_lanes(count, lanes):
    """PTX: $1 to $count are a thread's largest values, one per chunk; $0 becomes the largest of one
    chunk over ``lanes`` lanes. Lane i gets that of chunk ``i * slots // lanes``.

    Lanes half a group apart exchange the chunks that the other will own, then lanes a quarter
    apart, and so on. Lanes that own the same chunk exchange what they have.
    """
    left = slots(count)
    code = [f".reg .b32 lane, sent, v<{left}>;", ".reg .pred upper;", "mov.u32 lane, %laneid;"]
    code += [f"mov.b32 v{i}, {f'${i + 1}' if i < count else 0};" for i in range(left)]
    far = lanes // 2
    while far:
        left //= 2
        if left:
            code += [f"and.b32 sent, lane, {far};", "setp.ne.u32 upper, sent, 0;"]
        for i in range(max(left, 1)):
            if left:
                code += [f"selp.b32 sent, v{i}, v{i + left}, upper;", f"selp.b32 v{i}, v{i + left}, v{i}, upper;"]
            else:
                code += [f"mov.b32 sent, v{i};"]
            code += [f"shfl.sync.bfly.b32 sent, sent, {far}, 31, -1;", f"max.s32 v{i}, v{i}, sent;"]
        far //= 2
    return "{" + " ".join([*code, "mov.b32 $0, v0;"]) + "}"


@triton.constexpr_function
def _operands(count):
    """The constraints of one output and ``count`` inputs, all 32-bit registers."""
    return "=r" + ",r" * count


@triton.constexpr_function
def _from_lane(chunk, count, lanes):
    """PTX: $0 is the value of $1 in the lane that owns ``chunk``."""
    source = f"and.b32 lane, lane, {-lanes}; or.b32 lane, lane, {chunk * (lanes // slots(count))};"
    return "{.reg .b32 lane; mov.u32 lane, %laneid; " + source + " shfl.sync.idx.b32 $0, $1, lane, 31, -1;}"


@triton.jit
def _scale_word(scale, DTYPE: tl.constexpr, QUANT: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """What `store_scale` would store, in the low bits of an integer."""
    if QUANT.e8m0:
        return tl.where(scale == scale, scale.to(tl.int32, bitcast=True) >> 23, 255)
    elif QUANT.e4m3:
        return e4m3_code(scale)
    elif DTYPE == tl.float32:
        return scale.to(tl.int32, bitcast=True)
    else:
        return cast(scale, DTYPE, HW_ROUNDING).to(tl.int16, bitcast=True).to(tl.int32)


@triton.constexpr_function
def _store_word(dtype):
    """PTX: store the low bits of $2 at address $1 if $3 is not zero. `tl.store` would first
    exchange scales between threads.
    """
    size = dtype.primitive_bitwidth
    return "{.reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b" + str(size) + " [$1], $2; mov.b32 $0, 0;}"


@triton.jit
def store_groups_by_lane(
    held, weights, weight_offset, rs, limits, out, inner,
    DTYPE: tl.constexpr, TILE: tl.constexpr, QUANT: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Quantize a row of whole chunks, held in registers, by groups of ``vec * LANES`` columns;
    `store_groups` documents the arguments.
    """
    codes, codes_at, scale, scale_at, step = out
    LANES: tl.constexpr = QUANT.group // TILE.vec
    GROUPS: tl.constexpr = TILE.chunk // QUANT.group
    COUNT: tl.constexpr = TILE.count
    SCALE: tl.constexpr = scale.dtype.element_ty
    values = ()
    peaks = ()
    for c in tl.static_range(COUNT):
        h = held[c].to(tl.float32)
        g = weight_factor(weights[c], weight_offset, MATH)
        if QUANT.normed:
            v = quantized_norm(h, rs, g, DTYPE, MATH)
        else:
            v = h * g
        v = tl.reshape(v, (GROUPS, LANES, TILE.vec))
        values = values + (v,)
        peaks = peaks + (tl.max(magnitude(v), axis=2),)
    largest = tl.inline_asm_elementwise(
        _maxima_to_lanes(COUNT, LANES), _operands(COUNT), peaks, dtype=tl.int32, is_pure=False, pack=1
    )
    amax = largest.to(tl.float32, bitcast=True)
    row_factor = tl.sum(rs, axis=0)
    s, numerator = _scales(amax, row_factor, limits, QUANT, SCALE, MATH.hw_rounding)
    SHARE: tl.constexpr = LANES // slots(COUNT)
    lane = tl.arange(0, LANES)[None, :]
    chunk = lane // SHARE
    group = chunk * GROUPS + tl.arange(0, GROUPS)[:, None]
    stores = (chunk < COUNT) & (lane % SHARE == 0)
    places = scale + tl.sum(scale_at, axis=0) + _offset(group.to(tl.int64), step, QUANT)
    words = [places.to(tl.int64), _scale_word(s, SCALE, QUANT, MATH.hw_rounding), stores.to(tl.int32)]
    tl.inline_asm_elementwise(_store_word(SCALE), "=r,l,r,r", words, dtype=tl.int32, is_pure=False, pack=1)
    k = _group_factor(numerator + tl.zeros_like(s), applied_scale(s, limits, QUANT.overall), QUANT.divide)
    for c in tl.static_range(COUNT):
        own = tl.inline_asm_elementwise(
            _from_lane(c, COUNT, LANES), "=r,r", [k.to(tl.int32, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1
        )
        factors = own.to(tl.float32, bitcast=True)[:, :, None]
        quantized = tl.reshape(scaled(values[c], factors, QUANT.divide), (1, TILE.chunk))
        q = encode(quantized, QUANT)
        if QUANT.bits == 4:
            low, high = tl.split(tl.reshape(q, (1, TILE.chunk // 2, 2)))
            columns = c * (TILE.chunk // 2) + tl.arange(0, TILE.chunk // 2)
            tl.store(codes + codes_at[:, None] + columns[None, :], (low | (high << 4)).to(tl.uint8))
        else:
            tl.store(codes + codes_at[:, None] + (c * TILE.chunk + inner)[None, :], q)
