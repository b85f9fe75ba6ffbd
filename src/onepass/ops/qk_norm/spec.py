"""What one kernel over the rows of q and k computes (`QkSpec`) and where those rows are (`QkRows`).

A *token* is one index of the leading dimensions that q and k share. It has one row of q and one of k
or, if heads are normed separately, one row per head. One launch processes both tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ...core.layout import Geometry, Strides
from ...formats import Rounding
from ...rope import RopeStyle

Stage = Literal["sums", "means", "apply", "fused"]
"""Store the sums or the means of squares; norm with given means; or do both at once, storing no statistics."""

TENSORS: Final = ("q", "k", "q_out", "k_out", "stats", "positions", "q_scale_out", "k_scale_out")
"""In the order of `QkRows.strides`."""
WITH_HEADS: Final = ("q", "k", "q_out", "k_out", "q_scale_out", "k_scale_out")
"""Tensors with heads, in the order of `QkRows.steps`."""
QkScale = Literal["none", "tensor", "row"]
"""What fp8 results are divided by: nothing, a given number, or one number per row, which is stored too."""
MAX_HEAD: Final = 4096
"""Maximum number of columns of a rotated head."""


class RopeRule(NamedTuple):
    """How heads are rotated: the first ``dim`` columns of every ``head_dim``; ``positions`` is a dtype, or None."""

    style: RopeStyle
    head_dim: int
    dim: int
    positions: torch.dtype | None


@dataclass(frozen=True, eq=False)
class QkSpec:
    """Everything except sizes that affects the machine code; interned by `qk_spec`, so identity is equality.

    ``gamma`` and ``gamma_k`` are the dtypes of q's weight and of k's. ``two_eps``: k has its own epsilon.
    """

    stage: Stage
    x: torch.dtype
    gamma: torch.dtype | None
    gamma_k: torch.dtype | None
    out: torch.dtype | None
    rounding: Rounding
    heads: bool
    rope: RopeRule | None
    scale: QkScale = "none"
    two_eps: bool = False

    @property
    def applies(self) -> bool:
        """Whether the norm is stored."""
        return self.out is not None


@cache
def qk_spec(
    stage: Stage,
    x: torch.dtype,
    gamma: torch.dtype | None = None,
    out: torch.dtype | None = None,
    rounding: Rounding = "once",
    heads: bool = False,
    rope: RopeRule | None = None,
    gamma_k: torch.dtype | None = None,
    scale: QkScale = "none",
    two_eps: bool = False,
) -> QkSpec:
    """The interned `QkSpec` with these properties. Without ``gamma_k``, k's weight has the dtype of q's."""
    if gamma_k is not None and gamma_k == gamma:
        return qk_spec(stage, x, gamma, out, rounding, heads, rope, None, scale, two_eps)
    gammas = (gamma, gamma if gamma_k is None else gamma_k)
    return QkSpec(stage, x, *gammas, out, rounding, heads, rope, scale, two_eps)


class QkRows(NamedTuple):
    """Where the rows are: ``geom`` counts tokens, ``heads`` and ``widths`` (columns per row) are those of q and of k.

    ``steps`` are the strides between heads. Without positions, token i has position ``i % sequence``.
    """

    geom: Geometry
    strides: Sequence[Strides]
    heads: tuple[int, int]
    widths: tuple[int, int]
    steps: tuple[int, ...]
    sequence: int


NO_ROWS: Final = QkRows(Geometry(0, 1, 1), (), (1, 1), (0, 0), (0,) * len(WITH_HEADS), 1)
"""The rows of a call whose layout is not known yet."""


class QkCall(NamedTuple):
    """One call of a kernel over q and k: its spec, tensors and numbers, all validated."""

    spec: QkSpec
    q: Tensor
    k: Tensor
    gamma_q: Tensor | None = None
    gamma_k: Tensor | None = None
    q_out: Tensor | None = None
    k_out: Tensor | None = None
    stats: Tensor | None = None
    freqs: Tensor | None = None
    positions: Tensor | None = None
    eps: float = 0.0
    weight_offset: float = 0.0
    rows: QkRows = NO_ROWS
    eps_k: float = 0.0
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    q_scale_out: Tensor | None = None
    k_scale_out: Tensor | None = None
