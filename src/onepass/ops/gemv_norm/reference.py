"""A product and the norms of its first columns in float64, unrounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..linear.reference import matmul
from ..rms_norm.reference import rms_norm


class Products(NamedTuple):
    """The norm of each segment, and the columns behind them."""

    normed: list[Tensor]
    unnormed: Tensor


def gemv_and_partial_norm(
    act: Tensor, weight: Tensor, gammas: Sequence[Tensor], eps: float, weight_scale: Tensor | None = None
) -> Products:
    """``act @ weight.T``; each gamma norms as many columns as it has, one after the other."""
    y, _ = matmul(act, weight, weight_scale)
    *segments, unnormed = y.split([*(len(gamma) for gamma in gammas), y.shape[1] - sum(map(len, gammas))], 1)
    return Products([rms_norm(part, gamma, eps).y for part, gamma in zip(segments, gammas, strict=True)], unnormed)
