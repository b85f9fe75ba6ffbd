"""RMSNorm kernels: a row held in registers, chunk by chunk, or walked in chunks where it is too long.

Both do, for each row: load -> prologue -> residual -> sum of squares -> gamma -> store and/or quantize, reading every
element before its place is written, so outputs may be the inputs.
"""

import triton
import triton.language as tl

from .device.bins import neighbours, squares_of_places, sum_places, sum_places_and_peak
from .device.groups import store_groups, store_groups_by_lane
from .device.numbers import cast, divisor, encode_fp8, make_scale, quotient, scaled, store_scale
from .device.pdl import launch_dependents, wait
from .device.row import chunk_mask, factor, magnitude, normalize, reciprocal_rms, row_start, store, tile_columns


@triton.jit
def _combine(
    v, r, p0, at0, p1, at1, p2, at2, p3, at3, columns, mask,
    PROLOGUE: tl.constexpr, RESIDUAL: tl.constexpr, ROUND_SUM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """``prologue(v, ...) + r``, zero outside the mask: in float32, or as it was loaded or rounded. The prologue decodes fp8."""
    if PROLOGUE is not None:
        if v.dtype == tl.uint8:
            value = v
        else:
            value = v.to(tl.float32)
        h = tl.where(mask, PROLOGUE(value, p0, at0, p1, at1, p2, at2, p3, at3, columns, mask), 0.0)
        if RESIDUAL:
            h += r.to(tl.float32)
    elif RESIDUAL:
        h = v.to(tl.float32) + r.to(tl.float32)
    else:
        h = v
    if RESIDUAL and ROUND_SUM:
        return cast(h, r.dtype, EXACT)
    else:
        return h


@triton.jit
def _load_h(
    x, x_at, residual, r_at, p0, at0, p1, at1, p2, at2, p3, at3, columns, mask,
    PROLOGUE: tl.constexpr, ROUND_SUM: tl.constexpr, EXACT: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """``prologue(x, ...) + residual`` in float32, zero outside the mask."""
    v = tl.load(x + x_at[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy=POLICY)
    r = None
    if residual is not None:
        r = tl.load(residual + r_at[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy=POLICY)
    h = _combine(
        v, r, p0, at0, p1, at1, p2, at2, p3, at3, columns, mask, PROLOGUE, residual is not None, ROUND_SUM, EXACT
    )  # fmt: skip
    return h.to(tl.float32)


@triton.jit
def _load_chunks(
    pointer, start, place, n, present, CHUNK: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
    WHOLE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """The chunks of a tile of rows, as they lie."""
    chunks = ()
    for c in tl.static_range(COUNT):
        columns = c * CHUNK + place
        places = pointer + start[:, None] + columns[None, :]
        if ROWS == 1 and (WHOLE or c < COUNT - 1):
            chunks = chunks + (tl.load(places, eviction_policy=POLICY),)
        else:
            mask = chunk_mask(columns, n, present, c == COUNT - 1)
            chunks = chunks + (tl.load(places, mask=mask, other=0.0, eviction_policy=POLICY),)
    return chunks


@triton.jit
def _load_weights(gamma, place, n, CHUNK: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    chunks = ()
    for c in tl.static_range(COUNT):
        columns = c * CHUNK + place
        if c == COUNT - 1 and not WHOLE:
            chunks = chunks + (tl.load(gamma + columns[None, :], mask=(columns < n)[None, :], other=0.0),)
        else:
            chunks = chunks + (tl.load(gamma + columns[None, :]),)
    return chunks


@triton.jit
def _peaks(chunks, weights, weight_offset, COUNT: tl.constexpr, OFFSET: tl.constexpr):
    """The largest ``|h * g|`` of each place of a chunk, as integers."""
    peaks = magnitude(chunks[0].to(tl.float32) * factor(weights[0], weight_offset, OFFSET))
    for c in tl.static_range(1, COUNT):
        sizes = magnitude(chunks[c].to(tl.float32) * factor(weights[c], weight_offset, OFFSET))
        peaks = tl.maximum(peaks, sizes)
    return peaks


@triton.jit
def _normed_peaks(
    chunks, weights, weight_offset, rs, DTYPE: tl.constexpr, COUNT: tl.constexpr, OFFSET: tl.constexpr, HF: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The largest of each place after the norm."""
    g = factor(weights[0], weight_offset, OFFSET)
    peaks = magnitude(normalize(chunks[0].to(tl.float32), rs, g, DTYPE, HF, EXACT))
    for c in tl.static_range(1, COUNT):
        g = factor(weights[c], weight_offset, OFFSET)
        peaks = tl.maximum(peaks, magnitude(normalize(chunks[c].to(tl.float32), rs, g, DTYPE, HF, EXACT)))
    return peaks


@triton.jit
def _bound(scale_ub):
    """The upper bound of amax that the caller keeps in memory; NaN is none."""
    bound = tl.load(scale_ub)
    return tl.where(bound == bound, bound, float("inf"))


@triton.jit
def _row_factor(
    peak, rs, bound, least, static_scale, scale, scale_at, present,
    FP8_MAX: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr, E8M0: tl.constexpr,
    NORMED: tl.constexpr, DIVIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What a row is multiplied by, or with DIVIDE divided by, to become codes; stores the row's scale unless it is the caller's."""
    if SCALE == "static":
        s = tl.load(static_scale) + tl.zeros_like(rs)
    else:
        amax = peak.to(tl.float32, bitcast=True)
        if not NORMED:
            amax *= rs
        s = make_scale(amax, bound, FP8_MAX, scale.dtype.element_ty, LARGEST, UE8M0, EXACT, least)
        store_scale(scale, scale_at, present, s, E8M0, EXACT)
    if DIVIDE:
        return divisor(s)
    elif NORMED:
        return quotient(tl.where(rs == rs, 1.0, rs), s)
    else:
        return quotient(rs, s)


@triton.jit
def _rms_norm_row_kernel(
    x, x0, x1, x2, gamma, residual, r0, r1, r2, norm, y0, y1, y2, codes, c0, c1, c2, scale, s0, s1, s2, sg,
    new_residual, w0, w1, w2, static_scale, p0, p00, p01, p02, p1, p10, p11, p12, p2, p20, p21, p22, p3, p30, p31, p32,
    rows, n, n1, n2, eps, weight_offset, bound, least, scale_ub,
    PROLOGUE: tl.constexpr, HF: tl.constexpr, ROUND_SUM: tl.constexpr, NORMED: tl.constexpr, DIVIDE: tl.constexpr,
    FP8_MAX: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr,
    E8M0: tl.constexpr, HARDWARE: tl.constexpr, EXACT: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, COUNT: tl.constexpr, SETS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
    VEC: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr, EARLY_ROWS: tl.constexpr, EARLY_GAMMA: tl.constexpr, REREAD: tl.constexpr, OFFSET: tl.constexpr,
    BY_LANE: tl.constexpr,
):  # fmt: skip
    """Rows of up to COUNT chunks, each read once and held in registers; one tile of rows a program.

    REREAD: a row of so many chunks that fewer registers gain more than a second read, which finds it in the cache, costs.
    """
    if rows <= EARLY_ROWS:
        launch_dependents(PDL)
    place = tile_columns(CHUNK, WARPS, LANES)
    row = (tl.zeros((ROWS,), tl.int64) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    at0 = row_start(row, n1, n2, p00, p01, p02, LEVELS)
    at1 = row_start(row, n1, n2, p10, p11, p12, LEVELS)
    at2 = row_start(row, n1, n2, p20, p21, p22, LEVELS)
    at3 = row_start(row, n1, n2, p30, p31, p32, LEVELS)
    wait(PDL)
    if scale_ub is not None:
        bound = _bound(scale_ub)
    weights = ()
    if EARLY_GAMMA:
        weights = _load_weights(gamma, place, n, CHUNK, COUNT, WHOLE)
    x_at = row_start(row, n1, n2, x0, x1, x2, LEVELS)
    held = _load_chunks(x, x_at, place, n, present, CHUNK, COUNT, ROWS, WHOLE, "evict_last" if REREAD else "")
    if residual is not None or PROLOGUE is not None:
        added = held
        if residual is not None:
            added = _load_chunks(
                residual, row_start(row, n1, n2, r0, r1, r2, LEVELS), place, n, present, CHUNK, COUNT, ROWS, WHOLE, ""
            )  # fmt: skip
        sums = ()
        for c in tl.static_range(COUNT):
            columns = c * CHUNK + place
            h = _combine(
                held[c], added[c], p0, at0, p1, at1, p2, at2, p3, at3, columns,
                chunk_mask(columns, n, present, c == COUNT - 1), PROLOGUE, residual is not None, ROUND_SUM, EXACT,
            )  # fmt: skip
            sums = sums + (h,)
        held = sums
    launch_dependents(PDL)
    squares = squares_of_places(held, ROWS, CHUNK, COUNT, SETS, SIZE, WARPS, LANES)
    if not EARLY_GAMMA:
        weights = _load_weights(gamma, place, n, CHUNK, COUNT, WHOLE)
    if codes is not None and SCALE == "row" and not NORMED:
        peaks = _peaks(held, weights, weight_offset, COUNT, OFFSET)
        total, peak = sum_places_and_peak(squares, peaks, ROWS, CHUNK, SIZE, SETS, PIECES, WARPS, LANES, EXACT)
    else:
        total = sum_places(squares, ROWS, SIZE, SETS, PIECES)
    rs = reciprocal_rms(total, n, eps)
    codes_at = row_start(row, n1, n2, c0, c1, c2, LEVELS)
    scale_at = row_start(row, n1, n2, s0, s1, s2, LEVELS)
    if codes is not None and SCALE != "group":
        if SCALE == "row" and NORMED:
            peaks = _normed_peaks(held, weights, weight_offset, rs, x.dtype.element_ty, COUNT, OFFSET, HF, EXACT)
            peak = tl.max(peaks, axis=1)
        elif SCALE == "static":
            peak = tl.zeros((ROWS,), tl.int32)
        k = _row_factor(
            peak, rs, bound, least, static_scale, scale, scale_at, present, FP8_MAX, SCALE, LARGEST, UE8M0, E8M0, NORMED, DIVIDE,
            EXACT,
        )  # fmt: skip
    if BY_LANE:
        store_groups_by_lane(
            held, weights, weight_offset, rs, bound, least, codes, codes_at, scale, scale_at, sg, place, x.dtype.element_ty, CHUNK,
            COUNT, VEC, GROUP, FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE, LARGEST, UE8M0, E8M0, OFFSET, HF, NORMED, DIVIDE, EXACT,
        )  # fmt: skip
    for c in tl.static_range(COUNT):
        columns = c * CHUNK + place
        if ROWS == 1 and (WHOLE or c < COUNT - 1):
            mask = None
        else:
            mask = chunk_mask(columns, n, present, c == COUNT - 1)
        if REREAD:
            again = x + x_at[:, None] + columns[None, :]
            if mask is None:
                h = tl.load(again, eviction_policy="evict_first").to(tl.float32)
            else:
                h = tl.load(again, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        else:
            h = held[c].to(tl.float32)
        g = factor(weights[c], weight_offset, OFFSET)
        if new_residual is not None:
            store(new_residual, row_start(row, n1, n2, w0, w1, w2, LEVELS), columns, mask, h, EXACT)
        if norm is not None:
            y = normalize(h, rs, g, x.dtype.element_ty, HF, EXACT)
            store(norm, row_start(row, n1, n2, y0, y1, y2, LEVELS), columns, mask, y, EXACT)
        if codes is not None and not BY_LANE:
            if NORMED:
                v = normalize(h, rs, g, x.dtype.element_ty, HF, EXACT)
            else:
                v = h * g
            if SCALE == "group":
                store_groups(
                    v, rs, bound, least, codes, codes_at, scale, scale_at, sg, c * CHUNK, n, present, ROWS, CHUNK, WARPS, LANES,
                    GROUP, FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE, LARGEST, UE8M0, E8M0, NORMED, DIVIDE, EXACT,
                )  # fmt: skip
            else:
                q = encode_fp8(scaled(v, k[:, None], DIVIDE), FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE)
                tl.store(codes + codes_at[:, None] + columns[None, :], q, mask=mask)


@triton.jit
def _rms_norm_long_kernel(
    x, x0, x1, x2, gamma, residual, r0, r1, r2, norm, y0, y1, y2, codes, c0, c1, c2, scale, s0, s1, s2, sg,
    new_residual, w0, w1, w2, static_scale, p0, p00, p01, p02, p1, p10, p11, p12, p2, p20, p21, p22, p3, p30, p31, p32,
    rows, n, n1, n2, eps, weight_offset, bound, least, scale_ub,
    PROLOGUE: tl.constexpr, HF: tl.constexpr, ROUND_SUM: tl.constexpr, NORMED: tl.constexpr, DIVIDE: tl.constexpr,
    FP8_MAX: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr,
    E8M0: tl.constexpr, HARDWARE: tl.constexpr, EXACT: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, COUNT: tl.constexpr, SETS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
    VEC: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr, EARLY_ROWS: tl.constexpr, EARLY_GAMMA: tl.constexpr, REREAD: tl.constexpr, OFFSET: tl.constexpr,
    BY_LANE: tl.constexpr,
):  # fmt: skip
    """Rows of any length, walked in blocks: once for the statistics, once more (from L2) to write."""
    if rows <= EARLY_ROWS:
        launch_dependents(PDL)
    place = tile_columns(CHUNK, WARPS, LANES)
    wait(PDL)
    if scale_ub is not None:
        bound = _bound(scale_ub)
    row = tl.zeros((1,), tl.int64) + tl.program_id(0)
    present = row < rows
    x_at = row_start(row, n1, n2, x0, x1, x2, LEVELS)
    r_at = row_start(row, n1, n2, r0, r1, r2, LEVELS)
    at0 = row_start(row, n1, n2, p00, p01, p02, LEVELS)
    at1 = row_start(row, n1, n2, p10, p11, p12, LEVELS)
    at2 = row_start(row, n1, n2, p20, p21, p22, LEVELS)
    at3 = row_start(row, n1, n2, p30, p31, p32, LEVELS)
    codes_at = row_start(row, n1, n2, c0, c1, c2, LEVELS)
    scale_at = row_start(row, n1, n2, s0, s1, s2, LEVELS)
    squares = tl.zeros((1, CHUNK), tl.float32)
    peaks = tl.zeros((1, CHUNK), tl.int32)
    for first in range(0, n, CHUNK):
        columns = first + place
        mask = (columns < n)[None, :]
        h = _load_h(
            x, x_at, residual, r_at, p0, at0, p1, at1, p2, at2, p3, at3, columns, mask, PROLOGUE, ROUND_SUM, EXACT, "evict_last"
        )  # fmt: skip
        squares = tl.fma(h, h, squares)
        if codes is not None and SCALE == "row" and not NORMED:
            g = factor(tl.load(gamma + columns[None, :], mask=mask, other=0.0), weight_offset, OFFSET)
            peaks = tl.maximum(peaks, magnitude(h * g))
    launch_dependents(PDL)
    sums = (neighbours(squares, 1, CHUNK, SIZE, WARPS, LANES),)
    if codes is not None and SCALE == "row" and not NORMED:
        total, peak = sum_places_and_peak(sums, peaks, 1, CHUNK, SIZE, 1, PIECES, WARPS, LANES, EXACT)
    else:
        total = sum_places(sums, 1, SIZE, 1, PIECES)
        peak = tl.zeros((1,), tl.int32)
    rs = reciprocal_rms(total, n, eps)
    if codes is not None and SCALE == "row" and NORMED:
        for first in range(0, n, CHUNK):
            columns = first + place
            mask = (columns < n)[None, :]
            h = _load_h(
                x, x_at, residual, r_at, p0, at0, p1, at1, p2, at2, p3, at3, columns, mask, PROLOGUE, ROUND_SUM, EXACT, "evict_last"
            )  # fmt: skip
            g = factor(tl.load(gamma + columns[None, :], mask=mask, other=0.0), weight_offset, OFFSET)
            peaks = tl.maximum(
                peaks, magnitude(tl.where(mask, normalize(h, rs, g, x.dtype.element_ty, HF, EXACT), 0.0))
            )
        peak = tl.max(peaks, axis=1)
    if codes is not None and SCALE != "group":
        k = _row_factor(
            peak, rs, bound, least, static_scale, scale, scale_at, present, FP8_MAX, SCALE, LARGEST, UE8M0, E8M0, NORMED, DIVIDE,
            EXACT,
        )  # fmt: skip
    for first in range(0, n, CHUNK):
        columns = first + place
        mask = (columns < n)[None, :]
        h = _load_h(
            x, x_at, residual, r_at, p0, at0, p1, at1, p2, at2, p3, at3, columns, mask, PROLOGUE, ROUND_SUM, EXACT, "evict_first"
        )  # fmt: skip
        g = factor(tl.load(gamma + columns[None, :], mask=mask, other=0.0), weight_offset, OFFSET)
        if new_residual is not None:
            store(new_residual, row_start(row, n1, n2, w0, w1, w2, LEVELS), columns, mask, h, EXACT)
        if norm is not None:
            y = normalize(h, rs, g, x.dtype.element_ty, HF, EXACT)
            store(norm, row_start(row, n1, n2, y0, y1, y2, LEVELS), columns, mask, y, EXACT)
        if codes is not None:
            if NORMED:
                v = normalize(h, rs, g, x.dtype.element_ty, HF, EXACT)
            else:
                v = h * g
            if SCALE == "group":
                store_groups(
                    v, rs, bound, least, codes, codes_at, scale, scale_at, sg, first, n, present, 1, CHUNK, WARPS, LANES,
                    GROUP, FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE, LARGEST, UE8M0, E8M0, NORMED, DIVIDE, EXACT,
                )  # fmt: skip
            else:
                q = encode_fp8(scaled(v, k[:, None], DIVIDE), FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE)
                tl.store(codes + codes_at[:, None] + columns[None, :], q, mask=mask)
