"""Layouts of scales in memory: which shape and strides GEMMs read, and scales of one byte inside them.

- ``row``: [..., G], contiguous. ``column``: [..., G] with the rows contiguous, strides (1, M).
- ``column_tma``: the same with each column padded to 16 bytes, as the copy engine of Hopper needs it.
- ``column_packed``: int32 [..., ceil(G / 4)], each the exponents of four groups, the first in the lowest
  byte; columns are padded to 16 bytes. DeepGEMM reads this.
- ``128x4``: [M padded to 128, G padded to 4] of bytes, in tiles of 128 rows and 4 groups. Row r of a tile
  begins at byte ``r % 32 * 16 + r // 32 * 4``. The block-scaled GEMMs of cuBLAS and CUTLASS read this.

M is the number of rows in all leading dimensions together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..formats import Packing, ScaleLayout

ALIGNMENT: Final = 16
"""Bytes that columns of scales are padded to."""
TILE_ROWS: Final = 128
TILE_GROUPS: Final = 4
TILE_BYTES: Final = TILE_ROWS * TILE_GROUPS
PACKINGS: Final[dict[ScaleLayout, Packing]] = {"column_packed": "words", "128x4": "128x4"}


def padded(count: int, to: int) -> int:
    """``count`` rounded up to a multiple."""
    return (count + to - 1) // to * to


def scale_shape(lead: Sequence[int], groups: int, layout: ScaleLayout) -> tuple[int, ...]:
    """The shape of the tensor of scales."""
    if layout == "128x4":
        return padded(math.prod(lead), TILE_ROWS), padded(groups, TILE_GROUPS)
    return (*lead, padded(groups, TILE_GROUPS) // TILE_GROUPS if layout == "column_packed" else groups)


def empty_scale(
    lead: Sequence[int], groups: int, layout: ScaleLayout, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory for scales in a layout. Bytes that only pad it are not set."""
    shape = scale_shape(lead, groups, layout)
    if layout in ("row", "128x4"):
        return torch.empty(shape, dtype=dtype, device=device)
    column = math.prod(lead)
    if layout != "column":
        column = padded(column, ALIGNMENT // dtype.itemsize)
    strides = [math.prod(lead[i + 1 :]) for i in range(len(lead))]
    return torch.empty_strided(shape, (*strides, column), dtype=dtype, device=device)


def bytes_of_words(scale: Tensor) -> Tensor:
    """The lowest byte of every int32, as a tensor of bytes with the same shape."""
    memory = torch.empty(0, dtype=torch.uint8, device=scale.device)
    strides = [4 * stride for stride in scale.stride()]
    return memory.set_(scale.untyped_storage(), 4 * scale.storage_offset(), scale.shape, strides)
