"""What one launch computes (`SequenceSpec`), and where its tensors are (`SequenceRows`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

SPLIT: Final = 256
"""Keys that are summed as one. It defines the result, so it depends on nothing."""
MaskKind = Literal["none", "allowed", "added"]
"""No mask: a token sees the keys up to its own. Or a boolean mask, or float32 numbers that are added to scores."""


@dataclass(frozen=True, eq=False)
class SequenceSpec:
    """Everything except sizes that affects the machine code; interned by `sequence_spec`, so identity is equality.

    ``x`` is the dtype of queries and the result, ``kv`` that of keys and values. ``capped`` is whether scores are soft-capped.
    """

    x: torch.dtype
    kv: torch.dtype
    mask: MaskKind
    capped: bool


sequence_spec: Final = cache(SequenceSpec)
"""The interned `SequenceSpec` with these properties."""


class SequenceRows(NamedTuple):
    """Sizes, then strides in elements. ``heads`` are those of keys, each of which serves ``groups`` heads of queries.

    Without a mask token t sees the first ``seen + t`` keys.
    """

    heads: int
    groups: int
    tokens: int
    context: int
    columns: int
    values: int
    seen: int
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


class SequenceCall(NamedTuple):
    """One call: its spec, tensors and numbers, all validated. ``out`` is contiguous, [batch, tokens, heads of q, values]."""

    spec: SequenceSpec
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    scale: float
    softcap: float
    rows: SequenceRows

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""
        return self.q.get_device()
