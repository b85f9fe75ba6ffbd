"""The attention of a decode step to latents: `ops.attention.gpu_kernel` with scores of two products and one load of each entry.

A program takes one split of the context, for up to 16 rows of queries. Each of its warps has a piece of the columns: it
multiplies that piece of queries and keys, and later sums that piece of the latents. Scores are the sums of all pieces, from
the first to the last. So no warp holds whole queries, and no chain of products is long.
"""

import triton
import triton.language as tl

from ...gpu.lib.numbers import cast
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.lib.product import _operand
from ...gpu.lib.reduce import add_from_left
from ..attention.gpu_kernel import LOG2E, LOWEST, _end_split, _reference, _request


@triton.jit
def _places(WIDE: tl.constexpr, TILE: tl.constexpr):
    """The columns of each piece of ``WIDE`` columns, [pieces, 1, columns]."""
    PART: tl.constexpr = WIDE // TILE.pieces
    return tl.arange(0, TILE.pieces)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]


@triton.jit
def _load(at, step, inside, column, COLUMNS: tl.constexpr, WIDE: tl.constexpr, MATH: tl.constexpr):
    """Pieces [pieces, rows, columns] of the rows ``step`` after ``at`` that are ``inside``, zeros elsewhere."""
    mask = inside[None, :, None]
    if COLUMNS != WIDE:
        mask = mask & (column < COLUMNS)
    return _operand(tl.load(at + step[None, :, None] + column, mask=mask, other=0.0), MATH)


@triton.jit
def _latent_attention_kernel(tensors, rows, scale, ahead, TILE: tl.constexpr, MATH: tl.constexpr):
    """One split of the context, for one tile of rows."""
    launch_dependents(MATH.pdl)
    DTYPE: tl.constexpr = tensors.q.dtype.element_ty
    block = tl.program_id(0)
    split, unit = block % rows.splits, block // rows.splits
    unit_rows = rows.groups * rows.tokens
    tiles = tl.cdiv(unit_rows, TILE.rows)
    row0 = unit % tiles * TILE.rows
    b = unit // tiles
    first = split * TILE.split
    latents = tensors.latent + b.to(tl.int64) * rows.latent_batch
    keys = tensors.k_rot + b.to(tl.int64) * rows.k_rot_batch
    if MATH.pdl:
        if ahead:
            wanted = tl.minimum(first + tl.arange(0, TILE.split), rows.context - 1).to(tl.int64)[:, None]
            _request(latents + wanted * rows.latent_entry + (tl.arange(0, TILE.lines) * (128 // 2))[None, :])
            _request(keys + wanted * rows.k_rot_entry)
    wait(MATH.pdl)
    wide, narrow = _places(TILE.columns, TILE), _places(TILE.rotated, TILE)
    row = row0 + tl.arange(0, TILE.rows)
    inside = row < unit_rows
    head, token = (row % rows.groups).to(tl.int64), (row // rows.groups).to(tl.int64)
    q_at, step = tensors.q + b.to(tl.int64) * rows.q_batch, head * rows.q_head + token * rows.q_token
    queries = _load(q_at, step, inside, wide, MATH.columns, TILE.columns, MATH)
    q_at, step = tensors.q_rot + b.to(tl.int64) * rows.q_rot_batch, head * rows.q_rot_head + token * rows.q_rot_token
    turned = _load(q_at, step, inside, narrow, MATH.rotated, TILE.rotated, MATH)
    counts = True
    if MATH.mask != "none":
        mask = tensors.mask + b.to(tl.int64) * rows.mask_batch
        if MATH.mask == "one" and MATH.several:
            all = first + tl.arange(0, TILE.split)
            counts = tl.max(tl.load(mask + all, mask=all < rows.context, other=LOWEST).to(tl.float32), 0) != LOWEST
    top = tl.full((TILE.rows,), LOWEST, tl.float32)
    weights = tl.zeros((TILE.pieces, TILE.rows, 16), tl.float32)
    total = tl.zeros((TILE.pieces, TILE.rows, TILE.columns // TILE.pieces), tl.float32)
    ones = tl.full((TILE.pieces, TILE.block, 16), 1.0, DTYPE if MATH.hw_rounding else tl.float32)
    if counts:
        for at in tl.range(0, tl.minimum(TILE.split, rows.context - first), TILE.block, num_stages=TILE.stages):
            entry = first + at + tl.arange(0, TILE.block)
            here = entry < rows.context
            far = entry.to(tl.int64)
            if MATH.mask == "one":  # loaded before the products, which take as long
                bias = tl.load(mask + far, mask=here, other=0.0).to(tl.float32)[None, :] * LOG2E
            elif MATH.mask == "many":
                m_at = mask + token[:, None] * rows.mask_token + far[None, :]
                bias = tl.load(m_at, mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32) * LOG2E
            c = _load(latents, far * rows.latent_entry, here, wide, MATH.columns, TILE.columns, MATH)
            k = _load(keys, far * rows.k_rot_entry, here, narrow, MATH.rotated, TILE.rotated, MATH)
            pieces = tl.dot(turned, tl.permute(k, (0, 2, 1)), tl.dot(queries, tl.permute(c, (0, 2, 1))))
            scores = add_from_left(tl.permute(pieces, (1, 2, 0)), TILE.rows, TILE.block, TILE.pieces) * scale
            if MATH.mask != "none":
                scores += bias
            scores = tl.where(here[None, :], scores, LOWEST)
            larger = tl.maximum(top, tl.max(scores, 1))
            reference = _reference(larger)
            powers = _operand(cast(tl.exp2(scores - reference[:, None]), DTYPE, MATH.hw_rounding), MATH)
            powers = tl.broadcast_to(powers[None, :, :], (TILE.pieces, TILE.rows, TILE.block))
            kept = tl.exp2(top - reference)[None, :, None]
            weights = tl.dot(powers, ones, weights * kept)  # the order of `tl.sum` would depend on a layout
            total = tl.dot(powers, c, total * kept)
            top = larger
    weight = tl.max(tl.max(weights, 2), 0)  # all are equal
    total = tl.reshape(tl.permute(total, (1, 0, 2)), (TILE.rows, TILE.columns))
    column = tl.arange(0, TILE.columns)
    _end_split(tensors, rows, (top, weight, total), inside, column, (unit, split, row0, b, 0), True, TILE, MATH)
