"""Where a token's entry lies in a cache, token by token, and by which angles its pairs turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def paged(slots: Tensor, pages: int, entries: int) -> tuple[Tensor, Tensor]:
    """Page and entry of every slot; the page is -1 for a slot outside the cache."""
    return _both([divmod(s, entries) if 0 <= s < pages * entries else (-1, 0) for s in slots.flatten().tolist()])


def dense(starts: Sequence[int], sequences: int, tokens: int, entries: int) -> tuple[Tensor, Tensor]:
    """Sequence and entry of every token, whose first one lies at its ``starts``; -1 if there is no such entry."""
    places = []
    for sequence in range(sequences):
        for token in range(tokens):
            entry = (starts[sequence] if len(starts) > 1 else starts[0]) + token
            places.append((sequence, entry) if 0 <= entry < entries else (-1, 0))
    return _both(places)


def section_table(freqs: Tensor, positions: Tensor, sections: Sequence[int], style: str) -> Tensor:
    """A row of angles [tokens, dim] for each token of positions [3, ...], whose pairs turn by time, height and width."""
    count = sum(sections)
    axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    if style == "interleaved":
        ends = [3 * size for size in sections]
        axes = [pair % 3 if pair < ends[pair % 3] else 0 for pair in range(count)]
    rows = freqs[positions.flatten(1).long().clamp(0, freqs.shape[0] - 1)]
    return torch.cat([rows[axis, :, 2 * pair : 2 * pair + 2] for pair, axis in enumerate(axes)], -1)


def _both(places: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor(places, dtype=torch.int64).view(-1, 2)
    return pairs[:, 0], pairs[:, 1]
