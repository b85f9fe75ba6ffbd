"""Roundings and encodings: dtype casts, fp8 codes, scales. ``QUANT`` is a `quantization.Quant`.

``HW_ROUNDING``: the target's float casts round to nearest even. Triton's interpreter truncates to
bfloat16, so integer code rounds there.
"""

import triton
import triton.language as tl


@triton.jit
def cast(values, DTYPE: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """float32 to DTYPE, round to nearest even; NaN stays NaN."""
    if HW_ROUNDING:
        return values.to(DTYPE)
    elif DTYPE != tl.bfloat16:
        return values.to(DTYPE)
    else:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
        return quiet.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def convert(values, DTYPE: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """``values`` rounded to DTYPE, as float32 again."""
    if DTYPE == tl.float32:
        return values
    else:
        return cast(values, DTYPE, HW_ROUNDING).to(tl.float32)


@triton.jit
def encode_fp8(values, QUANT: tl.constexpr):
    """Saturate to +-max, round to nearest even and return 4-3 codes as uint8."""
    if QUANT.hardware:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _encode_in_software(values, QUANT)


@triton.jit
def encode(values, QUANT: tl.constexpr):
    """Saturate, round to nearest even and return codes: int8, uint8, or 4 bits in an int32."""
    if QUANT.integer:
        return _nearest_integer(values, QUANT)
    elif QUANT.hardware and QUANT.mantissa == 2:
        return values.to(tl.float8e5).to(tl.uint8, bitcast=True)
    elif QUANT.bits == 4:
        return _encode_e2m1(values, QUANT)
    elif QUANT.mantissa == 2:
        return _encode_e5m2(values, QUANT)
    else:
        return encode_fp8(values, QUANT)


@triton.jit
def _nearest_integer(values, QUANT: tl.constexpr):
    """int8 codes; NaN is 0. Adding 1.5 * 2**23 leaves the integer in the low bits of the sum."""
    held = tl.minimum(tl.maximum(values, -QUANT.max), QUANT.max)
    code = (held + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(values == values, code, 0).to(tl.int8)


@triton.jit
def _encode_e5m2(values, QUANT: tl.constexpr):
    """`_encode_in_software` with two mantissa bits."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    limit = tl.full(size.shape, QUANT.max, tl.float32).to(tl.int32, bitcast=True)
    held = tl.minimum(size, limit)
    power = tl.maximum(held & 0x7F800000, (128 - QUANT.bias) << 23)
    total = power.to(tl.float32, bitcast=True) * (2097152.0 + QUANT.bias) + held.to(tl.float32, bitcast=True)
    code = (total.to(tl.int32, bitcast=True) + (power >> 21)) & 0x7F
    code = code | ((bits >> 24) & 0x80)
    return tl.where(size > 0x7F800000, QUANT.nan, code).to(tl.uint8)


@triton.jit
def _encode_e2m1(values, QUANT: tl.constexpr):
    """`_encode_in_software` with one mantissa bit, as int32; NaN is 0."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    held = tl.minimum(size, 0x40C00000)  # 6
    power = tl.maximum(held & 0x7F800000, 0x3F800000)
    total = power.to(tl.float32, bitcast=True) * 4194305.0 + held.to(tl.float32, bitcast=True)
    code = (total.to(tl.int32, bitcast=True) + (power >> 22)) & 7
    code = code | ((bits >> 28) & 8)
    return tl.where(size > 0x7F800000, 0, code)


@triton.jit
def _encode_in_software(values, QUANT: tl.constexpr):
    """Exact on any chip: adding ``2**(e+20)`` to a value of exponent e leaves three mantissa bits,
    rounded by the adder; the constant's low part and ``e << 3`` then turn the sum's bits into the
    code. Below the smallest normal, e is constant.
    """
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    limit = tl.full(size.shape, QUANT.max, tl.float32).to(tl.int32, bitcast=True)
    held = tl.minimum(size, limit)
    power = tl.maximum(held & 0x7F800000, (128 - QUANT.bias) << 23)
    total = power.to(tl.float32, bitcast=True) * (1048576.0 + QUANT.bias) + held.to(tl.float32, bitcast=True)
    code = (total.to(tl.int32, bitcast=True) + (power >> 20)) & 0x7F
    sign = (bits >> 24) & 0x80
    if QUANT.negative_zero:
        code = code | sign
    else:
        code = tl.where(code == 0, 0, code | sign)
    return tl.where(size > 0x7F800000, QUANT.nan, code).to(tl.uint8)


@triton.jit
def make_scale(amax, bound, least, QUANT: tl.constexpr, DTYPE: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """The scale to store, as float32: ``min(amax, bound) / max``, at least ``least``, rounded to
    DTYPE or up to a power of two.

    A float scale below 2**-126 is 0; a finite amax never gives an infinite scale; a NaN or infinite
    amax gives NaN.
    """
    t = tl.div_rn(tl.minimum(amax, bound), tl.full(amax.shape, QUANT.unit, tl.float32))
    return rounded_scale(t, amax, least, QUANT, DTYPE, HW_ROUNDING)


@triton.jit
def rounded_scale(t, amax, least, QUANT: tl.constexpr, DTYPE: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """`make_scale` of a quotient."""
    if least is not None:
        t = tl.maximum(t, least)
    if QUANT.floor:
        exponent = tl.minimum(t.to(tl.int32, bitcast=True) >> 23, 254)
        scale = tl.where(exponent <= 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
    elif QUANT.ue8m0:
        bits = t.to(tl.int32, bitcast=True)
        exponent = tl.minimum(tl.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23), 254)
        scale = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
    else:
        rounded = tl.where(t < 1.1754943508222875e-38, 0.0, tl.minimum(t, QUANT.largest))
        scale = convert(rounded, DTYPE, HW_ROUNDING)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def rounded_e4m3_scale(t, amax, limits, QUANT: tl.constexpr):
    """The scale to store as float8_e4m3fn, as float32: ``t * overall``, at least ``least`` and 0,
    rounded to nearest even, at most 448. ``limits`` are bound, least and, if there is one, overall.
    """
    known = amax < float("inf")
    if QUANT.overall:
        t = tl.maximum(t, 0.0) * limits[2]
        known = known & (t == t)
    if limits[1] is not None:
        t = tl.maximum(t, limits[1])
    held = tl.minimum(tl.maximum(t, 0.0), 448.0)
    power = tl.maximum(held.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    step = power.to(tl.float32, bitcast=True) * 1048576.0
    return tl.where(known, (held + step) - step, float("nan"))


@triton.jit
def e4m3_code(scale):
    """The code of a number that float8_e4m3fn represents, in an int32; NaN is 0x7F."""
    bits = scale.to(tl.int32, bitcast=True)
    known = scale == scale
    small = (tl.where(known, scale, 0.0) * 512.0).to(tl.int32)
    return tl.where(known, tl.where(bits < (121 << 23), small, (bits >> 20) - (120 << 3)), 0x7F)


@triton.jit
def store_scale(pointer, offset, mask, scale, QUANT: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """Store scales; as e8m0 their biased exponent (2**-127 is 0), NaN as 255."""
    if QUANT.e8m0:
        bits = scale.to(tl.int32, bitcast=True)
        tl.store(pointer + offset, tl.where(scale == scale, bits >> 23, 255).to(tl.uint8), mask=mask)
    elif QUANT.e4m3:
        tl.store(pointer + offset, e4m3_code(scale).to(tl.uint8), mask=mask)
    else:
        tl.store(pointer + offset, cast(scale, pointer.dtype.element_ty, HW_ROUNDING), mask=mask)


@triton.jit
def divisor(scale):
    """What values are divided by: the scale, or infinity for 0, which gives signed zeros."""
    return tl.where(scale == 0.0, float("inf"), scale)


@triton.jit
def scaled(values, k, DIVIDE: tl.constexpr):
    """``values`` to encode: divided by ``k``, correctly rounded, or multiplied by it."""
    if DIVIDE:
        return tl.div_rn(values, k)
    else:
        return values * k


@triton.jit
def quotient(numerator, scale):
    """``numerator / scale``, 0 where the scale is 0, at most the largest float32; keeps NaN."""
    return held_quotient(tl.div_rn(numerator, scale), numerator, scale)


@triton.jit
def held_quotient(k, numerator, scale):
    """`quotient`, given the result of the division."""
    k = tl.where(k > 3.4028234663852886e38, 3.4028234663852886e38, k)
    return tl.where((scale == 0.0) & (numerator == numerator), 0.0, k)
