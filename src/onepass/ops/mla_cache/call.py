"""Turns validated tensors into one backend launch of MLA's cache write. Debug mode also checks the indices."""

from __future__ import annotations

import torch

from ...core.backend import Family
from ...core.contract import Contract
from ...core.debug import debugging
from ...formats import SMALLEST_EPS
from ...kvcache import table_fault
from ..qk_norm.call import check_positions
from .spec import MlaCall, MlaRows

_family = Family("mla_cache")


def run_mla(contract: Contract, call: MlaCall, turned: int) -> None:
    """Launch once, unless there are no tokens. Index tensors are None if the kernel does not need them."""
    q, kv, freqs, table, blocks = call.q, call.kv, call.freqs, call.table, call.blocks
    launch = _family.launch(q)
    tokens, heads, rope = q.shape
    if not tokens:
        return
    if debugging():
        _check(contract, call)
    pages, page_size, _ = blocks.shape
    requests, width, table_row = (0, 0, 0) if table is None else (*table.shape, table.stride(0))
    if call.lengths is not None:
        requests = call.lengths.shape[0]
    limit, freqs_row = (0, 0) if freqs is None else (freqs.shape[0], freqs.stride(0))
    q_strides, out_strides, block_strides = q.stride()[:2], call.q_out.stride()[:2], blocks.stride()[:2]
    scale_strides = (0, 0) if call.token_scale is None else call.token_scale.stride()
    latent = kv.shape[1] - rope
    sizes = (tokens, heads, latent, rope, turned, requests, width, pages, page_size, limit, call.gamma.shape[0])
    strides = (*q_strides, *out_strides, kv.stride(0), freqs_row, table_row, *block_strides, *scale_strides)
    launch(call._replace(rows=MlaRows(*sizes, *strides), eps=max(call.eps, SMALLEST_EPS)))


def _check(contract: Contract, call: MlaCall) -> None:
    """Read the index tensors on the host, which waits for the device; for debugging only."""
    tokens, blocks, table, freqs = call.q.shape[0], call.blocks, call.table, call.freqs
    offsets, lengths, slots, positions = call.offsets, call.lengths, call.slots, call.positions
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
