"""``linear``: a product with what surrounds it. Constants are the named tuples of `linear`.

16-bit x has four kernels that sum in the order of `gpu.lib.product`, so a row has the same bytes in each. Float32 x
has one, which sums in the order of `gpu.lib.weight_stream` and can norm x as it is loaded.
"""

import triton
import triton.language as tl

from ...gpu.lib.codes import decode, decode_words
from ...gpu.lib.numbers import cast, convert
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.lib.product import descriptor_product, piece_product, product
from ...gpu.lib.row import reciprocal_rms
from ...gpu.lib.weight_stream import act_row, add_residual, first_weights, fold, stream
from ...gpu.prologue import tanh


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
    """The reciprocal RMS of each row, summed as `gpu.lib.reduce` does; one program stores the sum with
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
def _spread(rs, j, STATS: tl.constexpr):
    """The reciprocal root of each lane's row in tile j of act."""
    row = act_row(j)
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
    WIDE: tl.constexpr = 8 // PARTS
    WT: tl.constexpr = TILE.columns // WIDE
    XT: tl.constexpr = TILE.rows
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
            roots = roots + (_spread(rs, j, STATS),)
        norm = (gamma, weight_offset, residual, strides.residual, roots)
    scales = (weight_scale, strides.weight_scale)
    totals = stream(ws, rows, norm, matrix, scales, k, x.dtype.element_ty, WT, XT, TILE, MATH)
    for i in tl.static_range(WT // SIDES):
        for j in tl.static_range(XT):
            row = first_row + j + tl.arange(0, 1)
            y = fold(totals[i * SIDES * XT + j], TILE)
            up = y
            if MATH.gated:
                up = fold(totals[(i * SIDES + 1) * XT + j], TILE)
            column = column0 + i * WIDE + tl.arange(0, WIDE)
            _finish(y, up, column, row, n, m, weight_scale, bias, add, out, strides, MATH)


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
def _finish_tile(totals, row0, column0, n, m, weight_scale, bias, add, out, strides, MATH: tl.constexpr):
    """`_finish` of the tile at ``row0`` and ``column0`` whose ``totals`` hold the sums of each side."""
    row = row0 + tl.arange(0, totals[0].shape[1])
    column = column0 + tl.arange(0, totals[0].shape[0])
    _finish(totals[0], totals[1 if MATH.gated else 0], column, row, n, m, weight_scale, bias, add, out, strides, MATH)


@triton.jit
def _linear_pieces_kernel(
    x, weight, weight_scale, bias, add, out, m, n, k, strides,
    TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """A tile of a product."""
    launch_dependents(MATH.pdl and not TILE.late)
    SIDES: tl.constexpr = 2 if MATH.gated else 1
    WIDE: tl.constexpr = TILE.columns // SIDES
    row0, column0 = _tile_at(tl.program_id(0), m, n, SIDES, TILE)
    place = tl.arange(0, TILE.columns)
    column = tl.minimum(column0 + place % WIDE, n - 1)
    if MATH.gated:
        column += place // WIDE * n
    row = row0 + tl.arange(0, TILE.rows)
    wait(MATH.pdl and not TILE.static)
    steps = (strides.x, strides.weight, strides.weight_scale)
    total = product(x, weight, weight_scale, column, row, m, k, steps, TILE, MATH)
    wait(MATH.pdl and TILE.static)
    launch_dependents(MATH.pdl and TILE.late)
    totals = (total,)
    if MATH.gated:
        totals = tl.split(tl.permute(tl.reshape(total, (2, WIDE, TILE.rows)), (1, 2, 0)))
    _finish_tile(totals, row0, column0, n, m, weight_scale, bias, add, out, strides, MATH)


@triton.jit
def _descriptors(
    x_tiles, weight_tiles, weight_scale, bias, add, out, m, n, k, strides,
    TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The same for many rows, loaded by the copy engine."""
    launch_dependents(MATH.pdl and not TILE.late)
    SIDES: tl.constexpr = 2 if MATH.gated else 1
    row0, column0 = _tile_at(tl.program_id(0), m, n, SIDES, TILE)
    wait(MATH.pdl)
    totals = descriptor_product(
        x_tiles, weight_tiles, weight_scale, row0, (column0, n + column0), n * SIDES, k, strides.weight_scale,
        SIDES, TILE, MATH,
    )  # fmt: skip
    launch_dependents(MATH.pdl and TILE.late)
    _finish_tile(totals, row0, column0, n, m, weight_scale, bias, add, out, strides, MATH)


@triton.jit
def _linear_descriptors_kernel(
    x_tiles, weight_tiles, weight_scale, bias, add, out, m, n, k, strides,
    TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`_descriptors` of weights without a scale per block."""
    _descriptors(x_tiles, weight_tiles, weight_scale, bias, add, out, m, n, k, strides, TILE, MATH)


@triton.jit
def _linear_blocks_kernel(
    x_tiles, weight_tiles, weight_scale, bias, add, out, m, n, k, strides,
    TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`_descriptors` of decoded weights with a scale per block: a name of its own in profiles."""
    _descriptors(x_tiles, weight_tiles, weight_scale, bias, add, out, m, n, k, strides, TILE, MATH)


@triton.jit
def _linear_split_kernel(
    x_tiles, weight_tiles, weight_scale, bias, add, out, sums, counter, m, n, k, strides,
    TILE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The same with a program per piece. The last program of a tile to finish adds the pieces.

    ``sums`` holds the float32 sums of all programs. `ops.gemv_norm.gpu_kernel` describes how they become visible.
    """
    launch_dependents(MATH.pdl and not TILE.late)
    SIDES: tl.constexpr = 2 if MATH.gated else 1
    block = tl.program_id(0)
    tile, piece = block // TILE.pieces, block % TILE.pieces
    row0, column0 = _tile_at(tile, m, n, SIDES, TILE)
    wait(MATH.pdl)
    found = piece_product(x_tiles, weight_tiles, row0, (column0, n + column0), k, piece, SIDES, TILE, MATH)
    launch_dependents(MATH.pdl and TILE.late)
    HIGH: tl.constexpr = found[0].shape[0]
    BROAD: tl.constexpr = found[0].shape[1]
    inner = tl.arange(0, HIGH)[:, None] * BROAD + tl.arange(0, BROAD)[None, :]
    first = sums + tile.to(tl.int64) * (TILE.pieces * SIDES * HIGH * BROAD)
    for s in tl.static_range(SIDES):
        tl.store(first + (piece * SIDES + s) * (HIGH * BROAD) + inner, found[s])
    tl.debug_barrier()
    order = tl.atomic_add(counter + tile, 1, sem="acq_rel", scope="gpu")
    if order == TILE.pieces - 1:
        totals = ()
        for s in tl.static_range(SIDES):
            total = tl.zeros((HIGH, BROAD), tl.float32)
            for p in tl.static_range(TILE.pieces):
                total += tl.load(first + (p * SIDES + s) * (HIGH * BROAD) + inner, cache_modifier=".cg")
            totals = totals + (total if TILE.weights_first else tl.trans(total),)
        _finish_tile(totals, row0, column0, n, m, weight_scale, bias, add, out, strides, MATH)
        tl.store(counter + tile, 0)


@triton.jit
def _decode_kernel(weight, out, n, k, stride, TILE: tl.constexpr, MATH: tl.constexpr):
    """A tile of codes."""
    launch_dependents(MATH.pdl)
    across = tl.cdiv(k, TILE.columns)
    block = tl.program_id(0)
    row = (block // across * TILE.rows + tl.arange(0, TILE.rows))[:, None]
    column = (block % across * TILE.columns + tl.arange(0, TILE.columns))[None, :]
    inside = (row < n) & (column < k)
    wait(MATH.pdl)
    codes = tl.load(weight.to(tl.pointer_type(tl.int8)) + row.to(tl.int64) * stride + column, mask=inside, other=0)
    if MATH.hardware:
        values = decode_words(codes, out.dtype.element_ty, MATH.weight)
    else:
        values = decode(codes, out.dtype.element_ty, MATH.weight)
    tl.store(out + row.to(tl.int64) * k + column, values, mask=inside)
