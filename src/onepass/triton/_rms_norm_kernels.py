"""RMSNorm kernels: a row held in registers, or walked in blocks where it is too long.

Both do, for each row: load -> prologue -> residual -> sum of squares -> gamma -> store and/or quantize, reading every
element before its place is written, so outputs may be the inputs.
"""

import triton
import triton.language as tl

from ._numbers import convert, encode_fp8, make_scale, quotient, store_scale
from ._pdl import launch_dependents, wait
from ._row import column_order, magnitude, normalize, reciprocal_rms, row_start, store, sum_and_peak, tile_columns


@triton.jit
def _load_h(
    x, x_at, residual, r_at, p0, at0, p1, at1, p2, at2, p3, at3, columns, mask,
    PROLOGUE: tl.constexpr, HF: tl.constexpr, EXACT: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """``prologue(x, ...) + residual`` in float32, zero outside the mask."""
    h = tl.load(x + x_at[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if PROLOGUE is not None:
        h = tl.where(mask, PROLOGUE(h, p0, at0, p1, at1, p2, at2, p3, at3, columns, mask), 0.0)
    if residual is not None:
        r = tl.load(residual + r_at[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy=POLICY)
        h += r.to(tl.float32)
        if HF:
            h = convert(h, residual.dtype.element_ty, EXACT)
    return h


@triton.jit
def _row_factor(
    peak, rs, bound, static_scale, scale, scale_at, present,
    FP8_MAX: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr, E8M0: tl.constexpr,
    HF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What a row is multiplied by to become codes; stores the row's scale unless it is the caller's."""
    if SCALE == "static":
        s = tl.load(static_scale) + tl.zeros_like(rs)
    else:
        amax = peak.to(tl.float32, bitcast=True)
        if not HF:
            amax *= rs
        s = make_scale(amax, bound, FP8_MAX, scale.dtype.element_ty, LARGEST, UE8M0, EXACT)
        store_scale(scale, scale_at, present, s, E8M0, EXACT)
    if HF:
        return quotient(tl.where(rs == rs, 1.0, rs), s)
    else:
        return quotient(rs, s)


@triton.jit
def _store_groups(
    values, rs, bound, codes, codes_at, scale, scale_at, sg, first, n, present,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr, GROUP: tl.constexpr,
    FP8_MAX: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr, NEGATIVE_ZERO: tl.constexpr, HARDWARE: tl.constexpr,
    LARGEST: tl.constexpr, UE8M0: tl.constexpr, E8M0: tl.constexpr, HF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Quantize a tile (columns ``first`` onwards) by groups of GROUP columns; store codes and scales."""
    grouped = tl.reshape(column_order(values, ROWS, BLOCK, VEC, ALIGNED, THREADS), (ROWS, BLOCK // GROUP, GROUP))
    amax = tl.max(magnitude(grouped), axis=2).to(tl.float32, bitcast=True)  # [ROWS, BLOCK // GROUP]
    if HF:
        numerator = tl.where(rs == rs, 1.0, rs)[:, None] + tl.zeros_like(amax)
    else:
        amax *= rs[:, None]
        numerator = rs[:, None] + tl.zeros_like(amax)
    s = make_scale(amax, bound, FP8_MAX, scale.dtype.element_ty, LARGEST, UE8M0, EXACT)
    group = first // GROUP + tl.arange(0, BLOCK // GROUP)
    inside = present[:, None] & (group < n // GROUP)[None, :]
    store_scale(scale, scale_at[:, None] + group.to(tl.int64)[None, :] * sg, inside, s, E8M0, EXACT)
    k = quotient(numerator, s)
    scaled = tl.reshape(grouped * k[:, :, None], (ROWS, BLOCK))
    columns = first + tl.arange(0, BLOCK)
    mask = present[:, None] & (columns < n)[None, :]
    codes_ = encode_fp8(scaled, FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE)
    tl.store(codes + codes_at[:, None] + columns[None, :], codes_, mask=mask)


@triton.jit
def _rms_norm_row_kernel(
    x, x0, x1, x2, gamma, residual, r0, r1, r2, norm, y0, y1, y2, codes, c0, c1, c2, scale, s0, s1, s2, sg,
    new_residual, w0, w1, w2, static_scale, p0, p00, p01, p02, p1, p10, p11, p12, p2, p20, p21, p22, p3, p30, p31, p32,
    rows, n, n1, n2, eps, weight_offset, bound,
    PROLOGUE: tl.constexpr, HF: tl.constexpr, FP8_MAX: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr,
    E8M0: tl.constexpr, HARDWARE: tl.constexpr, EXACT: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
    EARLY_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of up to BLOCK columns, each read once and held in registers; one tile of rows a program."""
    if rows <= EARLY_ROWS:
        launch_dependents(PDL)
    columns = tile_columns(BLOCK, VEC, ALIGNED, THREADS)
    inside = (columns < n)[None, :]
    row = (tl.zeros((ROWS,), tl.int64) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    mask = inside & present[:, None]
    wait(PDL)
    weight = tl.load(gamma + columns[None, :], mask=inside, other=0.0)
    h = _load_h(
        x, row_start(row, n1, n2, x0, x1, x2, LEVELS), residual, row_start(row, n1, n2, r0, r1, r2, LEVELS),
        p0, row_start(row, n1, n2, p00, p01, p02, LEVELS), p1, row_start(row, n1, n2, p10, p11, p12, LEVELS),
        p2, row_start(row, n1, n2, p20, p21, p22, LEVELS), p3, row_start(row, n1, n2, p30, p31, p32, LEVELS),
        columns, mask, PROLOGUE, HF, EXACT, "",
    )  # fmt: skip
    launch_dependents(PDL)
    g = weight.to(tl.float32) + weight_offset
    if codes is not None and SCALE == "row" and not HF:
        total, peak = sum_and_peak(h * h, magnitude(h * g), EXACT)
    else:
        total = tl.sum(h * h, axis=1)
    rs = reciprocal_rms(total, n, eps)
    if new_residual is not None:
        store(new_residual, row_start(row, n1, n2, w0, w1, w2, LEVELS), columns, mask, h, EXACT)
    if norm is not None:
        y = normalize(h, rs, g, x.dtype.element_ty, HF, EXACT)
        store(norm, row_start(row, n1, n2, y0, y1, y2, LEVELS), columns, mask, y, EXACT)
    if codes is not None:
        if HF:
            v = normalize(h, rs, g, x.dtype.element_ty, HF, EXACT)
        else:
            v = h * g
        codes_at = row_start(row, n1, n2, c0, c1, c2, LEVELS)
        scale_at = row_start(row, n1, n2, s0, s1, s2, LEVELS)
        if SCALE == "group":
            _store_groups(
                v, rs, bound, codes, codes_at, scale, scale_at, sg, 0, n, present, ROWS, BLOCK, VEC, ALIGNED, THREADS,
                GROUP, FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE, LARGEST, UE8M0, E8M0, HF, EXACT,
            )  # fmt: skip
        else:
            if SCALE == "static" or HF:
                peak = tl.max(magnitude(v), axis=1)
            k = _row_factor(
                peak, rs, bound, static_scale, scale, scale_at, present, FP8_MAX, SCALE, LARGEST, UE8M0, E8M0, HF, EXACT
            )  # fmt: skip
            q = encode_fp8(v * k[:, None], FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE)
            tl.store(codes + codes_at[:, None] + columns[None, :], q, mask=mask)


@triton.jit
def _rms_norm_long_kernel(
    x, x0, x1, x2, gamma, residual, r0, r1, r2, norm, y0, y1, y2, codes, c0, c1, c2, scale, s0, s1, s2, sg,
    new_residual, w0, w1, w2, static_scale, p0, p00, p01, p02, p1, p10, p11, p12, p2, p20, p21, p22, p3, p30, p31, p32,
    rows, n, n1, n2, eps, weight_offset, bound,
    PROLOGUE: tl.constexpr, HF: tl.constexpr, FP8_MAX: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr,
    E8M0: tl.constexpr, HARDWARE: tl.constexpr, EXACT: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
    EARLY_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of any length, walked in blocks: once for the statistics, once more (from L2) to write."""
    if rows <= EARLY_ROWS:
        launch_dependents(PDL)
    place = tile_columns(BLOCK, VEC, ALIGNED, THREADS)
    wait(PDL)
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
    squares = tl.zeros((1, BLOCK), tl.float32)
    peaks = tl.zeros((1, BLOCK), tl.int32)
    for first in range(0, n, BLOCK):
        columns = first + place
        mask = (columns < n)[None, :]
        h = _load_h(
            x,
            x_at,
            residual,
            r_at,
            p0,
            at0,
            p1,
            at1,
            p2,
            at2,
            p3,
            at3,
            columns,
            mask,
            PROLOGUE,
            HF,
            EXACT,
            "evict_last",
        )
        squares += h * h
        if codes is not None and SCALE == "row" and not HF:
            g = tl.load(gamma + columns[None, :], mask=mask, other=0.0).to(tl.float32) + weight_offset
            peaks = tl.maximum(peaks, magnitude(h * g))
    launch_dependents(PDL)
    rs = reciprocal_rms(tl.sum(squares, axis=1), n, eps)
    if codes is not None and SCALE == "row" and HF:
        for first in range(0, n, BLOCK):
            columns = first + place
            mask = (columns < n)[None, :]
            h = _load_h(
                x,
                x_at,
                residual,
                r_at,
                p0,
                at0,
                p1,
                at1,
                p2,
                at2,
                p3,
                at3,
                columns,
                mask,
                PROLOGUE,
                HF,
                EXACT,
                "evict_last",
            )
            g = tl.load(gamma + columns[None, :], mask=mask, other=0.0).to(tl.float32) + weight_offset
            peaks = tl.maximum(
                peaks, magnitude(tl.where(mask, normalize(h, rs, g, x.dtype.element_ty, HF, EXACT), 0.0))
            )
    if codes is not None and SCALE != "group":
        k = _row_factor(
            tl.max(peaks, axis=1), rs, bound, static_scale, scale, scale_at, present, FP8_MAX, SCALE, LARGEST, UE8M0, E8M0, HF, EXACT
        )  # fmt: skip
    for first in range(0, n, BLOCK):
        columns = first + place
        mask = (columns < n)[None, :]
        h = _load_h(
            x,
            x_at,
            residual,
            r_at,
            p0,
            at0,
            p1,
            at1,
            p2,
            at2,
            p3,
            at3,
            columns,
            mask,
            PROLOGUE,
            HF,
            EXACT,
            "evict_first",
        )
        g = tl.load(gamma + columns[None, :], mask=mask, other=0.0).to(tl.float32) + weight_offset
        if new_residual is not None:
            store(new_residual, row_start(row, n1, n2, w0, w1, w2, LEVELS), columns, mask, h, EXACT)
        if norm is not None:
            y = normalize(h, rs, g, x.dtype.element_ty, HF, EXACT)
            store(norm, row_start(row, n1, n2, y0, y1, y2, LEVELS), columns, mask, y, EXACT)
        if codes is not None:
            if HF:
                v = normalize(h, rs, g, x.dtype.element_ty, HF, EXACT)
            else:
                v = h * g
            if SCALE == "group":
                _store_groups(
                    v, rs, bound, codes, codes_at, scale, scale_at, sg, first, n, present, 1, BLOCK, VEC, ALIGNED, THREADS,
                    GROUP, FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE, LARGEST, UE8M0, E8M0, HF, EXACT,
                )  # fmt: skip
            else:
                q = encode_fp8(v * k[:, None], FP8_MAX, BIAS, NAN, NEGATIVE_ZERO, HARDWARE)
                tl.store(codes + codes_at[:, None] + columns[None, :], q, mask=mask)
