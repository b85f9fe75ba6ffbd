"""QK-RMSNorm: one launch over the rows of q and of k, each program a tile of rows of one of them.

The first programs take q, the others k. A tile of either has about as many elements, so that no program waits for
another: one long row or several short ones. Rows whose statistics are given are cut into pieces of columns instead, as
many rows high as makes the same tile, which reads gamma less often. Every element is read before its place is
written, so outputs may be the inputs. The order of all sums is that of `_tree`.
"""

import triton
import triton.language as tl

from .device.pdl import launch_dependents, wait
from .device.row import normalize, reciprocal_root, row_start, store
from .device.tree import FOLD, sum_chunks, sum_columns, sum_eights

EARLY_CHUNKS = tl.constexpr(4)
"""A row of more chunks leaves no registers for gamma, which is then read after the sum."""


@triton.jit
def _turn_neighbours(
    y, freqs, angles_at, first, ROWS: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr
):
    """Rotate columns 2i and 2i + 1 of each head; the tile begins at column ``first``, which is even, as HEAD is."""
    place = (first + 2 * tl.arange(0, BLOCK // 2)) % HEAD
    turns = (place < DIM)[None, :]
    at = angles_at[:, None] + place[None, :]
    cosine = tl.load(freqs + at, mask=turns, other=1.0)
    sine = tl.load(freqs + at + 1, mask=turns, other=0.0)
    a, b = tl.split(tl.reshape(y, (ROWS, BLOCK // 2, 2)))
    left = tl.where(turns, tl.fma(a, cosine, -(b * sine)), a)
    right = tl.where(turns, tl.fma(b, cosine, a * sine), b)
    return tl.reshape(tl.join(left, right), (ROWS, BLOCK))


@triton.jit
def _norm_at(x, x_at, gamma, columns, mask, rs, weight_offset, HF: tl.constexpr, EXACT: tl.constexpr):
    """The norm of these columns, which are read (perhaps again)."""
    weight = tl.load(gamma + columns[None, :], mask=mask, other=0.0)
    h = tl.load(x + x_at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return normalize(h, rs, weight.to(tl.float32) + weight_offset, x.dtype.element_ty, HF, EXACT)


@triton.jit
def _write_halves(
    x, x_at, gamma, rs, weight_offset, out, out_at, freqs, angles_at, first, n, present,
    STEP: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr, HF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Norm and rotate columns i and i + DIM/2 of each head, for the heads within STEP columns from ``first`` on.

    Both columns of a pair are read, and then written, by the same thread.
    """
    HALF: tl.constexpr = DIM // 2
    REST: tl.constexpr = HEAD - DIM
    pair = tl.arange(0, triton.next_power_of_2(STEP // HEAD * HALF))
    place = pair % HALF
    columns = first + pair // HALF * HEAD + place
    mask = present[:, None] & ((columns < n) & (pair < STEP // HEAD * HALF))[None, :]
    a = _norm_at(x, x_at, gamma, columns, mask, rs, weight_offset, HF, EXACT)
    b = _norm_at(x, x_at, gamma, columns + HALF, mask, rs, weight_offset, HF, EXACT)
    at = angles_at[:, None] + 2 * place[None, :]
    cosine = tl.load(freqs + at, mask=mask, other=0.0)
    sine = tl.load(freqs + at + 1, mask=mask, other=0.0)
    store(out, out_at, columns, mask, tl.fma(a, cosine, -(b * sine)), EXACT)
    store(out, out_at, columns + HALF, mask, tl.fma(b, cosine, a * sine), EXACT)
    if REST > 0:
        other = tl.arange(0, triton.next_power_of_2(STEP // HEAD * REST))
        columns = first + other // REST * HEAD + DIM + other % REST
        mask = present[:, None] & ((columns < n) & (other < STEP // HEAD * REST))[None, :]
        y = _norm_at(x, x_at, gamma, columns, mask, rs, weight_offset, HF, EXACT)
        store(out, out_at, columns, mask, y, EXACT)


@triton.jit
def _write(
    x, h, g, rs, out, out_at, freqs, angles_at, first, mask,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HF: tl.constexpr, ROPE: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Normalize, rotate neighbours and store a tile whose first column is ``first``."""
    y = normalize(h, rs, g, x.dtype.element_ty, HF, EXACT)
    if ROPE == "interleaved":
        y = _turn_neighbours(y, freqs, angles_at, first, ROWS, BLOCK, HEAD, DIM)
    store(out, out_at, first + tl.arange(0, BLOCK), mask, y, EXACT)


@triton.jit
def _load_weights(gamma, n, present, ROWS: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr):
    """All of gamma in chunks: for every row of the tile, in the layout of the rows whatever its dtype; once where heads share it."""
    weights = ()
    for c in tl.static_range(COUNT):
        columns = c * CHUNK + tl.arange(0, CHUNK)
        if HEADS:
            weights = weights + (tl.load(gamma + columns[None, :], mask=(columns < n)[None, :], other=0.0),)
        else:
            mask = present[:, None]
            if c == COUNT - 1:
                mask = mask & (columns < n)[None, :]
            places = tl.broadcast_to(gamma + columns[None, :], (ROWS, CHUNK))
            weights = weights + (tl.load(places, mask=mask, other=0.0),)
    return weights


@triton.jit
def _side(
    tile, x, x0, x1, x2, xh, gamma, out, y0, y1, y2, yh, stats, s0, s1, s2, freqs, f0, positions, p0, p1, p2,
    tokens, heads, n, n1, n2, sequence, limit, divisor, eps, weight_offset,
    SIDE: tl.constexpr, STAGE: tl.constexpr, HF: tl.constexpr, HEADS: tl.constexpr, ROPE: tl.constexpr, HEAD: tl.constexpr,
    DIM: tl.constexpr, EXACT: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, LONG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of one tensor: ROWS rows, or with given statistics ROWS rows of STEP columns."""
    place = tl.arange(0, BLOCK)
    begin = 0
    if STAGE == "apply":
        pieces = tl.cdiv(n, STEP)
        begin = (tile % pieces) * STEP
        tile = tile // pieces
    row = tile * ROWS + tl.arange(0, ROWS)
    if HEADS:
        token = row // heads
        head = (row % heads).to(tl.int64)
    else:
        token = row
        head = tl.zeros((ROWS,), tl.int64)
    present = token < tokens
    token64 = token.to(tl.int64)
    x_at = row_start(token64, n1, n2, x0, x1, x2, LEVELS) + head * xh
    out_at = row_start(token64, n1, n2, y0, y1, y2, LEVELS) + head * yh
    stats_at = row_start(token64, n1, n2, s0, s1, s2, LEVELS) + SIDE
    angles_at = token64
    wait(PDL)
    if ROPE != "none":
        if positions is None:
            position = (token % sequence).to(tl.int64)
        else:
            where = row_start(token64, n1, n2, p0, p1, p2, LEVELS)
            position = tl.load(positions + where, mask=present, other=0).to(tl.int64)
        angles_at = tl.minimum(tl.maximum(position, 0), limit - 1) * f0
    if STAGE == "apply":
        mean = tl.load(stats + stats_at, mask=present, other=0.0)
        if ROPE == "half":
            rs = reciprocal_root(mean + eps)
            launch_dependents(PDL)
            _write_halves(
                x, x_at, gamma, rs, weight_offset, out, out_at, freqs, angles_at, begin, n, present, STEP, HEAD, DIM, HF, EXACT
            )  # fmt: skip
        else:
            columns = begin + place
            inside = columns < n
            if STEP < BLOCK:
                inside = inside & (place < STEP)
            mask = present[:, None] & inside[None, :]
            weight = tl.load(gamma + columns[None, :], mask=inside[None, :], other=0.0)
            h = tl.load(x + x_at[:, None] + columns[None, :], mask=mask, other=0.0)
            launch_dependents(PDL)
            g = weight.to(tl.float32) + weight_offset
            rs = reciprocal_root(mean + eps)
            _write(
                x, h.to(tl.float32), g, rs, out, out_at, freqs, angles_at, begin, mask, ROWS, BLOCK, HF, ROPE, HEAD, DIM, EXACT
            )  # fmt: skip
    elif LONG:
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, n, BLOCK):
            columns = first + place
            mask = present[:, None] & (columns < n)[None, :]
            h = tl.load(x + x_at[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
            squares += h.to(tl.float32) * h.to(tl.float32)
        launch_dependents(PDL)
        total = sum_columns(squares, ROWS, BLOCK)
        mean = tl.div_rn(total, tl.full(total.shape, divisor, tl.float32))
        if STAGE == "stats":
            tl.store(stats + stats_at, mean, mask=present)
        else:
            rs = reciprocal_root(mean + eps)
            for first in range(0, n, STEP):
                if ROPE == "half":
                    _write_halves(
                        x, x_at, gamma, rs, weight_offset, out, out_at, freqs, angles_at, first, n, present, STEP, HEAD, DIM, HF, EXACT
                    )  # fmt: skip
                else:
                    columns = first + place
                    inside = columns < n
                    if STEP < BLOCK:
                        inside = inside & (place < STEP)
                    mask = present[:, None] & inside[None, :]
                    weight = tl.load(gamma + columns[None, :], mask=inside[None, :], other=0.0)
                    h = tl.load(x + x_at[:, None] + columns[None, :], mask=mask, other=0.0)
                    g = weight.to(tl.float32) + weight_offset
                    _write(
                        x, h.to(tl.float32), g, rs, out, out_at, freqs, angles_at, first, mask, ROWS, BLOCK, HF, ROPE, HEAD, DIM, EXACT
                    )  # fmt: skip
    else:
        values = ()
        for c in tl.static_range(COUNT):
            columns = c * CHUNK + tl.arange(0, CHUNK)
            mask = present[:, None]
            if c == COUNT - 1:
                mask = mask & (columns < n)[None, :]
            values = values + (tl.load(x + x_at[:, None] + columns[None, :], mask=mask, other=0.0),)
        weights = ()
        if STAGE == "fused" and ROPE != "half" and COUNT <= EARLY_CHUNKS:
            weights = _load_weights(gamma, n, present, ROWS, CHUNK, COUNT, HEADS)
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
            tl.store(stats + stats_at, mean, mask=present)
        else:
            rs = reciprocal_root(mean + eps)
            if ROPE == "half":
                _write_halves(
                    x, x_at, gamma, rs, weight_offset, out, out_at, freqs, angles_at, 0, n, present, STEP, HEAD, DIM, HF, EXACT
                )  # fmt: skip
            else:
                if COUNT > EARLY_CHUNKS:
                    weights = _load_weights(gamma, n, present, ROWS, CHUNK, COUNT, HEADS)
                for c in tl.static_range(COUNT):
                    mask = present[:, None]
                    if c == COUNT - 1:
                        mask = mask & (c * CHUNK + tl.arange(0, CHUNK) < n)[None, :]
                    g = weights[c].to(tl.float32) + weight_offset
                    _write(
                        x, values[c].to(tl.float32), g, rs, out, out_at, freqs, angles_at, c * CHUNK, mask,
                        ROWS, CHUNK, HF, ROPE, HEAD, DIM, EXACT,
                    )  # fmt: skip


@triton.jit
def _qk_norm_kernel(
    q, q0, q1, q2, qh, k, k0, k1, k2, kh, gamma_q, gamma_k, q_out, y0, y1, y2, yh, k_out, z0, z1, z2, zh,
    stats, s0, s1, s2, freqs, f0, positions, p0, p1, p2,
    tokens, q_heads, k_heads, nq, nk, n1, n2, sequence, limit, q_programs, q_divisor, k_divisor, eps, weight_offset,
    STAGE: tl.constexpr, HF: tl.constexpr, HEADS: tl.constexpr, ROPE: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr,
    EXACT: tl.constexpr, LEVELS: tl.constexpr, ROWS_Q: tl.constexpr, BLOCK_Q: tl.constexpr, STEP_Q: tl.constexpr,
    CHUNK_Q: tl.constexpr, COUNT_Q: tl.constexpr, LONG_Q: tl.constexpr, ROWS_K: tl.constexpr, BLOCK_K: tl.constexpr,
    STEP_K: tl.constexpr, CHUNK_K: tl.constexpr, COUNT_K: tl.constexpr, LONG_K: tl.constexpr,
    PDL: tl.constexpr, EARLY_ROWS: tl.constexpr,
):  # fmt: skip
    """Programs up to ``q_programs`` do q, those after it k. Statistics are sums of squares divided by the divisors."""
    if tokens <= EARLY_ROWS:
        launch_dependents(PDL)
    program = tl.program_id(0)
    if program < q_programs:
        _side(
            program, q, q0, q1, q2, qh, gamma_q, q_out, y0, y1, y2, yh, stats, s0, s1, s2, freqs, f0, positions, p0, p1, p2,
            tokens, q_heads, nq, n1, n2, sequence, limit, q_divisor, eps, weight_offset,
            0, STAGE, HF, HEADS, ROPE, HEAD, DIM, EXACT, LEVELS, ROWS_Q, BLOCK_Q, STEP_Q, CHUNK_Q, COUNT_Q, LONG_Q, PDL,
        )  # fmt: skip
    else:
        _side(
            program - q_programs, k, k0, k1, k2, kh, gamma_k, k_out, z0, z1, z2, zh, stats, s0, s1, s2, freqs, f0, positions, p0, p1, p2,
            tokens, k_heads, nk, n1, n2, sequence, limit, k_divisor, eps, weight_offset,
            1, STAGE, HF, HEADS, ROPE, HEAD, DIM, EXACT, LEVELS, ROWS_K, BLOCK_K, STEP_K, CHUNK_K, COUNT_K, LONG_K, PDL,
        )  # fmt: skip
