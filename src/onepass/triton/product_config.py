"""How a product is divided among programs.

Results depend only on the pieces that K is cut into (`Order`), which follow from N, the scales and
the dtypes. The rest may depend on M and K too. 16-bit weights take a `PieceTile`. 8-bit and float32
weights of few rows take a `StreamTile`.
"""

from functools import cache
from typing import Final, NamedTuple

import torch

from ..specs.gemv_norm import MAX_ROWS, SCALE_BLOCK, WeightScale
from .chip import Chip
from .tuning import tuning
from .tuning.table import PieceKind, StreamCut

GRAIN: Final = 64
"""Columns by which contiguous pieces of K grow."""
MOST_LOADS: Final = 32
"""Up to this many loads of aligned rows a kernel is unrolled; others loop."""
MOST_LOOPED: Final = 16
FEWEST_LOOPED: Final = 4
"""Loads in a stretch of a loop: as many as divide K evenly, or a few that are masked."""
WIDE: Final = 8192
"""Rows of 8-bit weights from which on few pieces keep every multiprocessor busy."""
WIDE_16: Final = 7168
"""Rows of 16-bit weights from which on one piece does."""


class Order(NamedTuple):
    """The order of summation over K, in ``pieces`` pieces that are added from the first to the last.

    ``block`` columns at a time are dealt to the pieces in turn. If it is 0, pieces are
    neighbours of equal length (`device.product`).
    """

    pieces: int
    block: int


def order_of(act: torch.dtype, weight: torch.dtype, scaled: WeightScale, n: int) -> Order:
    """The order of summation of a product with ``n`` columns."""
    blocks = scaled in ("block", "ue8m0_block")
    if act == torch.float32:
        return Order(16, SCALE_BLOCK if blocks else 16)
    if weight.itemsize == 2:
        return Order(1 if n >= WIDE_16 else 4, 0)
    return Order(4 if n >= WIDE else 16, SCALE_BLOCK if blocks else 64)


class PieceTile(NamedTuple):
    """Tiles of ``columns`` columns and ``rows`` rows; a step takes ``step`` columns of K, and
    ``stages`` steps are on their way.

    ``kind``: "cube", "flat" or "descriptors" (`device.product`). ``mask``: a step may reach beyond its
    piece. ``weights_first``: weights are a tensor core's left side. ``late``: the next kernel may start
    after the sums instead of at once. ``group`` tiles below each other run at the same time.
    """

    kind: PieceKind
    columns: int
    rows: int
    step: int
    stages: int
    warps: int
    pieces: int
    mask: bool
    weights_first: bool
    late: bool
    group: int


def is_contiguous(act: torch.dtype, weight: torch.dtype) -> bool:
    """Whether a product takes a `PieceTile`."""
    return act != torch.float32 and weight.itemsize == 2


@cache
def piece_tile(m: int, n: int, k: int, aligned: bool, chip: Chip, descriptors: bool) -> PieceTile:
    """The tile of a product with 16-bit weights.

    ``descriptors``: the kernel can use the copy engine, which needs aligned rows. On chips whose
    tensor cores may add in another order for another instruction, all tiles are cubes. Up to
    `MAX_ROWS` rows, the number of programs (the blocks of a trace) does not depend on alignment.
    """
    table = tuning(chip).pieces
    pieces = order_of(torch.bfloat16, torch.bfloat16, "none", n).pieces
    kinds = {"cube"}
    if chip.sums_sixteen:
        kinds |= {"flat", "descriptors"} if aligned and descriptors else {"flat"}
    cut = next(cut for most_m, most_n, cut in table.cuts[pieces] if m <= most_m and n <= most_n and cut.kind in kinds)
    length = -(-k // (pieces * GRAIN)) * GRAIN
    step, stages = cut.step, cut.stages
    if cut.kind != "cube" and pieces > 1 and length % step:
        step, stages = GRAIN, cut.stages * cut.step // GRAIN
    if chip.backend == "hip":  # with less shared memory
        step, stages = GRAIN, 2
    mask = pieces * length != k or length % step != 0
    first = cut.rows <= 64
    return PieceTile(
        cut.kind, cut.columns, cut.rows, step, stages, cut.warps, pieces, mask, first, cut.late, table.group
    )


def describe_pieces(tile: PieceTile, aligned: bool) -> str:
    """A readable name of a tile; equal names mean equal tiles."""
    marks = "".join(mark for mark, chosen in (("m", tile.mask), ("u", not aligned), ("l", tile.late)) if chosen)
    return (
        f"{tile.kind} {tile.columns}x{tile.rows}x{tile.step}/{tile.warps}w/s{tile.stages}g{tile.group}{marks} "
        f"p{tile.pieces}"
    )


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


def _cut(m: int, aligned: bool, order: Order, n: int, chip: Chip) -> StreamCut:
    """The measured cut for tensor cores."""
    table = tuning(chip).stream
    if m > MAX_ROWS and not aligned and order.pieces == 16:
        return table.unaligned_cut
    cuts = table.cuts[order.pieces]
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
    """The tile of a call with float32 x or 8-bit weights.

    Up to `MAX_ROWS` rows, the number of programs (the blocks of a trace) does not depend on
    alignment.
    """
    table = tuning(chip).stream
    order = order_of(act, weight, scaled, n)
    dot = act != torch.float32
    vec = 16 // weight.itemsize if dot else 4
    loads = order.block // (4 * vec)
    if dot:
        warps, columns, depth, ahead, pace = _cut(m, aligned, order, n, chip)
        most = table.most_rows if aligned or m <= MAX_ROWS else table.unaligned_rows
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
    words = dot and aligned and chip.casts_e4m3fn
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
    # by default 32 rows get 64 to 92 registers, 13.8 us instead of 12.5
    few, many = tile.warps == 4 and tile.columns == 8, tile.rows == table.most_rows and not tile.long
    return 128 if (few and not normed) or many else 0


WEIGHTS: Final = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
"""What kernels call 8-bit weights; others are "float"."""
