"""What one GEMV kernel does (`GemvSpec`), apart from sizes and addresses.

Columns of ``y = act @ weight.T`` come as *segments*, one after the other: each normed segment has its own gamma, what is left
is the tail. A kernel cuts every segment into tiles of columns; no tile spans two segments. Tiles are numbered through
all segments, the tail last; a tile is a *block* of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..formats import FP8_FORMATS, Fp8Format

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


class GemvCall(NamedTuple):
    """One call of a GEMV kernel: its spec, tensors and numbers, every one of them validated.

    ``y`` is a float32 workspace for the normed columns, if there are any. ``counter`` has one int32 per segment, all
    zero, as they are again afterwards; without it the backend provides one.
    """

    spec: GemvSpec
    widths: tuple[int, ...]
    act: Tensor
    weight: Tensor
    weight_scale: Tensor | None
    gammas: Sequence[Tensor]
    y: Tensor | None
    normed: Sequence[Tensor]
    scale: Tensor | None
    unnormed: Tensor | None
    counter: Tensor | None
    trace: Tensor | None
    units: Tensor | None
    eps: float

    @property
    def n(self) -> int:
        """Columns of y."""
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        """Terms of each sum."""
        return self.weight.shape[1]
