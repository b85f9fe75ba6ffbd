"""Reads, rotates and writes rotary columns, as tiles ``[HEADS, columns]`` of one token.

A tile is read as three parts: the first halves of its pairs, the second halves, and the columns
that do not rotate; or, where pairs are neighbours (not ``half``), as one part, returned three
times. ``MATH`` is a `MlaMath` or a `QkCacheMath`.
"""

import triton
import triton.language as tl

from .numbers import cast, convert, encode_fp8


@triton.jit
def encode(values, pointer, QUANT: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """``values`` rounded to the pointer's dtype, or encoded if QUANT has a format."""
    if QUANT.max > 0:
        return encode_fp8(values, QUANT)
    else:
        return cast(values, pointer.dtype.element_ty, HW_ROUNDING)


@triton.jit
def _mask(present, columns, width, GUARD: tl.constexpr, FULL: tl.constexpr):
    """Which heads and columns exist. GUARD: heads may be missing; FULL: no columns are missing."""
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
    out, at, present, first, width, values, BLOCK: tl.constexpr, GUARD: tl.constexpr, FULL: tl.constexpr,
    QUANT: tl.constexpr, HW_ROUNDING: tl.constexpr,
):  # fmt: skip
    """Round ``values`` and store them in the columns that `_read` would read."""
    columns = tl.arange(0, BLOCK)
    where = out + at[:, None] + (first + columns)[None, :]
    rounded = encode(values, out, QUANT, HW_ROUNDING)
    if GUARD or not FULL:
        tl.store(where, rounded, mask=_mask(present, columns, width, GUARD, FULL))
    else:
        tl.store(where, rounded)


@triton.jit
def read_rope(x, at, present, first, GUARD: tl.constexpr, MATH: tl.constexpr):
    """The parts, unconverted; ``turned`` of ``rope`` columns from ``first`` on will rotate."""
    ROPE: tl.constexpr = MATH.rope
    TURNED: tl.constexpr = MATH.turned
    if MATH.half:
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
    """Elements 2i and 2i + 1 of a row as float32, for each i of ``pair``: in one load (PACKED) or
    two.

    Indices beyond the COUNT pairs read the last one; FULL: there are none.
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
def angles(freqs, freqs_row, position, limit, SPLIT: tl.constexpr, MATH: tl.constexpr):
    """Cosines and sines of a position, both [1, pairs]; undefined beyond those that rotate.

    The compiler repeats a load of fewer elements than threads wherever its values are needed. It
    would move the result of a larger load, or even q, between threads. SPLIT: use two loads to stay
    below that size.
    """
    TURNED: tl.constexpr = MATH.turned
    PACKED: tl.constexpr = MATH.packed
    PAIRS: tl.constexpr = triton.next_power_of_2(TURNED if MATH.half else MATH.rope) // 2
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
def turn(a, b, rest, cosine, sine, DTYPE: tl.constexpr, HEADS: tl.constexpr, MATH: tl.constexpr):
    """Rotate the parts that `read_rope` returned, in float32; "reference" rounding rounds them to
    DTYPE.
    """
    TURNED: tl.constexpr = MATH.turned
    HALF: tl.constexpr = MATH.half
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    rest = rest.to(tl.float32)
    if TURNED > 0:
        BLOCK: tl.constexpr = triton.next_power_of_2(MATH.rope)
        if not HALF:
            a, b = tl.split(tl.reshape(a, (HEADS, BLOCK // 2, 2)))
        left = tl.fma(a, tl.broadcast_to(cosine, a.shape), (b * sine) * -1.0)
        right = tl.fma(b, tl.broadcast_to(cosine, a.shape), a * sine)
        if not HALF and TURNED < BLOCK:
            turns = (tl.arange(0, BLOCK // 2) < TURNED // 2)[None, :]
            left = tl.where(turns, left, a)
            right = tl.where(turns, right, b)
        if MATH.reference:
            left = convert(left, DTYPE, MATH.hw_rounding)
            right = convert(right, DTYPE, MATH.hw_rounding)
        if HALF:
            return left, right, (rest if TURNED < MATH.rope else left)
        else:
            a = tl.reshape(tl.join(left, right), (HEADS, BLOCK))
            return a, a, a
    else:
        return a, b, rest


@triton.jit
def write_rope(out, at, present, first, a, b, rest, GUARD: tl.constexpr, QUANT: tl.constexpr, MATH: tl.constexpr):
    """Store the parts that `turn` returned."""
    ROPE: tl.constexpr = MATH.rope
    TURNED: tl.constexpr = MATH.turned
    HW: tl.constexpr = MATH.hw_rounding
    if MATH.half:
        PAIRS: tl.constexpr = triton.next_power_of_2(TURNED // 2)
        FULL: tl.constexpr = PAIRS * 2 == TURNED
        _write(out, at, present, first, TURNED // 2, a, PAIRS, GUARD, FULL, QUANT, HW)
        _write(out, at, present, first + TURNED // 2, TURNED // 2, b, PAIRS, GUARD, FULL, QUANT, HW)
        if TURNED < ROPE:
            LEFT: tl.constexpr = ROPE - TURNED
            REST: tl.constexpr = triton.next_power_of_2(LEFT)
            _write(out, at, present, first + TURNED, LEFT, rest, REST, GUARD, REST == LEFT, QUANT, HW)
    else:
        BLOCK: tl.constexpr = triton.next_power_of_2(ROPE)
        _write(out, at, present, first, ROPE, a, BLOCK, GUARD, BLOCK == ROPE, QUANT, HW)


# --- angles from rows of cosines and sines, and the rotation that rounds every step ----------------------------------


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
    """`turn` that rounds the angles, both products of a sum, and the sum, to DTYPE."""
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
