"""Masks as what is added to scores of attention, in the forms that decode steps need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCKED: Final = -1e30
"""What `Biases.finite` adds to scores that do not count: a row without any that counts must not become NaN."""

ALIGNED: Final = 8
"""torch's memory-efficient attention reads this many entries of a bias at once, so rows start at multiples of it."""


class Biases(threading.local):
    """Masks as what is added to scores, converted once per step and thread instead of once per layer.

    A compiler finds equal expressions itself. Layers are called in order, so a layer that is not behind the last one
    starts a new step. A mask may have been changed since the step before.
    """

    def __init__(self) -> None:
        self.last = -1
        self.made: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def of(self, mask: Tensor, dtype: torch.dtype, layer: int) -> Tensor:
        """The bias of a mask, boolean (True where attention is allowed) or added to scores, as torch's attention computes it."""
        if mask.dtype is dtype:
            return mask
        allowed = mask.dtype is torch.bool
        if torch.compiler.is_compiling():
            return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf) if allowed else mask.to(dtype)

        def make() -> Tensor:
            # The logarithm of one is zero, and that of zero is -inf: one launch.
            return torch.log(mask, out=torch.empty_like(mask, dtype=dtype)) if allowed else mask.to(dtype)

        return self._once(mask, dtype, layer, (), make)

    def finite(self, mask: Tensor, layer: int) -> Tensor:
        """The float32 bias of a mask, boolean or added to scores, without infinities."""

        def make() -> Tensor:
            added = torch.log(mask) if mask.dtype is torch.bool else mask
            return added.float().clamp(min=BLOCKED)

        return make() if torch.compiler.is_compiling() else self._once(mask, torch.float32, layer, (), make)

    def aligned(self, mask: Tensor, dtype: torch.dtype, layer: int) -> Tensor:
        """The bias of a mask, boolean or added to scores, with rows that start at multiples of `ALIGNED` entries."""
        if torch.compiler.is_compiling():
            return _aligned(mask, dtype)
        if mask.dtype is dtype and _is_aligned(mask):
            return mask
        return self._once(mask, dtype, layer, (0,), lambda: _aligned(mask, dtype))

    def grouped(self, mask: Tensor, dtype: torch.dtype, layer: int, heads: tuple[int, int, int]) -> Tensor:
        """The same for queries [batch * heads, 1, groups * tokens, columns], whose heads of keys are a batch.

        ``heads`` is (batch, heads, groups). The bias can be expanded to all scores.
        """
        batch, keys, groups = heads
        given, own, length, context = mask.shape
        same = given == 1 and own == 1
        if same and length == 1:
            return self.aligned(mask, dtype, layer)

        def make() -> Tensor:
            split = mask.unsqueeze(1) if own == 1 else mask.view(given, keys, groups, length, context)
            repeats = 1 if own == 1 and length == 1 else groups
            shape = (1, 1) if same else (batch, keys)
            bias = _aligned(split.expand(*shape, repeats, length, context), dtype)
            return bias.flatten(2, 3).flatten(0, 1).unsqueeze(1)

        return make() if torch.compiler.is_compiling() else self._once(mask, dtype, layer, heads, make)

    def _once(
        self, mask: Tensor, dtype: torch.dtype, layer: int, form: tuple[int, ...], make: Callable[[], Tensor]
    ) -> Tensor:
        if layer <= self.last:
            self.made.clear()
        self.last = layer
        source, bias = self.made.get((id(mask), *form), (None, mask))
        if source is not mask or bias.dtype is not dtype:
            bias = make()
            self.made[id(mask), *form] = mask, bias
        return bias


biases = Biases()


def _is_aligned(bias: Tensor) -> bool:
    """Whether torch's memory-efficient attention can read a bias where it is."""
    steps = (bias.storage_offset(), *bias.stride()[:-1])
    return bias.stride(-1) == 1 and all(step % ALIGNED == 0 for step in steps)


def _aligned(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as a new bias whose rows start at multiples of `ALIGNED` entries. What is between rows is not read."""
    columns = mask.shape[-1]
    if torch.compiler.is_compiling():
        allowed = mask.dtype is torch.bool
        bias = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf) if allowed else mask.to(dtype)
        return F.pad(bias, (0, -columns % ALIGNED))[..., :columns]
    bias = mask.new_empty(*mask.shape[:-1], columns + -columns % ALIGNED, dtype=dtype)[..., :columns]
    return torch.log(mask, out=bias) if mask.dtype is torch.bool else bias.copy_(mask)
