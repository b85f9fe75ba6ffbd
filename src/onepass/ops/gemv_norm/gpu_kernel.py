"""``y = act @ weight.T`` with RMSNorm of its first columns, in one launch.

**Ordering.** A block stores its float32 y, all its threads meet at a barrier, and one of them adds
1 to its segment's counter with acquire-release order at device scope. The release makes the whole
block's stores visible to any block that sees that count; the acquire of whoever sees the last count
makes all blocks' stores visible to it.

**Who norms.** The last block to arrive or, if there are several rows, the last blocks: one for each row. All but the very
last wait until the others have arrived (`gpu.lib.arrivals`). The counter is zero again at the end. Constants are the named
tuples of `gemv_norm`.
"""

import triton
import triton.language as tl

from ...gpu.lib.arrivals import ARRIVED, await_all
from ...gpu.lib.gemv_stream import PIECES, add_shares, fold_fragments, fold_shares, stream_fragments
from ...gpu.lib.numbers import cast, encode_fp8, make_scale, quotient
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.lib.reduce import add_four, add_pairs
from ...gpu.lib.row import magnitude, reciprocal_rms
from ...gpu.lib.trace import name_unit, stamp
from ...gpu.lib.weight_stream import first_weights, fold, stream

CHUNK = tl.constexpr(512)
"""Columns that 4 warps norm at a time: 4 for each thread."""
PHASES = tl.constexpr(4)
"""Chunks this far apart are added first."""


@triton.jit
def _scaled(values, columns, inside, weight_scale, MATH: tl.constexpr):
    """``values`` of ``columns``, a tile of the same shape, times the weights' scales of rows or of the tensor."""
    if MATH.scaled == "row":
        return values * tl.load(weight_scale + columns, mask=inside, other=0.0)
    elif MATH.scaled == "tensor":
        return values * tl.load(weight_scale)
    else:
        return values


@triton.jit
def _store_columns(values, i, j, m, span, out, weight_scale, SEGMENTS: tl.constexpr, MATH: tl.constexpr):
    """``values`` [columns i, rows j] to the workspace (normed segments) or, scaled and rounded, to the tail.

    ``span`` holds the first column of the tile and its limit, where the tail starts, and whether
    this is the tail; ``out`` holds the workspace, the tile's first column in it and its stride, the
    tail and its stride.
    """
    row0, limit, tail_start, is_tail = span
    y, y_at, y_stride, unnormed, tail_stride = out
    inside = row0 + i < limit
    mask = inside[:, None] & (j < m)[None, :]
    place = j.to(tl.int64)[None, :]
    if is_tail:
        scaled = _scaled(values, (row0 + i)[:, None], inside[:, None], weight_scale, MATH)
        rounded = cast(scaled, unnormed.dtype.element_ty, MATH.hw_rounding)
        tl.store(unnormed + place * tail_stride + (row0 - tail_start + i)[:, None], rounded, mask=mask)
    elif SEGMENTS > 0:
        tl.store(y + place * y_stride + (y_at + i)[:, None], values, mask=mask)


@triton.jit
def _load_y(source, start, m, columns, mask, NORM: tl.constexpr, MATH: tl.constexpr):
    """Columns of rows that ``start`` of y: the sums of all shares, times the scale.

    Bypasses this multiprocessor's cache, which may lack what other blocks wrote.
    """
    y, y_stride, weight_scale, first_column, _ = source
    at = y + start * y_stride + columns
    share = m * y_stride
    v0 = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    if NORM.split > 1:
        v1 = tl.load(at + share, mask=mask, other=0.0, cache_modifier=".cg")
        v2 = tl.load(at + 2 * share, mask=mask, other=0.0, cache_modifier=".cg")
        v3 = tl.load(at + 3 * share, mask=mask, other=0.0, cache_modifier=".cg")
        v0 = (v0 + v1) + (v2 + v3)
    return _scaled(v0, first_column + columns, mask, weight_scale, MATH)


@triton.jit
def _sum_chunk(tile, SIDE: tl.constexpr):
    """[SIDE, CHUNK] to [SIDE] in an order that does not depend on the layout: fours, halves of
    each 128 columns, then the four 128s.

    With 4 columns per thread and 4 warps along a chunk, these sums are within a thread, between
    lanes, and in one exchange between warps.
    """
    for i in tl.static_range(2):
        tile = tl.sum(tl.reshape(tile, (SIDE, CHUNK >> (i + 1), 2)), axis=2)
    for i in tl.static_range(5):
        tile = tl.sum(tl.reshape(tile, (SIDE, 4, 2, 16 >> i)), axis=2)
    return tl.reshape(add_four(tl.reshape(tile, (SIDE, 1, 4)), SIDE, 1), (SIDE,))


@triton.jit
def _sum_phases(sums, COUNT: tl.constexpr, SIDE: tl.constexpr):
    """The sums of COUNT tiles, [SIDE, CHUNK] each, as [1]: chunks, then ``(p0 + p1) + (p2 + p3)`` over phases."""
    if SIDE == 4:
        total = tl.reshape(add_four(tl.reshape(_sum_chunk(sums[0], 4), (1, 1, 4)), 1, 1), (1,))
    elif SIDE == 2:
        total = add_pairs(tl.reshape(_sum_chunk(sums[0], 2), (1, 2)))
        if COUNT > 1:
            total += add_pairs(tl.reshape(_sum_chunk(sums[1], 2), (1, 2)))
    else:
        total = _sum_chunk(sums[0], 1)
        if COUNT > 1:
            total += _sum_chunk(sums[1], 1)
        if COUNT > 3:
            total += _sum_chunk(sums[2], 1) + _sum_chunk(sums[3], 1)
        elif COUNT > 2:
            total += _sum_chunk(sums[2], 1)
    return total


@triton.jit
def _norm_row(
    source,
    out,
    number,
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
    """RMSNorm of a row of segment S from the float32 workspace.

    ``source`` is the workspace, its stride, the scales of weights, the segment's first column and gamma; ``out`` the normed
    rows and their stride, the scale and its stride. Squares of chunks 4 apart are added first, then as in `_sum_chunk`, then
    the four sums: the order depends on the width alone.
    """
    gamma = source[4]
    normed, stride, scale, scale_stride = out
    SIDE: tl.constexpr = NORM.side
    TILES: tl.constexpr = NORM.tiles[S]
    AGAIN: tl.constexpr = PHASES // SIDE
    COUNT: tl.constexpr = AGAIN if AGAIN < TILES else TILES
    LONG: tl.constexpr = NORM.longs[S]
    CODES: tl.constexpr = S == 0 and scale is not None
    place = tl.arange(0, SIDE)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    row = (number + tl.arange(0, 1)).to(tl.int64)
    start = row[:, None]
    values = ()
    for t in tl.static_range(TILES):
        columns = t * (SIDE * CHUNK) + place
        values = values + (_load_y(source, start, m, columns, columns < width, NORM, MATH),)
    weights = ()
    for t in tl.static_range(TILES):
        columns = t * (SIDE * CHUNK) + place
        weights = weights + (tl.load(gamma + columns, mask=columns < width, other=0.0),)
    stamp(trace, block, 6, tl.sum(tl.sum(values[TILES - 1], 1), 0) if MATH.traced else 0.0, MATH.traced)
    sums = ()
    for a in tl.static_range(AGAIN):
        if a < TILES:
            squares = values[a] * values[a]
            for t in tl.static_range(a + AGAIN, TILES, AGAIN):
                squares = tl.fma(values[t], values[t], squares)
            sums = sums + (squares,)
    if CODES:
        sizes = magnitude(values[0] * weights[0].to(tl.float32))
        for t in tl.static_range(1, TILES):
            sizes = tl.maximum(sizes, magnitude(values[t] * weights[t].to(tl.float32)))
    if LONG:  # TILES then holds all phases
        for begin in tl.range(TILES * SIDE * CHUNK, width, PHASES * CHUNK):
            added = ()
            for a in tl.static_range(AGAIN):
                columns = begin + a * (SIDE * CHUNK) + place
                more = columns < width
                u = _load_y(source, start, m, columns, more, NORM, MATH)
                added = added + (tl.fma(u, u, sums[a]),)
                if CODES:
                    w = tl.load(gamma + columns, mask=more, other=0.0).to(tl.float32)
                    sizes = tl.maximum(sizes, magnitude(u * w))
            sums = added
    rs = reciprocal_rms(_sum_phases(sums, COUNT, SIDE), width, eps)
    stamp(trace, block, 7, tl.sum(rs, 0) if MATH.traced else 0.0, MATH.traced)
    factor = rs
    if CODES:
        amax = tl.max(tl.max(sizes, axis=1), axis=0, keep_dims=True).to(tl.float32, bitcast=True) * rs
        step = make_scale(amax, float("inf"), None, QUANT, tl.float32, MATH.hw_rounding)
        tl.store(scale + row * scale_stride, step)
        factor = quotient(rs, step)
    factor = factor[:, None]
    target = normed + start * stride
    for t in tl.static_range(TILES):
        columns = t * (SIDE * CHUNK) + place
        g = weights[t].to(tl.float32)
        if CODES:
            result = encode_fp8((values[t] * g) * factor, QUANT)
        else:
            result = cast((values[t] * factor) * g, normed.dtype.element_ty, MATH.hw_rounding)
        tl.store(target + columns, result, mask=columns < width)
    if LONG:
        for begin in tl.range(TILES * SIDE * CHUNK, width, SIDE * CHUNK):
            columns = begin + place
            more = columns < width
            u = _load_y(source, start, m, columns, more, NORM, MATH)
            w = tl.load(gamma + columns, mask=more, other=0.0).to(tl.float32)
            if CODES:
                rest = encode_fp8((u * w) * factor, QUANT)
            else:
                rest = cast((u * factor) * w, normed.dtype.element_ty, MATH.hw_rounding)
            tl.store(target + columns, rest, mask=more)


@triton.jit
def _gemv_partial_norm_kernel(
    act, weight, weight_scale, y, unnormed, scale, counter, trace, units, gammas, normed,
    m, k, widths, tail, strides, normed_strides, eps,
    TILE: tl.constexpr, NORM: tl.constexpr, MATH: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y; the last programs of a segment to finish norm the segment."""
    SEGMENTS: tl.constexpr = MATH.segments
    COLUMNS: tl.constexpr = TILE.columns
    SPLIT: tl.constexpr = NORM.split
    WIDE: tl.constexpr = COLUMNS * SPLIT
    SHARED: tl.constexpr = NORM.shared
    TRACED: tl.constexpr = MATH.traced
    launch_dependents(MATH.pdl)
    block = tl.program_id(0)
    stamp(trace, block, 0, block, TRACED)
    name_unit(units, block, TRACED)
    tiles = tl.cdiv(tail, COLUMNS)
    for s in tl.static_range(SEGMENTS):
        tiles += tl.cdiv(widths[s], WIDE) * SPLIT
    row_blocks = tl.cdiv(m, TILE.rows)
    tile = block % tiles
    first_row = block // tiles * TILE.rows
    # the tile covers columns row0 to limit of y, in segment `which`; SEGMENTS is the tail
    which = SEGMENTS
    expected = 0
    begin = 0
    start = 0
    row0 = 0
    limit = 0
    for s in tl.static_range(SEGMENTS):
        count = tl.cdiv(widths[s], WIDE) * SPLIT
        mine = (tile >= begin) & (tile < begin + count)
        which = tl.where(mine, s, which)
        expected = tl.where(mine, count * row_blocks, expected)
        row0 = tl.where(mine, start + (tile - begin) // SPLIT * WIDE, row0)
        limit = tl.where(mine, start + widths[s], limit)
        begin += count
        start += widths[s]
    is_tail = tile >= begin
    row0 = tl.where(is_tail, start + (tile - begin) * COLUMNS, row0)
    limit = tl.where(is_tail, start + tail, limit)
    span = (row0, limit, start, is_tail)
    done = 0.0
    rows = tl.minimum(m - first_row, TILE.rows)
    lead = first_row.to(tl.int64)
    lines = (act + lead * strides.act, rows, strides.act)
    if MATH.stream == "fragments":
        PER_TILE: tl.constexpr = 8 * TILE.warps // PIECES  # columns or rows that fill 8 lanes
        XT: tl.constexpr = TILE.rows // PER_TILE
        WT: tl.constexpr = COLUMNS // PER_TILE
        matrix = (weight, row0, limit, strides.weight)
        scales = (weight_scale, strides.weight_scale)
        share = tl.where(is_tail, -1, tile % SPLIT)  # every segment has a multiple of SPLIT tiles
        totals = stream_fragments(lines, matrix, scales, k, share, trace, block, WT, XT, TILE, MATH)
        first_sum = tile // SPLIT * WIDE
        if SPLIT > 1:
            first_sum += (tile % SPLIT).to(tl.int64) * m * strides.y
        out = (y, first_sum, strides.y, unnormed, strides.tail)
        for i in tl.static_range(WT // 2):
            for j in tl.static_range(XT):
                numbers = first_row + j * PER_TILE + tl.arange(0, PER_TILE)
                if SPLIT > 1:
                    sums = fold_shares(totals[i * XT + j])
                    if TRACED:
                        done += tl.sum(tl.sum(tl.sum(sums, 2), 1), 0)
                    if is_tail:
                        _store_columns(
                            add_shares(sums), tl.arange(0, 16), numbers, m, span, out, weight_scale, SEGMENTS, MATH
                        )
                    else:
                        wide = tl.reshape(sums, (4 * 16, 8))
                        _store_columns(wide, tl.arange(0, 4 * 16), numbers, m, span, out, weight_scale, SEGMENTS, MATH)
                else:
                    v = fold_fragments(totals[i * XT + j], TILE)
                    if TRACED:
                        done += tl.sum(tl.sum(v, 1), 0)
                    columns = i * 2 * PER_TILE + tl.arange(0, 2 * PER_TILE)
                    _store_columns(v, columns, numbers, m, span, out, weight_scale, SEGMENTS, MATH)
    else:
        PARTS: tl.constexpr = TILE.pieces // TILE.warps
        EACH: tl.constexpr = 8 // PARTS
        WT: tl.constexpr = COLUMNS // EACH
        XT: tl.constexpr = TILE.rows
        matrix = (weight, row0, limit, strides.weight, 0)
        ws = first_weights(matrix, k, WT, TILE, MATH)
        wait(MATH.pdl)
        stamp(trace, block, 1, block, TRACED)
        scales = (weight_scale, strides.weight_scale)
        totals = stream(ws, lines, (), matrix, scales, k, act.dtype.element_ty, WT, XT, TILE, MATH)
        out = (y, tile * COLUMNS, strides.y, unnormed, strides.tail)
        for i in tl.static_range(WT):
            for j in tl.static_range(XT):
                v = fold(totals[i * XT + j], TILE)
                if TRACED:
                    done += tl.sum(tl.sum(v, 1), 0)
                columns = i * EACH + tl.arange(0, EACH)
                numbers = first_row + j + tl.arange(0, 1)
                _store_columns(v, columns, numbers, m, span, out, weight_scale, SEGMENTS, MATH)
    stamp(trace, block, 2, done, TRACED)
    if SEGMENTS > 0:
        if not is_tail:
            tl.debug_barrier()
            stamp(trace, block, 3, block, TRACED)
            arrivals = counter + which
            state = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
            order = state & ARRIVED if SHARED else state
            stamp(trace, block, 4, order, TRACED)
            if order >= expected - (m if SHARED else 1):
                first = 0
                last = m
                rows_of_mine = -1
                if SHARED:
                    first, last, rows_of_mine = await_all(arrivals, state, expected, m)
                stamp(trace, block, 5, order, TRACED)
                first_column = 0
                from_column = 0
                for s in tl.static_range(SEGMENTS):
                    if which == s:
                        source = (y + from_column, strides.y, weight_scale, first_column, gammas[s])
                        target = (normed[s], normed_strides[s], scale, strides.scale)
                        for row in tl.range(first, last):
                            if not SHARED or rows_of_mine >> row & 1 != 0:
                                _norm_row(source, target, row, m, widths[s], eps, trace, block, s, NORM, QUANT, MATH)
                    first_column += widths[s]
                    from_column += tl.cdiv(widths[s], WIDE) * WIDE
                if not SHARED:
                    tl.store(arrivals, 0)
                stamp(trace, block, 8, order, TRACED)
    stamp(trace, block, 9, block, TRACED)
