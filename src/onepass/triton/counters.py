"""Arrival counters that nobody shares by accident.

A counter is zero before a launch and zero after it. Launches of one stream follow one another, so they may share one;
launches of two streams may not, nor may a captured graph, which can be replayed on any stream, share with anybody.
"""

from typing import Final

import torch
from torch import Tensor

from ..specs.gemv_norm import MAX_SEGMENTS

POOL: Final = 4096
"""Captured calls that one allocation serves."""

_streams: dict[tuple[int, int], Tensor] = {}
_pools: dict[int, list[Tensor]] = {}
_kept: list[Tensor] = []
"""Whole pools: a graph may be replayed long after the last counter of its pool was taken."""


def take(device: int) -> tuple[Tensor, tuple[int, int] | None]:
    """Zeroed counters for a launch on the current stream, and the key to `discard` them by should the launch fail."""
    if torch.cuda.is_current_stream_capturing():
        try:
            return _pools[device].pop(), None
        except LookupError:  # with nothing prepared the zeroing becomes part of the graph
            return torch.zeros(MAX_SEGMENTS, dtype=torch.int32, device=f"cuda:{device}"), None
    if not _pools.get(device):
        _kept.append(torch.zeros(POOL, MAX_SEGMENTS, dtype=torch.int32, device=f"cuda:{device}"))
        _pools[device] = list(_kept[-1].unbind())
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = torch.zeros(MAX_SEGMENTS, dtype=torch.int32, device=f"cuda:{device}")
    return found, key


def discard(key: tuple[int, int] | None) -> None:
    """Never use these counters again: a launch that failed may have left them at any value."""
    if key is not None:
        _streams.pop(key, None)
