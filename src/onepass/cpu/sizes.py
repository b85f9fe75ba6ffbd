"""Sizes that emitted code and the host that calls it agree on."""

from __future__ import annotations

from typing import Final

BLOCK: Final = 32
"""Columns that a kernel works on at a time; rows of scratch memory are whole blocks."""
CHUNK: Final = 512
"""Terms that a GEMV adds up before it sets the sum aside, so that long sums are as accurate as short ones."""
SUM: Final = 16
"""Lanes of a GEMV's sum."""
TILE: Final = 24
"""Columns of y in a GEMV's tile: a multiple of every number of weight rows that are processed together."""
ROW_BLOCKS: Final = (1, 2, 4, 6, 8)
"""Rows of ``act`` that a GEMV holds sums for at a time. Larger batches take several passes of six or eight rows."""
MAX_BLOCKS: Final = 8
"""Blocks of rows of ``act`` that pass over a chunk of a tile's weights while it is in the cache."""
PREPARED_ROWS: Final = 2
"""Rows of x that a thread normalizes and copies at a time."""
MAX_SLOTS: Final = 8
"""Maximum number of panels, of `MAX_BLOCKS` blocks each, that threads work on at a time."""


def row_blocks(m: int) -> tuple[int, int]:
    """The size and number of the blocks that ``m`` rows are divided into; the last may be partly empty."""
    count = -(-m // ROW_BLOCKS[-1])
    return next(block for block in ROW_BLOCKS if block * count >= m), count
