"""Statistics of a row and rotations, in float64 and unrounded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def mean_of_squares(x: Tensor) -> Tensor:
    """[..., 1]."""
    return x.double().square().mean(-1, keepdim=True)


class Rotated(NamedTuple):
    """``y``: the result; ``size``: the length of each element's pair, to which float errors of y are relative."""

    y: Tensor
    size: Tensor


def rotate(
    y: Tensor,
    freqs: Tensor,
    head_dim: int,
    *,
    positions: Tensor | None = None,
    style: str = "half",
    dim: int | None = None,
) -> Rotated:
    """RoPE of the first ``dim`` columns of every ``head_dim`` of y [..., N]; freqs [P, dim] has cos, sin, cos, sin, ...

    The position of a token is its index in the last leading dimension unless ``positions`` [...] has it.
    """
    dim = dim or freqs.shape[1]
    cos, sin = (t.unsqueeze(-2) for t in token_angles(freqs, y.shape[:-1], positions, dim))
    heads = y.double().unflatten(-1, (-1, head_dim))
    turning, rest = heads[..., :dim], heads[..., dim:]
    a, b = pairs(turning, style)
    size = (a.square() + b.square()).sqrt() * (cos.square() + sin.square()).sqrt()

    def joined(first: Tensor, second: Tensor, others: Tensor) -> Tensor:
        return torch.cat((from_pairs(first, second, style), others), -1).flatten(-2)

    return Rotated(joined(a * cos - b * sin, b * cos + a * sin, rest), joined(size, size, rest.abs()))


def token_angles(freqs: Tensor, lead: torch.Size, positions: Tensor | None, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [*lead, dim / 2] of every token, in float64; a position outside freqs uses the nearest row."""
    if positions is None:
        positions = torch.arange(lead[-1] if lead else 1, device=freqs.device).expand(lead or (1,)).reshape(lead)
    angles = freqs.double()[positions.long().clamp(0, freqs.shape[0] - 1)][..., :dim]
    return angles[..., 0::2], angles[..., 1::2]


def pairs(columns: Tensor, style: str) -> tuple[Tensor, Tensor]:
    """The first and the second column of each pair that rotates."""
    first, second = columns.chunk(2, -1) if style == "half" else (columns[..., 0::2], columns[..., 1::2])
    return first, second


def from_pairs(first: Tensor, second: Tensor, style: str) -> Tensor:
    """The inverse of `pairs`."""
    return torch.cat((first, second), -1) if style == "half" else torch.stack((first, second), -1).flatten(-2)
