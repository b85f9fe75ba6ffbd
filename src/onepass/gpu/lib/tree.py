"""A sum over the columns of a tile in an order that does not depend on the layout.

`tl.sum` adds in the order of a tile's layout, which depends on the width of its loads, the number
of warps and the tile's shape. Here the column numbers alone determine the operands of every
addition. Columns FOLD apart are added first, as in a row that is walked in blocks of FOLD; then
neighbours, three times; then the first half and the second half, until one sum is left. A tile's
padding is zeros, which change nothing, so the result depends on the row's length and values only.
The build must not contract products into these additions (``Build.contracts``), because contraction
would depend on the layout.

A row may also come in chunks, each a tile, whose columns are reduced to sums of eight as they
arrive. Halves of the row are then different chunks, so that most additions stay within a thread,
and with one warp along a row none leaves its warp.
"""

import triton
import triton.language as tl

FOLD = tl.constexpr(8192)


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
