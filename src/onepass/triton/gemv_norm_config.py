"""How a GEMV is cut: into tiles of columns, steps of k and rows of act a program.

What decides the bits (warps, parts, elements a load) follows from the dtypes alone; the rest may follow M and K too.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from ..specs.gemv_norm import MAX_ROWS, tiles

STEP: Final = 64
"""Elements of k that a step covers for each element a thread loads at a time: 16 pieces, 4 threads."""
FEWEST_STEPS: Final = 5
MOST_STEPS: Final = 28
"""With so many steps of k, and k whole steps, a kernel is made for just that number; otherwise one that loops fits all."""
LOOPED_STEPS: Final = 4
MOST_ROWS: Final = 32
"""Rows of act that a program multiplies, at most; more are more programs. M = 128 with fp8 weights took 51 us (16 rows: 79, 64: 94)."""
UNALIGNED_ROWS: Final = 16
UNALIGNED_FP8_ROWS: Final = 8
"""The same where elements are loaded one by one, each into a register of its own. Up to `MAX_ROWS` alignment changes no number of programs,
which is that of a trace's blocks."""
CHUNK: Final = 512
"""Columns of a norm's tile: 4 for each thread of 4 warps, so that 4 warps lie along a row whatever the rows."""
MOST_CHUNKS: Final = 8
MOST_VALUES: Final = 80
"""Values of a norm that a thread holds, at most."""


@dataclass(frozen=True)
class GemvConfig:
    """Tiles of ``columns`` columns and up to ``rows`` rows of act; ``depth`` steps of weights, ``ahead`` of act, are under way.

    ``dot``: tensor cores; otherwise float32 products. Before the previous kernel has ended no more than ``pace`` steps of
    weights are on their way at a time; 0 asks for all ``depth`` at once. ``long``: the ``steps`` are those of a loop.
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
    group: int
    chunks: tuple[int, ...]
    longs: tuple[bool, ...]


def _cut(m: int, n: int, fp8: bool, aligned: bool) -> tuple[int, int, int, int, int]:
    """Warps, columns, depth, ahead and pace for tensor cores: H200, bfloat16, us, from benchmarks/h200/tuning/20-gemv-wide.json.

    One block runs on a multiprocessor for every 4 columns that N has for it, as long as all fit at once: 2112 x 7168 took
    7.7 so (8 columns: 8.2), 2624 x 6144 8.4 with fewer registers (9.5 with as many), 4096 x 4096 9.0 with 8 columns (10.7).
    More rows of act are worth more columns and warps, which read act less often: M = 4 took 8.1 (4 warps: 9.2), M = 8 9.0
    (4 warps: 12.9; 16: 9.7), M = 16 11.9 with 16 warps (8: 12.3). fp8 weights (21-gemv-fp8.json): 8.6, 9.1, 9.6 and 11.7. More
    than 16 rows (38-gemv-many-rows.json): M = 32 14.2 (2 deep: 17.8), 64 23.1 (3 deep: 26.7); fp8 12.4 and 23.7 (paced: 13.8, 26.4).
    """
    if m > MAX_ROWS:
        if fp8 and not aligned:
            return 8, 8, 1, 1, 0
        return (16, 16, 3, 1, 2) if not fp8 and m <= MOST_ROWS else (16, 16, 2, 1, 0)
    if fp8:
        return (4, 4, 5, 1, 2) if m <= 2 else (8, 8, 5, 1, 2) if m <= 4 else (16, 16, 3, 1, 1)
    if m > 8:
        return 16, 16, 8, 2, 2
    if m > 2:
        return (8, 8, 8, 2, 3) if m <= 4 else (8, 8, 7, 2, 2)
    if n <= 2112:
        return 4, 4, 9, 1, 3
    return (4, 4, 5, 1, 2) if n <= 2640 else (4, 8, 4, 1, 1)


@cache
def gemv_config(
    act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...], aligned: bool
) -> GemvConfig:
    """The configuration of a call. Warps, columns, rows and depths change no bit of a result."""
    dot = act != torch.float32
    vec = 16 // weight.itemsize if dot else 4
    step = STEP * vec
    warps, columns, depth, ahead, pace = (
        _cut(m, n, weight.itemsize == 1, aligned) if dot else (4, 4, 7 if m == 1 else 4, 4 if m == 1 else 2, 2)
    )
    most = MOST_ROWS if aligned or m <= MAX_ROWS else UNALIGNED_FP8_ROWS if weight.itemsize == 1 else UNALIGNED_ROWS
    rows = min(most, max(warps // 2, 1 << (m - 1).bit_length())) if dot else (1 if m == 1 else 4)
    steps = k // step
    long = not aligned or k % step != 0 or not FEWEST_STEPS <= steps <= MOST_STEPS
    if long:
        steps = LOOPED_STEPS if aligned else 1
    mask = k % (steps * step) != 0
    chunks = tuple(min(MOST_CHUNKS, -(-w // CHUNK)) for w in widths)
    longs = tuple(w > MOST_CHUNKS * CHUNK for w in widths)
    group = _group(m, warps, max(chunks)) if chunks else 1
    depth, ahead = min(depth, steps), min(ahead, steps)
    pace = pace if aligned and not long else 0
    return GemvConfig(warps, vec, dot, columns, rows, steps, long, mask, depth, ahead, pace, group, chunks, longs)


def _group(m: int, warps: int, chunks: int) -> int:
    """Rows that are normed at a time: all of them, as long as a thread can hold its values."""
    side = warps // 4  # rows that the warps stand on
    group = max(side, 1 << (m - 1).bit_length())
    while group > side and group // side * 4 * chunks > MOST_VALUES:
        group //= 2
    return group


def blocks(act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...]) -> int:
    """Programs of a launch."""
    config = gemv_config(act, weight, m, n, k, widths, True)
    return sum(tiles(n, widths, config.columns)) * -(-m // config.rows)
