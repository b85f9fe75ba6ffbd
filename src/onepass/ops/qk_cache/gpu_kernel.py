"""Norms of q and k, RoPE, and the write of k and v into a cache: one launch, whose programs each
process some heads of one token.

A token's first programs process k, which has the longest chain of loads (slot, then entry), the
next ones v, the others q. Heads are read in the parts that rotate together (`gpu.lib.rope`), so
that both columns of a pair are in the same thread. If these parts are halves of the head, their
squares are summed as chunks of it; otherwise the row is loaded once more for its sum, from L1.
With statistics over all heads of a token, one program processes all of them. Every element is read
before it is overwritten, so q may be rotated in place. The order of all sums is that of
`gpu.lib.reduce`. Tensors, rows, numbers and constants are the named tuples of `qk_cache`.
"""

import triton
import triton.language as tl

from ...gpu.lib.numbers import convert, make_scale, quotient
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.lib.reduce import sum_chunks, sum_columns, sum_eights
from ...gpu.lib.rope import angles_of_rows, angles_of_table, read_rope, turn, turn_stepwise, write_rope
from ...gpu.lib.row import magnitude, normalize, reciprocal_root


@triton.jit
def _offset(token, outer, index, by_outer, by_token, LEVELS: tl.constexpr):
    """Where a token begins: by one stride, or by the strides of its sequence and its index there."""
    if LEVELS == 1:
        return token * by_token
    else:
        return outer * by_outer + index * by_token


@triton.jit
def _add_heads(tile, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """[HEADS, SIZE] to [1, SIZE]: the first half of the heads and the second, until one is left."""
    for i in tl.static_range(1, 12):
        if HEADS >> i > 0:
            tile = tl.sum(tl.reshape(tile, (2, HEADS >> i, SIZE)), axis=0)
    return tile


@triton.jit
def _sum_parts(a, b, HEADS: tl.constexpr, MATH: tl.constexpr):
    """Sums of squares of heads, or of all of them: of both halves, or of whole heads in ``a``."""
    SIZE: tl.constexpr = MATH.rope // 2 if MATH.half else triton.next_power_of_2(MATH.rope)
    COUNT: tl.constexpr = 2 if MATH.half else 1
    ROWS: tl.constexpr = 1 if MATH.norm == "whole" else HEADS
    eights = ()
    for c in tl.static_range(COUNT):
        h = (a if c == 0 else b).to(tl.float32)
        part = sum_eights(h * h, HEADS, SIZE)
        if MATH.norm == "whole":
            part = _add_heads(part, HEADS, SIZE // 8)
        eights = eights + (part,)
    return sum_chunks(eights, ROWS, SIZE, COUNT, SIZE * COUNT)


@triton.jit
def _sum_rows(x, at, start, present, n, SIDE: tl.constexpr, MATH: tl.constexpr):
    """The same from rows that are loaded for it: heads at ``at``, or all ``n`` columns at ``start``."""
    if MATH.norm == "head":
        BLOCK: tl.constexpr = max(8, triton.next_power_of_2(MATH.rope))
        columns = tl.arange(0, BLOCK)
        mask = present[:, None] & (columns < MATH.rope)[None, :]
        h = tl.load(x + at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        return sum_columns(h * h, SIDE.heads, BLOCK)
    else:
        place = tl.arange(0, SIDE.row)[None, :]
        h = tl.load(x + start + place, mask=place < n, other=0.0).to(tl.float32)
        squares = h * h
        if SIDE.long:
            for first in range(SIDE.row, n, SIDE.row):
                h = tl.load(x + start + first + place, mask=first + place < n, other=0.0).to(tl.float32)
                squares += h * h
        return sum_columns(squares, 1, SIDE.row)


@triton.jit
def _table_row(tensors, rows, at, HEADS: tl.constexpr, MATH: tl.constexpr):
    """The cosines and sines of the position at ``at``, for every head."""
    position = tl.load(tensors.positions + at).to(tl.int64)
    row = tl.minimum(tl.maximum(position, 0), rows.limit - 1) * rows.freqs_row
    return angles_of_table(tensors.freqs + row, HEADS, MATH)


@triton.jit
def _along_axes(tensors, rows, at, HEADS: tl.constexpr, MATH: tl.constexpr):
    """The same of three positions: each pair's, by the axis that it turns by.

    Whole rows are loaded. Pairs that are chosen by an address would be loaded by other threads than those that need them.
    """
    AXES: tl.constexpr = MATH.axes
    cosine, sine = _table_row(tensors, rows, at, HEADS, MATH)
    by_height = _table_row(tensors, rows, at + rows.positions_axis, HEADS, MATH)
    by_width = _table_row(tensors, rows, at + 2 * rows.positions_axis, HEADS, MATH)
    pair = tl.arange(0, cosine.shape[1])[None, :]
    tall = (pair >= AXES.height) & (pair < AXES.height_end) & ((pair - AXES.height) % AXES.step == 0)
    wide = (pair >= AXES.width) & (pair < AXES.width_end) & ((pair - AXES.width) % AXES.step == 0)
    cosine = tl.where(tall, by_height[0], tl.where(wide, by_width[0], cosine))
    return cosine, tl.where(tall, by_height[1], tl.where(wide, by_width[1], sine))


@triton.jit
def _angles(tensors, rows, token, outer, index, HEADS: tl.constexpr, MATH: tl.constexpr):
    """The token's cosines and sines, for every head."""
    if MATH.turned == 0:
        return 0.0, 0.0
    elif MATH.pair:
        cos = tensors.cos + _offset(token, outer, index, rows.cos_outer, rows.cos_token, MATH.levels)
        sin = tensors.sin + _offset(token, outer, index, rows.sin_outer, rows.sin_token, MATH.levels)
        return angles_of_rows(cos, sin, HEADS, MATH)
    elif MATH.axes is not None:
        at = _offset(token, outer, index, rows.positions_outer, rows.positions_token, MATH.levels)
        return _along_axes(tensors, rows, at, HEADS, MATH)
    else:
        if tensors.positions is None:
            position = index
        else:
            at = _offset(token, outer, index, rows.positions_outer, rows.positions_token, MATH.levels)
            position = tl.load(tensors.positions + at).to(tl.int64)
        row = tl.minimum(tl.maximum(position, 0), rows.limit - 1) * rows.freqs_row
        return angles_of_table(tensors.freqs + row, HEADS, MATH)


@triton.jit
def _normed(h, rs, weight, weight_offset, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """A part of the norm, rounded as the rotation needs it."""
    y = normalize(h.to(tl.float32), rs, weight.to(tl.float32) + weight_offset, DTYPE, MATH.hf, MATH.hw_rounding)
    if MATH.stepwise and not MATH.hf:
        y = convert(y, DTYPE, MATH.hw_rounding)
    return y


@triton.jit
def _weights(gamma, head, present, MATH: tl.constexpr):
    """The parts of gamma for every head, which may share it."""
    if MATH.norm == "head":
        return read_rope(gamma, tl.zeros_like(head), present, 0, False, MATH)
    else:
        return read_rope(gamma, head * MATH.rope, present, 0, True, MATH)


@triton.jit
def _scale_of(a, b, rest, scale, scale_at, there, SCALE: tl.constexpr, QUANT: tl.constexpr, MATH: tl.constexpr):
    """What some heads are divided by, [heads, 1] or [1, 1]. Scales that heads get for themselves are stored."""
    if SCALE == "tensor":
        return tl.load(scale + tl.arange(0, 1))[:, None]
    elif SCALE == "head":
        return tl.load(scale + scale_at, mask=there, other=1.0)[:, None]
    else:
        peak = tl.maximum(tl.max(magnitude(a), axis=1), tl.max(magnitude(b), axis=1))
        peak = tl.maximum(peak, tl.max(magnitude(rest), axis=1)).to(tl.float32, bitcast=True)
        own = make_scale(peak, float("inf"), None, QUANT, tl.float32, MATH.hw_rounding)
        tl.store(scale + scale_at, own, mask=there)
        return own[:, None]


@triton.jit
def _finish(
    parts, weights, rs, cosine, sine, numbers, scale, scale_at, out, out_at, there,
    DTYPE: tl.constexpr, HEADS: tl.constexpr, SCALE: tl.constexpr, QUANT: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Norm, rotate, scale and store the parts of some heads."""
    a, b, rest = parts
    if MATH.norm != "none":
        ga, gb, grest = weights
        a = _normed(a, rs, ga, numbers.weight_offset, DTYPE, MATH)
        b = _normed(b, rs, gb, numbers.weight_offset, DTYPE, MATH)
        rest = _normed(rest, rs, grest, numbers.weight_offset, DTYPE, MATH)
    else:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
        rest = rest.to(tl.float32)
    if MATH.turned > 0 and MATH.stepwise:
        a, b, rest = turn_stepwise(a, b, rest, cosine, sine, DTYPE, HEADS, MATH)
    elif MATH.turned > 0:
        a, b, rest = turn(a, b, rest, cosine, sine, DTYPE, HEADS, MATH)
    if SCALE != "none":
        given = _scale_of(a, b, rest, scale, scale_at, there, SCALE, QUANT, MATH)
        a = quotient(a, given)
        b = quotient(b, given)
        rest = quotient(rest, given)
    write_rope(out, out_at, there, 0, a, b, rest, True, QUANT, MATH)


@triton.jit
def _heads(
    piece, x, start, step, heads, gamma, cosine, sine, numbers, scale, scale_start, scale_step,
    out, out_start, out_step, valid,
    SIDE: tl.constexpr, SCALE: tl.constexpr, QUANT: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store some heads of q or k; with statistics over all heads, all of them."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    HEADS: tl.constexpr = SIDE.heads
    head = piece * HEADS + tl.arange(0, HEADS)
    present = head < heads
    head = head.to(tl.int64)
    at = start + head * step
    parts = read_rope(x, at, present, 0, True, MATH)
    weights = parts
    rs = 0.0
    if MATH.norm != "none":
        weights = _weights(gamma, head, present, MATH)
        if MATH.norm == "head":
            n = MATH.rope
        else:
            n = heads * MATH.rope
        if SIDE.exact:
            total = _sum_parts(parts[0], parts[1], HEADS, MATH)
        else:
            total = _sum_rows(x, at, start, present, n, SIDE, MATH)
        launch_dependents(MATH.pdl)
        rs = reciprocal_root(tl.div_rn(total, tl.full(total.shape, n, tl.float32)) + numbers.eps)
    else:
        launch_dependents(MATH.pdl)
    out_at = out_start + head * out_step
    scale_at = scale_start + head * scale_step
    _finish(
        parts, weights, rs, cosine, sine, numbers, scale, scale_at, out, out_at, present & valid,
        DTYPE, HEADS, SCALE, QUANT, MATH,
    )  # fmt: skip
    if SIDE.long:  # the other heads of a row that is longer than a tile
        for first in range(HEADS, heads, HEADS):
            later = first + tl.arange(0, HEADS)
            present = later < heads
            later = later.to(tl.int64)
            parts = read_rope(x, start + later * step, present, 0, True, MATH)
            weights = _weights(gamma, later, present, MATH)
            out_at = out_start + later * out_step
            scale_at = scale_start + later * scale_step
            _finish(
                parts, weights, rs, cosine, sine, numbers, scale, scale_at, out, out_at, present & valid,
                DTYPE, HEADS, SCALE, QUANT, MATH,
            )  # fmt: skip


@triton.jit
def _values(
    piece, v, start, step, heads, numbers, scale, scale_start, scale_step, out, out_start, out_step, valid,
    SIDE: tl.constexpr, SCALE: tl.constexpr, QUANT: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Store some heads of v, or their norms."""
    HEADS: tl.constexpr = SIDE.heads
    head = piece * HEADS + tl.arange(0, HEADS)
    present = head < heads
    at = start + head.to(tl.int64) * step
    y = read_rope(v, at, present, 0, True, MATH)[0]
    if MATH.norm == "head":
        if SIDE.exact:
            total = _sum_parts(y, y, HEADS, MATH)
        else:
            total = _sum_rows(v, at, start, present, MATH.rope, SIDE, MATH)
        launch_dependents(MATH.pdl)
        rs = reciprocal_root(tl.div_rn(total, tl.full(total.shape, MATH.rope, tl.float32)) + numbers.eps)
        y = y.to(tl.float32) * rs[:, None]
        if MATH.stepwise:
            y = convert(y, v.dtype.element_ty, MATH.hw_rounding)
    else:
        launch_dependents(MATH.pdl)
        y = y.to(tl.float32)
    if SCALE != "none":
        scale_at = scale_start + head.to(tl.int64) * scale_step
        y = quotient(y, _scale_of(y, y, y, scale, scale_at, present & valid, SCALE, QUANT, MATH))
    write_rope(out, out_start + head.to(tl.int64) * out_step, present & valid, 0, y, y, y, True, QUANT, MATH)


@triton.jit
def _entry(tensors, rows, numbers, token, outer, index, MATH: tl.constexpr):
    """The token's page and entry, and whether they exist."""
    if MATH.placing == "dense":
        entry = index + rows.first
        if tensors.starts is not None:
            entry += tl.load(tensors.starts + outer * rows.start_step).to(tl.int64)
        return outer, entry, (entry >= 0) & (entry < rows.entries)
    else:
        at = _offset(token, outer, index, rows.slots_outer, rows.slots_token, MATH.levels)
        slot = tl.load(tensors.slots + at).to(tl.int64)
        if MATH.paged:
            page = slot >> numbers.page_shift
            entry = slot - (page << numbers.page_shift)
        else:
            page = tl.maximum(slot, 0) // rows.entries
            entry = slot - page * rows.entries
        return page, entry, (slot >= 0) & (page < rows.pages)


@triton.jit
def _qk_cache_kernel(
    tensors, rows, numbers,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    MATH: tl.constexpr, VALUE: tl.constexpr, CACHE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The programs of a token are those of k, then those of v, then those of q. With up to ``early``
    programs the next kernel may start at once.
    """
    PROGRAMS: tl.constexpr = K.pieces + V.pieces + Q.pieces
    if tl.num_programs(0) <= numbers.early:
        launch_dependents(MATH.pdl)
    program = tl.program_id(0)
    number = program // PROGRAMS
    piece = program % PROGRAMS
    token = number.to(tl.int64)
    if MATH.indexed:
        outer = (number // rows.sequence).to(tl.int64)
        index = (number % rows.sequence).to(tl.int64)
    else:
        outer = token
        index = token * 0
    wait(MATH.pdl)
    if piece >= K.pieces + V.pieces:
        start = _offset(token, outer, index, rows.q_outer, rows.q_token, MATH.levels)
        out_start = _offset(token, outer, index, rows.q_out_outer, rows.q_out_token, MATH.levels)
        cosine, sine = _angles(tensors, rows, token, outer, index, Q.heads, MATH)
        _heads(
            piece - (K.pieces + V.pieces), tensors.q, start, rows.q_head, rows.q_heads, tensors.gamma_q,
            cosine, sine, numbers, None, 0, 0, tensors.q_out, out_start, rows.q_out_head, token >= 0,
            Q, "none", PLAIN, MATH,
        )  # fmt: skip
    else:
        if MATH.placing == "none":
            valid = token >= 0
            k_at = _offset(token, outer, index, rows.k_out_outer, rows.k_out_token, MATH.levels)
            k_step = rows.k_out_head
            k_out = tensors.k_out
            v_at = k_at
            page = token * 0
            entry = page
        else:
            page, entry, valid = _entry(tensors, rows, numbers, token, outer, index, MATH)
            k_at = page * rows.k_page + entry * rows.k_entry
            v_at = page * rows.v_page + entry * rows.v_entry
            k_step = rows.k_step
            k_out = tensors.k_cache
        if piece < K.pieces:
            start = _offset(token, outer, index, rows.k_outer, rows.k_token, MATH.levels)
            cosine, sine = _angles(tensors, rows, token, outer, index, K.heads, MATH)
            k_scale = tensors.k_scale_out if MATH.k_scale == "own" else tensors.k_scale
            scale_at = page * rows.k_scale_page + entry * rows.k_scale_entry
            _heads(
                piece, tensors.k, start, rows.k_head, rows.k_heads, tensors.gamma_k,
                cosine, sine, numbers, k_scale, scale_at, rows.k_scale_step, k_out, k_at, k_step, valid,
                K, MATH.k_scale, CACHE, MATH,
            )  # fmt: skip
        elif V.pieces > 0:
            start = _offset(token, outer, index, rows.v_outer, rows.v_token, MATH.levels)
            v_scale = tensors.v_scale_out if MATH.v_scale == "own" else tensors.v_scale
            scale_at = page * rows.v_scale_page + entry * rows.v_scale_entry
            _values(
                piece - K.pieces, tensors.v, start, rows.v_head, rows.k_heads, numbers, v_scale, scale_at,
                rows.v_scale_step, tensors.v_cache, v_at, rows.v_step, valid, V, MATH.v_scale, CACHE, VALUE,
            )  # fmt: skip
