"""A scale a group of columns: every group's largest value, its scale and its codes.

Two ways, with the same bytes. `store_groups` takes one tile after another; all threads of a group then make its scale, each the same
two divisions. `store_groups_by_lane` finds the largest values of all chunks of a row first and leaves each chunk's with a
lane of its own: a thread divides for one chunk, not for all. It exchanges values between lanes itself, which Triton
does not know of, and relies on a group's columns lying in neighbouring lanes, where their loads put them: a test reads from the compiler
that nothing moves them.
"""

import triton
import triton.language as tl

from .numbers import cast, divisor, encode_fp8, make_scale, quotient, scaled, store_scale
from .row import column_order, factor, magnitude, normalize


@triton.jit
def _scales(
    amax, row_factor, bound, least, FP8_MAX: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr,
    NORMED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The scales of groups with these largest values, and what is divided by them: the row's factor, or 1 where values have it."""
    if NORMED:
        numerator = tl.where(row_factor == row_factor, 1.0, row_factor)
    else:
        amax *= row_factor
        numerator = row_factor
    return make_scale(amax, bound, FP8_MAX, DTYPE, LARGEST, UE8M0, EXACT, least), numerator


@triton.jit
def _group_factor(numerator, s, DIVIDE: tl.constexpr):
    """What the values of a group are multiplied by, or with DIVIDE divided by."""
    if DIVIDE:
        return divisor(s)
    else:
        return quotient(numerator, s)


@triton.jit
def store_groups(
    values, rs, bound, least, codes, codes_at, scale, scale_at, sg, first, n, present,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    FP8_MAX: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr, NEGATIVE_ZERO: tl.constexpr, HARDWARE: tl.constexpr,
    LARGEST: tl.constexpr, UE8M0: tl.constexpr, E8M0: tl.constexpr, NORMED: tl.constexpr, DIVIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Quantize a tile (columns ``first`` onwards) by groups of GROUP columns; store codes and scales."""
    grouped = tl.reshape(column_order(values, ROWS, BLOCK, WARPS, LANES), (ROWS, BLOCK // GROUP, GROUP))
    amax = tl.max(magnitude(grouped), axis=2).to(tl.float32, bitcast=True)  # [ROWS, BLOCK // GROUP]
    # the row's factor in the layout of amax, where a thread has one group at a time and divides once for it, not for all
    if ROWS == 1:
        row_factor = tl.zeros_like(amax) + tl.sum(rs, axis=0)
    else:
        row_factor = tl.max(tl.zeros_like(grouped) + rs[:, None, None], axis=2)
    s, numerator = _scales(
        amax, row_factor, bound, least, FP8_MAX, scale.dtype.element_ty, LARGEST, UE8M0, NORMED, EXACT
    )
    group = first // GROUP + tl.arange(0, BLOCK // GROUP)
    inside = present[:, None] & (group < n // GROUP)[None, :]
    store_scale(scale, scale_at[:, None] + group.to(tl.int64)[None, :] * sg, inside, s, E8M0, EXACT)
    k = _group_factor(numerator, s, DIVIDE)
    quantized = tl.reshape(scaled(grouped, k[:, :, None], DIVIDE), (ROWS, BLOCK))
    columns = first + tl.arange(0, BLOCK)
    mask = present[:, None] & (columns < n)[None, :]
    codes_ = encode_fp8(quantized, FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE)
    tl.store(codes + codes_at[:, None] + columns[None, :], codes_, mask=mask)


@triton.constexpr_function
def slots(count):
    """The power of two that ``count`` chunks fill: a chunk's lanes are 1 in so many of a group's."""
    return 1 << (count - 1).bit_length()


@triton.constexpr_function
def _maxima_to_lanes(count, lanes):
    """PTX: $1 to $count are a thread's largest values of as many chunks; $0 becomes the largest, over ``lanes`` lanes, of one chunk:
    lane i has that of chunk ``i * slots // lanes``.

    Lanes half a group apart give each other the half of the chunks that the other will have, then lanes a quarter apart, and so on;
    lanes that are to have the same chunk give each other what they have.
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
    """PTX: $0 is what the lane of ``chunk`` has in $1."""
    source = f"and.b32 lane, lane, {-lanes}; or.b32 lane, lane, {chunk * (lanes // slots(count))};"
    return "{.reg .b32 lane; mov.u32 lane, %laneid; " + source + " shfl.sync.idx.b32 $0, $1, lane, 31, -1;}"


@triton.jit
def _scale_word(scale, DTYPE: tl.constexpr, E8M0: tl.constexpr, EXACT: tl.constexpr):
    """What `store_scale` would store, in the low bits of an integer."""
    if E8M0:
        return tl.where(scale == scale, scale.to(tl.int32, bitcast=True) >> 23, 255)
    elif DTYPE == tl.float32:
        return scale.to(tl.int32, bitcast=True)
    else:
        return cast(scale, DTYPE, EXACT).to(tl.int16, bitcast=True).to(tl.int32)


@triton.constexpr_function
def _store_word(dtype):
    """PTX: the low bits of $2 to address $1, if $3 is not zero. A `tl.store` would first exchange scales between threads."""
    size = dtype.primitive_bitwidth
    return "{.reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b" + str(size) + " [$1], $2; mov.b32 $0, 0;}"


@triton.jit
def store_groups_by_lane(
    held, weights, weight_offset, rs, bound, least, codes, codes_at, scale, scale_at, sg, place, DTYPE: tl.constexpr,
    CHUNK: tl.constexpr, COUNT: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr, FP8_MAX: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, NEGATIVE_ZERO: tl.constexpr, HARDWARE: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr,
    E8M0: tl.constexpr, OFFSET: tl.constexpr, HF: tl.constexpr, NORMED: tl.constexpr, DIVIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Quantize a row of whole chunks, held in registers, by groups of ``GROUP = VEC * LANES`` columns; store codes and scales."""
    LANES: tl.constexpr = GROUP // VEC
    GROUPS: tl.constexpr = CHUNK // GROUP
    values = ()
    peaks = ()
    for c in tl.static_range(COUNT):
        h = held[c].to(tl.float32)
        g = factor(weights[c], weight_offset, OFFSET)
        if NORMED:
            v = normalize(h, rs, g, DTYPE, HF, EXACT)
        else:
            v = h * g
        v = tl.reshape(v, (GROUPS, LANES, VEC))
        values = values + (v,)
        peaks = peaks + (tl.max(magnitude(v), axis=2),)
    largest = tl.inline_asm_elementwise(
        _maxima_to_lanes(COUNT, LANES), _operands(COUNT), peaks, dtype=tl.int32, is_pure=False, pack=1
    )
    amax = largest.to(tl.float32, bitcast=True)
    row_factor = tl.sum(rs, axis=0)
    s, numerator = _scales(
        amax, row_factor, bound, least, FP8_MAX, scale.dtype.element_ty, LARGEST, UE8M0, NORMED, EXACT
    )
    SHARE: tl.constexpr = LANES // slots(COUNT)
    lane = tl.arange(0, LANES)[None, :]
    chunk = lane // SHARE
    group = chunk * GROUPS + tl.arange(0, GROUPS)[:, None]
    stores = (chunk < COUNT) & (lane % SHARE == 0)
    places = scale + tl.sum(scale_at, axis=0) + group.to(tl.int64) * sg
    tl.inline_asm_elementwise(
        _store_word(scale.dtype.element_ty), "=r,l,r,r",
        [places.to(tl.int64), _scale_word(s, scale.dtype.element_ty, E8M0, EXACT), stores.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    k = _group_factor(numerator + tl.zeros_like(s), s, DIVIDE)
    for c in tl.static_range(COUNT):
        own = tl.inline_asm_elementwise(
            _from_lane(c, COUNT, LANES), "=r,r", [k.to(tl.int32, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1
        )
        quantized = tl.reshape(scaled(values[c], own.to(tl.float32, bitcast=True)[:, :, None], DIVIDE), (1, CHUNK))
        q = encode_fp8(quantized, FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE)
        tl.store(codes + codes_at[:, None] + (c * CHUNK + place)[None, :], q)
