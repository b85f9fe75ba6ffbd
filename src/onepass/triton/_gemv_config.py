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
FEWEST_STEPS: Final = 5
MOST_STEPS: Final = 28
"""With so many steps of k, and k whole steps, a kernel is made for just that number; otherwise one that loops fits all."""
LOOPED_STEPS: Final = 4
MAX_TILE_ROWS: Final = 8
"""Rows of act a program multiplies at most; of more, programs share the weights in L2. M = 16 in one program took 19.6 us instead of 25,
but ten times as long to compile, and spilled with fp8 weights."""
SMALLEST_BLOCK: Final = 4 * 32 * WARPS
"""Columns of a norm's tile at least: four for each thread, so that all threads lie along a row whatever the rows."""
LARGEST_BLOCK: Final = 4096
GROUP_TILE: Final = 8192
"""Values of a norm's tile over all its rows, at most."""


@dataclass(frozen=True)
class GemvConfig:
    """Tiles of ``columns`` columns and up to ``rows`` rows of act; ``depth`` steps of weights, ``ahead`` of act, are under way.

    ``dot``: tensor cores; otherwise float32 products. Before the previous kernel has ended no more than ``pace`` steps of
    weights are on their way at a time; 0 asks for all ``depth`` at once. ``long``: the ``steps`` are those of a loop.
    """

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
    group: int
    blocks: tuple[int, ...]
    longs: tuple[bool, ...]


def _cut(m: int, n: int, fp8: bool) -> tuple[int, int, int, int]:
    """Columns, depth, ahead and pace for tensor cores: H200, bfloat16, us, from benchmarks/h200/tuning/18-gemv-library.json.

    One block runs on a multiprocessor for every 4 columns that N has for it, as long as all fit at once: 2112 x 7168 took
    7.7 so (8 columns: 8.2), 2624 x 6144 8.4 with fewer registers (9.5 with as many), 4096 x 4096 9.0 with 8 columns (10.7).
    More rows of act are worth more columns: M = 4 took 9.5 (4 columns: 11.6).
    """
    if fp8:
        return (4, 4, 1, 2) if m <= 2 else (8, 2, 1, 1)
    if m > 2:
        return 8, 7, 2, 2
    if n <= 2112:
        return 4, 8, 2, 3
    return (4, 5, 1, 2) if n <= 2640 else (8, 4, 1, 1)


@cache
def gemv_config(
    act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...], aligned: bool
) -> GemvConfig:
    """The configuration of a call. Columns, rows and depths change no bit of a result."""
    dot = act != torch.float32
    vec = 16 // weight.itemsize if dot else 4
    step = STEP * vec
    columns, depth, ahead, pace = (
        _cut(m, n, weight.itemsize == 1) if dot else (4, 7 if m == 1 else 4, 4 if m == 1 else 2, 2)
    )
    rows = min(MAX_TILE_ROWS, max(2, 1 << (m - 1).bit_length())) if dot else (1 if m == 1 else 4)
    steps = k // step
    long = not aligned or k % step != 0 or not FEWEST_STEPS <= steps <= MOST_STEPS
    if long:
        steps = LOOPED_STEPS if aligned else 1
    mask = k % (steps * step) != 0
    blocks = tuple(max(SMALLEST_BLOCK, min(LARGEST_BLOCK, 1 << (w - 1).bit_length())) for w in widths)
    longs = tuple(w > LARGEST_BLOCK for w in widths)
    group = min(1 if m == 1 else 2 if m == 2 else 4, max(1, GROUP_TILE // max(blocks, default=LARGEST_BLOCK)))
    depth, ahead = min(depth, steps), min(ahead, steps)
    pace = pace if aligned and not long else 0
    return GemvConfig(vec, dot, columns, rows, steps, long, mask, depth, ahead, pace, group, blocks, longs)


def blocks(act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...]) -> int:
    """Programs of a launch."""
    config = gemv_config(act, weight, m, n, k, widths, True)
    return sum(tiles(n, widths, config.columns)) * -(-m // config.rows)
