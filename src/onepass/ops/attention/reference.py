"""The attention of a decode step in float64, unrounded."""

from __future__ import annotations

import torch
from torch import Tensor


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[batch, heads of q, tokens, entries]. A head of k serves as many consecutive heads of q as there are more of them."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q.double() @ k.mT * scale


def weights(scores: Tensor, mask: Tensor | None) -> Tensor:
    """How much of each entry a query takes: 0 of all of them where the mask hides all."""
    if mask is not None:
        scores = scores + mask.double()
    return torch.where((scores == -torch.inf).all(-1, keepdim=True), 0.0, scores.softmax(-1))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[batch, tokens, heads, columns]."""
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (weights(scores(q, k, scale), mask) @ v).transpose(1, 2)
