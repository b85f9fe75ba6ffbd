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
from typing import Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ...core.backend import launch_for
from ...core.contract import Contract
from ...core.process import debugging
from ...formats import SMALLEST_EPS, Rounding
from ...kvcache import table_fault
from ...rope import RopeStyle
from ..qk_norm.launch import check_positions

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


class MlaTensors(NamedTuple):
    """The tensors of a call. Index tensors are None if the kernel does not need them."""

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


class MlaCall(NamedTuple):
    """One call of the cache-write kernel: its spec, tensors and numbers, all validated."""

    spec: MlaSpec
    tensors: MlaTensors
    eps: float
    weight_offset: float
    rows: MlaRows

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""
        return self.tensors.q.get_device()


class MlaArguments(Protocol):
    """Validated arguments of `fused_rope_rmsnorm_quantization`."""

    q_rope: Tensor
    kv: Tensor
    gamma: Tensor
    blocks: Tensor
    freqs_cis: Tensor | None
    positions: Tensor | None
    input_row_offsets: Tensor | None
    cache_lengths: Tensor | None
    lookup_table: Tensor | None
    slot_mapping: Tensor | None
    kv_scale: Tensor | None
    per_token_scale: Tensor | None
    rope_style: RopeStyle
    rope_dim: int | None
    entry_format: str
    epsilon: float
    weight_offset: float
    rounding: Rounding
    q_rope_output: Tensor


def run_mla(contract: Contract, spec: MlaSpec, t: MlaTensors, turned: int, eps: float, weight_offset: float) -> None:
    """Launch once, unless there are no tokens."""
    q, freqs, table, blocks = t.q, t.freqs, t.table, t.blocks
    launch = launch_for("mla_cache", q)
    tokens, heads, rope = q.shape
    if not tokens:
        return
    if debugging():
        _check(contract, t)
    pages, page_size, _ = blocks.shape
    requests, width, table_row = (0, 0, 0) if table is None else (*table.shape, table.stride(0))
    if t.lengths is not None:
        requests = t.lengths.shape[0]
    limit, freqs_row = (0, 0) if freqs is None else (freqs.shape[0], freqs.stride(0))
    q_strides, out_strides, block_strides = q.stride()[:2], t.q_out.stride()[:2], blocks.stride()[:2]
    scale_strides = (0, 0) if t.token_scale is None else t.token_scale.stride()
    latent = t.kv.shape[1] - rope
    sizes = (tokens, heads, latent, rope, turned, requests, width, pages, page_size, limit, t.gamma.shape[0])
    strides = (*q_strides, *out_strides, t.kv.stride(0), freqs_row, table_row, *block_strides, *scale_strides)
    launch(MlaCall(spec, t, max(eps, SMALLEST_EPS), weight_offset, MlaRows(*sizes, *strides)))


def _check(contract: Contract, t: MlaTensors) -> None:
    """Read the index tensors on the host, which waits for the device; for debugging only."""
    tokens, blocks, table, freqs = t.q.shape[0], t.blocks, t.table, t.freqs
    offsets, lengths, slots, positions = t.offsets, t.lengths, t.slots, t.positions
    counts = None
    if offsets is not None and lengths is not None:
        starts = offsets.long().cpu()
        counts = starts.diff()
        if (counts < 0).any():
            request = int((counts < 0).nonzero()[0])
            got = f"{int(starts[request])} and then {int(starts[request + 1])} for request {request}"
            contract.fail("input_row_offsets", "not decrease", got)
        counts = starts.clamp(0, tokens).diff()  # later tokens belong to no request
        if table is not None:
            fault = table_fault(blocks, lengths, table, counts)
            if fault is not None:
                contract.fail(*fault)
    if slots is not None:
        limit = blocks.shape[0] * blocks.shape[1]
        outside = (slots >= limit).cpu()
        if outside.any():
            token = int(outside.nonzero()[0])
            contract.fail("slot_mapping", f"be below {limit}", f"{int(slots[token])} for token {token}")
    if freqs is None:
        return
    limit = freqs.shape[0]
    if positions is not None:
        check_positions(contract, positions, "freqs_cis", limit)
    elif lengths is not None and counts is not None:
        ends = torch.where(counts > 0, lengths.long().cpu() + counts, 0)
        if (ends > limit).any():
            request = int((ends > limit).nonzero()[0])
            got = f"{limit} for request {request}'s {int(ends[request])} tokens"
            contract.fail("freqs_cis", "have a row for every position", got)
