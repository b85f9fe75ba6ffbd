"""The tile of a GEMV and of the norms that follow it. Results do not depend on anything chosen here
but the order of summation (`product_config`).
"""

from functools import cache
from typing import Final, NamedTuple

import torch

from ..specs.gemv_norm import WeightScale, tiles
from .chip import INTERPRETER, Chip
from .product_config import PieceTile, StreamTile, is_contiguous, piece_tile, stream_tile
from .tuning import tuning

CHUNK: Final = 512
"""Columns of a norm's tile: 4 for each thread of the 4 warps along a row."""
MOST_CHUNKS: Final = 8


class NormTile(NamedTuple):
    """Norms of ``group`` rows at a time, each segment in ``chunks`` chunks; ``longs`` walk more."""

    group: int
    chunks: tuple[int, ...]
    longs: tuple[bool, ...]


class GemvConfig(NamedTuple):
    """How a call is divided."""

    tile: StreamTile | PieceTile
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
) -> StreamTile | PieceTile:
    if is_contiguous(act):
        return piece_tile(weight, scaled, m, n, k, aligned, chip, descriptors=False)
    return stream_tile(scaled, m, k, aligned)


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
