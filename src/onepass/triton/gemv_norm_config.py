"""How a GEMV is divided: into tiles of columns, steps of k and rows of act per program.

Results depend only on the pieces and the elements per load, which follow from the dtypes alone. The
rest may depend on M and K too.
"""

from functools import cache
from typing import Final, NamedTuple

import torch

from ..specs.gemv_norm import MAX_ROWS, tiles
from .chip import INTERPRETER, Chip
from .tuning import tuning
from .tuning.table import GemvCut

STEP: Final = 64
"""Elements of k per step for each element a thread loads at a time: 16 pieces, 4 threads."""
FEWEST_STEPS: Final = 5
MOST_STEPS: Final = 28
"""With FEWEST to MOST whole steps a kernel is unrolled for that number; others loop."""
LOOPED_STEPS: Final = 4
CHUNK: Final = 512
"""Columns of a norm's tile: 4 for each thread of the 4 warps along a row."""
MOST_CHUNKS: Final = 8


class GemvConfig(NamedTuple):
    """Tiles of ``columns`` columns and up to ``rows`` rows of act, with ``depth`` steps of weights
    and ``ahead`` of act in flight.

    ``dot``: tensor cores; otherwise float32 products. Before the previous kernel has ended, at most
    ``pace`` steps of weights are in flight; 0 requests all ``depth`` at once. ``long``: the
    ``steps`` are those of a loop.
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


def _cut(m: int, n: int, fp8: bool, aligned: bool, chip: Chip) -> GemvCut:
    """The measured cut for tensor cores."""
    table = tuning(chip).gemv
    if m > MAX_ROWS and fp8 and not aligned:
        return table.unaligned_fp8_cut
    cuts = table.fp8_cuts if fp8 else table.cuts
    return next(cut for most_m, most_n, cut in cuts if m <= most_m and n <= most_n)


@cache
def gemv_config(
    act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...], aligned: bool, chip: Chip
) -> GemvConfig:
    """The configuration of a call. Results do not depend on warps, columns, rows or depths.

    Up to `MAX_ROWS` rows, the number of programs (the blocks of a trace) does not depend on
    alignment.
    """
    table = tuning(chip).gemv
    dot, fp8 = act != torch.float32, weight.itemsize == 1
    vec = 16 // weight.itemsize if dot else 4
    step = STEP * vec
    if dot:
        warps, columns, depth, ahead, pace = _cut(m, n, fp8, aligned, chip)
        most = table.unaligned_fp8_rows if fp8 else table.unaligned_rows
        most = table.most_rows if aligned or m <= MAX_ROWS else most
        rows = min(most, max(warps // 2, 1 << (m - 1).bit_length()))
    else:
        warps, columns, depth, ahead, pace = 4, 4, 7 if m == 1 else 4, 4 if m == 1 else 2, 2
        rows = 1 if m == 1 else 4
    steps = k // step
    long = not aligned or k % step != 0 or not FEWEST_STEPS <= steps <= MOST_STEPS
    if long:
        steps = LOOPED_STEPS if aligned else 1
    mask = k % (steps * step) != 0
    chunks = tuple(min(MOST_CHUNKS, -(-w // CHUNK)) for w in widths)
    longs = tuple(w > MOST_CHUNKS * CHUNK for w in widths)
    group = _group(m, warps, max(chunks), table.most_values) if chunks else 1
    depth, ahead = min(depth, steps), min(ahead, steps)
    pace = pace if aligned and not long else 0
    return GemvConfig(warps, vec, dot, columns, rows, steps, long, mask, depth, ahead, pace, group, chunks, longs)


def _group(m: int, warps: int, chunks: int, most_values: int) -> int:
    """Rows that are normed at a time: all of them, as long as a thread can hold its values."""
    side = warps // 4  # rows that the warps cover
    group = max(side, 1 << (m - 1).bit_length())
    while group > side and group // side * 4 * chunks > most_values:
        group //= 2
    return group


def trace_blocks(
    act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...], chip: Chip = INTERPRETER
) -> int:
    """The number of blocks of a trace: the programs of a launch."""
    config = gemv_config(act, weight, m, n, k, widths, True, chip)
    return sum(tiles(n, widths, config.columns)) * -(-m // config.rows)
