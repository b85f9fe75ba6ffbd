"""What one launch of MLA's cache write computes (`MlaSpec`) and where its tensors are (`MlaRows`).

A *token* has H rows of q (``rope`` columns each) and one row of kv. That row has a latent of ``latent``
columns and ``rope`` more columns. The first ``normed`` columns of the latent are normed (by default
all of them) and the others only converted. The first ``turned`` of the ``rope`` columns are rotated,
as in every head of q. The row of kv is stored in the token's *entry*, ``latent + rope`` columns of the
cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ...formats import Rounding
from ...rope import RopeStyle

TILE: Final = 128
"""Columns of a latent that share a scale."""
MAX_LATENT: Final = 2048
MAX_ROPE: Final = 1024
MAX_HEADS: Final = 256

ScaleKind = Literal["none", "tensor", "token", "tile"]
"""What entries are divided by: nothing, one given number, or one number per entry, which is stored too.

tile: the entry has the format "fp8_ds_mla", with one number for each `TILE` columns of the latent.
"""


@dataclass(frozen=True, eq=False)
class MlaSpec:
    """Everything except sizes that affects the machine code; interned by `mla_spec`, so identity is equality.

    Dtypes of absent tensors are None. Without ``slots`` a token's slot follows from ``offsets``,
    ``lengths`` and ``table``; without ``positions`` its angles follow from ``offsets`` and ``lengths``.
    """

    q: torch.dtype
    q_out: torch.dtype
    kv: torch.dtype
    gamma: torch.dtype
    cache: torch.dtype
    freqs: torch.dtype | None = None
    offsets: torch.dtype | None = None
    lengths: torch.dtype | None = None
    table: torch.dtype | None = None
    slots: torch.dtype | None = None
    positions: torch.dtype | None = None
    style: RopeStyle = "interleaved"
    scale: ScaleKind = "none"
    rounding: Rounding = "once"


mla_spec: Final = cache(MlaSpec)
"""The interned `MlaSpec` with these properties."""


class MlaRows(NamedTuple):
    """Sizes, then strides in elements. Columns, index tensors and the rows of a table are contiguous.

    ``limit`` is freqs' number of rows: a position outside them uses the nearest row.
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
"""The rows of a call whose layout is not known yet."""


class MlaCall(NamedTuple):
    """One call of the cache-write kernel: its spec, tensors and numbers, all validated.

    Index tensors are None if the kernel does not need them.
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
