"""Where the rows of a call's tensors are, and its scales.

**Rows**: leading dimensions are folded into at most three strides (`geometry`).

**Scales** have one of the layouts that GEMMs read:

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
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..formats import Packing, ScaleLayout


class Geometry(NamedTuple):
    """``rows`` = n0 * n1 * n2 rows; row ``(i0 * n1 + i1) * n2 + i2`` of a tensor starts at ``i0*s0 + i1*s1 + i2*s2``.

    Strides count elements, one triple per tensor. With ``n1 == n2 == 1`` only ``s0`` matters.
    """

    rows: int
    n1: int
    n2: int


Strides = tuple[int, int, int]
LEVELS = 3
_NONE: Strides = (0, 0, 0)


def smallest_dimension(sizes: Sequence[int]) -> int:
    """The dimension to split if `geometry` finds too many levels: the smallest one with more than one index."""
    return min((d for d, size in enumerate(sizes) if size > 1), key=lambda d: sizes[d])


def geometry(tensors: Sequence[Tensor | None]) -> tuple[Geometry, list[Strides]] | None:
    """Fold the leading dimensions of ``tensors`` (one common leading shape) into at most three levels.

    Two neighbouring dimensions fold if every tensor steps through them as through one. Returns None if
    more than three levels remain: the caller then splits one dimension and launches once per index of
    it. A tensor that is None gets zero strides.
    """
    first = next(t for t in tensors if t is not None)
    if all(t is None or t.is_contiguous() for t in tensors):
        rows = Geometry(first.numel() // first.shape[-1], 1, 1)
        return rows, [_NONE if t is None else (t.shape[-1], 0, 0) for t in tensors]
    rank = first.dim()
    lead = first.shape[:-1]
    strides = [t.stride()[:-1] if t is not None else (0,) * (rank - 1) for t in tensors]
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in tensors]
    for dim, size in enumerate(lead):
        if size == 1:
            continue
        if sizes and all(step[-1] == stride[dim] * size for step, stride in zip(steps, strides, strict=True)):
            sizes[-1] *= size
            for step, stride in zip(steps, strides, strict=True):
                step[-1] = stride[dim]
        else:
            sizes.append(size)
            for step, stride in zip(steps, strides, strict=True):
                step.append(stride[dim])
    if len(sizes) > LEVELS:
        return None
    pad = LEVELS - len(sizes)
    n0, n1, n2 = sizes + [1] * pad
    triples: list[Strides] = [(*step, *[0] * pad) for step in steps]  # type: ignore[misc]
    return Geometry(n0 * n1 * n2, n1, n2), triples


# --- scales ---------------------------------------------------------------------------------------------------------

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
