"""Rows of columns that turn, as MLA's q and k have them: tiles ``[HEADS, columns]`` of one token, read, rotated and written.

A tile is read as three parts: the first halves of its pairs, the second halves, and the columns that do not turn; or, where
pairs are neighbours (not HALF), as one part, named three times.
"""

import triton
import triton.language as tl

from ...formats import E4M3FN, E4M3FNUZ
from .numbers import cast, convert, encode_fp8

FN_MAX = tl.constexpr(E4M3FN.max)
FN_BIAS = tl.constexpr(E4M3FN.bias)
FN_NAN = tl.constexpr(E4M3FN.nan_code)
FNUZ_MAX = tl.constexpr(E4M3FNUZ.max)
FNUZ_BIAS = tl.constexpr(E4M3FNUZ.bias)
FNUZ_NAN = tl.constexpr(E4M3FNUZ.nan_code)


@triton.jit
def encode(values, pointer, FP8: tl.constexpr, HARDWARE: tl.constexpr, EXACT: tl.constexpr):
    """``values`` as the pointer's dtype holds them; codes where FP8 names their format."""
    if FP8 == "e4m3fn":
        return encode_fp8(values, FN_MAX, FN_BIAS, FN_NAN, True, HARDWARE)
    elif FP8 == "e4m3fnuz":
        return encode_fp8(values, FNUZ_MAX, FNUZ_BIAS, FNUZ_NAN, False, False)
    else:
        return cast(values, pointer.dtype.element_ty, EXACT)


@triton.jit
def _mask(present, columns, width, GUARD: tl.constexpr, FULL: tl.constexpr):
    """Which heads and columns there are, of which GUARD says that heads and FULL that no columns may be missing."""
    if GUARD and not FULL:
        return present[:, None] & (columns < width)[None, :]
    elif GUARD:
        return present[:, None] & (columns >= 0)[None, :]
    else:
        return (present | True)[:, None] & (columns < width)[None, :]


@triton.jit
def _read(x, at, present, first, width, BLOCK: tl.constexpr, GUARD: tl.constexpr, FULL: tl.constexpr):
    """Columns ``first`` to ``first + width`` of the rows that begin at ``at`` [heads]."""
    columns = tl.arange(0, BLOCK)
    where = x + at[:, None] + (first + columns)[None, :]
    if GUARD or not FULL:
        return tl.load(where, mask=_mask(present, columns, width, GUARD, FULL), other=0.0)
    else:
        return tl.load(where)


@triton.jit
def _write(
    out, at, present, first, width, values,
    BLOCK: tl.constexpr, GUARD: tl.constexpr, FULL: tl.constexpr, FP8: tl.constexpr, HARDWARE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Round ``values`` and store them there."""
    columns = tl.arange(0, BLOCK)
    where = out + at[:, None] + (first + columns)[None, :]
    rounded = encode(values, out, FP8, HARDWARE, EXACT)
    if GUARD or not FULL:
        tl.store(where, rounded, mask=_mask(present, columns, width, GUARD, FULL))
    else:
        tl.store(where, rounded)


@triton.jit
def read_rope(x, at, present, first, ROPE: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, GUARD: tl.constexpr):
    """The parts as they are loaded; TURNED of the ROPE columns from ``first`` on will turn."""
    if HALF:
        PAIRS: tl.constexpr = triton.next_power_of_2(TURNED // 2)
        FULL: tl.constexpr = PAIRS * 2 == TURNED
        a = _read(x, at, present, first, TURNED // 2, PAIRS, GUARD, FULL)
        b = _read(x, at, present, first + TURNED // 2, TURNED // 2, PAIRS, GUARD, FULL)
        rest = a
        if TURNED < ROPE:
            REST: tl.constexpr = triton.next_power_of_2(ROPE - TURNED)
            rest = _read(x, at, present, first + TURNED, ROPE - TURNED, REST, GUARD, REST == ROPE - TURNED)
        return a, b, rest
    else:
        BLOCK: tl.constexpr = triton.next_power_of_2(ROPE)
        a = _read(x, at, present, first, ROPE, BLOCK, GUARD, BLOCK == ROPE)
        return a, a, a


@triton.jit
def _pairs(row, pair, COUNT: tl.constexpr, FULL: tl.constexpr, PACKED: tl.constexpr):
    """Elements 2i and 2i + 1 of a row as float32, for each i of ``pair``: in one load of both, or (not PACKED) in two.

    Beyond the COUNT pairs there are, the last one; FULL says that nothing is beyond.
    """
    if not FULL:
        pair = tl.minimum(pair, COUNT - 1)
    if not PACKED:
        return tl.load(row + 2 * pair).to(tl.float32), tl.load(row + 2 * pair + 1).to(tl.float32)
    elif row.dtype.element_ty == tl.float32:
        both = tl.load(row.to(tl.pointer_type(tl.int64)) + pair)
        return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        DTYPE: tl.constexpr = row.dtype.element_ty
        both = tl.load(row.to(tl.pointer_type(tl.int32)) + pair)
        first = both.to(tl.int16).to(DTYPE, bitcast=True)
        return first.to(tl.float32), (both >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def angles(
    freqs, freqs_row, position, limit, ROPE: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Cosines and sines of a position, both [1, pairs]; beyond those that turn, anything.

    The compiler repeats a load of fewer elements than there are threads wherever they are needed; of a larger one it would move the
    result, or even q, between threads. SPLIT: two loads instead of one, to stay below.
    """
    PAIRS: tl.constexpr = triton.next_power_of_2(TURNED if HALF else ROPE) // 2
    FULL: tl.constexpr = TURNED == 2 * PAIRS
    row = freqs + tl.minimum(tl.maximum(position, 0), limit - 1) * freqs_row
    if SPLIT:
        pair = 2 * tl.arange(0, PAIRS // 2)[None, :]
        c0, s0 = _pairs(row, pair, TURNED // 2, FULL, PACKED)
        c1, s1 = _pairs(row, pair + 1, TURNED // 2, FULL, PACKED)
        return tl.reshape(tl.join(c0, c1), (1, PAIRS)), tl.reshape(tl.join(s0, s1), (1, PAIRS))
    else:
        return _pairs(row, tl.arange(0, PAIRS)[None, :], TURNED // 2, FULL, PACKED)


@triton.jit
def turn(
    a, b, rest, cosine, sine, DTYPE: tl.constexpr, HEADS: tl.constexpr, ROPE: tl.constexpr, TURNED: tl.constexpr,
    HALF: tl.constexpr, REFERENCE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Rotate what `read_rope` has read: the same parts in float32, "reference" rounded to DTYPE."""
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    rest = rest.to(tl.float32)
    if TURNED > 0:
        BLOCK: tl.constexpr = triton.next_power_of_2(ROPE)
        if not HALF:
            a, b = tl.split(tl.reshape(a, (HEADS, BLOCK // 2, 2)))
        left = tl.fma(a, tl.broadcast_to(cosine, a.shape), (b * sine) * -1.0)
        right = tl.fma(b, tl.broadcast_to(cosine, a.shape), a * sine)
        if not HALF and TURNED < BLOCK:
            turns = (tl.arange(0, BLOCK // 2) < TURNED // 2)[None, :]
            left = tl.where(turns, left, a)
            right = tl.where(turns, right, b)
        if REFERENCE:
            left = convert(left, DTYPE, EXACT)
            right = convert(right, DTYPE, EXACT)
        if HALF:
            return left, right, (rest if TURNED < ROPE else left)
        else:
            a = tl.reshape(tl.join(left, right), (HEADS, BLOCK))
            return a, a, a
    else:
        return a, b, rest


@triton.jit
def write_rope(
    out, at, present, first, a, b, rest, ROPE: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, GUARD: tl.constexpr,
    FP8: tl.constexpr, HARDWARE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Store what `turn` has made."""
    if HALF:
        PAIRS: tl.constexpr = triton.next_power_of_2(TURNED // 2)
        FULL: tl.constexpr = PAIRS * 2 == TURNED
        _write(out, at, present, first, TURNED // 2, a, PAIRS, GUARD, FULL, FP8, HARDWARE, EXACT)
        _write(out, at, present, first + TURNED // 2, TURNED // 2, b, PAIRS, GUARD, FULL, FP8, HARDWARE, EXACT)
        if TURNED < ROPE:
            REST: tl.constexpr = triton.next_power_of_2(ROPE - TURNED)
            _write(
                out, at, present, first + TURNED, ROPE - TURNED, rest, REST, GUARD, REST == ROPE - TURNED, FP8, HARDWARE, EXACT
            )  # fmt: skip
    else:
        BLOCK: tl.constexpr = triton.next_power_of_2(ROPE)
        _write(out, at, present, first, ROPE, a, BLOCK, GUARD, BLOCK == ROPE, FP8, HARDWARE, EXACT)
