"""QK-RMSNorm: one launch over the rows of q and of k, each program a tile of rows of one of them.

The first programs process q, the others k. All tiles have about the same number of elements, in one
long row or several short ones, so that all programs take about the same time. Rows whose statistics
are given are cut into pieces of columns instead, several rows per tile, which reads gamma less
often. Every element is read before it is overwritten, so outputs may be the inputs. The order of
all sums is that of `gpu.lib.reduce`. Tensors and constants are the named tuples of `qk_norm`.
"""

import triton
import triton.language as tl

from ...gpu.lib.numbers import convert, encode_fp8, make_scale, quotient
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.lib.reduce import FOLD, sum_chunks, sum_columns, sum_eights
from ...gpu.lib.row import magnitude, normalize, reciprocal_root, row_start, store

EARLY_CHUNKS = tl.constexpr(4)
"""With more chunks per row no registers are left for gamma, which is then read after the sum."""


@triton.jit
def _turn_neighbours(y, freqs, angles_at, first, ROWS: tl.constexpr, BLOCK: tl.constexpr, MATH: tl.constexpr):
    """Rotate columns 2i and 2i + 1 of each head; ``first`` and the head size are even."""
    place = (first + 2 * tl.arange(0, BLOCK // 2)) % MATH.head
    turns = (place < MATH.dim)[None, :]
    at = angles_at[:, None] + place[None, :]
    cosine = tl.load(freqs + at, mask=turns, other=1.0)
    sine = tl.load(freqs + at + 1, mask=turns, other=0.0)
    a, b = tl.split(tl.reshape(y, (ROWS, BLOCK // 2, 2)))
    left = tl.where(turns, tl.fma(a, cosine, -(b * sine)), a)
    right = tl.where(turns, tl.fma(b, cosine, a * sine), b)
    return tl.reshape(tl.join(left, right), (ROWS, BLOCK))


@triton.jit
def _norm_at(source, columns, mask, rs, MATH: tl.constexpr):
    """The norm of these columns, which are read here, perhaps for the second time."""
    x, x_at, gamma, weight_offset = source
    weight = tl.load(gamma + columns[None, :], mask=mask, other=0.0)
    h = tl.load(x + x_at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return normalize(h, rs, weight.to(tl.float32) + weight_offset, x.dtype.element_ty, MATH.hf, MATH.hw_rounding)


@triton.jit
def _finished(y, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """What becomes a code: "hf" rounds rotated values to DTYPE first."""
    if MATH.hf and MATH.rope != "none":
        return convert(y, DTYPE, MATH.hw_rounding)
    else:
        return y


@triton.jit
def _put(
    out, out_at, columns, mask, y, scale, DTYPE: tl.constexpr, MATH: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Store values, or their codes."""
    if QUANT.max > 0:
        codes = encode_fp8(quotient(_finished(y, DTYPE, MATH), scale[:, None]), QUANT)
        tl.store(out + out_at[:, None] + columns[None, :], codes, mask=mask)
    else:
        store(out, out_at, columns, mask, y, MATH.hw_rounding)


@triton.jit
def _top(peak, mask, y, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """The larger of ``peak`` and each row's largest magnitude, as integers."""
    return tl.maximum(peak, tl.max(tl.where(mask, magnitude(_finished(y, DTYPE, MATH)), 0), axis=1))


@triton.jit
def _pairs(source, rs, freqs, angles_at, first, n, present, STEP: tl.constexpr, MATH: tl.constexpr):
    """Columns i and i + dim/2 of each head, for the heads within STEP columns from ``first`` on.

    Returns the first of the two, their mask, both norms, and the cosine and sine of their angle.
    """
    HEAD: tl.constexpr = MATH.head
    HALF: tl.constexpr = MATH.dim // 2
    pair = tl.arange(0, triton.next_power_of_2(STEP // HEAD * HALF))
    place = pair % HALF
    columns = first + pair // HALF * HEAD + place
    mask = present[:, None] & ((columns < n) & (pair < STEP // HEAD * HALF))[None, :]
    a = _norm_at(source, columns, mask, rs, MATH)
    b = _norm_at(source, columns + HALF, mask, rs, MATH)
    at = angles_at[:, None] + 2 * place[None, :]
    cosine = tl.load(freqs + at, mask=mask, other=0.0)
    sine = tl.load(freqs + at + 1, mask=mask, other=0.0)
    return columns, mask, a, b, cosine, sine


@triton.jit
def _others(source, rs, first, n, present, STEP: tl.constexpr, MATH: tl.constexpr):
    """The columns of the same heads that do not rotate, their mask and norm."""
    HEAD: tl.constexpr = MATH.head
    REST: tl.constexpr = MATH.head - MATH.dim
    other = tl.arange(0, triton.next_power_of_2(STEP // HEAD * REST))
    columns = first + other // REST * HEAD + MATH.dim + other % REST
    mask = present[:, None] & ((columns < n) & (other < STEP // HEAD * REST))[None, :]
    return columns, mask, _norm_at(source, columns, mask, rs, MATH)


@triton.jit
def _write_halves(
    source, rs, out, out_at, freqs, angles_at, first, n, present, scale,
    STEP: tl.constexpr, MATH: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Norm and rotate columns i and i + dim/2 of each head, for the heads within STEP columns from
    ``first`` on.

    Both columns of a pair are read, and then written, by the same thread.
    """
    DTYPE: tl.constexpr = source[0].dtype.element_ty
    columns, mask, a, b, cosine, sine = _pairs(source, rs, freqs, angles_at, first, n, present, STEP, MATH)
    _put(out, out_at, columns, mask, tl.fma(a, cosine, -(b * sine)), scale, DTYPE, MATH, QUANT)
    _put(out, out_at, columns + MATH.dim // 2, mask, tl.fma(b, cosine, a * sine), scale, DTYPE, MATH, QUANT)
    if MATH.head > MATH.dim:
        columns, mask, y = _others(source, rs, first, n, present, STEP, MATH)
        _put(out, out_at, columns, mask, y, scale, DTYPE, MATH, QUANT)


@triton.jit
def _top_of_halves(peak, source, rs, freqs, angles_at, first, n, present, STEP: tl.constexpr, MATH: tl.constexpr):
    """`_top` of what `_write_halves` writes."""
    DTYPE: tl.constexpr = source[0].dtype.element_ty
    _, mask, a, b, cosine, sine = _pairs(source, rs, freqs, angles_at, first, n, present, STEP, MATH)
    peak = _top(peak, mask, tl.fma(a, cosine, -(b * sine)), DTYPE, MATH)
    peak = _top(peak, mask, tl.fma(b, cosine, a * sine), DTYPE, MATH)
    if MATH.head > MATH.dim:
        _, mask, y = _others(source, rs, first, n, present, STEP, MATH)
        peak = _top(peak, mask, y, DTYPE, MATH)
    return peak


@triton.jit
def _turned(
    h, g, rs, freqs, angles_at, first,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Normalize a tile whose first column is ``first`` and rotate neighbours."""
    y = normalize(h.to(tl.float32), rs, g, DTYPE, MATH.hf, MATH.hw_rounding)
    if MATH.rope == "interleaved":
        y = _turn_neighbours(y, freqs, angles_at, first, ROWS, BLOCK, MATH)
    return y


@triton.jit
def _write(
    h, g, rs, out, out_at, freqs, angles_at, first, mask, scale,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MATH: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Normalize, rotate neighbours and store a tile."""
    y = _turned(h, g, rs, freqs, angles_at, first, DTYPE, ROWS, BLOCK, MATH)
    _put(out, out_at, first + tl.arange(0, BLOCK), mask, y, scale, DTYPE, MATH, QUANT)


@triton.jit
def _store_scale(peak, out, at, present, MATH: tl.constexpr, QUANT: tl.constexpr):
    """Turn each row's largest magnitude into its scale, and store that."""
    scale = make_scale(peak.to(tl.float32, bitcast=True), float("inf"), None, QUANT, tl.float32, MATH.hw_rounding)
    tl.store(out + at, scale, mask=present)
    return scale


@triton.jit
def _load_tile(source, first, place, n, present, STEP: tl.constexpr):
    """The columns ``first + place``, of which there are STEP: their mask, gamma and values."""
    x, x_at, gamma, _ = source
    columns = first + place
    inside = columns < n
    if STEP < place.shape[0]:
        inside = inside & (place < STEP)
    mask = present[:, None] & inside[None, :]
    weight = tl.load(gamma + columns[None, :], mask=inside[None, :], other=0.0)
    h = tl.load(x + x_at[:, None] + columns[None, :], mask=mask, other=0.0)
    return mask, weight, h


@triton.jit
def _load_weights(gamma, n, present, TILE: tl.constexpr, HEADS: tl.constexpr):
    """All of gamma in chunks: once where heads share it, otherwise for every row."""
    weights = ()
    for c in tl.static_range(TILE.count):
        columns = c * TILE.chunk + tl.arange(0, TILE.chunk)
        if HEADS:
            weights = weights + (tl.load(gamma + columns[None, :], mask=(columns < n)[None, :], other=0.0),)
        else:
            mask = present[:, None]
            if c == TILE.count - 1:
                mask = mask & (columns < n)[None, :]
            places = tl.broadcast_to(gamma + columns[None, :], (TILE.rows, TILE.chunk))
            weights = weights + (tl.load(places, mask=mask, other=0.0),)
    return weights


@triton.jit
def _side(
    tile, x, gamma, out, stats, freqs, positions, given_scale, scale_out, heads, n, divisor, shape,
    SIDE: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Process a tile of q or k: whole rows, or ``step`` columns of rows with given statistics."""
    STAGE: tl.constexpr = MATH.stage
    HALVES: tl.constexpr = MATH.rope == "half"
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    STEP: tl.constexpr = TILE.step
    CHUNK: tl.constexpr = TILE.chunk
    COUNT: tl.constexpr = TILE.count
    PDL: tl.constexpr = MATH.pdl
    DTYPE: tl.constexpr = x.at.dtype.element_ty
    eps, weight_offset = shape.eps, shape.weight_offset
    if SIDE == 1 and shape.eps_k is not None:
        eps = shape.eps_k
    place = tl.arange(0, BLOCK)
    begin = 0
    if STAGE == "apply":
        pieces = tl.cdiv(n, STEP)
        begin = (tile % pieces) * STEP
        tile = tile // pieces
    row = tile * ROWS + tl.arange(0, ROWS)
    if MATH.heads:
        token = row // heads
        head = (row % heads).to(tl.int64)
    else:
        token = row
        head = tl.zeros((ROWS,), tl.int64)
    present = token < shape.tokens
    token64 = token.to(tl.int64)
    x_at = row_start(token64, shape, x, MATH.levels) + head * x.head
    out_at = row_start(token64, shape, out, MATH.levels) + head * out.head
    stats_at = row_start(token64, shape, stats, MATH.levels) + SIDE
    angles_at = token64
    wait(PDL)
    if MATH.rope != "none":
        if positions.at is None:
            position = (token % shape.sequence).to(tl.int64)
        else:
            where = row_start(token64, shape, positions, MATH.levels)
            position = tl.load(positions.at + where, mask=present, other=0).to(tl.int64)
        angles_at = tl.minimum(tl.maximum(position, 0), shape.limit - 1) * freqs.row
    source = (x.at, x_at, gamma, weight_offset)
    scale = None
    if MATH.scale == "tensor":
        scale = tl.load(given_scale + tl.zeros((ROWS,), tl.int32))
    elif MATH.scale == "row":
        scale_at = row_start(token64, shape, scale_out, MATH.levels) + head * scale_out.head
        peak = tl.zeros((ROWS,), tl.int32)
    if STAGE == "apply":
        mean = tl.load(stats.at + stats_at, mask=present, other=0.0)
        if HALVES:
            rs = reciprocal_root(mean + eps)
            launch_dependents(PDL)
            _write_halves(source, rs, out.at, out_at, freqs.at, angles_at, begin, n, present, scale, STEP, MATH, QUANT)
        else:
            mask, weight, h = _load_tile(source, begin, place, n, present, STEP)
            launch_dependents(PDL)
            g = weight.to(tl.float32) + weight_offset
            rs = reciprocal_root(mean + eps)
            _write(h, g, rs, out.at, out_at, freqs.at, angles_at, begin, mask, scale, DTYPE, ROWS, BLOCK, MATH, QUANT)
    elif TILE.long:
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, n, BLOCK):
            columns = first + place
            mask = present[:, None] & (columns < n)[None, :]
            h = tl.load(x.at + x_at[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
            squares += h.to(tl.float32) * h.to(tl.float32)
        launch_dependents(PDL)
        total = sum_columns(squares, ROWS, BLOCK)
        mean = tl.div_rn(total, tl.full(total.shape, divisor, tl.float32))
        if STAGE == "stats":
            tl.store(stats.at + stats_at, mean, mask=present)
        else:
            rs = reciprocal_root(mean + eps)
            if MATH.scale == "row":
                for first in range(0, n, STEP):
                    if HALVES:
                        peak = _top_of_halves(peak, source, rs, freqs.at, angles_at, first, n, present, STEP, MATH)
                    else:
                        mask, weight, h = _load_tile(source, first, place, n, present, STEP)
                        g = weight.to(tl.float32) + weight_offset
                        y = _turned(h, g, rs, freqs.at, angles_at, first, DTYPE, ROWS, BLOCK, MATH)
                        peak = _top(peak, mask, y, DTYPE, MATH)
                scale = _store_scale(peak, scale_out.at, scale_at, present, MATH, QUANT)
            for first in range(0, n, STEP):
                if HALVES:
                    _write_halves(
                        source, rs, out.at, out_at, freqs.at, angles_at, first, n, present, scale, STEP, MATH, QUANT
                    )
                else:
                    mask, weight, h = _load_tile(source, first, place, n, present, STEP)
                    g = weight.to(tl.float32) + weight_offset
                    _write(
                        h, g, rs, out.at, out_at, freqs.at, angles_at, first, mask, scale,
                        DTYPE, ROWS, BLOCK, MATH, QUANT,
                    )  # fmt: skip
    else:
        values = ()
        for c in tl.static_range(COUNT):
            columns = c * CHUNK + tl.arange(0, CHUNK)
            mask = present[:, None]
            if c == COUNT - 1:
                mask = mask & (columns < n)[None, :]
            values = values + (tl.load(x.at + x_at[:, None] + columns[None, :], mask=mask, other=0.0),)
        weights = ()
        if STAGE == "fused" and not HALVES and COUNT <= EARLY_CHUNKS:
            weights = _load_weights(gamma, n, present, TILE, MATH.heads)
        launch_dependents(PDL)
        if CHUNK > FOLD:
            h = values[0].to(tl.float32)
            total = sum_columns(h * h, ROWS, CHUNK)
        else:
            eights = ()
            for c in tl.static_range(COUNT):
                h = values[c].to(tl.float32)
                eights = eights + (sum_eights(h * h, ROWS, CHUNK),)
            total = sum_chunks(eights, ROWS, CHUNK, COUNT, BLOCK)
        mean = tl.div_rn(total, tl.full(total.shape, divisor, tl.float32))
        if STAGE == "stats":
            tl.store(stats.at + stats_at, mean, mask=present)
        else:
            rs = reciprocal_root(mean + eps)
            if HALVES:
                if MATH.scale == "row":
                    peak = _top_of_halves(peak, source, rs, freqs.at, angles_at, 0, n, present, STEP, MATH)
                    scale = _store_scale(peak, scale_out.at, scale_at, present, MATH, QUANT)
                _write_halves(source, rs, out.at, out_at, freqs.at, angles_at, 0, n, present, scale, STEP, MATH, QUANT)
            else:
                if COUNT > EARLY_CHUNKS:
                    weights = _load_weights(gamma, n, present, TILE, MATH.heads)
                if MATH.scale == "row":
                    for c in tl.static_range(COUNT):
                        mask = present[:, None]
                        if c == COUNT - 1:
                            mask = mask & (c * CHUNK + tl.arange(0, CHUNK) < n)[None, :]
                        g = weights[c].to(tl.float32) + weight_offset
                        y = _turned(values[c], g, rs, freqs.at, angles_at, c * CHUNK, DTYPE, ROWS, CHUNK, MATH)
                        peak = _top(peak, mask, y, DTYPE, MATH)
                    scale = _store_scale(peak, scale_out.at, scale_at, present, MATH, QUANT)
                for c in tl.static_range(COUNT):
                    mask = present[:, None]
                    if c == COUNT - 1:
                        mask = mask & (c * CHUNK + tl.arange(0, CHUNK) < n)[None, :]
                    g = weights[c].to(tl.float32) + weight_offset
                    h = values[c]
                    _write(
                        h, g, rs, out.at, out_at, freqs.at, angles_at, c * CHUNK, mask, scale,
                        DTYPE, ROWS, CHUNK, MATH, QUANT,
                    )  # fmt: skip


@triton.jit
def _qk_norm_kernel(
    q, k, gamma_q, gamma_k, q_out, k_out, stats, freqs, positions, q_scale, k_scale, q_scale_out, k_scale_out, shape,
    MATH: tl.constexpr, QUANT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, EARLY_ROWS: tl.constexpr,
):  # fmt: skip
    """The first ``q_programs`` programs process q, the others k. Divisors apply to statistics."""
    if shape.tokens <= EARLY_ROWS:
        launch_dependents(MATH.pdl)
    program = tl.program_id(0)
    if program < shape.q_programs:
        n, heads, divisor = shape.nq, shape.q_heads, shape.q_divisor
        _side(
            program, q, gamma_q, q_out, stats, freqs, positions, q_scale, q_scale_out, heads, n, divisor, shape,
            0, Q, MATH, QUANT,
        )  # fmt: skip
    else:
        n, heads, divisor = shape.nk, shape.k_heads, shape.k_divisor
        tile = program - shape.q_programs
        _side(
            tile, k, gamma_k, k_out, stats, freqs, positions, k_scale, k_scale_out, heads, n, divisor, shape,
            1, K, MATH, QUANT,
        )  # fmt: skip
