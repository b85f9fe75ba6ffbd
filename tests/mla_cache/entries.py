"""MLA's cache write in float64, from the formulas alone: what each entry is before the store.

Rounds only for ``rounding="reference"``, which specifies rounding points.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onepass.ops.qk_norm.reference import Rotated, rotate
from onepass.ops.rms_norm.reference import rms_norm


class Write(NamedTuple):
    """``q`` [T, H, R] and ``entry`` [T, L + R], each with the size that float errors are relative to."""

    q: Rotated
    entry: Rotated


def mla_rope_norm(
    q: Tensor,
    kv: Tensor,
    gamma: Tensor,
    freqs: Tensor | None,
    position: Tensor,
    eps: float,
    *,
    style: str = "interleaved",
    dim: int | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> Write:
    """What is written, before the scale and the store.

    The first columns (gamma's length) are normed, the last (q's) are rotated, those between are unchanged.
    """
    latent, between, k = kv.split((gamma.shape[0], kv.shape[1] - gamma.shape[0] - q.shape[2], q.shape[2]), -1)
    reference = rounding == "reference"
    y = rms_norm(latent, gamma, eps, weight_offset=weight_offset, rounding="hf" if reference else "once").y
    turned_q, turned_k = (_turned(t, freqs, position, style, dim, reference) for t in (q, k.unsqueeze(1)))
    y = torch.cat((y, between.double()), -1)
    entry = Rotated(torch.cat((y, turned_k.y[:, 0]), -1), torch.cat((y.abs(), turned_k.size[:, 0]), -1))
    return Write(turned_q, entry)


def _turned(
    heads: Tensor, freqs: Tensor | None, position: Tensor, style: str, dim: int | None, rounded: bool
) -> Rotated:
    """RoPE of [T, H, R]."""
    if freqs is None or dim == 0 or not heads.numel():
        return Rotated(heads.double(), heads.double().abs())
    flat = rotate(heads.flatten(1), freqs, heads.shape[2], positions=position, style=style, dim=dim)
    y, size = (t.view(heads.shape) for t in flat)
    return Rotated(y.to(heads.dtype).double() if rounded else y, size)
