"""What one GEMV kernel does (`GemvSpec`), apart from sizes and addresses.

Columns of ``y = act @ weight.T`` come as *segments*, one after the other: each normed segment has its own gamma, what is left
is the tail. A kernel cuts every segment into tiles of columns; no tile spans two segments. Tiles are numbered through
all segments, the tail last; a tile is a *block* of the trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import torch

from .formats import FP8_FORMATS, Fp8Format

MAX_ROWS: Final = 16
"""Rows of ``act`` that one launch takes."""
MAX_SEGMENTS: Final = 4
"""Normed segments of one call."""

WeightScale = Literal["none", "row", "tensor"]


@dataclass(frozen=True, eq=False)
class GemvSpec:
    """Everything but sizes that shapes the machine code; interned by `gemv_spec`, so identity is equality.

    ``gammas`` has one dtype a normed segment. ``fp8`` is the format of the first one, when it is stored as codes.
    """

    act: torch.dtype
    weight: torch.dtype
    weight_scale: WeightScale
    gammas: tuple[torch.dtype, ...]
    fp8: Fp8Format | None
    traced: bool


@cache
def gemv_spec(
    act: torch.dtype,
    weight: torch.dtype,
    weight_scale: WeightScale,
    gammas: tuple[torch.dtype, ...],
    codes: torch.dtype | None,
    traced: bool,
) -> GemvSpec:
    """The interned `GemvSpec` of these properties."""
    return GemvSpec(act, weight, weight_scale, gammas, None if codes is None else FP8_FORMATS[codes], traced)


def tiles(n: int, widths: tuple[int, ...], tile: int) -> list[int]:
    """Tiles of each normed segment, then of the tail."""
    return [-(-width // tile) for width in (*widths, n - sum(widths))]
