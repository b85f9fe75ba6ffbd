"""What one row kernel computes (`RowSpec`), and one call of it (`RowCall`).

Every op of the RMSNorm family is a pass over rows. These two types are the whole interface between
the validated public call and a backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from ...core.layout import Geometry, Strides
from ...formats import CODE_FORMATS, CodeFormat, Rounding, ScaleRule
from ...prologues import Operand, Prologue, find

GateOrder = Literal["after", "before"]
GATE_ORDERS: Final[tuple[GateOrder, ...]] = ("after", "before")
GateActivation = Literal["silu", "sigmoid"]
GATE_ACTIVATIONS: Final[tuple[GateActivation, ...]] = ("silu", "sigmoid")
Statistic = Literal["rms", "layer"]
STATISTICS: Final[tuple[Statistic, ...]] = ("rms", "layer")


class After(NamedTuple):
    """Whether the norm is multiplied by ``act(gate)`` and, before that, a bias is added to it."""

    gate: bool = False
    bias: bool = False


NOTHING_AFTER: Final = After()


@dataclass(frozen=True, eq=False)
class RowSpec:
    """Everything that affects the machine code of one row kernel, and nothing that varies between calls.

    With ``h = prologue(x, *operands) + residual`` the kernel writes any of: ``h`` (if ``residual`` is
    set), the norm (``norm``), codes and scales (``fp8``, which may also be another format). Instances are interned by `row_spec`, so
    identity is equality.
    """

    x: torch.dtype
    gamma: torch.dtype | None
    residual: torch.dtype | None
    norm: torch.dtype | None
    fp8: CodeFormat | None
    fp8_max: float
    scale: ScaleRule | None
    prologue: Prologue | None
    operands: tuple[Operand, ...]
    rounding: Rounding
    round_sum: bool
    """Whether ``h`` is rounded to the residual's dtype before the norm."""
    after: After = NOTHING_AFTER
    """What follows the product with gamma. Its tensors are the last of ``operands``, the gate before the bias."""
    centered: bool = False
    """Whether the row's mean is subtracted from ``h`` first: LayerNorm."""
    per_row: bool = False
    """Whether each row has its own gamma."""
    rstd: bool = False
    """Whether the reciprocal RMS of each row is stored."""
    gate_activation: GateActivation = "silu"
    """What is applied to a gate that follows gamma."""

    @property
    def quantizes_norm(self) -> bool:
        """Whether amax and codes are computed from the norm itself, not from ``h * g`` with the row's factor applied later."""
        return self.rounding != "once" or any(self.after) or (self.scale is not None and self.scale.divides)

    @property
    def gate(self) -> int:
        """The index of the gate among the operands, or -1."""
        return len(self.operands) - sum(self.after) if self.after.gate else -1

    @property
    def bias(self) -> int:
        """The index of the bias among the operands, or -1."""
        return len(self.operands) - 1 if self.after.bias else -1

    @property
    def itemsize(self) -> int:
        """Bytes per element for choosing tiles: 8-bit rows use the tiles of 16-bit ones."""
        return max(2, self.x.itemsize)


def row_spec(
    x: torch.dtype,
    gamma: torch.dtype | None,
    residual: torch.dtype | None,
    norm: torch.dtype | None,
    rounding: Rounding,
    prologue: str = "",
    operands: tuple[Operand, ...] = (),
    codes: torch.dtype | None = None,
    fp8_max: float = 0.0,
    scale: ScaleRule | None = None,
    round_sum: bool | None = None,
    after: After = NOTHING_AFTER,
    centered: bool = False,
    per_row: bool = False,
    rstd: bool = False,
    gate_activation: GateActivation = "silu",
) -> RowSpec:
    """The interned `RowSpec` with these properties. ``round_sum=None`` follows ``rounding``."""
    if round_sum is None or residual in (None, torch.float32):  # rounding does not change a float32 sum
        round_sum = rounding == "hf"
    rest = (rounding, round_sum, after, centered, per_row, rstd, gate_activation if after.gate else "silu")
    return _interned(x, gamma, residual, norm, codes, fp8_max, scale, prologue, operands, *rest)


@cache
def _interned(*properties: Any) -> RowSpec:
    x, gamma, residual, norm, codes, fp8_max, scale, prologue, operands, *rest = properties
    fp8 = None if codes is None else CODE_FORMATS[codes]
    found = find(prologue) if prologue else None
    return RowSpec(x, gamma, residual, norm, fp8, fp8_max, scale, found, operands, *rest)


class RowCall(NamedTuple):
    """One call of a row kernel: its spec, tensors and numbers, all validated.

    ``n`` is the number of columns; ``geom`` and ``strides`` locate the rows. ``strides`` has one triple
    for each of x, residual, norm, codes, scale, new_residual, the operands, row_gamma and rstd, in this order. An output
    may be the input that it replaces. ``row_gamma`` [..., N] replaces ``gamma`` if rows differ in it, and neither is
    given if gamma is 1. ``rstd`` is [..., 1].
    """

    spec: RowSpec
    x: Tensor
    gamma: Tensor | None
    eps: float
    weight_offset: float
    residual: Tensor | None = None
    operands: Sequence[Tensor] = ()
    static_scale: Tensor | None = None
    norm: Tensor | None = None
    codes: Tensor | None = None
    scale: Tensor | None = None
    new_residual: Tensor | None = None
    scale_ub: float = math.inf
    scale_ub_tensor: Tensor | None = None
    min_scale: float = 0.0
    row_gamma: Tensor | None = None
    rstd: Tensor | None = None
    n: int = 0
    geom: Geometry = Geometry(0, 1, 1)
    strides: Sequence[Strides] = ()

    @property
    def rows(self) -> tuple[Tensor | None, ...]:
        """The tensors that ``strides`` describes."""
        outputs = (self.norm, self.codes, self.scale, self.new_residual)
        return (self.x, self.residual, *outputs, *self.operands, self.row_gamma, self.rstd)
