"""RMSNorm kernels: a row is held in registers, chunk by chunk, or walked in chunks if it is too
long.

Both do, for each row: load -> prologue or post-norm -> residual -> sum of squares -> gamma -> store
and/or quantize. Without a norm nothing is summed, and rs is 1.
Every element is read before it is overwritten, so outputs may be the inputs. Tensors of
rows are `launcher.Rows`, and `rms_norm` defines the constants.
"""

import triton
import triton.language as tl

from ...gpu.lib.gates import finish, load_finish
from ...gpu.lib.groups import pad_scales, store_groups, store_groups_by_lane
from ...gpu.lib.numbers import cast, convert, divisor, encode, encode_int8, make_scale, quotient, scaled, store_scale
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.lib.reduce import bin_squares, bin_values, neighbours, sum_bins, sum_bins_and_peak
from ...gpu.lib.row import (
    chunk_mask,
    load_chunks,
    load_columns,
    load_g,
    load_weights,
    magnitude,
    normalize,
    quantized_norm,
    reciprocal_rms,
    row_start,
    scale_start,
    store,
    tile_columns,
    weight_factor,
)
from ...prologues import MAX_OPERANDS

OPERANDS = tl.constexpr(MAX_OPERANDS)


@triton.jit
def _combine(v, r, operands, starts, columns, mask, PROLOGUE: tl.constexpr, MATH: tl.constexpr):
    """``prologue(v, ...) + r``, zero outside the mask; float32 only after a sum or prologue."""
    if PROLOGUE is not None:
        if v.dtype == tl.uint8:
            value = v
        else:
            value = v.to(tl.float32)
        h = tl.where(mask, PROLOGUE(value, operands, starts, columns, mask), 0.0)
        if r is not None:
            h += r.to(tl.float32)
    elif r is not None:
        h = v.to(tl.float32) + r.to(tl.float32)
    else:
        h = v
    if r is not None and MATH.round_sum:
        return cast(h, r.dtype, MATH.hw_rounding)
    else:
        return h


@triton.jit
def _post_normed(v, rs, weight, weight_offset, branch_scale, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """The post-norm of some columns in x's dtype, as `rms_norm` stores it, and its rounded product."""
    if MATH.offset:
        g = weight.to(tl.float32) + weight_offset
    elif MATH.shift_post:
        g = (weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        g = weight.to(tl.float32)
    b = cast(normalize(v.to(tl.float32), rs, g, DTYPE, MATH.hf, MATH.hw_rounding), DTYPE, MATH.hw_rounding)
    if MATH.scaled:
        return cast(b.to(tl.float32) * branch_scale, DTYPE, MATH.hw_rounding)
    else:
        return b


@triton.jit
def _post_norm(
    chunks, gamma_post, inner, n, eps, weight_offset, branch_scale,
    DTYPE: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The chunks of rows, normed."""
    weights = load_columns(gamma_post, inner, n, TILE)
    rs = reciprocal_rms(sum_bins(bin_squares(chunks, TILE), TILE), n, eps)
    normed = ()
    for c in tl.static_range(TILE.count):
        normed = normed + (_post_normed(chunks[c], rs, weights[c], weight_offset, branch_scale, DTYPE, MATH),)
    return normed


@triton.jit
def _load_h(
    x, x_at, residual, r_at, operands, starts, columns, mask, post,
    PROLOGUE: tl.constexpr, MATH: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """``prologue(x, ...) + residual`` in float32, zero outside the mask. ``post``: the post-norm's rs, gamma, offset and scale."""
    v = tl.load(x.at + x_at[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy=POLICY)
    if MATH.post:
        weight = tl.load(post[1] + columns[None, :], mask=mask, other=0.0)
        v = _post_normed(v, post[0], weight, post[2], post[3], x.at.dtype.element_ty, MATH)
    r = None
    if residual.at is not None:
        r = tl.load(residual.at + r_at[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy=POLICY)
    return _combine(v, r, operands, starts, columns, mask, PROLOGUE, MATH).to(tl.float32)


@triton.jit
def _peaks(chunks, weights, weight_offset, COUNT: tl.constexpr, MATH: tl.constexpr):
    """The largest ``|h * g|`` over all chunks, as integers."""
    peaks = magnitude(chunks[0].to(tl.float32) * weight_factor(weights[0], weight_offset, MATH))
    for c in tl.static_range(1, COUNT):
        sizes = magnitude(chunks[c].to(tl.float32) * weight_factor(weights[c], weight_offset, MATH))
        peaks = tl.maximum(peaks, sizes)
    return peaks


@triton.jit
def _normed_peaks(chunks, weights, weight_offset, rs, DTYPE: tl.constexpr, COUNT: tl.constexpr, MATH: tl.constexpr):
    """`_peaks` of the norm."""
    g = weight_factor(weights[0], weight_offset, MATH)
    peaks = magnitude(quantized_norm(chunks[0].to(tl.float32), rs, g, DTYPE, MATH))
    for c in tl.static_range(1, COUNT):
        g = weight_factor(weights[c], weight_offset, MATH)
        y = quantized_norm(chunks[c].to(tl.float32), rs, g, DTYPE, MATH)
        peaks = tl.maximum(peaks, magnitude(y))
    return peaks


@triton.jit
def _finished_peaks(chunks, DTYPE: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """`_peaks` of norms with their bias and gate."""
    peaks = tl.zeros((TILE.rows, TILE.chunk), tl.int32)
    for c in tl.static_range(TILE.count):
        peaks = tl.maximum(peaks, magnitude(_stored(chunks[c], DTYPE, MATH)))
    return peaks


@triton.jit
def _stored(y, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """The norm as it is quantized: rounded first, if it is stored."""
    if MATH.stored:
        return convert(y, DTYPE, MATH.hw_rounding)
    else:
        return y


@triton.jit
def _mean(total, n):
    """``total / n``; NaN when that is not finite, so that the whole row becomes the same NaN."""
    mean = tl.div_rn(total, tl.full(total.shape, n, tl.float32))
    return tl.where(tl.abs(mean) < float("inf"), mean, float("nan"))


@triton.jit
def _centered(chunks, inner, n, present, TILE: tl.constexpr):
    """The chunks of rows minus the mean of the row; zero beyond its end."""
    mean = _mean(sum_bins(bin_values(chunks, TILE), TILE), n)
    centered = ()
    for c in tl.static_range(TILE.count):
        difference = chunks[c].to(tl.float32) - mean[:, None]
        if not TILE.whole and c == TILE.count - 1:
            difference = tl.where(chunk_mask(c * TILE.chunk + inner, n, present, True), difference, 0.0)
        centered = centered + (difference,)
    return centered


@triton.jit
def _bound(scale_ub):
    """The upper bound of amax that the caller keeps in memory; NaN means none.

    -inf becomes a number, for `ratios.over`. Scales are the same.
    """
    bound = tl.maximum(tl.load(scale_ub), -3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(bound == bound, bound, float("inf"))


@triton.jit
def _row_factor(
    peak, rs, limits, static_scale, scale, scale_at, present, QUANT: tl.constexpr, HW_ROUNDING: tl.constexpr
):
    """What a row is multiplied by (``divide``: divided by) to become codes; stores the row's scale
    unless the caller gave it.
    """
    if QUANT.kind == "static":
        s = tl.load(static_scale) + tl.zeros_like(rs)
    else:
        amax = peak.to(tl.float32, bitcast=True)
        if not QUANT.normed:
            amax *= rs
        s = make_scale(amax, limits[0], limits[1], QUANT, scale.dtype.element_ty, HW_ROUNDING)
        store_scale(scale, scale_at, present, s, QUANT, HW_ROUNDING)
    if QUANT.divide:
        return divisor(s)
    elif QUANT.normed:
        return quotient(tl.where(rs == rs, 1.0, rs), s)
    else:
        return quotient(rs, s)


@triton.jit
def _row_codes(values, TILE: tl.constexpr, QUANT: tl.constexpr):
    """The codes of scaled values."""
    if TILE.assembly and QUANT.integer:
        return encode_int8(values, QUANT.max)
    else:
        return encode(values, QUANT)


@triton.jit
def _starts(row, shape, operands, LEVELS: tl.constexpr):
    """Where the rows of a prologue's operands begin."""
    starts = ()
    for i in tl.static_range(OPERANDS):
        starts = starts + (row_start(row, shape, operands[i], LEVELS),)
    return starts


@triton.jit
def _rms_norm_row_kernel(
    x, gamma, residual, norm, codes, scale, scale_group, new_residual, static_scale, operands, shape,
    eps, weight_offset, bound, least, scale_ub, row_gamma, rstd, gamma_post, branch_scale,
    PROLOGUE: tl.constexpr, MATH: tl.constexpr, QUANT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of up to ``count`` chunks, each read once and held in registers; one tile of rows per
    program.

    ``reread``: a second read of the row, which hits the cache, costs less than holding it in
    registers.
    """
    LEVELS: tl.constexpr = TILE.levels
    COUNT: tl.constexpr = TILE.count
    DTYPE: tl.constexpr = x.at.dtype.element_ty
    n = shape.n
    if shape.rows <= TILE.early_rows:
        launch_dependents(PDL)
    inner = tile_columns(TILE)
    row = (tl.zeros((TILE.rows,), tl.int64) + tl.program_id(0)) * TILE.rows + tl.arange(0, TILE.rows)
    present = row < shape.rows
    starts = _starts(row, shape, operands, LEVELS)
    wait(PDL)
    if scale_ub is not None:
        bound = _bound(scale_ub)
    if QUANT.overall:
        limits = (bound, least, tl.load(static_scale))
    else:
        limits = (bound, least)
    weights = ()
    if TILE.early_gamma:
        weights = load_weights(gamma, row_gamma, row, shape, inner, present, TILE)
    x_at = row_start(row, shape, x, LEVELS)
    held = load_chunks(x.at, x_at, inner, n, present, TILE, "evict_last" if TILE.reread else "")
    if MATH.post:
        held = _post_norm(held, gamma_post, inner, n, eps, weight_offset, branch_scale, DTYPE, TILE, MATH)
    if residual.at is not None or PROLOGUE is not None:
        added = held
        if residual.at is not None:
            r_at = row_start(row, shape, residual, LEVELS)
            added = load_chunks(residual.at, r_at, inner, n, present, TILE, "")
        sums = ()
        for c in tl.static_range(COUNT):
            columns = c * TILE.chunk + inner
            r = added[c] if residual.at is not None else None
            mask = chunk_mask(columns, n, present, c == COUNT - 1)
            sums = sums + (_combine(held[c], r, operands, starts, columns, mask, PROLOGUE, MATH),)
        held = sums
    gates = held
    biases = held
    if MATH.gate >= 0:
        gates = load_chunks(operands[MATH.gate].at, starts[MATH.gate], inner, n, present, TILE, "")
    if MATH.bias >= 0:
        biases = load_columns(operands[MATH.bias].at, inner, n, TILE)
    launch_dependents(PDL)
    whole = held
    if MATH.centered:
        held = _centered(held, inner, n, present, TILE)
    if not MATH.unnormed:
        squares = bin_squares(held, TILE)
    if not TILE.early_gamma:
        weights = load_weights(gamma, row_gamma, row, shape, inner, present, TILE)
    if MATH.unnormed:
        rs = tl.full((TILE.rows,), 1.0, tl.float32)
    else:
        if codes.at is not None and QUANT.kind == "row" and not QUANT.normed:
            peaks = _peaks(held, weights, weight_offset, COUNT, MATH)
            total, peak = sum_bins_and_peak(squares, peaks, TILE, MATH.hw_rounding)
        else:
            total = sum_bins(squares, TILE)
        rs = reciprocal_rms(total, n, eps)
    if rstd.at is not None:
        tl.store(rstd.at + row_start(row, shape, rstd, LEVELS), rs, mask=present)
    codes_at = row_start(row, shape, codes, LEVELS)
    scale_at = scale_start(row, shape, scale, LEVELS, QUANT)
    if codes.at is not None:
        pad_scales(scale.at, scale_at, scale_group, n, present, QUANT)
    out = (codes.at, codes_at, scale.at, scale_at, scale_group)
    finished = held
    if MATH.finishes:
        finished = ()
        for c in tl.static_range(COUNT):
            g = weight_factor(weights[c], weight_offset, MATH)
            y = normalize(held[c].to(tl.float32), rs, g, DTYPE, MATH.hf, MATH.hw_rounding)
            finished = finished + (finish(y, gates[c], biases[c], DTYPE, TILE, MATH),)
    if codes.at is not None and QUANT.kind != "group":
        if QUANT.kind == "row" and MATH.finishes:
            peak = tl.max(_finished_peaks(finished, DTYPE, TILE, MATH), axis=1)
        elif QUANT.kind == "row" and QUANT.normed:
            peak = tl.max(_normed_peaks(held, weights, weight_offset, rs, DTYPE, COUNT, MATH), axis=1)
        elif QUANT.kind == "static":
            peak = tl.zeros((TILE.rows,), tl.int32)
        k = _row_factor(peak, rs, limits, static_scale, scale.at, scale_at, present, QUANT, MATH.hw_rounding)
    if TILE.lane_scales:
        values = ()
        for c in tl.static_range(COUNT):
            if MATH.finishes:
                v = _stored(finished[c], DTYPE, MATH)
            else:
                g = weight_factor(weights[c], weight_offset, MATH)
                if QUANT.normed:
                    v = quantized_norm(held[c].to(tl.float32), rs, g, DTYPE, MATH)
                else:
                    v = held[c].to(tl.float32) * g
            values = values + (v,)
        store_groups_by_lane(values, rs, limits, out, inner, TILE, QUANT, MATH.hw_rounding)
    for c in tl.static_range(COUNT):
        columns = c * TILE.chunk + inner
        if TILE.rows == 1 and (TILE.whole or c < COUNT - 1):
            mask = None
        else:
            mask = chunk_mask(columns, n, present, c == COUNT - 1)
        if TILE.reread:
            again = x.at + x_at[:, None] + columns[None, :]
            if mask is None:
                h = tl.load(again, eviction_policy="evict_first").to(tl.float32)
            else:
                h = tl.load(again, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        else:
            h = held[c].to(tl.float32)
        g = weight_factor(weights[c], weight_offset, MATH)
        if new_residual.at is not None:
            if MATH.centered:
                sum_ = whole[c].to(tl.float32)
            else:
                sum_ = h
            store(new_residual.at, row_start(row, shape, new_residual, LEVELS), columns, mask, sum_, MATH.hw_rounding)
        if norm.at is not None:
            if MATH.finishes:
                y = finished[c]
            else:
                y = normalize(h, rs, g, DTYPE, MATH.hf, MATH.hw_rounding)
            store(norm.at, row_start(row, shape, norm, LEVELS), columns, mask, y, MATH.hw_rounding)
        if codes.at is not None and not TILE.lane_scales:
            if MATH.finishes:
                v = _stored(finished[c], DTYPE, MATH)
            elif QUANT.normed:
                v = quantized_norm(h, rs, g, DTYPE, MATH)
            else:
                v = h * g
            if QUANT.kind == "group":
                store_groups(v, rs, limits, out, c * TILE.chunk, n, present, TILE, QUANT, MATH.hw_rounding)
            else:
                q = _row_codes(scaled(v, k[:, None], QUANT.divide), TILE, QUANT)
                tl.store(codes.at + codes_at[:, None] + columns[None, :], q, mask=mask)


@triton.jit
def _rms_norm_long_kernel(
    x, gamma, residual, norm, codes, scale, scale_group, new_residual, static_scale, operands, shape,
    eps, weight_offset, bound, least, scale_ub, row_gamma, rstd, gamma_post, branch_scale,
    PROLOGUE: tl.constexpr, MATH: tl.constexpr, QUANT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of any length, walked in blocks: once for the statistics, once more (from L2) to write."""
    LEVELS: tl.constexpr = TILE.levels
    CHUNK: tl.constexpr = TILE.chunk
    DTYPE: tl.constexpr = x.at.dtype.element_ty
    n = shape.n
    if shape.rows <= TILE.early_rows:
        launch_dependents(PDL)
    inner = tile_columns(TILE)
    wait(PDL)
    if scale_ub is not None:
        bound = _bound(scale_ub)
    if QUANT.overall:
        limits = (bound, least, tl.load(static_scale))
    else:
        limits = (bound, least)
    row = tl.zeros((1,), tl.int64) + tl.program_id(0)
    present = row < shape.rows
    x_at = row_start(row, shape, x, LEVELS)
    r_at = row_start(row, shape, residual, LEVELS)
    starts = _starts(row, shape, operands, LEVELS)
    codes_at = row_start(row, shape, codes, LEVELS)
    scale_at = scale_start(row, shape, scale, LEVELS, QUANT)
    if codes.at is not None:
        pad_scales(scale.at, scale_at, scale_group, n, present, QUANT)
    out = (codes.at, codes_at, scale.at, scale_at, scale_group)
    post = (0.0, gamma_post, weight_offset, branch_scale)
    if MATH.post:
        squares = tl.zeros((1, CHUNK), tl.float32)
        for first in range(0, n, CHUNK):
            columns = first + inner
            mask = (columns < n)[None, :]
            v = tl.load(x.at + x_at[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
            squares = tl.fma(v.to(tl.float32), v.to(tl.float32), squares)
        post_rs = reciprocal_rms(sum_bins((neighbours(squares, TILE),), TILE), n, eps)
        post = (post_rs, gamma_post, weight_offset, branch_scale)
    if MATH.centered:
        values = tl.zeros((1, CHUNK), tl.float32)
        for first in range(0, n, CHUNK):
            columns = first + inner
            mask = (columns < n)[None, :]
            values += _load_h(
                x, x_at, residual, r_at, operands, starts, columns, mask, post, PROLOGUE, MATH, "evict_last"
            )
        mean = _mean(sum_bins((neighbours(values, TILE),), TILE), n)
    squares = tl.zeros((1, CHUNK), tl.float32)
    peaks = tl.zeros((1, CHUNK), tl.int32)
    if not MATH.unnormed:
        for first in range(0, n, CHUNK):
            columns = first + inner
            mask = (columns < n)[None, :]
            h = _load_h(x, x_at, residual, r_at, operands, starts, columns, mask, post, PROLOGUE, MATH, "evict_last")
            if MATH.centered:
                h = tl.where(mask, h - mean[:, None], 0.0)
            squares = tl.fma(h, h, squares)
            if codes.at is not None and QUANT.kind == "row" and not QUANT.normed:
                g = load_g(gamma, row_gamma, row, shape, columns, mask, weight_offset, MATH, LEVELS)
                peaks = tl.maximum(peaks, magnitude(h * g))
    launch_dependents(PDL)
    if MATH.unnormed:
        peak = tl.zeros((1,), tl.int32)
        rs = tl.full((1,), 1.0, tl.float32)
    else:
        sums = (neighbours(squares, TILE),)
        if codes.at is not None and QUANT.kind == "row" and not QUANT.normed:
            total, peak = sum_bins_and_peak(sums, peaks, TILE, MATH.hw_rounding)
        else:
            total = sum_bins(sums, TILE)
            peak = tl.zeros((1,), tl.int32)
        rs = reciprocal_rms(total, n, eps)
    if rstd.at is not None:
        tl.store(rstd.at + row_start(row, shape, rstd, LEVELS), rs, mask=present)
    if codes.at is not None and QUANT.kind == "row" and QUANT.normed:
        for first in range(0, n, CHUNK):
            columns = first + inner
            mask = (columns < n)[None, :]
            h = _load_h(x, x_at, residual, r_at, operands, starts, columns, mask, post, PROLOGUE, MATH, "evict_last")
            g = load_g(gamma, row_gamma, row, shape, columns, mask, weight_offset, MATH, LEVELS)
            if MATH.centered:
                h = tl.where(mask, h - mean[:, None], 0.0)
            if MATH.finishes:
                gate, bias = load_finish(operands, starts, columns, mask, MATH)
                y = normalize(h, rs, g, DTYPE, MATH.hf, MATH.hw_rounding)
                y = _stored(finish(y, gate, bias, DTYPE, TILE, MATH), DTYPE, MATH)
            else:
                y = quantized_norm(h, rs, g, DTYPE, MATH)
            peaks = tl.maximum(peaks, magnitude(tl.where(mask, y, 0.0)))
        peak = tl.max(peaks, axis=1)
    if codes.at is not None and QUANT.kind != "group":
        k = _row_factor(peak, rs, limits, static_scale, scale.at, scale_at, present, QUANT, MATH.hw_rounding)
    for first in range(0, n, CHUNK):
        columns = first + inner
        mask = (columns < n)[None, :]
        h = _load_h(x, x_at, residual, r_at, operands, starts, columns, mask, post, PROLOGUE, MATH, "evict_first")
        g = load_g(gamma, row_gamma, row, shape, columns, mask, weight_offset, MATH, LEVELS)
        if new_residual.at is not None:
            store(new_residual.at, row_start(row, shape, new_residual, LEVELS), columns, mask, h, MATH.hw_rounding)
        if MATH.centered:
            h = tl.where(mask, h - mean[:, None], 0.0)
        if MATH.finishes:
            gate, bias = load_finish(operands, starts, columns, mask, MATH)
            finished = normalize(h, rs, g, DTYPE, MATH.hf, MATH.hw_rounding)
            finished = finish(finished, gate, bias, DTYPE, TILE, MATH)
        if norm.at is not None:
            if MATH.finishes:
                y = finished
            else:
                y = normalize(h, rs, g, DTYPE, MATH.hf, MATH.hw_rounding)
            store(norm.at, row_start(row, shape, norm, LEVELS), columns, mask, y, MATH.hw_rounding)
        if codes.at is not None:
            if MATH.finishes:
                v = _stored(finished, DTYPE, MATH)
            elif QUANT.normed:
                v = quantized_norm(h, rs, g, DTYPE, MATH)
            else:
                v = h * g
            if QUANT.kind == "group":
                store_groups(v, rs, limits, out, first, n, present, TILE, QUANT, MATH.hw_rounding)
            else:
                q = _row_codes(scaled(v, k[:, None], QUANT.divide), TILE, QUANT)
                tl.store(codes.at + codes_at[:, None] + columns[None, :], q, mask=mask)
