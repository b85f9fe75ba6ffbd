"""Arrival counters. Launches that may overlap never share one.

A counter is zero before and after each launch. Launches on one stream run in sequence and share a
counter. Each captured launch has a separate one, because a graph can be replayed on any stream.
"""

from typing import Final

import torch
from torch import Tensor

from ..fastpath import native
from ..specs.gemv_norm import MAX_SEGMENTS

POOL: Final = 4096
"""Captured calls per allocation."""
MOST: Final = 2048
"""Counters of a stream."""

_streams: dict[tuple[int, int], Tensor] = {}
_pools: dict[int, list[Tensor]] = {}
_kept: list[Tensor] = []
"""Keeps pools alive: a graph may be replayed long after its pool is used up."""


def take(device: int, number: int = MAX_SEGMENTS) -> tuple[Tensor, tuple[int, int] | None]:
    """At least ``number`` zeroed counters for a launch on the current stream, and the key to `discard` them."""
    if number > MOST:
        return torch.zeros(number, dtype=torch.int32, device=f"cuda:{device}"), None
    if torch.cuda.is_current_stream_capturing():
        try:
            if number <= MAX_SEGMENTS:
                return _pools[device].pop(), None
        except LookupError:
            native.forget()  # the next call that is not captured comes here and fills the pool
        # no counter left, or many needed: zeroing becomes part of the graph
        return torch.zeros(number, dtype=torch.int32, device=f"cuda:{device}"), None
    if not _pools.get(device):
        _kept.append(torch.zeros(POOL, MAX_SEGMENTS, dtype=torch.int32, device=f"cuda:{device}"))
        _pools[device] = list(_kept[-1].unbind())
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = torch.zeros(MOST, dtype=torch.int32, device=f"cuda:{device}")
    return found, key


def discard(key: tuple[int, int] | None) -> None:
    """Stop using these counters: a failed launch may have left them at any value."""
    if key is not None:
        _streams.pop(key, None)
        native.forget()
