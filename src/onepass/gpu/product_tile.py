"""How a product is divided among programs.

Results depend only on the pieces that K is cut into (`Order`), which follow from N, the scales and
the dtypes. The rest may depend on M and K too. Products of 16-bit x take a `PieceTile`, those of float32 x
a `StreamTile`.
"""

from functools import cache
from typing import Final, NamedTuple

import torch

from ..formats import SCALE_BLOCK, WeightScale
from .chip import Chip, tuning
from .tuning.table import PieceCut, PieceKind

GRAIN: Final = 64
"""Columns by which neighboring pieces of K grow; with a scale per block, `SCALE_BLOCK`."""
MOST_LOADS: Final = 32
"""Up to this many loads of aligned rows a kernel is unrolled; others loop."""
MOST_LOOPED: Final = 16
FEWEST_LOOPED: Final = 4
"""Loads in a stretch of a loop: as many as divide K evenly, or a few that are masked."""
WIDE: Final = 7168
"""Rows of 16-bit weights from which on one piece keeps every multiprocessor busy."""


NARROW: Final = 2640
"""Rows of 8-bit weights up to which a multiprocessor has one program, which needs more warps and pieces."""


MOST_STATIC: Final = 16
"""Rows up to which static weights are read before the previous kernel has ended: decode steps."""


class Order(NamedTuple):
    """The order of summation over K, in ``pieces`` pieces that are added from the first to the last.

    ``block`` columns at a time are dealt to the pieces in turn. If it is 0, pieces are
    neighbors of equal length, a multiple of ``grain`` (`gpu.lib.product`).
    """

    pieces: int
    block: int
    grain: int


def order_of(act: torch.dtype, weight: torch.dtype, scaled: WeightScale, n: int) -> Order:
    """The order of summation of a product with ``n`` columns."""
    blocks = has_blocks(scaled)
    if act == torch.float32:
        return Order(16, SCALE_BLOCK if blocks else 16, 0)
    if weight.itemsize == 2:
        return Order(1 if n >= WIDE else 4, 0, GRAIN)
    return Order(8 if n <= NARROW else 4, 0, SCALE_BLOCK if blocks else GRAIN)


def has_blocks(scaled: WeightScale) -> bool:
    """Whether each block of weights has a scale."""
    return scaled in ("block", "ue8m0_block")


class PieceTile(NamedTuple):
    """Tiles of ``columns`` columns and ``rows`` rows; a step takes ``step`` columns of K, and
    ``stages`` steps are on their way.

    ``kind``: "cube", "flat", "descriptors", "split" or "decoded" (`gpu.lib.product`). ``grain``: see `Order`. ``aligned``: rows start on
    16 bytes. ``mask``: a step may reach beyond its piece. ``weights_first``: weights are a tensor core's left side. ``late``: the next
    kernel may start after the sums instead of at once. ``group`` tiles below each other run at the same time. ``static``: the first
    weights are requested before the previous kernel has ended.
    """

    kind: PieceKind
    columns: int
    rows: int
    step: int
    stages: int
    warps: int
    pieces: int
    grain: int
    aligned: bool
    mask: bool
    weights_first: bool
    late: bool
    group: int
    static: bool = False


def is_contiguous(act: torch.dtype) -> bool:
    """Whether a product takes a `PieceTile`."""
    return act != torch.float32


def _piece_cut(m: int, n: int, k: int, pieces: int, codes: bool, static: bool, kinds: set[str], chip: Chip) -> PieceCut:
    """The measured tile: the first in the chip's table that is for such a product."""
    table = tuning(chip).pieces
    cuts = table.codes if codes else table.cuts[pieces]
    if static:
        cuts = (table.static_codes if codes else table.static_cuts[pieces]) + cuts
    return next(
        cut for most_m, most_n, most_k, cut in cuts if m <= most_m and n <= most_n and k <= most_k and cut.kind in kinds
    )


@cache
def piece_tile(
    weight: torch.dtype,
    scaled: WeightScale,
    m: int,
    n: int,
    k: int,
    aligned: bool,
    chip: Chip,
    descriptors: bool,
    static: bool = False,
) -> PieceTile:
    """The tile of a product of 16-bit x.

    ``descriptors``: the kernel can use the copy engine, which needs aligned rows. ``static``: it may read weights before the
    previous kernel has ended. On chips whose
    tensor cores may add in another order for another instruction, all tiles are cubes. Up to
    `MAX_ROWS` rows, the number of programs (the blocks of a trace) does not depend on alignment or scales.
    """
    codes = weight.itemsize == 1
    pieces, _, grain = order_of(torch.bfloat16, weight, scaled, n)
    kinds = {"cube"}
    if chip.sums_sixteen:
        kinds |= {"flat", "descriptors", "split", "decoded"} if aligned and descriptors else {"flat"}
    static = static and chip.has_pdl and aligned and m <= MOST_STATIC
    cut = _piece_cut(m, n, k, pieces, codes, static, kinds, chip)
    if cut.kind == "decoded" and has_blocks(scaled) and cut.step != SCALE_BLOCK:  # a step has one scale
        cut = tuning(chip).pieces.blocks
    length = -(-k // (pieces * grain)) * grain
    rows, step, stages = cut.rows, cut.step, cut.stages
    if codes and cut.kind != "decoded":
        if step > SCALE_BLOCK and (length % step or has_blocks(scaled)):  # a step has one scale
            step, stages = SCALE_BLOCK, cut.stages * 3 // 2
        if step < grain:  # and a scale one step
            step, stages = grain, 2
        if cut.kind == "flat" and length % step:
            step, stages = GRAIN, stages * step // GRAIN
        if not aligned:  # each element is loaded into a register of its own
            step, stages = grain, 2
    elif cut.kind != "cube" and pieces > 1 and length % step:  # blocks always divide a piece
        step, stages = GRAIN, cut.stages * cut.step // GRAIN
    if chip.backend == "hip":  # with less shared memory
        rows, step, stages = rows if grain == GRAIN else min(rows, 128 // pieces), grain, 2
    mask = pieces * length != k or length % step != 0
    first = (codes and cut.kind != "decoded") or rows <= 64
    group = tuning(chip).pieces.group
    warps = pieces if codes and cut.kind == "cube" else cut.warps  # each decodes other weights
    tile = (cut.kind, cut.columns, rows, step, stages, warps)
    return PieceTile(*tile, pieces, grain, aligned, mask, first, cut.late, group, static)


def describe_pieces(tile: PieceTile) -> str:
    """A readable name of a tile; equal names mean equal tiles."""
    options = (("m", tile.mask), ("u", not tile.aligned), ("l", tile.late), ("s", tile.static))
    marks = "".join(mark for mark, chosen in options if chosen)
    return (
        f"{tile.kind} {tile.columns}x{tile.rows}x{tile.step}/{tile.warps}w/s{tile.stages}g{tile.group}{marks} "
        f"p{tile.pieces}"
    )


class StreamTile(NamedTuple):
    """Tiles of ``columns`` columns and up to ``rows`` rows of act, with ``depth`` loads of weights
    and ``ahead`` of act in flight, multiplied in float32.

    Before the previous kernel has ended, at most ``pace`` loads of weights are in flight; 0 requests all
    ``depth`` at once. A block takes ``loads`` loads of ``vec`` elements per thread. ``long``: the ``steps``
    loads are those of a loop.
    """

    warps: int
    vec: int
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


def _stretch(blocks: int, loads: int) -> int:
    """Loads in a stretch of a loop over ``blocks`` blocks of each piece."""
    even = [b for b in range(1, blocks + 1) if blocks % b == 0 and b * loads <= MOST_LOOPED]
    most = max(even, default=1) * loads
    return most if most >= FEWEST_LOOPED else -(-FEWEST_LOOPED // loads) * loads


@cache
def stream_tile(scaled: WeightScale, m: int, k: int, aligned: bool) -> StreamTile:
    """The tile of a call with float32 x.

    Up to `MAX_ROWS` rows, the number of programs (the blocks of a trace) does not depend on
    alignment.
    """
    pieces, block, _ = order_of(torch.float32, torch.float32, scaled, 1)
    warps, vec, columns, pace = 4, 4, 4, 2
    rows, depth, ahead = (1, 7, 4) if m == 1 else (4, 4, 2)
    loads = block // (4 * vec)
    step = pieces * block
    steps = -(-k // step) * loads
    long = not aligned or steps > MOST_LOADS
    if long:
        steps = _stretch(-(-k // step) if k % step == 0 else 1, loads) if aligned else loads
    mask = k % (steps // loads * step) != 0
    pace = pace if aligned and not long else 0
    tile = (warps, vec, columns, rows, steps, long, mask, min(depth, steps), min(ahead, steps), pace)
    return StreamTile(*tile, pieces, block, loads)


def describe_tile(tile: StreamTile, aligned: bool) -> str:
    """A readable name of a tile; equal names mean equal tiles."""
    extent = f"{tile.steps}{'+' if tile.long else ''}{'m' if tile.mask else ''}"
    vec = f"v{tile.vec}{'' if aligned else 'u'}"
    return (
        f"{tile.columns}x{tile.rows}/{tile.warps}w/products/{vec}/{extent} p{tile.pieces}b{tile.block} "
        f"d{tile.depth}a{tile.ahead}p{tile.pace}"
    )


def tile_registers(tile: StreamTile, aligned: bool, chip: Chip) -> int:
    """The register limit per thread; 0 leaves it to the assembler."""
    return 0 if aligned else min(tuning(chip).stream.unaligned_registers, 2048 // tile.warps)


WEIGHTS: Final = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
"""What kernels call 8-bit weights; others are "float"."""
