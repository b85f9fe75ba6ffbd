"""A sum over the columns of a tile in an order that no layout can change.

`tl.sum` adds in the order of a tile's layout, which follows the width of its loads, the number of warps and the tile's
shape. Here every addition is one of two numbers, and which two is a matter of column numbers alone: neighbours, three
times, then the first half with the second half until one is left; columns FOLD apart before any of that, as in a row
that is walked in blocks of FOLD. A tile's padding is zeros, which change nothing, so the result depends on the row's
length and values only. The build must not contract products into these additions
(``Build.contracts``): it would in one layout and not in another. With the usual layout, eight columns a thread, the
first three steps and the tile's repetitions stay within a thread; then come warps, then lanes.
"""

import triton
import triton.language as tl

FOLD = tl.constexpr(8192)


@triton.jit
def sum_columns(tile, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK] to [ROWS]; BLOCK is a power of two from 8 to 2 * FOLD."""
    total = tile
    LEFT: tl.constexpr = min(BLOCK, FOLD)
    if BLOCK > FOLD:
        total = tl.sum(tl.reshape(total, (ROWS, 2, LEFT)), axis=1)
    for i in tl.static_range(3):
        total = tl.sum(tl.reshape(total, (ROWS, LEFT >> (i + 1), 2)), axis=2)
    for i in tl.static_range(3, 24):
        if (LEFT >> i) > 1:
            total = tl.sum(tl.reshape(total, (ROWS, 2, LEFT >> (i + 1))), axis=1)
    return tl.reshape(total, (ROWS,))
