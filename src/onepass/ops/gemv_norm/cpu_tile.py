"""How a GEMV is divided on the CPU: into tiles of columns."""

from __future__ import annotations

import torch

from ...cpu.sizes import TILE
from .spec import tiles


def trace_blocks(act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...]) -> int:
    """The number of blocks of a trace: one per tile, whatever the dtypes and M."""
    return sum(tiles(n, widths, TILE))
