"""``linear``: a product with what surrounds it. Constants are the named tuples of `linear`.

16-bit weights have two kernels that sum in the order of `device.product`. Other weights have one for few
rows of x and one for many, which sum in the order of `device.fragments`. So a row has the same bytes in
either. Of these four, the kernel that streams few rows can norm x as it is loaded.
"""

import triton
import triton.language as tl

from .device.fragments import decode
from .device.numbers import cast, convert
from .device.pdl import launch_dependents, wait
from .device.product import descriptor_product, product
from .device.row import reciprocal_rms
from .device.weight_stream import SCALED, act_row, add_residual, first_weights, fold, scale_value, stream
from .prologue import tanh


@triton.jit
def _activate(g, ACTIVATION: tl.constexpr):
    """silu, or gelu by tanh or erf."""
    if ACTIVATION == "silu_mul":
        return g / (1.0 + tl.exp(g * -1.0))
    elif ACTIVATION == "gelu_tanh_mul":
        return 0.5 * g * (1.0 + tanh(0.7978845608028654 * (g + 0.044715 * (g * g * g))))
    else:
        return 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))


@triton.jit
def _complete(y, column, inside, weight_scale, bias, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """Scale, bias and, for "hf", the rounding of ``y`` [columns, rows]."""
    if MATH.scaled == "row":
        y = y * tl.load(weight_scale + column, mask=inside, other=0.0)[:, None]
    elif MATH.scaled == "tensor":
        y = y * tl.load(weight_scale)
    if bias is not None:
        y = y + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    if MATH.hf:
        y = convert(y, DTYPE, MATH.hw_rounding)
    return y


@triton.jit
def _finish(y, up, column, row, n, m, weight_scale, bias, add, out, strides, MATH: tl.constexpr):
    """From sums [columns, rows] to the stored result; ``up`` is y's second half with an activation."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    inside = column < n
    y = _complete(y, column, inside, weight_scale, bias, DTYPE, MATH)
    if MATH.gated:
        up = _complete(up, column + n, inside, weight_scale, bias, DTYPE, MATH)
        gate = _activate(y, MATH.activation)
        if MATH.hf:
            gate = convert(gate, DTYPE, MATH.hw_rounding)
        y = gate * up
        if MATH.hf:
            y = convert(y, DTYPE, MATH.hw_rounding)
    mask = inside[:, None] & (row < m)[None, :]
    place = row.to(tl.int64)[None, :]
    if add is not None:
        y = y + tl.load(add + place * strides.add + column[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place * strides.out + column[:, None], cast(y, DTYPE, MATH.hw_rounding), mask=mask)


@triton.jit
def _statistics(x, residual, residual_out, m, k, strides, eps, writes, STATS: tl.constexpr, MATH: tl.constexpr):
    """The reciprocal RMS of each row, summed as `device.bins` does; one program stores the sum with
    the residual.
    """
    row = tl.arange(0, STATS.rows)
    place = row.to(tl.int64)[:, None]
    squares = tl.zeros((STATS.rows, STATS.bins), tl.float32)
    for first in tl.range(0, k, STATS.bins):
        columns = (first + tl.arange(0, STATS.bins))[None, :]
        mask = (row < m)[:, None] & (columns < k)
        h = tl.load(x + place * strides.x + columns, mask=mask, other=0.0).to(tl.float32)
        if MATH.residual:
            r = tl.load(residual + place * strides.residual + columns, mask=mask, other=0.0)
            h = add_residual(h, r, MATH)
            target = residual_out + place * strides.residual_out + columns
            tl.store(target, cast(h, residual_out.dtype.element_ty, MATH.hw_rounding), mask=mask & writes)
        squares = tl.fma(h, h, squares)
    for i in tl.static_range(1, 15):
        if STATS.bins >> i > 0:
            squares = tl.sum(tl.reshape(squares, (STATS.rows, STATS.bins >> i, 2)), axis=2)
    return reciprocal_rms(tl.reshape(squares, (STATS.rows,)), k, eps)


@triton.jit
def _spread(rs, j, STATS: tl.constexpr, TILE: tl.constexpr):
    """The reciprocal root of each lane's row in tile j of act."""
    row = act_row(j, TILE)
    spread = tl.zeros_like(row).to(tl.float32)
    for r in tl.static_range(STATS.rows):
        one = tl.sum(tl.where(tl.arange(0, STATS.rows) == r, rs, 0.0), axis=0)
        spread = tl.where(row == r, one, spread)
    return spread


@triton.jit
def _linear_rows_kernel(
    x, weight, weight_scale, gamma, residual, bias, add, out, residual_out, m, n, k, strides, eps, weight_offset,
    TILE: tl.constexpr, STATS: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """A tile of columns for up to ``rows`` rows of x. With a norm, all rows are in one tile."""
    launch_dependents(MATH.pdl)
    PARTS: tl.constexpr = TILE.pieces // TILE.warps
    SIDES: tl.constexpr = 2 if MATH.gated else 1
    WT: tl.constexpr = TILE.columns // (16 // PARTS if TILE.dot else 8 // PARTS)
    XT: tl.constexpr = TILE.rows // (8 // PARTS) if TILE.dot else TILE.rows
    tiles = tl.cdiv(n, TILE.columns // SIDES)
    block = tl.program_id(0)
    column0 = block % tiles * (TILE.columns // SIDES)
    first_row = block // tiles * TILE.rows
    matrix = (weight, column0, n, strides.weight, n)
    ws = first_weights(matrix, k, WT, TILE, MATH)
    wait(MATH.pdl)
    rows = (x + first_row.to(tl.int64) * strides.x, tl.minimum(m - first_row, TILE.rows), strides.x)
    norm = ()
    if MATH.normed or MATH.residual:
        rs = _statistics(x, residual, residual_out, m, k, strides, eps, block == 0, STATS, MATH)
        roots = ()
        for j in tl.static_range(XT):
            roots = roots + (_spread(rs, j, STATS, TILE),)
        norm = (gamma, weight_offset, residual, strides.residual, roots)
    scales = (weight_scale, strides.weight_scale)
    totals = stream(ws, rows, norm, matrix, scales, k, x.dtype.element_ty, WT, XT, TILE, MATH)
    HIGH: tl.constexpr = 8 // PARTS if TILE.dot else 1
    WIDE: tl.constexpr = 8 // PARTS
    STRIDE: tl.constexpr = 1 if TILE.dot else SIDES  # accumulators from one group of columns to the next
    for i in tl.static_range(WT if TILE.dot else WT // SIDES):
        for j in tl.static_range(XT):
            row = first_row + j * HIGH + tl.arange(0, HIGH)
            v = fold(totals[i * STRIDE * XT + j], TILE)
            if TILE.dot and MATH.gated:
                y, up = tl.split(tl.permute(tl.reshape(v, (2, WIDE, HIGH)), (1, 2, 0)))
                column = column0 + i * WIDE + tl.arange(0, WIDE)
            elif TILE.dot:
                y, up = v, v
                column = column0 + i * 2 * WIDE + tl.arange(0, 2 * WIDE)
            else:
                y, up = v, v
                if MATH.gated:
                    up = fold(totals[(i * STRIDE + 1) * XT + j], TILE)
                column = column0 + i * WIDE + tl.arange(0, WIDE)
            _finish(y, up, column, row, n, m, weight_scale, bias, add, out, strides, MATH)


@triton.jit
def _linear_tile_kernel(
    x, weight, weight_scale, bias, add, out, m, n, k, strides,
    TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """A tile of ``columns`` columns and ``rows`` rows, block of K by block, piece by piece."""
    launch_dependents(MATH.pdl)
    SIDES: tl.constexpr = 2 if MATH.gated else 1
    BLOCKS: tl.constexpr = MATH.scaled == "block" or MATH.scaled == "ue8m0_block"
    DTYPE: tl.constexpr = x.dtype.element_ty
    COLUMNS: tl.constexpr = TILE.columns
    down, across = tl.cdiv(m, TILE.rows), tl.cdiv(n, COLUMNS // SIDES)
    # programs that run at the same time share rows of weights, then rows of x
    block = tl.program_id(0)
    band = block // (TILE.group * across)
    height = tl.minimum(down - band * TILE.group, TILE.group)
    first_row = (band * TILE.group + block % (TILE.group * across) % height) * TILE.rows
    column0 = block % (TILE.group * across) // height * (COLUMNS // SIDES)
    place = tl.arange(0, COLUMNS)
    if MATH.gated:
        side = place // (COLUMNS // 2)
        local = tl.minimum(column0 + place % (COLUMNS // 2), n - 1) + side * n
    else:
        local = tl.minimum(column0 + place, n - 1)
    row = tl.minimum(first_row + tl.arange(0, TILE.rows), m - 1)
    # a step takes ``run`` blocks of one piece
    STEP: tl.constexpr = TILE.block * TILE.run
    ahead = tl.arange(0, STEP) // TILE.block * TILE.pieces
    inner = ahead * TILE.block + tl.arange(0, STEP) % TILE.block
    w_at = weight + local.to(tl.int64)[:, None] * strides.weight + inner[None, :]
    x_at = x + row.to(tl.int64)[:, None] * strides.x + inner[None, :]
    if BLOCKS:
        s_at = weight_scale + (local // SCALED).to(tl.int64) * strides.weight_scale
    blocks = tl.cdiv(k, TILE.block)
    HIGH: tl.constexpr = COLUMNS if TILE.weights_first else TILE.rows
    BROAD: tl.constexpr = TILE.rows if TILE.weights_first else COLUMNS
    total = tl.zeros((HIGH, BROAD), tl.float32)
    sums = tl.zeros((HIGH, BROAD), tl.float32)
    piece = 0
    b = 0
    wait(MATH.pdl)
    steps = 0
    for p in tl.static_range(TILE.pieces):
        steps += tl.cdiv(tl.maximum(blocks - p, 0), TILE.pieces * TILE.run)
    for _ in tl.range(0, steps, num_stages=TILE.stages):
        at = b * TILE.block
        if TILE.mask:
            w = tl.load(w_at + at, mask=(inner < k - at)[None, :], other=0)
            v = tl.load(x_at + at, mask=(inner < k - at)[None, :], other=0.0)
        else:
            w = tl.load(w_at + at)
            v = tl.load(x_at + at)
        if MATH.weight == "fp8" and MATH.hardware:
            w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            if DTYPE == tl.bfloat16:  # by way of float32, which is faster than the direct conversion
                w = w.to(tl.float32).to(tl.bfloat16)
        elif MATH.weight != "float":
            w = decode(w, DTYPE, MATH.weight)
        if not MATH.hw_rounding:  # the interpreter multiplies bfloat16 as integers
            w, v = w.to(tl.float32), v.to(tl.float32)
        if BLOCKS:
            s = scale_value(tl.load(s_at + b), MATH.scaled)
            sums = tl.fma(tl.dot(w, tl.trans(v)), tl.broadcast_to(s[:, None], (HIGH, BROAD)), sums)
        elif TILE.weights_first:
            sums = tl.dot(w, tl.trans(v), sums)
        else:
            sums = tl.dot(v, tl.trans(w), sums)
        # numbers are computed apart from tiles, or loads would wait for sums
        ends = b + TILE.pieces * TILE.run >= blocks
        piece += ends.to(tl.int32)
        b = tl.where(ends, piece, b + TILE.pieces * TILE.run)
        if ends:
            total += sums
            sums = tl.zeros((HIGH, BROAD), tl.float32)
    rows = first_row + tl.arange(0, TILE.rows)
    if not TILE.weights_first:
        total = tl.trans(total)
    if MATH.gated:
        y, up = tl.split(tl.permute(tl.reshape(total, (2, COLUMNS // 2, TILE.rows)), (1, 2, 0)))
        column = column0 + tl.arange(0, COLUMNS // 2)
    else:
        y, up = total, total
        column = column0 + place
    _finish(y, up, column, rows, n, m, weight_scale, bias, add, out, strides, MATH)


@triton.jit
def _tile_at(block, m, n, SIDES: tl.constexpr, TILE: tl.constexpr):
    """The first row and column of a program's tile. Programs that run at the same time share rows of
    weights, then rows of x.
    """
    down, across = tl.cdiv(m, TILE.rows), tl.cdiv(n, TILE.columns // SIDES)
    band = block // (TILE.group * across)
    height = tl.minimum(down - band * TILE.group, TILE.group)
    row0 = (band * TILE.group + block % (TILE.group * across) % height) * TILE.rows
    return row0, block % (TILE.group * across) // height * (TILE.columns // SIDES)


@triton.jit
def _linear_pieces_kernel(
    x, weight, weight_scale, bias, add, out, m, n, k, strides,
    TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """A tile of a product with 16-bit weights."""
    launch_dependents(MATH.pdl and not TILE.late)
    SIDES: tl.constexpr = 2 if MATH.gated else 1
    WIDE: tl.constexpr = TILE.columns // SIDES
    row0, column0 = _tile_at(tl.program_id(0), m, n, SIDES, TILE)
    place = tl.arange(0, TILE.columns)
    column = tl.minimum(column0 + place % WIDE, n - 1)
    if MATH.gated:
        column += place // WIDE * n
    row = row0 + tl.arange(0, TILE.rows)
    wait(MATH.pdl)
    total = product(x, weight, column, row, m, k, strides.x, strides.weight, TILE, MATH)
    launch_dependents(MATH.pdl and TILE.late)
    if MATH.gated:
        y, up = tl.split(tl.permute(tl.reshape(total, (2, WIDE, TILE.rows)), (1, 2, 0)))
    else:
        y, up = total, total
    _finish(y, up, column0 + tl.arange(0, WIDE), row, n, m, weight_scale, bias, add, out, strides, MATH)


@triton.jit
def _linear_descriptors_kernel(
    x_tiles, weight_tiles, weight_scale, bias, add, out, m, n, k, strides,
    TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The same for many rows, loaded by the copy engine."""
    launch_dependents(MATH.pdl and not TILE.late)
    SIDES: tl.constexpr = 2 if MATH.gated else 1
    WIDE: tl.constexpr = TILE.columns // SIDES
    row0, column0 = _tile_at(tl.program_id(0), m, n, SIDES, TILE)
    wait(MATH.pdl)
    totals = descriptor_product(x_tiles, weight_tiles, row0, (column0, n + column0), k, SIDES, TILE, MATH)
    launch_dependents(MATH.pdl and TILE.late)
    row = row0 + tl.arange(0, TILE.rows)
    column = column0 + tl.arange(0, WIDE)
    _finish(totals[0], totals[SIDES - 1], column, row, n, m, weight_scale, bias, add, out, strides, MATH)
