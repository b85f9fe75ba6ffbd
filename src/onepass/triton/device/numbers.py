"""Roundings and encodings: dtype casts, fp8 codes, scales.

``EXACT`` says that the target rounds float casts to nearest even by itself; Triton's interpreter does not for
bfloat16, so there the integer route is taken.
"""

import triton
import triton.language as tl


@triton.jit
def cast(values, DTYPE: tl.constexpr, EXACT: tl.constexpr):
    """float32 to DTYPE, round to nearest even; NaN stays NaN."""
    if EXACT:
        return values.to(DTYPE)
    elif DTYPE != tl.bfloat16:
        return values.to(DTYPE)
    else:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
        return quiet.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def convert(values, DTYPE: tl.constexpr, EXACT: tl.constexpr):
    """``values`` rounded to DTYPE, as float32 again."""
    if DTYPE == tl.float32:
        return values
    else:
        return cast(values, DTYPE, EXACT).to(tl.float32)


@triton.jit
def encode_fp8(
    values,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    NAN: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Saturate to +-MAX, round to nearest even and return 4-3 codes as uint8."""
    if HARDWARE:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _encode_in_software(values, MAX, BIAS, NAN, NEGATIVE_ZERO)


@triton.jit
def _encode_in_software(values, MAX: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr, NEGATIVE_ZERO: tl.constexpr):
    """Exact on any chip: adding ``2**(e+20)`` to a value of exponent e leaves three mantissa bits, rounded by the adder; the
    constant's low part and ``e << 3`` then turn the sum's bits into the code. Below the smallest normal e is held.
    """
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    limit = tl.full(size.shape, MAX, tl.float32).to(tl.int32, bitcast=True)
    held = tl.minimum(size, limit)
    power = tl.maximum(held & 0x7F800000, (128 - BIAS) << 23)
    total = power.to(tl.float32, bitcast=True) * (1048576.0 + BIAS) + held.to(tl.float32, bitcast=True)
    code = (total.to(tl.int32, bitcast=True) + (power >> 20)) & 0x7F
    sign = (bits >> 24) & 0x80
    if NEGATIVE_ZERO:
        code = code | sign
    else:
        code = tl.where(code == 0, 0, code | sign)
    return tl.where(size > 0x7F800000, NAN, code).to(tl.uint8)


@triton.jit
def make_scale(
    amax, bound, MAX: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr, EXACT: tl.constexpr,
    least=None,
):  # fmt: skip
    """The scale to store, as float32: ``min(amax, bound) / MAX``, but at least ``least``, rounded to DTYPE or up to a power of two.

    A float scale below 2**-126 is 0; a finite amax never gives an infinite scale; a NaN or infinite amax gives NaN.
    """
    t = tl.div_rn(tl.minimum(amax, bound), tl.full(amax.shape, MAX, tl.float32))
    if least is not None:
        t = tl.maximum(t, least)
    if UE8M0:
        bits = t.to(tl.int32, bitcast=True)
        exponent = tl.minimum(tl.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23), 254)
        scale = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = convert(tl.where(t < 1.1754943508222875e-38, 0.0, tl.minimum(t, LARGEST)), DTYPE, EXACT)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def store_scale(pointer, offset, mask, scale, E8M0: tl.constexpr, EXACT: tl.constexpr):
    """Store scales; as e8m0 their biased exponent (2**-127 is 0), NaN as 255."""
    if E8M0:
        bits = scale.to(tl.int32, bitcast=True)
        tl.store(pointer + offset, tl.where(scale == scale, bits >> 23, 255).to(tl.uint8), mask=mask)
    else:
        tl.store(pointer + offset, cast(scale, pointer.dtype.element_ty, EXACT), mask=mask)


@triton.jit
def divisor(scale):
    """What values are divided by: the scale, or infinity for a scale of 0, which makes every number a zero of its sign."""
    return tl.where(scale == 0.0, float("inf"), scale)


@triton.jit
def scaled(values, k, DIVIDE: tl.constexpr):
    """``values`` as they are encoded: divided by ``k``, correctly rounded, or multiplied by it."""
    if DIVIDE:
        return tl.div_rn(values, k)
    else:
        return values * k


@triton.jit
def quotient(numerator, scale):
    """``numerator / scale``, 0 where the scale is 0, never beyond the largest float32; NaN stays NaN."""
    k = tl.div_rn(numerator, scale)
    k = tl.where(k > 3.4028234663852886e38, 3.4028234663852886e38, k)
    return tl.where((scale == 0.0) & (numerator == numerator), 0.0, k)
