"""``y = act @ weight.T`` with RMSNorm of its first columns, in one launch.

**Ordering.** A block stores its float32 y, all its threads meet at a barrier, and one of them adds 1 to its segment's
counter with acquire-release order at device scope. The release makes the whole block's stores visible to whoever sees that
count, the acquire of the last to arrive makes all blocks' stores visible to it; it norms the segment and writes 0 back
for the next launch.
"""

import triton
import triton.language as tl

from .device.gemv_stream import (
    PIECES,
    add_four,
    arrived,
    decode,
    fold_parts,
    fold_products,
    fragment_w,
    fragment_x,
    lane_row,
    load_tile,
)
from .device.numbers import cast, encode_fp8, make_scale, quotient
from .device.pdl import launch_dependents, wait
from .device.row import magnitude, reciprocal_rms
from .device.trace import name_unit, stamp

CHUNK = tl.constexpr(512)
"""Columns of a norm's tile: 4 for each thread of 4 warps."""


@triton.jit
def _load_weights(
    weight, row0, limit, stride, at, k, TILES: tl.constexpr, VEC: tl.constexpr, WARPS: tl.constexpr, MASK: tl.constexpr
):
    """One step of the tile's weight rows."""
    PARTS: tl.constexpr = PIECES // WARPS
    tiles = ()
    for i in tl.static_range(TILES):
        row = row0 + i * (8 // PARTS) + lane_row() // PARTS
        tiles = tiles + (load_tile(weight, row, limit, stride, at, k, VEC, WARPS, MASK, "evict_first"),)
    return tiles


@triton.jit
def _load_act(
    act, m, stride, at, k,
    TILES: tl.constexpr, VEC: tl.constexpr, WARPS: tl.constexpr, DOT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One step of the rows of act that the program multiplies."""
    PARTS: tl.constexpr = PIECES // WARPS
    tiles = ()
    for i in tl.static_range(TILES):
        if DOT:
            row = i * (8 // PARTS) + lane_row() // PARTS
        else:
            row = i + lane_row() * 0
        tiles = tiles + (load_tile(act, row, m, stride, at, k, VEC, WARPS, MASK, "evict_last"),)
    return tiles


@triton.jit
def _multiply(
    ws, xs, totals, DTYPE: tl.constexpr, WT: tl.constexpr, XT: tl.constexpr, VEC: tl.constexpr, WARPS: tl.constexpr,
    DOT: tl.constexpr, FP8: tl.constexpr, HARDWARE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One step's products added to the accumulators."""
    sums = ()
    if DOT:
        for i in tl.static_range(WT // 2):
            first, second = decode(ws[2 * i], DTYPE, FP8, HARDWARE), decode(ws[2 * i + 1], DTYPE, FP8, HARDWARE)
            left = fragment_w(first, second, VEC, WARPS)
            for j in tl.static_range(XT):
                right = fragment_x(xs[j], VEC, WARPS)
                if not EXACT:  # the interpreter multiplies bfloat16 as integers
                    left, right = left.to(tl.float32), right.to(tl.float32)
                sums = sums + (tl.dot(left, right, totals[i * XT + j]),)
    else:
        for i in tl.static_range(WT):
            w = decode(ws[i], DTYPE, FP8, HARDWARE).to(tl.float32)
            for j in tl.static_range(XT):
                sums = sums + (tl.fma(w, xs[j].to(tl.float32), totals[i * XT + j]),)
    return sums


@triton.jit
def _stream(
    act, weight, m, k, row0, limit, act_stride, weight_stride,
    STEPS: tl.constexpr, LONG: tl.constexpr, MASK: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr, PACE: tl.constexpr,
    PACK: tl.constexpr, WT: tl.constexpr, XT: tl.constexpr, VEC: tl.constexpr, WARPS: tl.constexpr, DOT: tl.constexpr, FP8: tl.constexpr,
    HARDWARE: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr, trace, block, TRACED: tl.constexpr,
):  # fmt: skip
    """Accumulators over all of k. The first weights are asked for before the previous kernel has ended.

    Steps are unrolled: a value that is still on its way from memory must not be carried around a loop, where the compiler
    would move, and so await, its halves. Very long K is walked in unrolled stretches.
    """
    STEP: tl.constexpr = PIECES * 4 * VEC
    DTYPE: tl.constexpr = act.dtype.element_ty
    ws = ()
    for s in tl.static_range(DEPTH):
        if PACE > 0 and s >= PACE:
            arrived(ws[s - PACE][WT - 1], PACK)
        ws = ws + (_load_weights(weight, row0, limit, weight_stride, s * STEP, k, WT, VEC, WARPS, MASK),)
    wait(PDL)
    stamp(trace, block, 1, block, TRACED)
    totals = ()
    for i in tl.static_range(WT // 2 * XT if DOT else WT * XT):
        if DOT:
            totals = totals + (tl.zeros((WARPS, 16, 8), tl.float32),)
        else:
            totals = totals + (tl.zeros((4, 8, WARPS, VEC), tl.float32),)
    xs = ()
    for s in tl.static_range(AHEAD):
        xs = xs + (_load_act(act, m, act_stride, s * STEP, k, XT, VEC, WARPS, DOT, MASK),)
    for s in tl.static_range(STEPS):
        if s + DEPTH < STEPS:
            ws = ws + (_load_weights(weight, row0, limit, weight_stride, (s + DEPTH) * STEP, k, WT, VEC, WARPS, MASK),)
        if s + AHEAD < STEPS:
            xs = xs + (_load_act(act, m, act_stride, (s + AHEAD) * STEP, k, XT, VEC, WARPS, DOT, MASK),)
        totals = _multiply(ws[s], xs[s], totals, DTYPE, WT, XT, VEC, WARPS, DOT, FP8, HARDWARE, EXACT)
    if LONG:
        for begin in tl.range(STEPS * STEP, k, STEPS * STEP, num_stages=1):
            more = ()
            for s in tl.static_range(DEPTH):
                more = more + (
                    _load_weights(weight, row0, limit, weight_stride, begin + s * STEP, k, WT, VEC, WARPS, MASK),
                )
            for s in tl.static_range(STEPS):
                if s + DEPTH < STEPS:
                    at = begin + (s + DEPTH) * STEP
                    more = more + (_load_weights(weight, row0, limit, weight_stride, at, k, WT, VEC, WARPS, MASK),)
                x = _load_act(act, m, act_stride, begin + s * STEP, k, XT, VEC, WARPS, DOT, MASK)
                totals = _multiply(more[s], x, totals, DTYPE, WT, XT, VEC, WARPS, DOT, FP8, HARDWARE, EXACT)
    return totals


@triton.jit
def _store_columns(
    values, i, j, row0, limit, m, tail_start, is_tail, y, y_at, y_stride, unnormed, tail_stride, weight_scale,
    SCALED: tl.constexpr, SEGMENTS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """``values`` [columns i, rows j] to the workspace (normed segments) or, rounded, to the tail."""
    inside = row0 + i < limit
    if SCALED == "row":
        values = values * tl.load(weight_scale + row0 + i, mask=inside, other=0.0)[:, None]
    elif SCALED == "tensor":
        values = values * tl.load(weight_scale)
    mask = inside[:, None] & (j < m)[None, :]
    place = j.to(tl.int64)[None, :]
    if is_tail:
        out = cast(values, unnormed.dtype.element_ty, EXACT)
        tl.store(unnormed + place * tail_stride + (row0 - tail_start + i)[:, None], out, mask=mask)
    elif SEGMENTS > 0:
        tl.store(y + place * y_stride + (y_at + i)[:, None], values, mask=mask)


@triton.jit
def _load_y(y, start, y_stride, columns, mask):
    """Past the cache of this multiprocessor, which other blocks did not write to."""
    return tl.load(y + start * y_stride + columns, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _sum_chunk(tile, GROUP: tl.constexpr):
    """[GROUP, CHUNK] to [GROUP] in an order that no layout can change: fours, halves of each 128 columns, then the four 128s.

    With 4 columns a thread and 4 warps along a row that is threads, lanes, and one exchange between warps.
    """
    for i in tl.static_range(2):
        tile = tl.sum(tl.reshape(tile, (GROUP, CHUNK >> (i + 1), 2)), axis=2)
    for i in tl.static_range(5):
        tile = tl.sum(tl.reshape(tile, (GROUP, 4, 2, 16 >> i)), axis=2)
    return tl.reshape(add_four(tl.reshape(tile, (GROUP, 1, 4)), GROUP, 1), (GROUP,))


@triton.jit
def _norm_segment(
    y, y_stride, gamma, normed, stride, scale, scale_stride, m, width, eps, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    LONG: tl.constexpr, CODES: tl.constexpr, FP8_MAX: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr, NEGATIVE_ZERO: tl.constexpr,
    ENCODES: tl.constexpr, EXACT: tl.constexpr, trace, block, TRACED: tl.constexpr,
):  # fmt: skip
    """RMSNorm of one segment's rows from the float32 workspace, GROUP at a time.

    Squares of the same place in all chunks are added first, then as `_sum_chunk` does: the order depends on the width alone.
    """
    place = tl.arange(0, CHUNK)[None, :]
    for first in tl.range(0, m, GROUP):
        row = first + tl.arange(0, GROUP)
        present = (row < m)[:, None]
        start = row.to(tl.int64)[:, None]
        values = ()
        for c in tl.static_range(CHUNKS):
            columns = c * CHUNK + place
            values = values + (_load_y(y, start, y_stride, columns, present & (columns < width)),)
        weights = ()
        for c in tl.static_range(CHUNKS):
            columns = c * CHUNK + place
            weights = weights + (tl.load(gamma + columns, mask=columns < width, other=0.0),)
        stamp(trace, block, 6, tl.sum(tl.sum(values[CHUNKS - 1], 1), 0) if TRACED else 0.0, TRACED)
        squares = values[0] * values[0]
        sizes = squares
        if CODES:
            sizes = magnitude(values[0] * weights[0].to(tl.float32))
        for c in tl.static_range(1, CHUNKS):
            squares = tl.fma(values[c], values[c], squares)
            if CODES:
                sizes = tl.maximum(sizes, magnitude(values[c] * weights[c].to(tl.float32)))
        if LONG:
            for begin in tl.range(CHUNKS * CHUNK, width, CHUNK):
                more = begin + place < width
                u = _load_y(y, start, y_stride, begin + place, present & more)
                squares = tl.fma(u, u, squares)
                if CODES:
                    w = tl.load(gamma + begin + place, mask=more, other=0.0).to(tl.float32)
                    sizes = tl.maximum(sizes, magnitude(u * w))
        total = _sum_chunk(squares, GROUP)
        rs = reciprocal_rms(total, width, eps)
        stamp(trace, block, 7, tl.sum(rs, 0) if TRACED else 0.0, TRACED)
        factor = rs
        if CODES:
            amax = tl.max(sizes, axis=1).to(tl.float32, bitcast=True) * rs
            step = make_scale(amax, float("inf"), FP8_MAX, tl.float32, 3.4028234663852886e38, False, EXACT)
            tl.store(scale + row.to(tl.int64) * scale_stride, step, mask=row < m)
            factor = quotient(rs, step)
        factor = factor[:, None]
        for c in tl.static_range(CHUNKS):
            columns = c * CHUNK + place
            g = weights[c].to(tl.float32)
            if CODES:
                out = encode_fp8((values[c] * g) * factor, FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, ENCODES)
            else:
                out = cast((values[c] * factor) * g, normed.dtype.element_ty, EXACT)
            tl.store(normed + start * stride + columns, out, mask=present & (columns < width))
        if LONG:
            for begin in tl.range(CHUNKS * CHUNK, width, CHUNK):
                more = begin + place < width
                u = _load_y(y, start, y_stride, begin + place, present & more)
                w = tl.load(gamma + begin + place, mask=more, other=0.0).to(tl.float32)
                if CODES:
                    rest = encode_fp8((u * w) * factor, FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, ENCODES)
                else:
                    rest = cast((u * factor) * w, normed.dtype.element_ty, EXACT)
                tl.store(normed + start * stride + begin + place, rest, mask=present & more)


@triton.jit
def _gemv_partial_norm_kernel(
    act, weight, weight_scale, y, unnormed, scale, counter, trace, units,
    gamma0, gamma1, gamma2, gamma3, normed0, normed1, normed2, normed3,
    m, k, width0, width1, width2, width3, tail, act_stride, weight_stride, y_stride, tail_stride, scale_stride,
    stride0, stride1, stride2, stride3, eps,
    SEGMENTS: tl.constexpr, STEPS: tl.constexpr, LONG: tl.constexpr, MASK: tl.constexpr, DEPTH: tl.constexpr,
    AHEAD: tl.constexpr, PACE: tl.constexpr, PACK: tl.constexpr, VEC: tl.constexpr, DOT: tl.constexpr,
    WARPS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr, HARDWARE: tl.constexpr, SCALED: tl.constexpr,
    GROUP: tl.constexpr, CHUNKS: tl.constexpr, LONGS: tl.constexpr, FP8_MAX: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, NEGATIVE_ZERO: tl.constexpr, ENCODES: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
    TRACED: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of y for up to ROWS rows of act a program; the last program of a segment norms it.

    Ordering: stores of y, barrier, acquire-release count at device scope; whoever counts last has seen every store, norms
    the segment and sets the count back to 0.
    """
    launch_dependents(PDL)
    block = tl.program_id(0)
    stamp(trace, block, 0, block, TRACED)
    name_unit(units, block, TRACED)
    widths = (width0, width1, width2, width3)
    tiles = tl.cdiv(tail, COLUMNS)
    for s in tl.static_range(SEGMENTS):
        tiles += tl.cdiv(widths[s], COLUMNS)
    row_blocks = tl.cdiv(m, ROWS)
    tile = block % tiles
    first_row = block // tiles * ROWS
    # the tile's columns are row0 to limit of y, and segment `which` of it; SEGMENTS is the tail
    which = SEGMENTS
    begin = 0
    start = 0
    row0 = 0
    limit = 0
    for s in tl.static_range(SEGMENTS):
        count = tl.cdiv(widths[s], COLUMNS)
        mine = (tile >= begin) & (tile < begin + count)
        which = tl.where(mine, s, which)
        row0 = tl.where(mine, start + (tile - begin) * COLUMNS, row0)
        limit = tl.where(mine, start + widths[s], limit)
        begin += count
        start += widths[s]
    is_tail = tile >= begin
    row0 = tl.where(is_tail, start + (tile - begin) * COLUMNS, row0)
    limit = tl.where(is_tail, start + tail, limit)
    rows = tl.minimum(m - first_row, ROWS)
    lead = first_row.to(tl.int64)

    PARTS: tl.constexpr = PIECES // WARPS
    WT: tl.constexpr = COLUMNS // (8 // PARTS)
    XT: tl.constexpr = ROWS // (8 // PARTS) if DOT else ROWS
    totals = _stream(
        act + lead * act_stride, weight, rows, k, row0, limit, act_stride, weight_stride, STEPS, LONG, MASK, DEPTH, AHEAD,
        PACE, PACK, WT, XT, VEC, WARPS, DOT, FP8, HARDWARE, EXACT, PDL, trace, block, TRACED,
    )  # fmt: skip
    WIDE: tl.constexpr = 16 // PARTS
    HIGH: tl.constexpr = 8 // PARTS
    y_at = tile * COLUMNS
    done = 0.0
    if DOT:
        for i in tl.static_range(WT // 2):
            for j in tl.static_range(XT):
                v = fold_parts(totals[i * XT + j], WARPS)
                if TRACED:
                    done += tl.sum(tl.sum(v, 1), 0)
                _store_columns(
                    v, i * WIDE + tl.arange(0, WIDE), first_row + j * HIGH + tl.arange(0, HIGH), row0, limit, m, start, is_tail,
                    y, y_at, y_stride, unnormed, tail_stride, weight_scale, SCALED, SEGMENTS, EXACT,
                )  # fmt: skip
    else:
        for i in tl.static_range(WT):
            for j in tl.static_range(XT):
                v = fold_products(totals[i * XT + j], WARPS)
                if TRACED:
                    done += tl.sum(tl.sum(v, 1), 0)
                _store_columns(
                    v, i * 2 + tl.arange(0, 2), first_row + j + tl.arange(0, 1), row0, limit, m, start, is_tail,
                    y, y_at, y_stride, unnormed, tail_stride, weight_scale, SCALED, SEGMENTS, EXACT,
                )  # fmt: skip
    stamp(trace, block, 2, done, TRACED)
    if SEGMENTS > 0:
        if not is_tail:
            tl.debug_barrier()
            stamp(trace, block, 3, block, TRACED)
            order = tl.atomic_add(counter + which, 1, sem="acq_rel", scope="gpu")
            stamp(trace, block, 4, order, TRACED)
            gammas = (gamma0, gamma1, gamma2, gamma3)
            outputs = (normed0, normed1, normed2, normed3)
            strides = (stride0, stride1, stride2, stride3)
            from_tile = 0
            for s in tl.static_range(SEGMENTS):
                count = tl.cdiv(widths[s], COLUMNS)
                if (which == s) & (order == count * row_blocks - 1):
                    stamp(trace, block, 5, order, TRACED)
                    _norm_segment(
                        y + from_tile * COLUMNS, y_stride, gammas[s], outputs[s], strides[s], scale, scale_stride, m, widths[s],
                        eps, CHUNKS[s], GROUP, LONGS[s], s == 0 and scale is not None,
                        FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, ENCODES, EXACT, trace, block, TRACED,
                    )  # fmt: skip
                    tl.store(counter + s, 0)
                    stamp(trace, block, 8, order, TRACED)
                from_tile += count
    stamp(trace, block, 9, block, TRACED)
