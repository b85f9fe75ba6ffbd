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
"""Rows of ``act`` that a GEMV holds sums for at a time. Larger batches take two passes of six or eight rows."""
