"""Turns validated tensors into one backend launch of the cache write of q, k and v. Debug mode checks the indices."""

from __future__ import annotations

from ...core.backend import Family
from ...core.contract import Contract
from ...core.debug import debugging
from ...formats import SMALLEST_EPS
from ..qk_norm.call import check_positions
from .spec import CacheLayout, QkCacheCall, QkCacheRows

_family = Family("qk_cache")
_ABSENT = (0, 0, 0, 0)


def run_qk_cache(contract: Contract, call: QkCacheCall, first: int, layout: CacheLayout) -> None:
    """Launch once, unless there are no tokens."""
    q, k, v, freqs, starts = call.q, call.k, call.v, call.freqs, call.starts
    launch = _family.launch(q)
    *lead, q_heads, head = q.shape
    sequence = lead[-1]
    tokens = sequence if len(lead) == 1 else lead[0] * sequence
    if not tokens:
        return
    if debugging():
        _check(contract, call, layout)
    with_heads = [_ABSENT if t is None else t.stride() for t in (q, k, v, call.q_out, call.k_out)]
    others = [_ABSENT if t is None else t.stride() for t in (call.slots, call.positions, call.cos, call.sin)]
    strides: list[int] = []
    if len(lead) == 1 or sequence == 1:  # one stride reaches every token, and the head's is the last but one
        folded = True
        for step in with_heads:
            strides += (0, step[0], step[-2])
        for step in others:
            strides += (0, step[0])
    else:
        folded = lead[0] == 1 or all(step[0] == sequence * step[1] for step in (*with_heads, *others))
        for step in with_heads:
            strides += (step[0], step[1], step[2])
        for step in others:
            strides += (step[0], step[1])
    limit, freqs_row = (0, 0) if freqs is None else (freqs.shape[0], freqs.stride(0))
    start_step = 0 if starts is None or starts.shape[0] == 1 else starts.stride(0)
    pages = entries = value = 0
    caches: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    if v is not None and call.k_cache is not None and call.v_cache is not None:
        entry, by_head = (1, 2) if layout == "NHD" else (2, 1)
        pages, entries, value = call.k_cache.shape[0], call.k_cache.shape[entry], v.shape[-1]
        of_k, of_v = call.k_cache.stride(), call.v_cache.stride()
        caches = (of_k[0], of_k[entry], of_k[by_head], of_v[0], of_v[entry], of_v[by_head])
    sizes = (tokens, sequence, q_heads, k.shape[-2], head, value, pages, entries, limit, int(folded), first)
    rows = QkCacheRows._make((*sizes, *strides, freqs_row, start_step, *caches))
    launch(call._replace(rows=rows, eps=max(call.eps, SMALLEST_EPS)))


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
