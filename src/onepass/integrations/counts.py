"""How many tokens the layers of transformers' static cache hold: counted on the device, once per step.

Every layer of a static cache has a counter on the device, and adds to it after each write: one launch per layer. A decode
step writes into the layers' tensors itself, and adds to all counters at once when it has written the last layer.
"""

from __future__ import annotations

from typing import Any, Final

import torch

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
        self.pending: list[Any] = []

    def add(self, index: int, layer: Any, tokens: int) -> None:
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


def count(cache: Any, index: int, layer: Any, tokens: int) -> None:
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


def settle(cache: Any) -> None:
    """Count what is pending, before a layer counts for itself."""
    counts = None if cache is None else getattr(cache, _NAME, None)
    if counts is not None and not torch.compiler.is_compiling():
        counts.flush()
