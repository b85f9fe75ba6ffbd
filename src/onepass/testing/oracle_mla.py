"""MLA's cache write in float64, from the formulas alone: where each token's entry lies, and what it is before the store.

Like `onepass.testing.oracle`, of which it is a part, it imports torch alone and rounds only for ``rounding="reference"``, which
is a choice of rounding points.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .oracle import Rotated, apply_rms_norm, mean_of_squares, rotate


class Places(NamedTuple):
    """Of each token the row of freqs that it takes, and its slot (page * page_size + entry), -1 for none; int64 [T]."""

    position: Tensor
    slot: Tensor


def places(
    tokens: int,
    pages: int,
    page_size: int,
    *,
    offsets: Tensor | None = None,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
    slots: Tensor | None = None,
    positions: Tensor | None = None,
) -> Places:
    """Token by token, by the definition; ``slots`` and ``positions`` go before what follows from the other three."""
    found: list[int] = [0] * tokens
    slot: list[int] = [-1] * tokens
    if offsets is not None and lengths is not None:
        begins = [int(v) for v in offsets.tolist()]
        rows = table.tolist() if table is not None else []
        for request, length in enumerate(lengths.tolist()):
            for token in range(max(begins[request], 0), min(begins[request + 1], tokens)):
                place = length + token - begins[request]
                found[token] = place
                column = place // page_size
                if table is not None and place >= 0 and column < table.shape[1] and 0 <= rows[request][column] < pages:
                    slot[token] = rows[request][column] * page_size + place % page_size
    if slots is not None:
        slot = [s if 0 <= s < pages * page_size else -1 for s in slots.tolist()]
    return Places(positions.long() if positions is not None else torch.tensor(found), torch.tensor(slot).long())


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
    """What is written, before scale, store and their rounding. The norm is of as many columns as gamma has, and the last
    columns, as many as q has, turn; those between are themselves.
    """
    latent, between, k = kv.split((gamma.shape[0], kv.shape[1] - gamma.shape[0] - q.shape[2], q.shape[2]), -1)
    reference = rounding == "reference"
    y = apply_rms_norm(
        latent, gamma, mean_of_squares(latent), eps, weight_offset=weight_offset, rounding="hf" if reference else "once"
    )
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


def divided(entry: Tensor, scale: Tensor) -> Tensor:
    """``entry / scale``; 0 where the scale is 0, unless the entry is NaN."""
    return torch.where((scale == 0) & ~entry.isnan(), 0.0, entry / scale.double())
