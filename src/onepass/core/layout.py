"""Where the rows of a call's tensors are: leading dimensions folded into at most three strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


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
