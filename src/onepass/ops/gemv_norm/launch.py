"""What one GEMV kernel computes (`GemvSpec`), and one call of it (`GemvCall`).

The columns of ``y = act @ weight.T`` are divided into consecutive *segments*: each normed segment has
a gamma, and the rest is the tail. A kernel splits every segment into tiles of columns; no tile
spans two segments. Tiles are numbered across all segments, the tail last. Each tile is a *block* of
the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from ...formats import FP8_FORMATS, Fp8Format, WeightScale

MAX_ROWS: Final = 16
"""Maximum number of rows of ``act`` per launch."""
MOST_SHARES: Final = 4
"""Most programs that share a tile of columns. Each has its own sums in the workspace."""
MOST_COLUMNS: Final = 64
"""Most columns that one program or the `MOST_SHARES` of a tile compute: no segment needs so many more in the workspace."""
MAX_SEGMENTS: Final = 4
"""Maximum number of normed segments per call."""


@dataclass(frozen=True, eq=False)
class GemvSpec:
    """Everything except sizes that affects the machine code; interned by `gemv_spec`, so identity is equality.

    ``gammas`` has one dtype per normed segment. ``fp8`` is the first one's format if it is stored as codes.
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
    """The interned `GemvSpec` with these properties."""
    return GemvSpec(act, weight, weight_scale, gammas, None if codes is None else FP8_FORMATS[codes], traced)


def tiles(n: int, widths: tuple[int, ...], tile: int) -> list[int]:
    """The number of tiles of each normed segment, then of the tail."""
    return [-(-width // tile) for width in (*widths, n - sum(widths))]


def programs(n: int, widths: tuple[int, ...], tile: int, split: int) -> int:
    """The programs of a launch for up to `MAX_ROWS` rows: ``split`` of them share as many tiles of a normed segment."""
    *normed, tail = tiles(n, widths, tile)
    return sum([-(-count // split) * split for count in normed]) + tail


class GemvCall(NamedTuple):
    """One call of a GEMV kernel: its spec, tensors and numbers, all validated.

    ``y`` is a float32 workspace for the normed columns, if there are any: `MOST_SHARES` times as many rows as act has.
    ``counter`` has one int32 per segment, all zero before and after the call; without it the backend provides one.
    """

    spec: GemvSpec
    widths: tuple[int, ...]
    act: Tensor
    weight: Tensor
    weight_scale: Tensor | None
    gammas: Sequence[Tensor]
    y: Tensor | None
    normed: Sequence[Tensor]
    scale: Tensor | None = None
    unnormed: Tensor | None = None
    counter: Tensor | None = None
    trace: Tensor | None = None
    units: Tensor | None = None
    eps: float = 0.0

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""
        return self.act.get_device()


class GemvArguments(Protocol):
    """Validated arguments that all products have."""

    act: Tensor
    weight: Tensor
    weight_scale: Tensor | None
    block_scale: Tensor | None


class PlainArguments(GemvArguments, Protocol):
    """Validated arguments of a product without norms."""

    y_scratch: Tensor


class NormedArguments(GemvArguments, Protocol):
    """Validated arguments of `gemv_and_partial_norm`."""

    gamma: Tensor
    gamma1: Tensor | None
    gamma2: Tensor | None
    gamma3: Tensor | None
    normed_dtype: torch.dtype | None
    eps: float
    normed_output: Tensor
    scale_output: Tensor | None
    normed_output1: Tensor | None
    normed_output2: Tensor | None
    normed_output3: Tensor | None
    unnormed_output: Tensor | None


class ScratchArguments(NormedArguments, Protocol):
    """Validated arguments of `gemv_and_partial_norm_with_scratch`."""

    finish_counter: Tensor
    trace: Tensor | None
    units: Tensor | None
