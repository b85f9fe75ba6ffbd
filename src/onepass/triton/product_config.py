"""How a product with few rows is divided: into tiles of columns, loads of k and rows of act per
program.

Results depend only on the pieces and blocks that K is cut into (`Order`), which follow from N, the
scales and the dtypes. The rest may depend on M and K too.
"""

from functools import cache
from typing import Final, NamedTuple

import torch

from ..specs.gemv_norm import MAX_ROWS, SCALE_BLOCK, WeightScale
from .chip import Chip
from .tuning import tuning
from .tuning.table import StreamCut

MOST_LOADS: Final = 32
"""Up to this many loads of aligned rows a kernel is unrolled; others loop."""
MOST_LOOPED: Final = 16
FEWEST_LOOPED: Final = 4
"""Loads in a stretch of a loop: as many as divide K evenly, or a few that are masked."""
WIDE: Final = 8192
"""Rows of weight from which on few pieces keep every multiprocessor busy."""


class Order(NamedTuple):
    """The order of summation: K in blocks of ``block`` columns, dealt to ``pieces`` pieces in turn."""

    pieces: int
    block: int


def order_of(act: torch.dtype, scaled: WeightScale, n: int) -> Order:
    """The order of summation of a product with ``n`` columns."""
    blocks = scaled in ("block", "ue8m0_block")
    if act == torch.float32:
        return Order(16, SCALE_BLOCK if blocks else 16)
    return Order(4 if n >= WIDE else 16, SCALE_BLOCK if blocks else 64)


class StreamTile(NamedTuple):
    """Tiles of ``columns`` columns and up to ``rows`` rows of act, with ``depth`` loads of weights
    and ``ahead`` of act in flight.

    ``dot``: tensor cores; otherwise float32 products. Before the previous kernel has ended, at most
    ``pace`` loads of weights are in flight; 0 requests all ``depth`` at once. A block takes
    ``loads`` loads of ``vec`` elements per thread. ``long``: the ``steps`` loads are those of a
    loop. ``words``: 8-bit weights are loaded as 32-bit words.
    """

    warps: int
    vec: int
    dot: bool
    columns: int
    rows: int
    steps: int
    long: bool
    mask: bool
    depth: int
    ahead: int
    pace: int
    pieces: int
    block: int
    loads: int
    words: bool


def _cut(m: int, bits8: bool, aligned: bool, order: Order, n: int, chip: Chip) -> StreamCut:
    """The measured cut for tensor cores."""
    table = tuning(chip).stream
    if m > MAX_ROWS and bits8 and not aligned and order.pieces == 16:
        return table.unaligned_8bit_cut
    cuts = table.cuts[order.pieces, 8 if bits8 else 16]
    return next(cut for most_m, most_n, cut in cuts if m <= most_m and n <= most_n)


def _stretch(blocks: int, loads: int) -> int:
    """Loads in a stretch of a loop over ``blocks`` blocks of each piece."""
    even = [b for b in range(1, blocks + 1) if blocks % b == 0 and b * loads <= MOST_LOOPED]
    most = max(even, default=1) * loads
    return most if most >= FEWEST_LOOPED else -(-FEWEST_LOOPED // loads) * loads


@cache
def stream_tile(
    act: torch.dtype, weight: torch.dtype, scaled: WeightScale, m: int, n: int, k: int, aligned: bool, chip: Chip
) -> StreamTile:
    """The tile of a call.

    Up to `MAX_ROWS` rows, the number of programs (the blocks of a trace) does not depend on
    alignment.
    """
    table = tuning(chip).stream
    order = order_of(act, scaled, n)
    dot, bits8 = act != torch.float32, weight.itemsize == 1
    vec = 16 // weight.itemsize if dot else 4
    loads = order.block // (4 * vec)
    if dot:
        warps, columns, depth, ahead, pace = _cut(m, bits8, aligned, order, n, chip)
        most = table.unaligned_8bit_rows if bits8 else table.unaligned_rows
        most = table.most_rows if aligned or m <= MAX_ROWS else most
        rows = min(most, max(8 * warps // order.pieces, 1 << (m - 1).bit_length()))
    else:
        warps, columns, depth, ahead, pace = 4, 4, 7 if m == 1 else 4, 4 if m == 1 else 2, 2
        rows = 1 if m == 1 else 4
    step = order.pieces * order.block
    steps = -(-k // step) * loads
    long = not aligned or steps > MOST_LOADS
    if long:
        steps = _stretch(-(-k // step) if k % step == 0 else 1, loads) if aligned else loads
    mask = k % (steps // loads * step) != 0
    depth, ahead = min(depth, steps), min(ahead, steps)
    pace = pace if aligned and not long else 0
    words = bits8 and dot and aligned and chip.casts_e4m3fn
    tile = (warps, vec, dot, columns, rows, steps, long, mask, depth, ahead, pace)
    return StreamTile(*tile, order.pieces, order.block, loads, words)


def describe_tile(tile: StreamTile, aligned: bool) -> str:
    """A readable name of a tile; equal names mean equal tiles."""
    shape = "dot" if tile.dot else "products"
    extent = f"{tile.steps}{'+' if tile.long else ''}{'m' if tile.mask else ''}"
    vec = f"v{tile.vec}{'' if aligned else 'u'}"
    return (
        f"{tile.columns}x{tile.rows}/{tile.warps}w/{shape}/{vec}/{extent} p{tile.pieces}b{tile.block} "
        f"d{tile.depth}a{tile.ahead}p{tile.pace}"
    )


def tile_registers(tile: StreamTile, aligned: bool, chip: Chip, normed: bool = False) -> int:
    """The register limit per thread; 0 leaves it to the assembler. A norm needs more than 128."""
    table = tuning(chip).stream
    if not aligned:
        return min(table.unaligned_registers, 2048 // tile.warps)
    # a 134th register made 4096 x 4096 two waves, 11.8 us instead of 9.0; by default 32 rows get 64
    # to 92 registers, 13.8 us instead of 12.5
    few, many = tile.warps == 4 and tile.columns == 8, tile.rows == table.most_rows and not tile.long
    return 128 if (few and not normed) or many else 0


WEIGHTS: Final = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
"""What kernels call 8-bit weights; others are "float"."""
