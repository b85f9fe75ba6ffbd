"""Arrival counters. Launches that may overlap never share one.

A counter is zero before and after each launch. Launches on one stream run in sequence and share their
counters. Each captured launch has separate ones, because a graph can be replayed on any stream.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from ..core import native, recording

POOL: Final = 1 << 18
"""Counters for captured calls per allocation."""
MOST: Final = 2048
"""Counters of a stream."""

_streams: dict[tuple[int, int], Tensor] = {}
_pools: dict[int, Tensor] = {}
"""What is left for captured calls."""
_lock: Final = threading.Lock()
_kept: list[Tensor] = []
"""Keeps pools alive: a graph may be replayed long after its pool is used up."""


def launch_counted(device: int, number: int, launch: Callable[[Tensor], None]) -> None:
    """``launch(counters)`` on the current stream, with ``number`` zeroed ones. Device -1 is the interpreter."""
    if device < 0:
        launch(torch.zeros(number, dtype=torch.int32))
        return
    counter, key = take(device, number)
    if recording.tape.on:
        source = recording.Source(partial(take, device, number), discard, per_stream=True)
        recording.mark(counter.data_ptr(), source)
    try:
        launch(counter)
    except BaseException:
        discard(key)
        raise


def take(device: int, number: int) -> tuple[Tensor, tuple[int, int] | None]:
    """At least ``number`` zeroed counters for a launch on the current stream, and the key to `discard` them."""
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            pool = _pools.get(device)
            if pool is not None and len(pool) >= number:
                _pools[device] = pool[number:]
                return pool[:number], None
        native.forget()  # the next call that is not captured comes here and fills the pool
        return _zeros(number, device), None  # zeroing becomes part of the graph
    if number > MOST:
        return _zeros(number, device), None
    with _lock:
        pool = _pools.get(device)
        if pool is None or len(pool) < MOST:
            _pools[device] = _zeros(POOL, device)
            _kept.append(_pools[device])
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    counter = _streams.get(key)
    if counter is None:
        counter = _streams[key] = _zeros(MOST, device)
    return counter, key


def _zeros(number: int, device: int) -> Tensor:
    return torch.zeros(number, dtype=torch.int32, device=f"cuda:{device}")


def discard(key: tuple[int, int] | None) -> None:
    """Stop using these counters: a failed launch may have left them at any value."""
    if key is not None:
        _streams.pop(key, None)
        native.forget()
