"""Sums in fixed orders: the one place that says in which order a kernel adds.

`tl.sum` adds in the order of a tile's layout, which depends on the width of its loads, the number of warps and the
tile's shape. Here, both operands of every addition are specified by the numbers of columns, so no tile, chip or compiler
version changes a result. Padding is zeros, which change nothing. Builds must not contract products into these
additions (``Build.contracts``), because contraction would depend on the layout.

- Bins (`bin_squares`, `sum_bins`): rows of rms_norm, layer_norm, rms_norm_fused_quant, and linear where it norms.
- Tree (`sum_eights`, `sum_chunks`, `sum_columns`): rows and heads of the other norms.
- Fours (`add_four`): what fragments of gemv_and_partial_norm, and of linear with float32 x, leave in the lanes of a warp.
- From the left (`add_from_left`): pieces of K in linear, and of a score in attend_latents.

Tensor cores add along K: `product_tile.Order`, `product`, `weight_stream` and `gemv_stream` say in which pieces, and
`ops.attention.spec.SPLIT` into which splits attention cuts its context. The table in docs/numerics.md, "Orders of sums",
has every op, why it sums so, and the orders on CPUs.

**Bins.** A row has bins (`gpu_tile.row_bins`; their number depends only on the row's length), and
column c belongs to bin ``c % bins``. Each bin sums its own squares, one fused multiply-add after
the other. Then neighbouring bins are added, then neighbouring sums, until one is left. A row comes in chunks (``TILE``
is a `gpu_tile.RowConfig`), of which ``sets`` hold all the bins. Neighbours within a chunk are added within a warp. What
is left, one value per warp and set, is exchanged once, together with the row's largest value; `tl.sum` would need two
exchanges.

**Tree.** Columns FOLD apart are added first, as in a row that is walked in blocks of FOLD; then neighbours, three
times; then the first half and the second half, until one sum is left. A row may also come in chunks, each a tile, whose
columns are reduced to sums of eight as they arrive. Halves of the row are then different chunks, so that most additions
stay within a thread, and with one warp along a row none leaves its warp.
"""

import triton
import triton.language as tl

from .row import column_order

FOLD = tl.constexpr(8192)


# --- fours, and from the left ---------------------------------------------------------------------------------------


@triton.jit
def add_pairs(values):
    """Add the two elements of the last dimension."""
    even, odd = tl.split(values)
    return even + odd


@triton.jit
def add_four(values, A: tl.constexpr, B: tl.constexpr):
    """``[A, B, 4]`` to ``[A, B]`` as ``(v0 + v1) + (v2 + v3)``."""
    return add_pairs(add_pairs(tl.reshape(values, (A, B, 2, 2))))


@triton.jit
def add_from_left(values, A: tl.constexpr, B: tl.constexpr, COUNT: tl.constexpr):
    """``[A, B, COUNT]`` to ``[A, B]``: the first plus the second, plus the third, and so on."""
    parts = (values,)
    for i in tl.static_range(5):
        if COUNT >> (i + 1) > 0:
            halves = ()
            for j in tl.static_range(1 << i):
                grouped = tl.permute(tl.reshape(parts[j], (A, B, 2, COUNT >> (i + 1))), (0, 1, 3, 2))
                low, high = tl.split(grouped)
                halves = halves + (low, high)
            parts = halves
    total = tl.reshape(parts[0], (A, B)) + 0.0  # no negative zeros
    for j in tl.static_range(1, COUNT):
        total += tl.reshape(parts[j], (A, B))
    return total


# --- bins -----------------------------------------------------------------------------------------------------------


@triton.jit
def _add_neighbours(tile, ROWS: tl.constexpr, SIZE: tl.constexpr, LEFT: tl.constexpr):
    """[ROWS, SIZE] to [ROWS, LEFT]."""
    for i in tl.static_range(1, 15):
        if SIZE >> i >= LEFT:
            tile = tl.sum(tl.reshape(tile, (ROWS, SIZE >> i, 2)), axis=2)
    return tile


@triton.jit
def _larger_neighbours(tile, ROWS: tl.constexpr, SIZE: tl.constexpr, LEFT: tl.constexpr):
    """`_add_neighbours` with the maximum instead of the sum."""
    for i in tl.static_range(1, 15):
        if SIZE >> i >= LEFT:
            tile = tl.max(tl.reshape(tile, (ROWS, SIZE >> i, 2)), axis=2)
    return tile


@triton.jit
def neighbours(tile, TILE: tl.constexpr):
    """Reduce a tile of sums, [rows, chunk] as in `tile_columns`, to [rows, size] in column order:
    add each thread's adjacent columns.
    """
    return _add_neighbours(column_order(tile, TILE), TILE.rows, TILE.chunk, TILE.size)


@triton.jit
def bin_squares(chunks, TILE: tl.constexpr):
    """The sums of the bins, in float32: ``sets`` tiles of [rows, size]."""
    sums = ()
    for first in tl.static_range(TILE.sets):
        if first < TILE.count:
            h = chunks[first].to(tl.float32)
            squares = h * h
            for c in tl.static_range(first + TILE.sets, TILE.count, TILE.sets):
                h = chunks[c].to(tl.float32)
                squares = tl.fma(h, h, squares)
            sums = sums + (neighbours(squares, TILE),)
        else:  # the row ends before this chunk
            sums = sums + (tl.zeros((TILE.rows, TILE.size), tl.float32),)
    return sums


@triton.jit
def bin_values(chunks, TILE: tl.constexpr):
    """`bin_squares` of the values themselves."""
    sums = ()
    for first in tl.static_range(TILE.sets):
        if first < TILE.count:
            values = chunks[first].to(tl.float32)
            for c in tl.static_range(first + TILE.sets, TILE.count, TILE.sets):
                values += chunks[c].to(tl.float32)
            sums = sums + (neighbours(values, TILE),)
        else:  # the row ends before this chunk
            sums = sums + (tl.zeros((TILE.rows, TILE.size), tl.float32),)
    return sums


@triton.jit
def _sum_and_larger(a_sum, a_peak, b_sum, b_peak):
    return a_sum + b_sum, tl.maximum(a_peak, b_peak)


@triton.jit
def _merge_neighbours(tile, peaks, LEFT: tl.constexpr, TILE: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """`_add_neighbours`, and the maximum of ``peaks``, in one reduction to share a layout."""
    for i in tl.static_range(1, 15):
        if TILE.size >> i >= LEFT:
            pairs = tl.reshape(tile, (TILE.rows, TILE.size >> i, 2))
            sizes = tl.reshape(peaks, (TILE.rows, TILE.size >> i, 2))
            if HW_ROUNDING:
                tile, peaks = tl.reduce((pairs, sizes), 2, _sum_and_larger)
            else:  # the interpreter walks a joint reduction element by element
                tile, peaks = tl.sum(pairs, axis=2), tl.max(sizes, axis=2)
    return tile, peaks


@triton.constexpr_function
def _by_twos(size):
    """The shape of ``size`` elements with one dimension of size 2 per bit of the index."""
    return (1,) + (2,) * (size.bit_length() - 1)


@triton.jit
def _join(tensors, COUNT: tl.constexpr):
    """COUNT tensors as one; the last dimensions are the index."""
    for i in tl.static_range(1, 6):
        if COUNT >> i > 0:
            joined = ()
            for j in tl.static_range(COUNT >> i):
                joined = joined + (tl.join(tensors[j], tensors[j + (COUNT >> i)]),)
            tensors = joined
    return tensors[0]


@triton.jit
def _split(tensor, COUNT: tl.constexpr):
    """COUNT tensors along the last dimensions of one, in bit-reversed order."""
    tensors = (tensor,)
    for i in tl.static_range(0, 8):
        if COUNT >> (i + 1) > 0:
            halves = ()
            for j in tl.static_range(1 << i):
                even, odd = tl.split(tensors[j])
                halves = halves + (even, odd)
            tensors = halves
    return tensors


@triton.jit
def _add_all(tensors, COUNT: tl.constexpr):
    """Add neighbours, which after `_split` are half of all tensors apart, until one is left."""
    for i in tl.static_range(1, 9):
        if COUNT >> i > 0:
            added = ()
            for j in tl.static_range(COUNT >> i):
                added = added + (tensors[j] + tensors[j + (COUNT >> i)],)
            tensors = added
    return tensors[0]


@triton.jit
def _add_sets(tensors, COUNT: tl.constexpr):
    """`_add_all` for tensors in natural order."""
    for i in tl.static_range(1, 6):
        if COUNT >> i > 0:
            added = ()
            for j in tl.static_range(COUNT >> i):
                added = added + (tensors[2 * j] + tensors[2 * j + 1],)
            tensors = added
    return tensors[0]


@triton.jit
def _settle(tensor):
    """A [1] tensor for any layout; otherwise Triton would repeat the exchange for each layout."""
    return tl.zeros((1,), tensor.dtype) + tl.sum(tensor, axis=0)


@triton.jit
def sum_bins(sums, TILE: tl.constexpr):
    """``sets`` tiles of [rows, size] to [rows]; each piece of a row is in one warp."""
    COUNT: tl.constexpr = TILE.sets * TILE.pieces
    left = ()
    for i in tl.static_range(TILE.sets):
        left = left + (_add_neighbours(sums[i], TILE.rows, TILE.size, TILE.pieces if TILE.rows == 1 else 1),)
    if TILE.rows > 1:
        return tl.reshape(_add_sets(left, TILE.sets), (TILE.rows,))
    else:
        each = tl.reshape(_join(left, TILE.sets), (TILE.pieces, TILE.sets))
        each = tl.reshape(tl.permute(each, (1, 0)), _by_twos(COUNT))
        return _settle(_add_all(_split(each, COUNT), COUNT))


@triton.jit
def sum_bins_and_peak(sums, peaks, TILE: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """`sum_bins`, and the largest of ``peaks``, [rows, chunk], per row, in one exchange."""
    COUNT: tl.constexpr = TILE.sets * TILE.pieces
    LEFT: tl.constexpr = TILE.pieces if TILE.rows == 1 else 1
    sizes = _larger_neighbours(column_order(peaks, TILE), TILE.rows, TILE.chunk, TILE.size)
    total, peak = _merge_neighbours(sums[0], sizes, LEFT, TILE, HW_ROUNDING)
    left = (total,)
    for i in tl.static_range(1, TILE.sets):
        left = left + (_add_neighbours(sums[i], TILE.rows, TILE.size, LEFT),)
    if TILE.rows > 1:
        return tl.reshape(_add_sets(left, TILE.sets), (TILE.rows,)), tl.reshape(peak, (TILE.rows,))
    else:
        bits = ()
        for i in tl.static_range(TILE.sets):
            bits = bits + (left[i].to(tl.int32, bitcast=True),)
        for _ in tl.static_range(TILE.sets):
            bits = bits + (peak,)
        each = tl.reshape(_join(bits, 2 * TILE.sets), (TILE.pieces, 2 * TILE.sets))
        each = tl.reshape(tl.permute(each, (1, 0)), _by_twos(2 * COUNT))
        pairs = _split(each, COUNT)
        totals = ()
        largest = tl.zeros((1,), tl.int32)
        for j in tl.static_range(COUNT):
            word, size = tl.split(pairs[j])
            totals = totals + (word.to(tl.float32, bitcast=True),)
            if j % TILE.sets == 0:  # the others are duplicates
                largest = tl.maximum(largest, size)
        return _settle(_add_all(totals, COUNT)), _settle(largest)


# --- tree -----------------------------------------------------------------------------------------------------------


@triton.jit
def sum_eights(tile, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, SIZE] to [ROWS, SIZE / 8]."""
    for i in tl.static_range(3):
        tile = tl.sum(tl.reshape(tile, (ROWS, SIZE >> (i + 1), 2)), axis=2)
    return tile


@triton.jit
def _add_halves(tiles, COUNT: tl.constexpr, HALF: tl.constexpr):
    """The first COUNT of ``2 * HALF`` tiles, those from HALF on added to the others."""
    merged = ()
    for c in tl.static_range(min(COUNT, HALF)):
        if c + HALF < min(COUNT, 2 * HALF):
            merged = merged + (tiles[c] + tiles[c + HALF],)
        else:
            merged = merged + (tiles[c],)
    return merged


@triton.jit
def sum_chunks(eights, ROWS: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """COUNT chunks of a row of BLOCK columns, each reduced by `sum_eights`, to [ROWS]."""
    for i in tl.static_range(1, 16):
        if (BLOCK // CHUNK) >> i > 0:
            eights = _add_halves(eights, COUNT, (BLOCK // CHUNK) >> i)
    total = eights[0]
    for i in tl.static_range(4, 24):
        if (CHUNK >> i) > 0:
            total = tl.sum(tl.reshape(total, (ROWS, 2, CHUNK >> i)), axis=1)
    return tl.reshape(total, (ROWS,))


@triton.jit
def sum_columns(tile, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK] to [ROWS]; BLOCK is a power of two from 8 to 2 * FOLD."""
    LEFT: tl.constexpr = min(BLOCK, FOLD)
    if BLOCK > FOLD:
        tile = tl.sum(tl.reshape(tile, (ROWS, 2, LEFT)), axis=1)
    return sum_chunks((sum_eights(tile, ROWS, LEFT),), ROWS, LEFT, 1, LEFT)
