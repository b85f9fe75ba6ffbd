"""What one launch of MLA's cache write does (`MlaSpec`) and where its tensors lie (`MlaRows`).

A *token* has H rows of q (``rope`` columns each) and one row of kv: a latent of ``latent`` columns, of which the first ``normed``
are normed (all of them unless the caller says otherwise) and the others are converted, no more, and
``rope`` columns, of which the first ``turned`` are rotated, as they are in every head of q. Its *entry*, ``latent + rope``
columns of one place in the cache, takes the row of kv.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..rope import RopeStyle

MAX_LATENT: Final = 2048
MAX_ROPE: Final = 256
MAX_HEADS: Final = 256

MlaRounding = Literal["once", "reference"]
"""Round once, at the store; or as the kernel this op is named after: every product to the inputs' dtypes first."""
ScaleKind = Literal["none", "tensor", "token"]
"""What entries are divided by: nothing, one given number, or each by a number of its own that is stored beside it."""


@dataclass(frozen=True, eq=False)
class MlaSpec:
    """Everything but sizes that shapes the machine code; interned by `mla_spec`, so identity is equality.

    Of the index tensors the dtypes; None where the call has none. Without ``slots`` a token's place comes from
    ``offsets``, ``lengths`` and ``table``; without ``positions`` its angles come from ``offsets`` and ``lengths``.
    """

    q: torch.dtype
    q_out: torch.dtype
    kv: torch.dtype
    gamma: torch.dtype
    cache: torch.dtype
    freqs: torch.dtype | None
    offsets: torch.dtype | None
    lengths: torch.dtype | None
    table: torch.dtype | None
    slots: torch.dtype | None
    positions: torch.dtype | None
    style: RopeStyle
    scale: ScaleKind
    rounding: MlaRounding


@cache
def mla_spec(
    q: torch.dtype,
    q_out: torch.dtype,
    kv: torch.dtype,
    gamma: torch.dtype,
    cache: torch.dtype,
    freqs: torch.dtype | None = None,
    offsets: torch.dtype | None = None,
    lengths: torch.dtype | None = None,
    table: torch.dtype | None = None,
    slots: torch.dtype | None = None,
    positions: torch.dtype | None = None,
    style: RopeStyle = "interleaved",
    scale: ScaleKind = "none",
    rounding: MlaRounding = "once",
) -> MlaSpec:
    """The interned `MlaSpec` of these properties."""
    return MlaSpec(
        q, q_out, kv, gamma, cache, freqs, offsets, lengths, table, slots, positions, style, scale, rounding
    )  # fmt: skip


class MlaRows(NamedTuple):
    """Sizes, then strides in elements. Columns lie side by side; so do the index tensors' elements and a table's row.

    ``limit`` is freqs' number of rows: a position outside them takes the nearest.
    """

    tokens: int
    heads: int
    latent: int
    rope: int
    turned: int
    requests: int
    table_width: int
    pages: int
    page_size: int
    limit: int
    normed: int
    q_token: int
    q_head: int
    out_token: int
    out_head: int
    kv_token: int
    freqs_row: int
    table_row: int
    block_page: int
    block_entry: int
    scale_page: int
    scale_entry: int


NO_ROWS: Final = MlaRows(*[0] * len(MlaRows._fields))
"""The rows of a call that is not laid out yet."""


class MlaCall(NamedTuple):
    """One call of the cache-write kernel: its spec, tensors and numbers, every one of them validated.

    Index tensors are None where the kernel has no use for them.
    """

    spec: MlaSpec
    q: Tensor
    kv: Tensor
    gamma: Tensor
    freqs: Tensor | None
    offsets: Tensor | None
    lengths: Tensor | None
    table: Tensor | None
    slots: Tensor | None
    positions: Tensor | None
    kv_scale: Tensor | None
    q_out: Tensor
    blocks: Tensor
    token_scale: Tensor | None
    eps: float
    weight_offset: float
    rows: MlaRows = NO_ROWS
