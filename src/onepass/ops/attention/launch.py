"""What one launch of a decode step's attention computes (`AttentionSpec`), and where its tensors are (`AttentionRows`).

A head of keys serves ``groups`` heads of queries. The queries of a sequence that share a head of keys, ``groups`` times
``tokens``, are the *rows* of a product. A *split* is `SPLIT` neighbouring entries of the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

SPLIT: Final = 256
"""Entries of the context that are summed as one. It defines the result, so it depends on nothing."""
ROWS: Final = 16
"""Rows of queries that a program multiplies: what a tensor core takes."""
MAX_COLUMNS: Final = 256
"""Maximum number of columns of a head."""

MaskKind = Literal["none", "one", "many"]
"""No mask, or one with a row for the only token of a sequence, or with a row per token."""


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """Everything except sizes that affects the machine code; interned by `attention_spec`, so identity is equality."""

    x: torch.dtype
    mask: MaskKind


attention_spec: Final = cache(AttentionSpec)
"""The interned `AttentionSpec` with these properties."""


class AttentionRows(NamedTuple):
    """Sizes, then strides in elements. ``heads`` are those of keys. The strides of q are between its own heads."""

    batch: int
    heads: int
    groups: int
    tokens: int
    context: int
    columns: int
    splits: int
    q_batch: int
    q_head: int
    q_token: int
    k_batch: int
    k_head: int
    k_entry: int
    v_batch: int
    v_head: int
    v_entry: int
    mask_batch: int
    mask_token: int


class AttentionCall(NamedTuple):
    """One call: its spec, tensors and numbers, all validated.

    ``out`` is contiguous, [batch, tokens, heads of q, columns]. The launch adds ``sums``, ``tops`` and ``counter``.
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    scale: float
    rows: AttentionRows
    sums: Tensor | None = None
    tops: Tensor | None = None
    counter: Tensor | None = None

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""
        return self.q.get_device()
