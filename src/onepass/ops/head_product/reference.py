"""Products of each head with a weight of its own in float64, unrounded."""

from __future__ import annotations

import torch
from torch import Tensor


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, heads, N] of x [rows, heads, K] and weight [heads, K, N]."""
    return torch.einsum("rhk,hkn->rhn", x.double(), weight.double())
