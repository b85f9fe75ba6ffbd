"""Turns validated tensors into one backend launch of the cache write of q, k and v. Debug mode checks the indices."""

from __future__ import annotations

from torch import Tensor

from ..contract.declaration import Contract
from ..fastpath.debug import debugging
from ..formats import SMALLEST_EPS
from ..specs.qk_cache import CacheLayout, QkCacheCall, QkCacheRows
from .dispatch import Family
from .qk_norm_call import check_positions

_family = Family("qk_cache")
_WITH_HEADS = ("q", "k", "v", "q_out", "k_out")


def run_qk_cache(contract: Contract, call: QkCacheCall, first: int, layout: CacheLayout) -> None:
    """Launch once, unless there are no tokens."""
    q, k, v, freqs = call.q, call.k, call.v, call.freqs
    launch = _family.launch(q)
    *lead, q_heads, head = q.shape
    tokens, sequence = lead[0] * lead[-1] if len(lead) == 2 else lead[0], lead[-1]
    if not tokens:
        return
    if debugging():
        _check(contract, call, layout)
    steps = [_steps(getattr(call, name), lead) for name in _WITH_HEADS]
    steps += [_steps(t, lead) for t in (call.slots, call.positions, call.cos, call.sin)]
    folded = all(outer == sequence * inner for outer, inner in steps) or len(lead) == 1 or 1 in lead
    if len(lead) == 2 and lead[1] == 1:
        steps = [(0, outer) for outer, _ in steps]
    strides: list[int] = []
    for i, name in enumerate(_WITH_HEADS):
        tensor = getattr(call, name)
        strides += (*steps[i], 0 if tensor is None else tensor.stride(-2))
    for outer, inner in steps[len(_WITH_HEADS) :]:
        strides += (outer, inner)
    limit, freqs_row = (0, 0) if freqs is None else (freqs.shape[0], freqs.stride(0))
    starts = call.starts
    start_step = 0 if starts is None or starts.shape[0] == 1 else starts.stride(0)
    pages, entries, caches = 0, 0, [0] * 6
    if call.k_cache is not None and call.v_cache is not None:
        entry, step = (1, 2) if layout == "NHD" else (2, 1)
        pages, entries = call.k_cache.shape[0], call.k_cache.shape[entry]
        caches = [t.stride(d) for t in (call.k_cache, call.v_cache) for d in (0, entry, step)]
    value = 0 if v is None else v.shape[-1]
    sizes = (tokens, sequence, q_heads, k.shape[-2], head, value, pages, entries, limit, int(folded), first)
    rows = QkCacheRows._make((*sizes, *strides, freqs_row, start_step, *caches))
    launch(call._replace(rows=rows, eps=max(call.eps, SMALLEST_EPS)))


def _steps(tensor: Tensor | None, lead: list[int]) -> tuple[int, int]:
    """The strides between sequences and between tokens."""
    if tensor is None:
        return 0, 0
    strides = tensor.stride()
    inner = len(lead) - 1
    return (strides[0] if inner else 0), strides[inner]


def _check(contract: Contract, call: QkCacheCall, layout: CacheLayout) -> None:
    """Read the index tensors on the host, which waits for the device; for debugging only."""
    if call.freqs is not None:
        limit = call.freqs.shape[0]
        if call.positions is not None:
            check_positions(contract, call.positions, "freqs", limit)
        elif call.q.shape[-3] > limit:
            contract.fail("freqs", "have a row for every token of a sequence", f"{limit} for {call.q.shape[-3]} tokens")
    if call.slots is not None and call.k_cache is not None:
        limit = call.k_cache.shape[0] * call.k_cache.shape[1 if layout == "NHD" else 2]
        most = int(call.slots.max())
        if most >= limit:
            contract.fail("slots", f"be below {limit}", str(most))
