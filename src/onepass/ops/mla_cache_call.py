"""From checked tensors to one backend launch of MLA's cache write; and what is read on the host when debugging."""

from __future__ import annotations

import torch

from ..contract.declaration import Contract
from ..fastpath.debug import debugging
from ..formats import SMALLEST_EPS
from ..kvcache import table_fault
from ..specs.mla_cache import MlaCall, MlaRows
from .dispatch import Launch

_launch = Launch("mla_cache")


def run_mla(contract: Contract, call: MlaCall, turned: int) -> None:
    """One launch; none when there are no tokens. Index tensors are None where the kernel has no use for them."""
    q, kv, gamma, freqs, table, blocks = call.q, call.kv, call.gamma, call.freqs, call.table, call.blocks
    launch = _launch.on(q)
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
    q_token, q_head, _ = q.stride()
    out_token, out_head, _ = call.q_out.stride()
    block_page, block_entry, _ = blocks.stride()
    scale_page, scale_entry = (0, 0) if call.token_scale is None else call.token_scale.stride()
    rows = MlaRows(
        tokens, heads, kv.shape[1] - rope, rope, turned, requests, width, pages, page_size, limit, gamma.shape[0], q_token,
        q_head, out_token, out_head, kv.stride(0), freqs_row, table_row, block_page, block_entry, scale_page, scale_entry,
    )  # fmt: skip
    launch(call._replace(rows=rows, eps=max(call.eps, SMALLEST_EPS)))


def _check(contract: Contract, call: MlaCall) -> None:
    """Read the tables on the host, which waits for the device: for debugging only."""
    tokens, blocks, table, freqs = call.q.shape[0], call.blocks, call.table, call.freqs
    offsets, lengths, slots, positions = call.offsets, call.lengths, call.slots, call.positions
    counts = None
    if offsets is not None and lengths is not None:
        starts = offsets.long().cpu()
        counts = starts.diff()
        if (counts < 0).any():
            request = int((counts < 0).nonzero()[0])
            contract.fail(
                "input_row_offsets",
                "not fall",
                f"{int(starts[request])} and then {int(starts[request + 1])} for request {request}",
            )
        counts = starts.clamp(0, tokens).diff()  # tokens beyond are nobody's
        if table is not None:
            fault = table_fault(blocks, lengths, table, counts)
            if fault is not None:
                contract.fail(*fault)
    if slots is not None:
        places = blocks.shape[0] * blocks.shape[1]
        outside = (slots >= places).cpu()
        if outside.any():
            token = int(outside.nonzero()[0])
            contract.fail("slot_mapping", f"be below {places}", f"{int(slots[token])} for token {token}")
    if freqs is None:
        return
    limit = freqs.shape[0]
    if positions is not None:
        least, most = (int(v) for v in positions.aminmax())
        if least < 0 or most >= limit:
            contract.fail("positions", f"lie within the {limit} rows of freqs_cis", f"{least} to {most}")
    elif lengths is not None and counts is not None:
        ends = torch.where(counts > 0, lengths.long().cpu() + counts, 0)
        if (ends > limit).any():
            request = int((ends > limit).nonzero()[0])
            contract.fail(
                "freqs_cis",
                "have a row for every position",
                f"{limit} for the {int(ends[request])} of request {request}",
            )
