"""What one launch of a product per head computes (`HeadSpec`), and where its tensors are (`HeadRows`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

WeightOrder = Literal["rows", "columns"]
"""Whether neighbours in memory belong to the same row of a weight [K, N], or to the same column."""


@dataclass(frozen=True, eq=False)
class HeadSpec:
    """Everything except sizes that affects the machine code; interned by `head_spec`, so identity is equality."""

    x: torch.dtype
    order: WeightOrder


head_spec: Final = cache(HeadSpec)
"""The interned `HeadSpec` with these properties."""


class HeadRows(NamedTuple):
    """Sizes, then strides in elements. ``weight_step`` is between rows of a weight, or between columns: see `WeightOrder`."""

    rows: int
    heads: int
    k: int
    n: int
    x_row: int
    x_head: int
    weight_head: int
    weight_step: int


class HeadCall(NamedTuple):
    """One call: its spec, tensors and numbers, all validated. ``out`` is contiguous, [rows, heads, N]."""

    spec: HeadSpec
    x: Tensor
    weight: Tensor
    out: Tensor
    rows: HeadRows

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""
        return self.x.get_device()
