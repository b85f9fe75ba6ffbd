"""Angles from rows of cosines and sines, and the rotation that rounds every step, on the parts of
`mla_rope`. ``MATH`` is a `qk_cache.QkCacheMath`.
"""

import triton
import triton.language as tl

from .numbers import convert


@triton.jit
def _load_pairs(pointer, HEADS: tl.constexpr, STEP: tl.constexpr, MATH: tl.constexpr):
    """One element per pair, ``STEP`` apart, [HEADS, pairs]; 0 beyond the pairs that rotate.

    Every thread loads what it needs. The compiler would pass one row's values between threads.
    """
    COUNT: tl.constexpr = MATH.turned // 2
    PAIRS: tl.constexpr = triton.next_power_of_2(MATH.turned if MATH.half else MATH.rope) // 2
    pair = tl.broadcast_to(tl.arange(0, PAIRS)[None, :], (HEADS, PAIRS))
    if COUNT < PAIRS:
        return tl.load(pointer + STEP * pair, mask=pair < COUNT, other=0)
    else:
        return tl.load(pointer + STEP * pair)


@triton.jit
def angles_of_rows(cos, sin, HEADS: tl.constexpr, MATH: tl.constexpr):
    """A token's cosines and sines, both [HEADS, pairs], from one row of each."""
    return _load_pairs(cos, HEADS, 1, MATH).to(tl.float32), _load_pairs(sin, HEADS, 1, MATH).to(tl.float32)


@triton.jit
def angles_of_table(row, HEADS: tl.constexpr, MATH: tl.constexpr):
    """The same from a row of (cos, sin), in one load per pair where the rows are aligned."""
    if MATH.packed:
        both = _load_pairs(row.to(tl.pointer_type(tl.int64)), HEADS, 1, MATH)
        return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return _load_pairs(row, HEADS, 2, MATH), _load_pairs(row + 1, HEADS, 2, MATH)


@triton.jit
def turn_stepwise(a, b, rest, cosine, sine, DTYPE: tl.constexpr, HEADS: tl.constexpr, MATH: tl.constexpr):
    """`mla_rope.turn` that rounds the angles, both products of a sum, and the sum, to DTYPE."""
    TURNED: tl.constexpr = MATH.turned
    HALF: tl.constexpr = MATH.half
    HW: tl.constexpr = MATH.hw_rounding
    BLOCK: tl.constexpr = triton.next_power_of_2(MATH.rope)
    cosine = convert(cosine, DTYPE, HW)
    sine = convert(sine, DTYPE, HW)
    if not HALF:
        a, b = tl.split(tl.reshape(a, (HEADS, BLOCK // 2, 2)))
    left = convert(convert(a * cosine, DTYPE, HW) - convert(b * sine, DTYPE, HW), DTYPE, HW)
    right = convert(convert(b * cosine, DTYPE, HW) + convert(a * sine, DTYPE, HW), DTYPE, HW)
    if HALF:
        return left, right, (rest if TURNED < MATH.rope else left)
    else:
        if TURNED < BLOCK:
            turns = (tl.arange(0, BLOCK // 2) < TURNED // 2)[None, :]
            left = tl.where(turns, left, a)
            right = tl.where(turns, right, b)
        a = tl.reshape(tl.join(left, right), (HEADS, BLOCK))
        return a, a, a
