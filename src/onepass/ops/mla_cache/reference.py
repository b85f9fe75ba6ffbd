"""Which entry of a paged cache a token has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Per token: the row of freqs to use, and the slot (page * page_size + entry), -1 for none; int64 [T]."""

    position: Tensor
    slot: Tensor


def slots(
    tokens: int,
    pages: int,
    page_size: int,
    offsets: Tensor | None = None,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
    mapping: Tensor | None = None,
    positions: Tensor | None = None,
) -> Slots:
    """Token by token, by the definition; ``mapping`` and ``positions`` override what follows from the tables."""
    position, slot = [0] * tokens, [-1] * tokens
    if offsets is not None and lengths is not None:
        begins = [int(v) for v in offsets.tolist()]
        rows = table.tolist() if table is not None else []
        for request, length in enumerate(lengths.tolist()):
            for token in range(max(begins[request], 0), min(begins[request + 1], tokens)):
                at = position[token] = length + token - begins[request]
                column = at // page_size
                if table is not None and at >= 0 and column < table.shape[1] and 0 <= rows[request][column] < pages:
                    slot[token] = rows[request][column] * page_size + at % page_size
    if mapping is not None:
        slot = [s if 0 <= s < pages * page_size else -1 for s in mapping.tolist()]
    return Slots(positions.long() if positions is not None else torch.tensor(position), torch.tensor(slot).long())
