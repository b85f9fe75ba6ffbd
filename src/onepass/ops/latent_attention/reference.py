"""The attention of a decode step to latents in float64, unrounded."""

from __future__ import annotations

from torch import Tensor

from ..attention.reference import weights


def scores(q: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, scale: float) -> Tensor:
    """[batch, heads, tokens, entries]: every head has the same latents and rotated keys."""
    return (q.double() @ latent.double().mT + q_rot.double() @ k_rot.double().mT) * scale


def attend_latents(
    q: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """[batch, tokens, heads, columns of a latent]."""
    return (weights(scores(q, q_rot, latent, k_rot, scale), mask) @ latent.double()).transpose(1, 2)
