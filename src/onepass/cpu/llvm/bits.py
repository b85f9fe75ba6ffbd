"""Number formats as bits: loads and stores of rows, bf16/f16 rounding, codes and scales.

Everything that emitted code knows about a format of codes is here and derived from its `CodeFormat`. Everything works on
vectors and on scalars. A kernel holds the columns of a block in one of two orders: in order, or *paired* (even columns
in the first half of the lanes, odd columns in the second). Paired is the cheapest way to split bf16: one 32-bit word
holds an even column in its low half and an odd one in its high half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from llvmlite import ir

from ...formats import E4M3FN, FLOAT32_MAX, FP8_FORMATS, QUANTIZED, SMALLEST_SCALE, CodeFormat, ScaleRule
from .emit import F16, F32, I1, I8, I16, I32, LANES, Bool, Float, Function, Int, constant, declare, type_of

_HALF: Final = LANES // 2
EVEN_ODD: Final = [*range(0, LANES, 2), *range(1, LANES, 2)]
_INFINITY: Final = 0x7F800000
_ABS: Final = 0x7FFFFFFF
_ELEMENT: Final = {torch.float32: F32, torch.float16: F16, torch.bfloat16: I16, torch.float8_e8m0fnu: I8}
_ELEMENT.update(dict.fromkeys(QUANTIZED, I8))
_WORDS: Final = ir.VectorType(I16, LANES)
_INSTRUCTION: Final = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
_CLASSIFY: Final = "llvm.x86.avx512.fpclass.ps.512"
_SUBNORMAL: Final = 0x20
_UPPER: Final = 0xFFFF0000
INTERLEAVED: Final = [lane // 2 + _HALF * (lane % 2) for lane in range(LANES)]
"""The lane of each column in paired order: even columns first, then odd ones."""


def magnitude(value: Float) -> Int:
    """The bits of ``|value|``. As integers they have the order of the numbers, with NaN above everything."""
    return value.bits() & _ABS


def is_finite(value: Float) -> Bool:
    """Neither infinite nor NaN."""
    return magnitude(value) < _INFINITY


def lane_mask(mask: Bool, paired: bool) -> Bool:
    """A mask over columns as a mask over lanes."""
    return mask.shuffle(mask, EVEN_ODD) if paired else mask


# --- bf16, f16 and f32 ---------------------------------------------------------------------------------------------


def _cast(value: Float, element: ir.Type, instruction: str) -> Any:
    return getattr(value.builder, instruction)(value.ir, type_of(element, value.lanes))


def round_to(dtype: torch.dtype, value: Float) -> Float:
    """``value`` rounded to ``dtype`` (to nearest even), as float32."""
    if dtype == torch.bfloat16:
        return bf16_rounded(value)
    if dtype == torch.float16:
        half = Float(value.builder, _cast(value, F16, "fptrunc"))
        return Float(value.builder, _cast(half, F32, "fpext"))
    return value


def load_row(
    f: Function, dtype: torch.dtype, address: Int, mask: Bool | None, paired: bool, lanes: int = LANES
) -> Float:
    """A block of columns as float32; columns outside ``mask`` are 0. Only whole blocks come paired."""
    raw = f.load(address, _ELEMENT[dtype], mask, lanes)
    if dtype == torch.bfloat16 and paired:
        words = Int(f.builder, f.builder.bitcast(raw, ir.VectorType(I32, _HALF)))
        even, odd = words << 16, words & 0xFFFF0000
        return even.shuffle(odd, range(LANES)).float()
    value = _widen(f, dtype, raw, ir.VectorType(I32, lanes))
    return value.shuffle(value, EVEN_ODD) if paired else value


def load_scalar(f: Function, dtype: torch.dtype, address: Int) -> Float:
    """One number as float32."""
    return _widen(f, dtype, f.load(address, _ELEMENT[dtype], lanes=0), I32)


def _widen(f: Function, dtype: torch.dtype, raw: ir.Value, words: ir.Value) -> Float:
    if dtype == torch.bfloat16:
        return (Int(f.builder, f.builder.zext(raw, words)) << 16).float()
    if dtype in FP8_FORMATS:
        return decode(FP8_FORMATS[dtype], Int(f.builder, f.builder.zext(raw, words)))
    if dtype == torch.float8_e8m0fnu:  # the byte is the exponent field, except that 0 is 2**-127 and 255 is NaN
        exponents = Int(f.builder, f.builder.zext(raw, words))
        powers = exponents.eq(0).where(exponents.number(0x400000), exponents << 23)
        return exponents.eq(255).where(exponents.number(0x7FC00000), powers).float()
    if dtype == torch.int8:
        return Int(f.builder, f.builder.sext(raw, words)).to_float()
    value = Float(f.builder, raw)
    return value if dtype == torch.float32 else Float(f.builder, _cast(value, F32, "fpext"))


def store_row(
    f: Function,
    dtype: torch.dtype,
    value: Float,
    address: Int,
    mask: Bool | None,
    paired: bool,
    exact: bool = False,
    bypass: Bool | None = None,
) -> None:
    """Write a block of columns, rounded to ``dtype`` or, if that is an 8-bit format, saturated. ``exact``: it is rounded.

    ``bypass`` is that of `Function.store`, and has no effect on 8-bit formats.
    """
    if dtype in FP8_FORMATS:
        fmt = FP8_FORMATS[dtype]
        store_codes(f, encode(fmt, fmt.max, value, may_be_nan=True), address, mask, paired)
    elif dtype == torch.bfloat16 and value.lanes == LANES:
        f.store(bf16_columns(value, paired, exact), address, mask, bypass)
    else:
        value = value.shuffle(value, INTERLEAVED) if paired else value
        f.store(_narrow(dtype, value), address, mask, bypass)


def store_scalar(f: Function, dtype: torch.dtype, value: Float, address: Int) -> None:
    """Write one number; as float8_e8m0fnu it must be a power of two or NaN, as float8_e4m3fn at most 448 or NaN."""
    f.store(_narrow(dtype, value), address)


def _narrow(dtype: torch.dtype, value: Float) -> Any:
    if dtype == torch.bfloat16:
        word = bf16_words(value) >> 16
        return value.builder.trunc(word.ir, type_of(I16, value.lanes))
    if dtype == torch.float8_e8m0fnu:  # 2**-127 is a float32 subnormal, whose exponent field is its byte, 0
        byte = magnitude(value) >> 23
        return value.builder.trunc(byte.ir, I8)
    if dtype == torch.float8_e4m3fn:
        code = encode(E4M3FN, E4M3FN.max, value, may_be_nan=True).bytes()
        return value.builder.trunc(code.ir, I8)
    return value.ir if dtype == torch.float32 else _cast(value, F16, "fptrunc")


# --- rounding to bf16 ------------------------------------------------------------------------------------------------
#
# To nearest even, with subnormals and NaN payloads alike on every CPU.
#
# There are three ways, which give the same bits. Integer arithmetic on 32-bit words works for everything. Two vectors of
# words that are packed first need half as many instructions, which work on 16-bit lanes; a block with NaN takes the first
# way. The conversion instruction of AVX512-BF16 needs fewest, but flushes subnormals: a block that has one takes the first
# way.


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def bf16_words(value: Float) -> Int:
    """Words whose upper halves are ``value`` in bfloat16; lower halves are arbitrary."""
    bits = value.bits()
    rounded = bits + ((bits >> 16) & 1) + 0x7FFF
    return value.is_nan().where(bits | 0x400000, rounded)


def bf16_rounded(value: Float) -> Float:
    """``value`` rounded, as float32. Two lanes are rounded in one word, as if they were paired columns."""
    if value.lanes != LANES:
        return (bf16_words(value) & _UPPER).float()
    pairs = Int(value.builder, value.builder.bitcast(bf16_columns(value, True), ir.VectorType(I32, _HALF)))
    return (pairs << 16).shuffle(pairs & _UPPER, range(LANES)).float()


def bf16_columns(value: Float, paired: bool, exact: bool = False) -> Any:
    """`LANES` columns as 16-bit integers in order; ``value`` holds them in order or paired. ``exact``: it is rounded."""
    builder = value.builder

    def upper(halves: Int) -> Any:
        if not paired:
            return builder.trunc((halves >> 16).ir, _WORDS)
        even, odd = halves.halves()
        return builder.bitcast(((even >> 16) | (odd & _UPPER)).ir, _WORDS)

    def plain() -> Any:
        return upper(bf16_words(value))

    if exact:
        return upper(value.bits())
    if _has_instruction(value):
        fast = Int(builder, _converted(value))
        fast = fast.shuffle(fast, INTERLEAVED) if paired else fast
        return _unless(_has_subnormal(value), fast, plain)
    return _unless(_has_nan(value), _packed(value), plain) if paired else plain()


def _packed(value: Float) -> Int:
    """Paired columns, none of which is NaN: the bits that are kept, and one more where those that are lost round up.

    The lost bits round up if they are above 0x8000, or at it while the kept bits are odd. Less 0x8000 they are a signed
    number, and with the last bit of the kept ones it is positive.
    """
    builder = value.builder
    even, odd = value.bits().halves()
    kept = Int(builder, builder.bitcast(((even >> 16) | (odd & _UPPER)).ir, _WORDS))
    lost = builder.bitcast(((even & 0xFFFF) | (odd << 16)).ir, _WORDS)
    excess = Int(builder, builder.xor(lost, constant(_WORDS, 0x8000)))
    excess = excess.add_saturated(kept & 1)
    up = builder.icmp_signed(">", excess.ir, constant(_WORDS, 0))
    return kept - Int(builder, builder.sext(up, _WORDS))


def _has_instruction(value: Float) -> bool:
    return "avx512bf16" in getattr(value.builder.module, "features", ())


def _converted(value: Float) -> Any:
    """All lanes by the instruction, as 16-bit integers."""
    builder = value.builder
    low, high = value.halves()
    result = ir.VectorType(_BFloat(), LANES)
    function = declare(builder, _INSTRUCTION, result, [low.ir.type, low.ir.type])
    return builder.bitcast(builder.call(function, [high.ir, low.ir]), _WORDS)


def _has_subnormal(value: Float) -> Bool:
    builder = value.builder
    masks = []
    for half in value.halves():
        function = declare(builder, _CLASSIFY, ir.VectorType(I1, _HALF), [half.ir.type, I32])
        masks.append(Bool(builder, builder.call(function, [half.ir, ir.Constant(I32, _SUBNORMAL)])))
    return _any(masks[0] | masks[1])


def _has_nan(value: Float) -> Bool:
    low, high = value.halves()
    return _any(Bool(value.builder, value.builder.fcmp_unordered("uno", low.ir, high.ir)))


def _any(mask: Bool) -> Bool:
    builder = mask.builder
    number = builder.bitcast(mask.ir, ir.IntType(mask.lanes))
    return Bool(builder, builder.icmp_unsigned("!=", number, ir.Constant(number.type, 0)))


def _unless(rare: Bool, fast: Float | Int, slow: Callable[[], Any]) -> Any:
    """``fast`` or, if something ``rare`` is true, ``slow()``."""
    builder = rare.builder
    before = builder.block
    with builder.if_then(rare.ir, likely=False):
        other, behind = slow(), builder.block
    result = builder.phi(fast.ir.type)
    result.add_incoming(fast.ir, before)
    result.add_incoming(other, behind)
    return result


# --- codes ---------------------------------------------------------------------------------------------------------


class Codes(NamedTuple):
    """Codes in two words per lane: the low 7 bits of ``magnitude`` and the top bit of ``sign``; others are arbitrary."""

    magnitude: Int
    sign: Int

    def bytes(self) -> Int:
        """The codes as numbers."""
        return (self.magnitude & 0x7F) | ((self.sign >> 24) & 0x80)


def decode(fmt: CodeFormat, codes: Int) -> Float:
    """The numbers of FP8 codes, exactly; a subnormal code is the difference of two normal float32 numbers."""
    size = codes & 0x7F
    least = (128 - fmt.bias) << 23
    small = ((size << 20) + least).float() - codes.number(least).float()
    large = ((size << 20) + ((127 - fmt.bias) << 23)).float()
    value = ((size < 8).where(small, large).bits() | ((codes & 0x80) << 24)).float()
    nan = size.eq(fmt.nan_code) if fmt.has_negative_zero else codes.eq(fmt.nan_code)
    return nan.where(value.number(float("nan")), value)


def encode(fmt: CodeFormat, limit: float, value: Float, may_be_nan: bool = False) -> Codes:
    """Codes of ``value`` clamped to ``+-limit``, rounded to nearest even. NaN only if it ``may_be_nan``.

    With m mantissa bits and ``t`` the power of two at or below ``|value|`` (at least the smallest normal), the sum
    ``t * (2**(23 - m) + bias) + |value|`` has its last bit at ``t * 2**-m``, one step of the format: the float32 adder
    rounds, its low bits are the code's mantissa, and ``bias`` makes the exponents below bit 7 come out right. Of a
    4-bit code the low 3 bits of the magnitude count.
    """
    if fmt.integer:
        return _integers(limit, value, may_be_nan)
    shift = 23 - fmt.mantissa
    largest = torch.tensor(limit, dtype=torch.float32).view(torch.int32)
    clamped = magnitude(value).min(int(largest))
    power = (clamped & _INFINITY).max((128 - fmt.bias) << 23)
    rounded = power.float().fma(float(2**shift + fmt.bias), clamped.float()).bits() + (power >> shift)
    sign = value.bits()
    if not fmt.has_negative_zero:
        sign = (rounded & 0x7F).eq(0).where(sign.number(0), sign)
    if not may_be_nan:
        return Codes(rounded, sign)
    nan = value.is_nan()
    nan_sign = sign.number((fmt.nan_code & 0x80) << 24)
    return Codes(nan.where(rounded.number(fmt.nan_code), rounded), nan.where(nan_sign, sign))


def _integers(limit: float, value: Float, may_be_nan: bool) -> Codes:
    """The nearest integers of numbers up to ``limit``, ties to even, as bytes in two's complement; NaN is 0.

    Adding 1.5 * 2**23 leaves the integer in the low bits of the sum, negative ones too.
    """
    clamped = (value > limit).where(value.number(limit), value)
    clamped = (clamped < -limit).where(value.number(-limit), clamped)
    rounded = (clamped + 1.5 * 2**23).bits()
    if may_be_nan:
        rounded = value.is_nan().where(rounded.number(0), rounded)
    return Codes(rounded, rounded << 24)


def store_nibbles(f: Function, codes: Codes, address: Int, mask: Bool | None, paired: bool) -> None:
    """Write a block of 4-bit codes in pairs: the even column in the low half of a byte."""
    codes4 = (codes.magnitude & 7) | ((codes.sign >> 28) & 8)
    even, odd = (codes4 if paired else codes4.shuffle(codes4, EVEN_ODD)).halves()
    pairs = f.builder.trunc((even | (odd << 4)).ir, ir.VectorType(I8, _HALF))
    f.store(pairs, address, None if mask is None else mask.shuffle(mask, range(0, LANES, 2)))


def store_codes(f: Function, codes: Codes, address: Int, mask: Bool | None, paired: bool) -> None:
    """Write a block of 8-bit codes."""
    if paired:
        low, high = codes.magnitude.halves()
        low_sign, high_sign = codes.sign.halves()
        magnitudes = _select(0x7F00, high << 8, low)
        signs = _select(0x8000, high_sign >> 16, low_sign >> 24)
        words = f.builder.trunc(_select(0x8080, signs, magnitudes).ir, ir.VectorType(I16, _HALF))
        f.store(f.builder.bitcast(words, ir.VectorType(I8, LANES)), address, mask)
    else:
        f.store(f.builder.trunc(codes.bytes().ir, ir.VectorType(I8, LANES)), address, mask)


def _select(bits: int, yes: Int, no: Int) -> Int:
    """The given bits from ``yes``, the others from ``no``: one instruction if the CPU has three-operand logic."""
    return (yes & bits) | (no & (~bits & 0xFFFFFFFF))


def fill_nan(f: Function, fmt: CodeFormat, address: Int, mask: Bool | None) -> None:
    """Write NaN codes to a whole block; zeros in a format without NaN."""
    count = LANES if fmt.bits == 8 else _HALF
    if mask is not None and count == _HALF:
        mask = mask.shuffle(mask, range(0, LANES, 2))
    f.store(ir.Constant(ir.VectorType(I8, count), [fmt.nan_code] * count), address, mask)


# --- scales --------------------------------------------------------------------------------------------------------


def make_scale(
    rule: ScaleRule,
    fp8_max: float,
    amax: Float,
    bound: Float,
    least: Float | None = None,
    overall: Float | None = None,
) -> Float:
    """The stored scale ``max(min(amax, bound) / fp8_max, least)`` as float32; NaN if ``amax`` is infinite or NaN.

    ``overall`` multiplies the quotient. If the rule rounds down, ``fp8_max`` is the largest power of two of the codes.
    """
    wanted = (amax < bound).where(amax, bound) / fp8_max
    finite = is_finite(amax)
    if overall is not None:
        wanted = (wanted > 0.0).where(wanted, 0.0) * overall  # the bound may be negative
        finite = finite & ~wanted.is_nan()
    if least is None and (rule.bound_in_memory or overall is not None):  # either may be negative
        least = wanted.number(0.0)
    if least is not None:
        wanted = (wanted > least).where(wanted, least)
    if rule.dtype == torch.float8_e4m3fn:
        scale = _nearest_e4m3(wanted)
    elif rule.floor:
        scale = _power_of_two_below(wanted)
    elif rule.ue8m0:
        scale = _power_of_two_above(wanted)
    else:
        scale = (wanted < SMALLEST_SCALE).where(wanted.number(0.0), wanted)
        largest = torch.finfo(rule.dtype).max
        scale = round_to(rule.dtype, (scale > largest).where(scale.number(largest), scale))
    return finite.where(scale, amax.number(float("nan")))


def _power_of_two_above(value: Float) -> Float:
    """The smallest power of two that is at least ``value`` and at least ``2**-127``."""
    bits = value.bits()
    exponent = (bits + 0x7FFFFF) >> 23
    # Subnormals: up to 2**-127 the answer is that subnormal, above it is 2**-126, which the sum above gives too.
    return (bits < 0x400001).where(bits.number(0x400000), exponent << 23).float()


def _power_of_two_below(value: Float) -> Float:
    """The largest power of two that is at most ``value``, and at least ``2**-127``."""
    bits = value.bits()
    return (bits < 0x800000).where(bits.number(0x400000), bits & _INFINITY).float()


def _nearest_e4m3(value: Float) -> Float:
    """``value``, which is not negative, rounded to a float8_e4m3fn number, at most 448; NaN stays NaN."""
    top = E4M3FN.max
    held = (value > top).where(value.number(top), value)
    power = (held.bits() & _INFINITY).max((128 - E4M3FN.bias) << 23).float() * float(2**20)
    return (held + power) - power


def applied_scale(scale: Float, overall: Float | None) -> Float:
    """What codes are multiplied by to give numbers: the stored scale, divided by the one of all groups."""
    if overall is None:
        return scale
    return scale.eq(0.0).where(scale.number(0.0), scale / overall)


def divisor(scale: Float) -> Float:
    """What values are divided by: the scale, or infinity if it is 0, so that all codes are zeros."""
    return scale.eq(0.0).where(scale.number(float("inf")), scale)


def multiplier(numerator: Float | float, scale: Float) -> Float:
    """``numerator / scale``: at most the largest float32, 0 where the scale is 0, NaN where either is NaN."""
    top = numerator if isinstance(numerator, Float) else scale.number(numerator)
    quotient = top / scale
    quotient = (quotient > FLOAT32_MAX).where(scale.number(FLOAT32_MAX), quotient)
    return scale.eq(0.0).where(top.is_nan().where(top, scale.number(0.0)), quotient)


def quotient(value: Float, scale: Float) -> Float:
    """``value / scale``: 0 where the scale is 0, NaN where either is. Beyond float32 it saturates like its largest number."""
    zero = scale.eq(0.0) & value.eq(value)
    return zero.where(value.number(0.0), value / scale)
