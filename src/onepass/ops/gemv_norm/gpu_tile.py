"""The tile of a GEMV and of the norms that follow it.

Results depend on the order of summation alone. Products of 16-bit act have an order of their own (`gpu.lib.gemv_stream`),
the same for every call. Those of float32 act have `linear`'s (`product_tile`).

A module of its own, because it must not import Triton.
"""

from functools import cache
from typing import Final, NamedTuple

import torch

from ...formats import WeightScale
from ...gpu.chip import INTERPRETER, Chip, tuning
from ...gpu.product_tile import StreamTile, is_contiguous, stream_tile
from ...gpu.tuning.table import GemvCut
from .launch import MAX_ROWS, MOST_SHARES, programs

CHUNK: Final = 512
"""Columns that 4 warps norm at a time: 4 for each thread."""
MOST_CHUNKS: Final = 8
"""Chunks of a row that are held in registers; longer rows are read twice. A multiple of the kernel's PHASES."""
MOST_COUNTED: Final = 4095
"""Programs of a segment that can share its norm: what `gpu.lib.arrivals` counts."""
MOST_STEPS: Final = 28
"""With up to this many whole steps a kernel is unrolled for that number; others loop."""


class NormTile(NamedTuple):
    """A row is normed ``side`` chunks at once: each segment in ``tiles`` such tiles; ``longs`` walk more. ``shared``: each row by
    another program. ``split``: as many programs have sums of the same columns.
    """

    split: int
    shared: bool
    side: int
    tiles: tuple[int, ...]
    longs: tuple[bool, ...]


class FragmentTile(NamedTuple):
    """Tiles of ``columns`` columns and up to ``rows`` rows of act, with ``depth`` steps of weights
    and ``ahead`` of act in flight. ``split`` programs share as many times the normed columns, and each sums a part of K.

    Before the previous kernel has ended, at most ``pace`` steps of weights are in flight; 0 requests all
    ``depth`` at once. ``long``: the ``steps`` are those of a loop. A thread loads ``vec`` weights at a time.
    """

    warps: int
    vec: int
    columns: int
    rows: int
    split: int
    steps: int
    long: bool
    mask: bool
    depth: int
    ahead: int
    pace: int


GemvTile = FragmentTile | StreamTile


class GemvConfig(NamedTuple):
    """How a call is divided."""

    tile: GemvTile
    norm: NormTile


@cache
def gemv_config(
    act: torch.dtype,
    weight: torch.dtype,
    scaled: WeightScale,
    m: int,
    n: int,
    k: int,
    widths: tuple[int, ...],
    aligned: bool,
    chip: Chip,
) -> GemvConfig:
    """The configuration of a call."""
    tile = _tile(act, weight, scaled, m, n, k, aligned, chip)
    if isinstance(tile, FragmentTile) and not widths:
        tile = tile._replace(split=1)
    side = max(1, tile.warps // 4)
    chunks = [min(MOST_CHUNKS, -(-width // CHUNK)) for width in widths]
    longs = tuple(width > MOST_CHUNKS * CHUNK for width in widths)
    split = tile.split if isinstance(tile, FragmentTile) else 1
    counts = [-(-width // (tile.columns * split)) * split * -(-m // tile.rows) for width in widths]
    shared = m > 1 and len(counts) > 0 and all(m <= count <= MOST_COUNTED for count in counts)
    return GemvConfig(tile, NormTile(split, shared, side, tuple(-(-chunk // side) for chunk in chunks), longs))


def _tile(
    act: torch.dtype, weight: torch.dtype, scaled: WeightScale, m: int, n: int, k: int, aligned: bool, chip: Chip
) -> GemvTile:
    if is_contiguous(act):
        return fragment_tile(weight.itemsize, m, n, k, aligned, chip)
    return stream_tile(scaled, m, k, aligned)


@cache
def fragment_tile(itemsize: int, m: int, n: int, k: int, aligned: bool, chip: Chip) -> FragmentTile:
    """The tile of a call with 16-bit act and weights of ``itemsize`` bytes.

    Up to `MAX_ROWS` rows, the number of programs (the blocks of a trace) does not depend on alignment.
    """
    table = tuning(chip).gemv
    cuts = table.cuts if itemsize == 2 else table.codes
    cut: GemvCut = next(cut for most_m, most_n, cut in cuts if m <= most_m and n <= most_n)
    vec = 16 // itemsize
    step = 64 * vec  # 16 pieces, 4 threads
    most = table.most_rows if aligned or m <= MAX_ROWS else table.unaligned_rows
    rows = min(most, max(cut.warps // 2, 1 << (m - 1).bit_length()))
    steps = k // step
    fewest, looped = (5, 4) if itemsize == 2 else (3, 2)
    long = not aligned or k % step != 0 or not fewest <= steps <= MOST_STEPS
    if long:
        steps = looped if aligned else 1
    mask = k % (steps * step) != 0
    pace = cut.pace if aligned and not long and chip.has_pdl else 0
    depth, ahead = min(cut.depth, steps), min(cut.ahead, steps)
    split = MOST_SHARES if cut.split and m <= MAX_ROWS else 1
    return FragmentTile(cut.warps, vec, cut.columns, rows, split, steps, long, mask, depth, ahead, pace)


def fragment_registers(tile: FragmentTile, aligned: bool, chip: Chip) -> int:
    """The register limit per thread; 0 leaves it to the assembler."""
    if not aligned:
        return min(tuning(chip).stream.unaligned_registers, 2048 // tile.warps)
    # a 134th register made 4096 x 4096 two waves, 11.8 us instead of 9.0; by default 32 rows get 64
    # to 92 registers, 13.8 us instead of 12.5
    few = tile.warps == 4 and tile.columns == 8
    many = tile.rows == tuning(chip).gemv.most_rows and not tile.long
    return 128 if few or many else 0


def describe_fragments(tile: FragmentTile, aligned: bool) -> str:
    """A readable name of a tile; equal names mean equal tiles."""
    extent = f"{tile.steps}{'+' if tile.long else ''}{'m' if tile.mask else ''}"
    vec = f"v{tile.vec}{'' if aligned else 'u'}"
    split = f"/{tile.split}k" if tile.split > 1 else ""
    return f"{tile.columns}x{tile.rows}{split}/{tile.warps}w/dot/{vec}/{extent} d{tile.depth}a{tile.ahead}p{tile.pace}"


def trace_blocks(act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...]) -> int:
    """The number of blocks of a trace: the programs of a launch. It does not depend on scales."""
    return blocks(_tile(act, weight, "none", m, n, k, True, INTERPRETER), m, n, widths)


def blocks(tile: GemvTile, m: int, n: int, widths: tuple[int, ...]) -> int:
    """The programs of a launch."""
    split = tile.split if isinstance(tile, FragmentTile) else 1
    return programs(n, widths, tile.columns, split) * -(-m // tile.rows)
