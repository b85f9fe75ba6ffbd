"""Roundings and encodings: what kernels know about an output format (`Quant`), dtype casts, codes and scales.

``HW_ROUNDING``: the target's float casts round to nearest even. Triton's interpreter truncates to
bfloat16, so integer code rounds there.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...formats import FLOAT32_MAX, CodeFormat, ScaleRule
from ..chip import Chip


class Quant(NamedTuple):
    """The constants of a code format and its scales. ``max`` 0: values are not stored as codes.

    ``hardware``: the chip's own cast encodes values. ``e8m0``: scales are stored as exponents.
    ``normed``: codes are made from the norm itself; otherwise the row's factor is applied together
    with the scale. ``divide``: values are divided by the scale. ``unit``: what amax is divided by.
    ``floor``: powers of two are rounded down. ``e4m3``: scales are stored as float8_e4m3fn.
    ``overall``: scales are multiplied by one number in memory. ``packing``: `ScaleRule.packing`.
    """

    max: float
    bias: int
    nan: int
    negative_zero: bool
    hardware: bool
    kind: str
    group: int
    largest: float
    ue8m0: bool
    e8m0: bool
    normed: bool
    divide: bool
    unit: float
    mantissa: int = 3
    bits: int = 8
    integer: bool = False
    floor: bool = False
    e4m3: bool = False
    overall: bool = False
    packing: str = ""


def hardware_cast(fmt: CodeFormat | None, chip: Chip) -> bool:
    """Whether the chip converts to and from this format itself."""
    return fmt is not None and fmt.name in ("e4m3fn", "e5m2") and chip.casts_e4m3fn


def quant(
    fmt: CodeFormat | None,
    chip: Chip,
    rule: ScaleRule | None = None,
    maximum: float | None = None,
    normed: bool = False,
) -> Quant:
    """The constants of a format and a scale rule; by default float32 scales per row."""
    facts = (0.0, 0, 0, False) if fmt is None else (fmt.max, fmt.bias, fmt.nan_code, fmt.has_negative_zero)
    if maximum is not None:
        facts = (torch.tensor(maximum, dtype=torch.float32).item(), *facts[1:])  # as kernels use it
    hardware = hardware_cast(fmt, chip)
    none = Quant(*facts, hardware, "none", 0, FLOAT32_MAX, False, False, normed, False, facts[0])
    if fmt is not None:
        none = none._replace(mantissa=fmt.mantissa, bits=fmt.bits, integer=fmt.integer)
    if rule is None:
        return none
    return none._replace(
        kind=rule.kind,
        group=rule.group,
        largest=torch.finfo(rule.dtype).max,
        ue8m0=rule.ue8m0,
        e8m0=rule.dtype == torch.float8_e8m0fnu,
        divide=rule.divides,
        unit=fmt.largest_power if rule.floor and fmt is not None else facts[0],
        floor=rule.floor,
        e4m3=rule.dtype == torch.float8_e4m3fn,
        overall=rule.has_global,
        packing=rule.packing,
    )


# --- casts and codes -------------------------------------------------------------------------------------------------


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


# --- codes on NVIDIA chips: fewer instructions than `encode` compiles to, with the same results ----------------------


@triton.constexpr_function
def _int8(limit):
    """PTX: $0 has the codes of $1 to $4. NaN converts to 0, and the last two instructions saturate to -128 and 127."""
    code = [".reg .f32 v<4>;", ".reg .b32 n<4>, t;"]
    for i in range(4):
        code += [f"max.NaN.f32 v{i}, ${i + 1}, {-float(limit)!r};"]
        if limit < 127:
            code += [f"min.NaN.f32 v{i}, v{i}, {float(limit)!r};"]
        code += [f"cvt.rni.s32.f32 n{i}, v{i};"]
    code += ["cvt.pack.sat.s8.s32.b32 t, n3, n2, 0;", "cvt.pack.sat.s8.s32.b32 $0, n1, n0, t;"]
    return "{" + " ".join(code) + "}"


@triton.jit
def encode_int8(values, LIMIT: tl.constexpr):
    """Codes of at most LIMIT; NaN is 0."""
    return tl.inline_asm_elementwise(_int8(LIMIT), "=r,f,f,f,f", [values], dtype=tl.int8, is_pure=True, pack=4)


@triton.constexpr_function
def _e2m1():
    """PTX: byte i of $0 has the codes of the i-th of the first four operands, and of the second four in its high half.

    Codes are a concave function of the numbers, in three straight parts: 2v, v + 2 and v / 2 + 4, rounded to integers.
    So the code is the least of the three. Adding 2**23 leaves the integer in the low bits of a sum. The third four
    operands are the limits of these sums. They are also the results for NaN.
    """
    code = [".reg .f32 a, p, q;", ".reg .b32 t<8>, b<4>, w, u, s;"]
    for i in range(8):
        code += [f"abs.f32 a, ${i + 1};"]
        code += ["fma.rn.f32 p, a, 0f40000000, 0f4B000000;", "add.rn.f32 q, a, 0f4B000002;", "min.f32 p, p, q;"]
        code += ["fma.rn.f32 q, a, 0f3F000000, 0f4B000004;", "min.f32 p, p, q;"]
        code += [f"min.f32 p, p, ${9 + i % 4};", f"mov.b32 t{i}, p;"]
    code += [f"mad.lo.u32 b{i}, t{i + 4}, 16, t{i};" for i in range(4)]
    code += ["prmt.b32 w, b0, b1, 0x0040;", "prmt.b32 u, b2, b3, 0x0040;", "prmt.b32 w, w, u, 0x5410;"]
    for first, mask in ((1, "0x08080808"), (5, "0x80808080")):  # selectors of 8 and more repeat a byte's sign
        names = [f"${first + i}" for i in range(4)]
        code += [f"mov.b32 t{i}, {name};" for i, name in enumerate(names)]
        code += ["prmt.b32 u, t0, t1, 0x00FB;", "prmt.b32 s, t2, t3, 0x00FB;", "prmt.b32 u, u, s, 0x5410;"]
        code += [f"and.b32 u, u, {mask};", "or.b32 w, w, u;"]
    return "{" + " ".join([*code, "mov.b32 $0, w;"]) + "}"


@triton.jit
def encode_e2m1_pairs(low, high, factor):
    """Bytes of two codes each, of numbers that were multiplied by ``factor``; 0 where the factor is NaN."""
    limit = tl.broadcast_to(tl.where(factor == factor, 8388615.0, 8388608.0), low.shape)
    return tl.inline_asm_elementwise(
        _e2m1(), "=r,f,f,f,f,f,f,f,f,f,f,f,f", [low, high, limit], dtype=tl.uint8, is_pure=True, pack=4
    )


# --- scales ----------------------------------------------------------------------------------------------------------


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
