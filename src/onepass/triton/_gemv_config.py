"""How a GEMV is cut: into tiles of columns, steps of k and rows of act a program.

What decides the bits (warps, parts, elements a load) follows from the dtypes alone; the rest may follow M and K too.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from ..gemv import tiles

WARPS: Final = 4
STEP: Final = 64
"""Elements of k that a step covers for each element a thread loads at a time: 4 warps, 4 parts, 4 threads."""
MAX_STEPS: Final = 32
"""Steps unrolled at most; longer K is walked in stretches of half as many."""
SMALLEST_BLOCK: Final = 4 * 32 * WARPS
"""Columns of a norm's tile at least: four for each thread, so that all threads lie along a row whatever the rows."""
LARGEST_BLOCK: Final = 4096
GROUP_TILE: Final = 8192
"""Values of a norm's tile over all its rows, at most."""


@dataclass(frozen=True)
class GemvConfig:
    """Tiles of ``columns`` columns and up to ``rows`` rows of act; ``depth`` steps of weights, ``ahead`` of act, are under way.

    ``apart`` and ``dot`` choose the shape of the fragments (`_gemv_stream`). Before the previous kernel has ended no more than
    ``pace`` steps of weights are on their way at a time; 0 asks for all ``depth`` at once.
    """

    vec: int
    dot: bool
    apart: bool
    columns: int
    rows: int
    steps: int
    long: bool
    mask: bool
    depth: int
    ahead: int
    pace: int
    group: int
    blocks: tuple[int, ...]


@cache
def gemv_config(
    act: torch.dtype, weight: torch.dtype, m: int, k: int, widths: tuple[int, ...], aligned: bool
) -> GemvConfig:
    """The configuration of a call."""
    dot = act != torch.float32
    vec = 16 // weight.itemsize if dot else 4
    step = STEP * vec
    steps = -(-k // step)
    long = steps > MAX_STEPS
    if long:
        steps = MAX_STEPS // 2
    mask = k % (steps * step if long else step) != 0
    apart, columns, depth, ahead, pace = False, 4, 7, 4, 2
    if not dot:
        rows = 1 if m == 1 else 2 if m == 2 else 4
    elif m <= 2:
        rows = 2
    elif m <= 4:
        rows, columns = 4, 8
    else:
        rows, columns, apart, depth, ahead, pace = (8 if m <= 8 else 16), 16, True, 3, 1, 1
    blocks = tuple(max(SMALLEST_BLOCK, min(LARGEST_BLOCK, 1 << (w - 1).bit_length())) for w in widths)
    group = min(1 << (min(m, 16) - 1).bit_length(), max(1, GROUP_TILE // max(blocks, default=LARGEST_BLOCK)))
    depth, ahead = min(depth, steps), min(ahead, steps)
    return GemvConfig(
        vec, dot, apart, columns, rows, steps, long, mask, depth, ahead, pace if aligned else 0, group, blocks
    )


def blocks(act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...]) -> int:
    """Programs of a launch."""
    config = gemv_config(act, weight, m, k, widths, True)
    return sum(tiles(n, widths, config.columns)) * -(-m // config.rows)
