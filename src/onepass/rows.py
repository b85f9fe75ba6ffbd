"""What one row kernel does (`RowSpec`) and where its rows lie (`Geometry`).

Every op of the RMSNorm family is a pass over rows; these two small types are the whole interface between the
checked public call and a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .formats import FP8_FORMATS, Fp8Format, Rounding, ScaleRule
from .prologues import Prologue, find

OperandKind = Literal["full", "column", "row", "group"]


class Operand(NamedTuple):
    """One extra tensor of a prologue: ``full`` [..., N], ``column`` [N], ``row`` [..., 1] or ``group`` [..., N / group]."""

    kind: OperandKind
    dtype: torch.dtype
    group: int = 0


@dataclass(frozen=True, eq=False)
class RowSpec:
    """Everything that shapes the machine code of one row kernel; nothing that varies from call to call.

    With ``h = prologue(x, *operands) + residual`` the kernel writes any of: ``h`` (``residual`` set), the norm
    (``norm`` set), fp8 codes and scales (``fp8`` set). Instances are interned by `row_spec`: identity is equality.
    """

    x: torch.dtype
    gamma: torch.dtype
    residual: torch.dtype | None
    norm: torch.dtype | None
    fp8: Fp8Format | None
    fp8_max: float
    scale: ScaleRule | None
    prologue: Prologue | None
    operands: tuple[Operand, ...]
    rounding: Rounding
    round_sum: bool
    """Whether ``h`` is rounded to the residual's dtype before it is normed."""

    @property
    def quantizes_norm(self) -> bool:
        """Whether amax and codes are made of the norm itself, and not of ``h * g`` with the row's factor applied later."""
        return self.rounding == "hf" or (self.scale is not None and self.scale.divides)

    @property
    def itemsize(self) -> int:
        """Bytes of an element by which tiles are chosen: 8-bit rows have the tiles of 16-bit ones."""
        return max(2, self.x.itemsize)


def row_spec(
    x: torch.dtype,
    gamma: torch.dtype,
    residual: torch.dtype | None,
    norm: torch.dtype | None,
    rounding: Rounding,
    prologue: str = "",
    operands: tuple[Operand, ...] = (),
    codes: torch.dtype | None = None,
    fp8_max: float = 0.0,
    scale: ScaleRule | None = None,
    round_sum: bool | None = None,
) -> RowSpec:
    """The interned `RowSpec` of these properties; ``round_sum=None`` means what ``rounding`` implies."""
    if round_sum is None or round_sum == (rounding == "hf") or residual in (None, torch.float32):
        round_sum = rounding == "hf"  # a float32 sum is as it was: one kernel for both
    return _row_spec(x, gamma, residual, norm, rounding, prologue, operands, codes, fp8_max, scale, round_sum)


@cache
def _row_spec(
    x: torch.dtype,
    gamma: torch.dtype,
    residual: torch.dtype | None,
    norm: torch.dtype | None,
    rounding: Rounding,
    prologue: str,
    operands: tuple[Operand, ...],
    codes: torch.dtype | None,
    fp8_max: float,
    scale: ScaleRule | None,
    round_sum: bool,
) -> RowSpec:
    fp8 = FP8_FORMATS[codes] if codes is not None else None
    found = find(prologue) if prologue else None
    return RowSpec(x, gamma, residual, norm, fp8, fp8_max, scale, found, operands, rounding, round_sum)


class Geometry(NamedTuple):
    """``rows`` = n0 * n1 * n2 rows; row ``(i0 * n1 + i1) * n2 + i2`` of a tensor starts at ``i0*s0 + i1*s1 + i2*s2``.

    Strides count elements, one triple a tensor. With ``n1 == n2 == 1`` only ``s0`` matters.
    """

    rows: int
    n1: int
    n2: int


Strides = tuple[int, int, int]
LEVELS = 3


_NONE: Strides = (0, 0, 0)


def smallest_dimension(sizes: Sequence[int]) -> int:
    """The dimension to take apart where `geometry` finds too many levels: the smallest that has more than one index."""
    return min((d for d, size in enumerate(sizes) if size > 1), key=lambda d: sizes[d])


def geometry(tensors: Sequence[Tensor | None]) -> tuple[Geometry, list[Strides]] | None:
    """Fold the leading dimensions of ``tensors`` (one common leading shape) into at most three levels.

    Two neighbouring dimensions fold when every tensor steps through them as through one. Returns None when more
    than three levels remain: the caller then takes one dimension apart and launches once for each index of it. A tensor
    that is None gets zero strides.
    """
    first = next(t for t in tensors if t is not None)
    if all(t is None or t.is_contiguous() for t in tensors):
        return Geometry(first.numel() // first.shape[-1], 1, 1), [
            _NONE if t is None else (t.shape[-1], 0, 0) for t in tensors
        ]
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
