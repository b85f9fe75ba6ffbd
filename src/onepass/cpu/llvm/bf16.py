"""Rounding to bfloat16: to nearest even, with subnormals and NaN payloads alike on every CPU.

There are three ways, which give the same bits. Integer arithmetic on 32-bit words works for everything. Two vectors of
words that are packed first need half as many instructions, which work on 16-bit lanes; a block with NaN takes the first
way. The conversion instruction of AVX512-BF16 needs fewest, but flushes subnormals: a block that has one takes the first
way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from .vec import I1, I16, I32, LANES, Bool, Float, Int, constant, declare

_HALF: Final = LANES // 2
_WORDS: Final = ir.VectorType(I16, LANES)
_INSTRUCTION: Final = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
_CLASSIFY: Final = "llvm.x86.avx512.fpclass.ps.512"
_SUBNORMAL: Final = 0x20
_UPPER: Final = 0xFFFF0000
INTERLEAVED: Final = [lane // 2 + _HALF * (lane % 2) for lane in range(LANES)]
"""The lane of each column in paired order: even columns first, then odd ones."""


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def words(value: Float) -> Int:
    """Words whose upper halves are ``value`` in bfloat16; lower halves are arbitrary."""
    bits = value.bits()
    rounded = bits + ((bits >> 16) & 1) + 0x7FFF
    return value.is_nan().where(bits | 0x400000, rounded)


def rounded(value: Float) -> Float:
    """``value`` rounded, as float32. Two lanes are rounded in one word, as if they were paired columns."""
    if value.lanes != LANES:
        return (words(value) & _UPPER).float()
    pairs = Int(value.builder, value.builder.bitcast(columns(value, True), ir.VectorType(I32, _HALF)))
    return (pairs << 16).shuffle(pairs & _UPPER, range(LANES)).float()


def columns(value: Float, paired: bool, exact: bool = False) -> Any:
    """`LANES` columns as 16-bit integers in order; ``value`` holds them in order or paired. ``exact``: it is rounded."""
    builder = value.builder

    def upper(halves: Int) -> Any:
        if not paired:
            return builder.trunc((halves >> 16).ir, _WORDS)
        even, odd = halves.halves()
        return builder.bitcast(((even >> 16) | (odd & _UPPER)).ir, _WORDS)

    def plain() -> Any:
        return upper(words(value))

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
