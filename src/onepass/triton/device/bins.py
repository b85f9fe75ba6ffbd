"""The sum of a row's squares in an order that no layout can change.

A row has PLACES places (`_config.row_places`: a matter of its length alone) and column c belongs to place ``c % PLACES``. Each place
adds up its own squares, one fused multiply-add after the other; then neighbouring places are added, then neighbouring sums, until one
is left. Every addition is of two given numbers, so neither the width of loads nor the number of warps, the tile's shape, the chip or
the version of the compiler has a say. Beyond the row's end there are zeros, which change nothing. The build must not contract
products into sums (``Build.contracts``): it would in one layout and not in another.

A row comes in chunks, of which SETS have all the places; a chunk's neighbours are added within a warp, and what is left, a value a
warp and set, is brought together in one exchange, the row's largest value with it. `tl.sum` would take two.
"""

import triton
import triton.language as tl

from .row import column_order


@triton.jit
def _add_neighbours(tile, ROWS: tl.constexpr, SIZE: tl.constexpr, LEFT: tl.constexpr):
    """[ROWS, SIZE] to [ROWS, LEFT]."""
    for i in tl.static_range(1, 15):
        if SIZE >> i >= LEFT:
            tile = tl.sum(tl.reshape(tile, (ROWS, SIZE >> i, 2)), axis=2)
    return tile


@triton.jit
def _larger_neighbours(tile, ROWS: tl.constexpr, SIZE: tl.constexpr, LEFT: tl.constexpr):
    """The same for the larger of two."""
    for i in tl.static_range(1, 15):
        if SIZE >> i >= LEFT:
            tile = tl.max(tl.reshape(tile, (ROWS, SIZE >> i, 2)), axis=2)
    return tile


@triton.jit
def neighbours(
    tile, ROWS: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr
):
    """A tile of sums, [ROWS, CHUNK] as `tile_columns` has them, to [ROWS, SIZE] in the order of columns: what a thread has side by side."""
    return _add_neighbours(column_order(tile, ROWS, CHUNK, WARPS, LANES), ROWS, CHUNK, SIZE)


@triton.jit
def squares_of_places(
    chunks, ROWS: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, SETS: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """What places add up to, in float32: SETS tiles of [ROWS, SIZE]."""
    sums = ()
    for first in tl.static_range(SETS):
        if first < COUNT:
            h = chunks[first].to(tl.float32)
            squares = h * h
            for c in tl.static_range(first + SETS, COUNT, SETS):
                h = chunks[c].to(tl.float32)
                squares = tl.fma(h, h, squares)
            sums = sums + (neighbours(squares, ROWS, CHUNK, SIZE, WARPS, LANES),)
        else:  # the row ends before
            sums = sums + (tl.zeros((ROWS, SIZE), tl.float32),)
    return sums


@triton.jit
def _sum_and_larger(a_sum, a_peak, b_sum, b_peak):
    return a_sum + b_sum, tl.maximum(a_peak, b_peak)


@triton.jit
def _merge_neighbours(tile, peaks, ROWS: tl.constexpr, SIZE: tl.constexpr, LEFT: tl.constexpr, EXACT: tl.constexpr):
    """`_add_neighbours`, and the larger ones of another tile. Together: then they lie alike, and nothing must move for them to meet."""
    for i in tl.static_range(1, 15):
        if SIZE >> i >= LEFT:
            pairs = tl.reshape(tile, (ROWS, SIZE >> i, 2))
            sizes = tl.reshape(peaks, (ROWS, SIZE >> i, 2))
            if EXACT:
                tile, peaks = tl.reduce((pairs, sizes), 2, _sum_and_larger)
            else:  # the interpreter walks a joint reduction element by element
                tile, peaks = tl.sum(pairs, axis=2), tl.max(sizes, axis=2)
    return tile, peaks


@triton.constexpr_function
def _by_twos(size):
    """The shape of ``size`` elements, a dimension for every bit of their number."""
    return (1,) + (2,) * (size.bit_length() - 1)


@triton.jit
def _join(tensors, COUNT: tl.constexpr):
    """COUNT tensors as one, their number the last dimensions."""
    for i in tl.static_range(1, 6):
        if COUNT >> i > 0:
            joined = ()
            for j in tl.static_range(COUNT >> i):
                joined = joined + (tl.join(tensors[j], tensors[j + (COUNT >> i)]),)
            tensors = joined
    return tensors[0]


@triton.jit
def _split(tensor, COUNT: tl.constexpr):
    """COUNT tensors of the last dimensions of one, in the order of their number's reversed bits: the first half has even numbers."""
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
    """Neighbours added until one is left, of tensors as `_split` leaves them: there the neighbours are half of all apart."""
    for i in tl.static_range(1, 9):
        if COUNT >> i > 0:
            added = ()
            for j in tl.static_range(COUNT >> i):
                added = added + (tensors[j] + tensors[j + (COUNT >> i)],)
            tensors = added
    return tensors[0]


@triton.jit
def _add_sets(tensors, COUNT: tl.constexpr):
    """The same of tensors in their own order."""
    for i in tl.static_range(1, 6):
        if COUNT >> i > 0:
            added = ()
            for j in tl.static_range(COUNT >> i):
                added = added + (tensors[2 * j] + tensors[2 * j + 1],)
            tensors = added
    return tensors[0]


@triton.jit
def _settle(tensor):
    """The [1] of one row number, whatever layout it is used in: for each, Triton would repeat the exchange."""
    return tl.zeros((1,), tensor.dtype) + tl.sum(tensor, axis=0)


@triton.jit
def sum_places(sums, ROWS: tl.constexpr, SIZE: tl.constexpr, SETS: tl.constexpr, PIECES: tl.constexpr):
    """SETS tiles of sums, [ROWS, SIZE], to [ROWS]; each of PIECES of a row is in one warp."""
    left = ()
    for i in tl.static_range(SETS):
        left = left + (_add_neighbours(sums[i], ROWS, SIZE, PIECES if ROWS == 1 else 1),)
    if ROWS > 1:
        return tl.reshape(_add_sets(left, SETS), (ROWS,))
    else:
        each = tl.reshape(_join(left, SETS), (PIECES, SETS))
        each = tl.reshape(tl.permute(each, (1, 0)), _by_twos(SETS * PIECES))
        return _settle(_add_all(_split(each, SETS * PIECES), SETS * PIECES))


@triton.jit
def sum_places_and_peak(
    sums, peaks, ROWS: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, SETS: tl.constexpr, PIECES: tl.constexpr,
    WARPS: tl.constexpr, LANES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`sum_places`, and the largest of the integers ``peaks``, [ROWS, CHUNK], along rows: in the same exchange."""
    LEFT: tl.constexpr = PIECES if ROWS == 1 else 1
    sizes = _larger_neighbours(column_order(peaks, ROWS, CHUNK, WARPS, LANES), ROWS, CHUNK, SIZE)
    total, peak = _merge_neighbours(sums[0], sizes, ROWS, SIZE, LEFT, EXACT)
    left = (total,)
    for i in tl.static_range(1, SETS):
        left = left + (_add_neighbours(sums[i], ROWS, SIZE, LEFT),)
    if ROWS > 1:
        return tl.reshape(_add_sets(left, SETS), (ROWS,)), tl.reshape(peak, (ROWS,))
    else:
        words = ()
        for i in tl.static_range(SETS):
            words = words + (left[i].to(tl.int32, bitcast=True),)
        for _ in tl.static_range(SETS):
            words = words + (peak,)
        each = tl.reshape(_join(words, 2 * SETS), (PIECES, 2 * SETS))
        each = tl.reshape(tl.permute(each, (1, 0)), _by_twos(2 * SETS * PIECES))
        pairs = _split(each, SETS * PIECES)
        totals = ()
        largest = tl.zeros((1,), tl.int32)
        for j in tl.static_range(SETS * PIECES):
            word, size = tl.split(pairs[j])
            totals = totals + (word.to(tl.float32, bitcast=True),)
            if j % SETS == 0:  # the others are the same again
                largest = tl.maximum(largest, size)
        return _settle(_add_all(totals, SETS * PIECES)), _settle(largest)
