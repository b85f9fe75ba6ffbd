"""Caches of transformers: layers that a launch writes into directly, and how many tokens they hold.

Every layer of a static cache has a counter on the device, and adds to it after each write: one launch per layer. A decode
step writes into the layers' tensors itself, and adds to all counters at once when it has written the last layer.
"""

from __future__ import annotations

import sys
from typing import Final, Protocol

import torch
from torch import Tensor


class CacheLayer(Protocol):
    """What is read and written of a layer of a static cache."""

    keys: Tensor
    values: Tensor
    is_initialized: bool
    max_cache_len: int
    cumulative_length: Tensor
    cumulative_length_int: int


class Cache(Protocol):
    """What is used of a cache of transformers."""

    layers: list[CacheLayer]
    offloading: bool

    def update(self, keys: Tensor, values: Tensor, layer: int, *more: object) -> tuple[Tensor, Tensor]:
        """Write keys and values; return all to attend to."""
        ...

    def get_seq_length(self) -> int | Tensor:
        """How many tokens it holds."""
        ...


_NAME: Final = "_onepass_counts"
OUTSIDE: Final = "_onepass_counted_outside"
"""The attribute of a layer whose counter is moved on by somebody else, once per step."""


class Counts:
    """Which layers of a cache were written in this step, and which of them are not counted yet.

    Layers are written in order, so a layer that is not behind the one before starts a new step. The last layer of a step
    is known from the step before: in the first step, and in one after a step that ended earlier, every layer is
    counted at once.
    """

    def __init__(self) -> None:
        self.last = -1
        self.seen = -1
        self.tokens = 0
        self.pending: list[Tensor] = []

    def add(self, index: int, layer: CacheLayer, tokens: int) -> None:
        """Count tokens of a layer, now or together with the last layer."""
        if index <= self.seen:
            self.last = -1 if self.pending else self.seen
            self.flush()
        self.seen = index
        if index > self.last or (self.pending and tokens != self.tokens):
            self.flush()
            layer.cumulative_length.add_(tokens)
            return
        self.tokens = tokens
        self.pending.append(layer.cumulative_length)
        if index == self.last:
            self.flush()

    def flush(self) -> None:
        """Count what is pending, in one launch."""
        if self.pending:
            pending, self.pending = self.pending, []
            torch._foreach_add_(pending, self.tokens)


def count(cache: Cache, index: int, layer: CacheLayer, tokens: int) -> None:
    """What the layer's own update does after it has written tokens. Compiled code counts every layer, as transformers does."""
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int += tokens
    if OUTSIDE in layer.__dict__:
        return
    if torch.compiler.is_compiling():
        layer.cumulative_length.add_(tokens)
        return
    counts: Counts | None = cache.__dict__.get(_NAME)
    if counts is None:
        counts = Counts()
        setattr(cache, _NAME, counts)
    counts.add(index, layer, tokens)


def settle(cache: Cache | None) -> None:
    """Count what is pending, before a layer counts for itself."""
    counts = None if cache is None else getattr(cache, _NAME, None)
    if counts is not None and not torch.compiler.is_compiling():
        counts.flush()


def dense_layer(cache: Cache | None, index: int, k: Tensor) -> CacheLayer | None:
    """The layer of transformers' static cache that keys are written into directly; None for other caches.

    A layer with a sliding window qualifies until its window is full. Then it moves its entries itself.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if cache is None or caches is None or type(cache) is not caches.StaticCache or cache.offloading:
        return None
    layer = cache.layers[index]
    if not layer.is_initialized or not isinstance(getattr(layer, "cumulative_length", None), Tensor):
        return None  # transformers 4.57 counts on the host
    if type(layer) is caches.StaticSlidingWindowLayer:
        if layer.cumulative_length_int + k.shape[1] > layer.max_cache_len:
            return None
    elif type(layer) is not caches.StaticLayer:
        return None
    fits = layer.keys.dtype is k.dtype and layer.keys.shape[0] == k.shape[0] and layer.keys.device == k.device
    return layer if fits else None


def is_mla_cache(cache: object) -> bool:
    """Whether a cache is an `MlaCache`, whose entries have a launch of their own."""
    return bool(getattr(cache, "onepass_mla", False))
