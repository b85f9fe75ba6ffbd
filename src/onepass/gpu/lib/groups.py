"""One scale per group of columns: every group's largest value, its scale and its codes.

There are two implementations with identical results. `store_groups` processes one tile at a time,
and every thread of a group computes its scale with the same two divisions. `store_groups_by_lane`
first finds the largest values of all chunks of a row and shares the chunks between the lanes of a
group, so that a thread divides for its own chunks instead of all. It exchanges values between lanes
with PTX, and relies on a group's columns lying in neighbouring lanes, where their loads put them. A
test reads the compiler's output to check that nothing moves them.

``TILE.assembly``: PTX may be used.
"""

import triton
import triton.language as tl

from .numbers import (
    cast,
    divisor,
    e4m3_code,
    encode,
    encode_e2m1_pairs,
    encode_int8,
    held_quotient,
    rounded_e4m3_scale,
    rounded_scale,
    scaled,
    store_scale,
)
from .ratios import over, ratio, ratio_of_any
from .row import column_order, magnitude


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(values, AXIS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The largest magnitudes along an axis, as float32; NaN if there is one."""
    if ASSEMBLY:
        return tl.reduce(tl.abs(values), AXIS, _larger)
    else:
        return tl.max(magnitude(values), axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def _scales(
    amax, row_factor, limits,
    QUANT: tl.constexpr, DTYPE: tl.constexpr, HW_ROUNDING: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The scales of groups with these largest values, and their numerator: the row's factor, or 1
    if it is already applied.
    """
    if QUANT.normed:
        numerator = tl.where(row_factor == row_factor, 1.0, row_factor)
    else:
        amax *= row_factor
        numerator = row_factor
    t = over(tl.minimum(amax, limits[0]), QUANT.unit, ASSEMBLY)
    if QUANT.e4m3:
        return rounded_e4m3_scale(t, amax, limits, QUANT), numerator
    else:
        return rounded_scale(t, amax, limits[1], QUANT, DTYPE, HW_ROUNDING), numerator


@triton.jit
def _inverse_power(scale):
    """``1 / scale`` of a power of two from 2**-127 to 2**127; NaN stays NaN."""
    exponent = scale.to(tl.int32, bitcast=True) >> 23  # 0 for 2**-127
    inverse = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(scale == scale, inverse, scale)


@triton.jit
def _group_factor(numerator, s, limits, QUANT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """What the values of a group with the stored scale ``s`` are multiplied by, or with ``divide`` divided by."""
    if QUANT.overall:
        s = tl.where(s == 0.0, 0.0, ratio_of_any(s, tl.broadcast_to(limits[2], s.shape), ASSEMBLY))
    if QUANT.divide:
        return divisor(s)
    elif QUANT.ue8m0:
        return held_quotient(numerator * _inverse_power(s), numerator, s)
    elif QUANT.overall:  # which may have made s infinite
        return held_quotient(ratio_of_any(numerator, s, ASSEMBLY), numerator, s)
    else:
        return held_quotient(ratio(numerator, s, ASSEMBLY), numerator, s)


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
def _codes(values, k, SHAPE: tl.constexpr, QUANT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Bytes of codes of groups, [.., columns or pairs], in SHAPE; ``k`` is their `_group_factor`."""
    quantized = scaled(values, k, QUANT.divide)
    if QUANT.bits == 4:
        pairs = tl.reshape(quantized, (SHAPE[0], SHAPE[1] // 2, 2))
        if ASSEMBLY and not QUANT.divide:
            factors = tl.reshape(tl.broadcast_to(k, quantized.shape), (SHAPE[0], SHAPE[1] // 2, 2))
            low, high = tl.split(pairs)
            return encode_e2m1_pairs(low, high, tl.split(factors)[0])
        else:
            low, high = tl.split(encode(pairs, QUANT))
            return (low | (high << 4)).to(tl.uint8)
    elif ASSEMBLY and QUANT.integer:
        return encode_int8(tl.reshape(quantized, SHAPE), QUANT.max)
    else:
        return encode(tl.reshape(quantized, SHAPE), QUANT)


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
    PACKED: tl.constexpr = 8 // QUANT.bits
    grouped = tl.reshape(column_order(values, TILE), (TILE.rows, GROUPS, QUANT.group))
    amax = _largest(grouped, 2, TILE.assembly)  # [rows, GROUPS]
    # the row's factor in the layout of amax, where a thread holds one group at a time and divides
    # once for it
    if TILE.rows == 1:
        row_factor = tl.zeros_like(amax) + tl.sum(rs, axis=0)
    else:
        row_factor = tl.max(tl.zeros_like(grouped) + rs[:, None, None], axis=2)
    s, numerator = _scales(amax, row_factor, limits, QUANT, scale.dtype.element_ty, HW_ROUNDING, TILE.assembly)
    group = first // QUANT.group + tl.arange(0, GROUPS)
    inside = present[:, None] & (group < n // QUANT.group)[None, :]
    places = scale_at[:, None] + _offset(group.to(tl.int64)[None, :], step, QUANT)
    store_scale(scale, places, inside, s, QUANT, HW_ROUNDING)
    k = _group_factor(numerator, s, limits, QUANT, TILE.assembly)
    q = _codes(grouped, k[:, :, None], (TILE.rows, TILE.chunk), QUANT, TILE.assembly)
    columns = first // PACKED + tl.arange(0, TILE.chunk // PACKED)
    mask = present[:, None] & (columns < n // PACKED)[None, :]
    tl.store(codes + codes_at[:, None] + columns[None, :], q, mask=mask)


@triton.constexpr_function
def slots(count):
    """``count`` rounded up to a power of two: the number of parts of a group's lanes."""
    return 1 << (count - 1).bit_length()


@triton.constexpr_function
def owned(count, lanes):
    """How many of ``count`` chunks each lane of a group owns, at most."""
    return max(1, slots(count) // lanes)


@triton.constexpr_function
def _words(count, lanes):
    """The types of the results of `_maxima_to_lanes`."""
    return (tl.float32,) * owned(count, lanes)


@triton.constexpr_function
def _maxima_to_lanes(count, lanes):
    """PTX: the inputs are a thread's largest values, one per chunk; the outputs become the largest of
    the chunks that the lane owns, over ``lanes`` lanes. Lane i owns chunk ``i * slots // lanes``, or
    ``owned`` chunks from ``i * owned`` on.

    Lanes half a group apart exchange the chunks that the other will own, then lanes a quarter
    apart, and so on. Lanes that own the same chunk exchange what they have.
    """
    left, keep = slots(count), owned(count, lanes)
    code = [".reg .b32 lane, sent;", f".reg .f32 got, v<{left}>;", ".reg .pred upper;", "mov.u32 lane, %laneid;"]
    code += [f"mov.f32 v{i}, {f'${i + keep}' if i < count else '0f00000000'};" for i in range(left)]
    far = lanes // 2
    while far:
        left //= 2
        if left:
            code += [f"and.b32 sent, lane, {far};", "setp.ne.u32 upper, sent, 0;"]
        for i in range(max(left, 1)):
            if left:
                code += [f"selp.f32 got, v{i}, v{i + left}, upper;", f"selp.f32 v{i}, v{i + left}, v{i}, upper;"]
            else:
                code += [f"mov.f32 got, v{i};"]
            code += ["mov.b32 sent, got;", f"shfl.sync.bfly.b32 sent, sent, {far}, 31, -1;"]
            code += ["mov.b32 got, sent;", f"max.NaN.f32 v{i}, v{i}, got;"]
        far //= 2
    return "{" + " ".join([*code, *(f"mov.f32 ${i}, v{i};" for i in range(keep))]) + "}"


@triton.constexpr_function
def _operands(count, lanes):
    """The constraints of the outputs and inputs of `_maxima_to_lanes`."""
    return ",".join(["=f"] * owned(count, lanes) + ["f"] * count)


@triton.constexpr_function
def _from_lane(chunk, count, lanes):
    """PTX: $0 is the value of $1 in the lane that owns ``chunk``."""
    owner = chunk * lanes // slots(count)
    source = f"and.b32 lane, lane, {-lanes}; or.b32 lane, lane, {owner};"
    return (
        "{.reg .b32 lane, word; mov.u32 lane, %laneid; "
        + source
        + " mov.b32 word, $1; shfl.sync.idx.b32 word, word, lane, 31, -1; mov.b32 $0, word;}"
    )


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
    chunks, rs, limits, out, inner, TILE: tl.constexpr, QUANT: tl.constexpr, HW_ROUNDING: tl.constexpr
):
    """Quantize a row of whole chunks, held in registers, by groups of ``vec * LANES`` columns;
    `store_groups` documents the arguments.
    """
    codes, codes_at, scale, scale_at, step = out
    LANES: tl.constexpr = QUANT.group // TILE.vec
    GROUPS: tl.constexpr = TILE.chunk // QUANT.group
    COUNT: tl.constexpr = TILE.count
    OWNED: tl.constexpr = owned(COUNT, LANES)
    SHARE: tl.constexpr = max(1, LANES // slots(COUNT))
    PACKED: tl.constexpr = 8 // QUANT.bits
    SCALE: tl.constexpr = scale.dtype.element_ty
    values = ()
    peaks = ()
    for c in tl.static_range(COUNT):
        v = tl.reshape(chunks[c], (GROUPS, LANES, TILE.vec))
        values = values + (v,)
        peaks = peaks + (_largest(v, 2, True),)
    largest = tl.inline_asm_elementwise(
        _maxima_to_lanes(COUNT, LANES), _operands(COUNT, LANES), peaks, _words(COUNT, LANES), is_pure=False, pack=1
    )
    row_factor = tl.sum(rs, axis=0)
    lane = tl.arange(0, LANES)[None, :]
    factors = ()
    for i in tl.static_range(OWNED):
        s, numerator = _scales(largest[i], row_factor, limits, QUANT, SCALE, HW_ROUNDING, True)
        chunk = lane // SHARE * OWNED + i
        group = chunk * GROUPS + tl.arange(0, GROUPS)[:, None]
        stores = (chunk < COUNT) & (lane % SHARE == 0)
        places = scale + tl.sum(scale_at, axis=0) + _offset(group.to(tl.int64), step, QUANT)
        words = [places.to(tl.int64), _scale_word(s, SCALE, QUANT, HW_ROUNDING), stores.to(tl.int32)]
        tl.inline_asm_elementwise(_store_word(SCALE), "=r,l,r,r", words, dtype=tl.int32, is_pure=False, pack=1)
        factors = factors + (_group_factor(numerator + tl.zeros_like(s), s, limits, QUANT, True),)
    for c in tl.static_range(COUNT):
        k = tl.inline_asm_elementwise(
            _from_lane(c, COUNT, LANES), "=f,f", [factors[c % OWNED]], dtype=tl.float32, is_pure=False, pack=1
        )
        q = _codes(values[c], k[:, :, None], (1, TILE.chunk), QUANT, True)
        if QUANT.bits == 4:
            inner = tl.arange(0, TILE.chunk // 2)
        tl.store(codes + codes_at[:, None] + (c * (TILE.chunk // PACKED) + inner)[None, :], q)
