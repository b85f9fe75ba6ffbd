"""The tile of a GEMV and of the norms that follow it.

Results depend on the order of summation alone. 16-bit weights have an order of their own
(`device.gemv_stream`), the same for every call. Other products have `linear`'s (`product_config`).

A module of its own, because it must not import Triton.
"""

from functools import cache
from typing import Final, NamedTuple

import torch

from ...formats import WeightScale
from ...gpu.chip import INTERPRETER, Chip
from ...gpu.product_tile import PieceTile, StreamTile, is_contiguous, piece_tile, stream_tile
from ...gpu.tuning import tuning
from ...gpu.tuning.table import GemvCut
from .launch import MAX_ROWS, tiles

CHUNK: Final = 512
"""Columns of a norm's tile: 4 for each thread of the 4 warps along a row."""
MOST_CHUNKS: Final = 8
VEC: Final = 8
"""16-bit weights per load of a thread."""
STEP: Final = 64 * VEC
"""Columns of K per step: 16 pieces, 4 threads, `VEC` elements."""
FEWEST_STEPS: Final = 5
MOST_STEPS: Final = 28
"""With FEWEST to MOST whole steps a kernel is unrolled for that number; others loop."""
LOOPED_STEPS: Final = 4


class NormTile(NamedTuple):
    """Norms of ``group`` rows at a time, each segment in ``chunks`` chunks; ``longs`` walk more."""

    group: int
    chunks: tuple[int, ...]
    longs: tuple[bool, ...]


class FragmentTile(NamedTuple):
    """Tiles of ``columns`` columns and up to ``rows`` rows of act, with ``depth`` steps of weights
    and ``ahead`` of act in flight.

    Before the previous kernel has ended, at most ``pace`` steps of weights are in flight; 0 requests all
    ``depth`` at once. ``long``: the ``steps`` are those of a loop.
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


GemvTile = FragmentTile | StreamTile | PieceTile


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
    chunks = tuple(min(MOST_CHUNKS, -(-w // CHUNK)) for w in widths)
    longs = tuple(w > MOST_CHUNKS * CHUNK for w in widths)
    group = _group(m, tile.warps, max(chunks), tuning(chip).stream.most_values) if chunks else 1
    return GemvConfig(tile, NormTile(group, chunks, longs))


def _tile(
    act: torch.dtype, weight: torch.dtype, scaled: WeightScale, m: int, n: int, k: int, aligned: bool, chip: Chip
) -> GemvTile:
    if weight.itemsize == 2:
        return fragment_tile(m, n, k, aligned, chip)
    if is_contiguous(act):
        return piece_tile(weight, scaled, m, n, k, aligned, chip, descriptors=False)
    return stream_tile(scaled, m, k, aligned)


@cache
def fragment_tile(m: int, n: int, k: int, aligned: bool, chip: Chip) -> FragmentTile:
    """The tile of a call with 16-bit weights.

    Up to `MAX_ROWS` rows, the number of programs (the blocks of a trace) does not depend on alignment.
    """
    table = tuning(chip).gemv
    cut: GemvCut = next(cut for most_m, most_n, cut in table.cuts if m <= most_m and n <= most_n)
    most = table.most_rows if aligned or m <= MAX_ROWS else table.unaligned_rows
    rows = min(most, max(cut.warps // 2, 1 << (m - 1).bit_length()))
    steps = k // STEP
    long = not aligned or k % STEP != 0 or not FEWEST_STEPS <= steps <= MOST_STEPS
    if long:
        steps = LOOPED_STEPS if aligned else 1
    mask = k % (steps * STEP) != 0
    pace = cut.pace if aligned and not long and chip.has_pdl else 0
    depth, ahead = min(cut.depth, steps), min(cut.ahead, steps)
    return FragmentTile(cut.warps, VEC, cut.columns, rows, steps, long, mask, depth, ahead, pace)


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
    return f"{tile.columns}x{tile.rows}/{tile.warps}w/dot/{vec}/{extent} d{tile.depth}a{tile.ahead}p{tile.pace}"


def _group(m: int, warps: int, chunks: int, most_values: int) -> int:
    """Rows that are normed at a time: all of them, as long as a thread can hold its values."""
    side = max(1, warps // 4)  # rows that the warps cover
    group = max(side, 1 << (m - 1).bit_length())
    while group > side and group * chunks * CHUNK // (32 * warps) > most_values:
        group //= 2
    return group


def trace_blocks(
    act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...], chip: Chip = INTERPRETER
) -> int:
    """The number of blocks of a trace: the programs of a launch. It does not depend on scales."""
    tile = _tile(act, weight, "none", m, n, k, True, chip)
    return sum(tiles(n, widths, tile.columns)) * -(-m // tile.rows)
