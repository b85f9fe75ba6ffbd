"""``y = act @ weight.T`` with RMSNorm of its first columns, in one launch.

**Ordering.** A block stores its float32 y, all its threads meet at a barrier, and one of them adds
1 to its segment's counter with acquire-release order at device scope. The release makes the whole
block's stores visible to any block that sees that count; the acquire of the last block to arrive
makes all blocks' stores visible to it. That block norms the segment and writes 0 back for the next
launch. Constants are the named tuples of `gemv_norm`.
"""

import triton
import triton.language as tl

from ...gpu.lib.gemv_stream import PIECES, fold_fragments, stream_fragments
from ...gpu.lib.numbers import cast, encode_fp8, make_scale, quotient
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.lib.product import product
from ...gpu.lib.reduce import add_four
from ...gpu.lib.row import magnitude, reciprocal_rms
from ...gpu.lib.trace import name_unit, stamp
from ...gpu.lib.weight_stream import first_weights, fold, stream

CHUNK = tl.constexpr(512)
"""Columns of a norm's tile: 4 for each thread of 4 warps."""


@triton.jit
def _store_columns(values, i, j, m, span, out, weight_scale, SEGMENTS: tl.constexpr, MATH: tl.constexpr):
    """``values`` [columns i, rows j] to the workspace (normed segments) or, rounded, to the tail.

    ``span`` holds the first column of the tile and its limit, where the tail starts, and whether
    this is the tail; ``out`` holds the workspace, the tile's first column in it and its stride, the
    tail and its stride.
    """
    row0, limit, tail_start, is_tail = span
    y, y_at, y_stride, unnormed, tail_stride = out
    inside = row0 + i < limit
    if MATH.scaled == "row":
        values = values * tl.load(weight_scale + row0 + i, mask=inside, other=0.0)[:, None]
    elif MATH.scaled == "tensor":
        values = values * tl.load(weight_scale)
    mask = inside[:, None] & (j < m)[None, :]
    place = j.to(tl.int64)[None, :]
    if is_tail:
        rounded = cast(values, unnormed.dtype.element_ty, MATH.hw_rounding)
        tl.store(unnormed + place * tail_stride + (row0 - tail_start + i)[:, None], rounded, mask=mask)
    elif SEGMENTS > 0:
        tl.store(y + place * y_stride + (y_at + i)[:, None], values, mask=mask)


@triton.jit
def _load_y(y, start, y_stride, columns, mask):
    """Bypass this multiprocessor's cache, which may lack what other blocks wrote."""
    return tl.load(y + start * y_stride + columns, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _sum_chunk(tile, GROUP: tl.constexpr):
    """[GROUP, CHUNK] to [GROUP] in an order that does not depend on the layout: fours, halves of
    each 128 columns, then the four 128s.

    With 4 columns per thread and 4 warps along a row, these sums are within a thread, between
    lanes, and in one exchange between warps.
    """
    for i in tl.static_range(2):
        tile = tl.sum(tl.reshape(tile, (GROUP, CHUNK >> (i + 1), 2)), axis=2)
    for i in tl.static_range(5):
        tile = tl.sum(tl.reshape(tile, (GROUP, 4, 2, 16 >> i)), axis=2)
    return tl.reshape(add_four(tl.reshape(tile, (GROUP, 1, 4)), GROUP, 1), (GROUP,))


@triton.jit
def _norm_segment(
    source,
    out,
    m,
    width,
    eps,
    trace,
    block,
    S: tl.constexpr,
    NORM: tl.constexpr,
    QUANT: tl.constexpr,
    MATH: tl.constexpr,
):
    """RMSNorm of the rows of segment S from the float32 workspace, ``group`` at a time.

    ``source`` is the workspace, its stride and gamma; ``out`` the normed rows and their stride, the
    scale and its stride. Squares at the same position of all chunks are added first, then as in
    `_sum_chunk`: the order depends on the width alone.
    """
    y, y_stride, gamma = source
    normed, stride, scale, scale_stride = out
    CHUNKS: tl.constexpr = NORM.chunks[S]
    LONG: tl.constexpr = NORM.longs[S]
    GROUP: tl.constexpr = NORM.group
    CODES: tl.constexpr = S == 0 and scale is not None
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
        stamp(trace, block, 6, tl.sum(tl.sum(values[CHUNKS - 1], 1), 0) if MATH.traced else 0.0, MATH.traced)
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
        stamp(trace, block, 7, tl.sum(rs, 0) if MATH.traced else 0.0, MATH.traced)
        factor = rs
        if CODES:
            amax = tl.max(sizes, axis=1).to(tl.float32, bitcast=True) * rs
            step = make_scale(amax, float("inf"), None, QUANT, tl.float32, MATH.hw_rounding)
            tl.store(scale + row.to(tl.int64) * scale_stride, step, mask=row < m)
            factor = quotient(rs, step)
        factor = factor[:, None]
        for c in tl.static_range(CHUNKS):
            columns = c * CHUNK + place
            g = weights[c].to(tl.float32)
            if CODES:
                result = encode_fp8((values[c] * g) * factor, QUANT)
            else:
                result = cast((values[c] * factor) * g, normed.dtype.element_ty, MATH.hw_rounding)
            tl.store(normed + start * stride + columns, result, mask=present & (columns < width))
        if LONG:
            for begin in tl.range(CHUNKS * CHUNK, width, CHUNK):
                more = begin + place < width
                u = _load_y(y, start, y_stride, begin + place, present & more)
                w = tl.load(gamma + begin + place, mask=more, other=0.0).to(tl.float32)
                if CODES:
                    rest = encode_fp8((u * w) * factor, QUANT)
                else:
                    rest = cast((u * factor) * w, normed.dtype.element_ty, MATH.hw_rounding)
                tl.store(normed + start * stride + begin + place, rest, mask=present & more)


@triton.jit
def _gemv_partial_norm_kernel(
    act, weight, weight_scale, y, unnormed, scale, counter, trace, units, gammas, normed,
    m, k, widths, tail, strides, normed_strides, eps,
    TILE: tl.constexpr, NORM: tl.constexpr, MATH: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y; the last program of a segment to finish norms the segment."""
    SEGMENTS: tl.constexpr = MATH.segments
    COLUMNS: tl.constexpr = TILE.columns
    TRACED: tl.constexpr = MATH.traced
    launch_dependents(MATH.pdl)
    block = tl.program_id(0)
    stamp(trace, block, 0, block, TRACED)
    name_unit(units, block, TRACED)
    tiles = tl.cdiv(tail, COLUMNS)
    for s in tl.static_range(SEGMENTS):
        tiles += tl.cdiv(widths[s], COLUMNS)
    row_blocks = tl.cdiv(m, TILE.rows)
    tile = block % tiles
    first_row = block // tiles * TILE.rows
    # the tile covers columns row0 to limit of y, in segment `which`; SEGMENTS is the tail
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
    span = (row0, limit, start, is_tail)
    out = (y, tile * COLUMNS, strides.y, unnormed, strides.tail)
    done = 0.0
    rows = tl.minimum(m - first_row, TILE.rows)
    lead = first_row.to(tl.int64)
    lines = (act + lead * strides.act, rows, strides.act)
    if MATH.stream == "fragments":
        PER_TILE: tl.constexpr = 8 * TILE.warps // PIECES  # columns or rows that fill 8 lanes
        XT: tl.constexpr = TILE.rows // PER_TILE
        WT: tl.constexpr = COLUMNS // PER_TILE
        matrix = (weight, row0, limit, strides.weight)
        totals = stream_fragments(lines, matrix, k, trace, block, WT, XT, TILE, MATH)
        for i in tl.static_range(WT // 2):
            for j in tl.static_range(XT):
                v = fold_fragments(totals[i * XT + j], TILE)
                if TRACED:
                    done += tl.sum(tl.sum(v, 1), 0)
                columns = i * 2 * PER_TILE + tl.arange(0, 2 * PER_TILE)
                numbers = first_row + j * PER_TILE + tl.arange(0, PER_TILE)
                _store_columns(v, columns, numbers, m, span, out, weight_scale, SEGMENTS, MATH)
    elif MATH.stream == "pieces":
        wait(MATH.pdl)
        stamp(trace, block, 1, block, TRACED)
        columns = tl.arange(0, COLUMNS)
        column = tl.minimum(row0 + columns, limit - 1)
        numbers = first_row + tl.arange(0, TILE.rows)
        steps = (strides.act, strides.weight, strides.weight_scale)
        v = product(act, weight, weight_scale, column, numbers, m, k, steps, TILE, MATH)
        if TRACED:
            done += tl.sum(tl.sum(v, 1), 0)
        _store_columns(v, columns, numbers, m, span, out, weight_scale, SEGMENTS, MATH)
    else:
        PARTS: tl.constexpr = TILE.pieces // TILE.warps
        WIDE: tl.constexpr = 8 // PARTS
        WT: tl.constexpr = COLUMNS // WIDE
        XT: tl.constexpr = TILE.rows
        matrix = (weight, row0, limit, strides.weight, 0)
        ws = first_weights(matrix, k, WT, TILE, MATH)
        wait(MATH.pdl)
        stamp(trace, block, 1, block, TRACED)
        scales = (weight_scale, strides.weight_scale)
        totals = stream(ws, lines, (), matrix, scales, k, act.dtype.element_ty, WT, XT, TILE, MATH)
        for i in tl.static_range(WT):
            for j in tl.static_range(XT):
                v = fold(totals[i * XT + j], TILE)
                if TRACED:
                    done += tl.sum(tl.sum(v, 1), 0)
                columns = i * WIDE + tl.arange(0, WIDE)
                numbers = first_row + j + tl.arange(0, 1)
                _store_columns(v, columns, numbers, m, span, out, weight_scale, SEGMENTS, MATH)
    stamp(trace, block, 2, done, TRACED)
    if SEGMENTS > 0:
        if not is_tail:
            tl.debug_barrier()
            stamp(trace, block, 3, block, TRACED)
            order = tl.atomic_add(counter + which, 1, sem="acq_rel", scope="gpu")
            stamp(trace, block, 4, order, TRACED)
            from_tile = 0
            for s in tl.static_range(SEGMENTS):
                count = tl.cdiv(widths[s], COLUMNS)
                if (which == s) & (order == count * row_blocks - 1):
                    stamp(trace, block, 5, order, TRACED)
                    source = (y + from_tile * COLUMNS, strides.y, gammas[s])
                    target = (normed[s], normed_strides[s], scale, strides.scale)
                    _norm_segment(source, target, m, widths[s], eps, trace, block, s, NORM, QUANT, MATH)
                    tl.store(counter + s, 0)
                    stamp(trace, block, 8, order, TRACED)
                from_tile += count
    stamp(trace, block, 9, block, TRACED)
