"""The attention of a decode step: few queries, all entries of a cache, one launch.

A program takes one split of the context, for one head of keys and up to 16 rows of queries. It holds, per row, the
largest score, the sum of the exponentials relative to it, and the sum of values weighted by them. With one split it
divides and stores. Otherwise it leaves these in memory, and the last program of the head to finish joins the splits.
`ops.gemv_norm.gpu_kernel` describes how memory of other programs becomes visible.

A split is always joined in the same way, and every other sum belongs to one row. So a row's bytes depend on its query,
its context and its mask, and on nothing else. Scores are in units of log2, because a GPU computes powers of two.
"""

import triton
import triton.language as tl

from ...gpu.lib.numbers import cast
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.lib.product import _operand

LOWEST = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _request(address):
    """Ask the L2 cache for a line. Nothing is read into the program, so another kernel may still write there."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _reference(top):
    """What exponents are relative to: the largest score, or 0 if no entry counts."""
    return tl.where(top == LOWEST, 0.0, top)


@triton.jit
def _join(
    tensors, first, row, inside, splits, place, column, COUNTED: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr
):
    """Add the splits of some rows from the first to the last, and store the quotient at ``place``.

    ``COUNTED``: splits in which no entry counts have no sums. Those are most splits of a long static cache. Their ``tops``
    and weights are there, because NaN scores count.
    """
    ROWS: tl.constexpr = TILE.joined
    top = tl.full((ROWS,), LOWEST, tl.float32)
    for at in tl.range(0, splits, TILE.looked):
        split = at + tl.arange(0, TILE.looked)[:, None]
        there = tensors.tops + (first + split) * (2 * TILE.rows) + row[None, :]
        tops = tl.load(there, mask=(split < splits) & inside[None, :], other=LOWEST, cache_modifier=".cg")
        top = tl.maximum(top, tl.max(tops, 0))
    reference = _reference(top)
    total = tl.zeros((ROWS, TILE.columns), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    for split in tl.range(0, splits, num_stages=TILE.join_stages):
        there = tensors.tops + (first + split) * (2 * TILE.rows) + row
        tops = tl.load(there, mask=inside, other=LOWEST, cache_modifier=".cg")
        sums = tl.load(there + TILE.rows, mask=inside, other=0.0, cache_modifier=".cg")
        there = tensors.sums + ((first + split) * TILE.rows + row).to(tl.int64)[:, None] * TILE.columns
        present = tops != LOWEST if COUNTED else inside
        values = tl.load(there + column[None, :], mask=present[:, None], other=0.0, cache_modifier=".cg")
        factor = tl.exp2(tops - reference)
        weight += sums * factor
        total += values * factor[:, None]
    _store(tensors, total, weight, place, inside, column, MATH)


@triton.jit
def _store(tensors, total, weight, place, inside, column, MATH: tl.constexpr):
    """Divide and store. A row without any entry that counts is zero."""
    quotient = tl.where(weight[:, None] == 0.0, 0.0, total / weight[:, None])
    quotient = cast(quotient, tensors.out.dtype.element_ty, MATH.hw_rounding)
    tl.store(tensors.out + place[:, None] + column[None, :], quotient, mask=_both(inside, column, MATH))


@triton.jit
def _both(inside, column, MATH: tl.constexpr):
    """Rows that are inside, and columns unless all of them exist."""
    if MATH.columns == column.shape[0]:
        return inside[:, None]
    else:
        return inside[:, None] & (column < MATH.columns)[None, :]


@triton.jit
def _out_at(row, rows, b, h, MATH: tl.constexpr):
    """Where rows of queries are in the result, [batch, tokens, heads of q, columns]."""
    token = (b * rows.tokens + row // rows.groups).to(tl.int64)
    return (token * (rows.heads * rows.groups) + h * rows.groups + row % rows.groups) * MATH.columns


@triton.jit
def _end_split(
    tensors, rows, sums, inside, column, where, COUNTED: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr
):
    """Store the result of the only split, or leave its sums. The last program of a tile of rows joins the splits.

    ``sums`` are the largest score, the weight and the total of each row; ``where`` the tile's number, the split, the
    first row, the sequence and the head of keys.
    """
    top, weight, total = sums
    unit, split, row0, b, h = where
    if not MATH.several:
        row = row0 + tl.arange(0, TILE.rows)
        _store(tensors, total, weight, _out_at(row, rows, b, h, MATH), inside, column, MATH)
    else:
        first_sum = unit * rows.splits
        mine = (first_sum + split) * (2 * TILE.rows) + tl.arange(0, TILE.rows)
        tl.store(tensors.tops + mine, top)
        tl.store(tensors.tops + mine + TILE.rows, weight)
        mine = ((first_sum + split) * TILE.rows + tl.arange(0, TILE.rows)).to(tl.int64)[:, None] * TILE.columns
        present = inside & (top != LOWEST) if COUNTED else inside
        tl.store(tensors.sums + mine + column[None, :], total, mask=present[:, None])
        tl.debug_barrier()
        order = tl.atomic_add(tensors.counter + unit, 1, sem="acq_rel", scope="gpu")
        if order == rows.splits - 1:
            left = tl.minimum(TILE.rows, rows.groups * rows.tokens - row0)
            for r in tl.range(0, left, TILE.joined):
                some = r + tl.arange(0, TILE.joined)
                place = _out_at(row0 + some, rows, b, h, MATH)
                _join(tensors, first_sum, some, some < left, rows.splits, place, column, COUNTED, TILE, MATH)
            tl.store(tensors.counter + unit, 0)


@triton.jit
def _attention_kernel(tensors, rows, scale, ahead, TILE: tl.constexpr, MATH: tl.constexpr):
    """One split of the context, for one head of keys and one tile of rows."""
    launch_dependents(MATH.pdl)
    DTYPE: tl.constexpr = tensors.q.dtype.element_ty
    block = tl.program_id(0)
    split, unit = block % rows.splits, block // rows.splits
    unit_rows = rows.groups * rows.tokens
    tiles = tl.cdiv(unit_rows, TILE.rows)
    row0 = unit % tiles * TILE.rows
    h, b = unit // tiles % rows.heads, unit // tiles // rows.heads
    first = split * TILE.split
    column = tl.arange(0, TILE.columns)
    keys = tensors.k + b.to(tl.int64) * rows.k_batch + h.to(tl.int64) * rows.k_head
    values = tensors.v + b.to(tl.int64) * rows.v_batch + h.to(tl.int64) * rows.v_head
    if MATH.pdl:
        if ahead:
            wanted = tl.minimum(first + tl.arange(0, TILE.split), rows.context - 1).to(tl.int64)[:, None]
            lines = (tl.arange(0, TILE.lines) * (128 // 2))[None, :]
            _request(keys + wanted * rows.k_entry + lines)
            _request(values + wanted * rows.v_entry + lines)
    wait(MATH.pdl)
    row = row0 + tl.arange(0, TILE.rows)
    inside = row < unit_rows
    head, token = (h * rows.groups + row % rows.groups).to(tl.int64), (row // rows.groups).to(tl.int64)
    q_at = tensors.q + b.to(tl.int64) * rows.q_batch + head[:, None] * rows.q_head + token[:, None] * rows.q_token
    queries = _operand(tl.load(q_at + column[None, :], mask=_both(inside, column, MATH), other=0.0), MATH)
    counts = True
    if MATH.mask != "none":
        mask = tensors.mask + b.to(tl.int64) * rows.mask_batch
        if MATH.mask == "one" and MATH.several:
            all = first + tl.arange(0, TILE.split)
            counts = tl.max(tl.load(mask + all, mask=all < rows.context, other=LOWEST).to(tl.float32), 0) != LOWEST
    top = tl.full((TILE.rows,), LOWEST, tl.float32)
    weights = tl.zeros((TILE.rows, 16), tl.float32)
    total = tl.zeros((TILE.rows, TILE.columns), tl.float32)
    ones = tl.full((TILE.block, 16), 1.0, DTYPE if MATH.hw_rounding else tl.float32)
    if counts:
        for at in tl.range(0, tl.minimum(TILE.split, rows.context - first), TILE.block, num_stages=TILE.stages):
            entry = first + at + tl.arange(0, TILE.block)
            here = entry < rows.context
            far = entry.to(tl.int64)
            k = tl.load(keys + far[:, None] * rows.k_entry + column[None, :], mask=_both(here, column, MATH), other=0.0)
            v = tl.load(
                values + far[:, None] * rows.v_entry + column[None, :], mask=_both(here, column, MATH), other=0.0
            )
            scores = tl.dot(queries, tl.trans(_operand(k, MATH))) * scale
            if MATH.mask == "one":
                scores += tl.load(mask + far, mask=here, other=0.0).to(tl.float32)[None, :] * LOG2E
            elif MATH.mask == "many":
                m_at = mask + token[:, None] * rows.mask_token + far[None, :]
                scores += tl.load(m_at, mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32) * LOG2E
            scores = tl.where(here[None, :], scores, LOWEST)
            larger = tl.maximum(top, tl.max(scores, 1))
            reference = _reference(larger)
            powers = _operand(cast(tl.exp2(scores - reference[:, None]), DTYPE, MATH.hw_rounding), MATH)
            kept = tl.exp2(top - reference)[:, None]
            weights = tl.dot(powers, ones, weights * kept)  # the order of `tl.sum` would depend on a layout
            total = tl.dot(powers, _operand(v, MATH), total * kept)
            top = larger
    weight = tl.max(weights, 1)  # all 16 are equal
    _end_split(tensors, rows, (top, weight, total), inside, column, (unit, split, row0, b, h), False, TILE, MATH)
