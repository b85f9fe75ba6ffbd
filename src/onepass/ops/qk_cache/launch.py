"""What one launch of the norm, rotation and cache write of q, k and v computes (`QkCacheSpec`), and where its
tensors are (`QkCacheRows`).

A *token* has ``q_heads`` rows of q and ``k_heads`` rows of k, ``head`` columns each, and ``k_heads`` rows of v with
``value`` columns. Tokens form ``tokens / sequence`` sequences. A token's *entry* is one place per head in each cache:
caches are ``pages`` pages of ``entries`` entries, and in a dense cache a page is a sequence.
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
from ...rope import RopeStyle
from ..qk_norm.launch import check_positions

MAX_HEAD: Final = 1024
"""Maximum number of columns of a head."""
MAX_HEADS: Final = 1024

CacheLayout = Literal["NHD", "HND", "dense"]
CACHE_LAYOUTS: Final[tuple[CacheLayout, ...]] = ("NHD", "HND", "dense")
NormKind = Literal["none", "head", "whole"]
"""Which columns share statistics: none, those of a head, or those of all heads of a token."""
Placing = Literal["none", "slots", "dense"]
"""How a token's entry is found; "none": there is no cache, and the result of k is a tensor."""


class Turn(NamedTuple):
    """The rotation of the first ``dim`` columns of every head.

    ``pair``: the angles are rows of cosines and of sines, one of each per token. Otherwise they are rows of a table,
    chosen by positions of the dtype ``positions`` or, if that is None, by the token's index in its sequence.
    """

    style: RopeStyle
    dim: int
    angles: torch.dtype
    pair: bool = False
    positions: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class QkCacheSpec:
    """Everything except sizes that affects the machine code; interned by `qk_cache_spec`, so identity is equality.

    ``k_out`` is the dtype of k's result: the cache's, if there is one. ``k_scaled`` and ``v_scaled`` tell whether
    values are divided by a scale.
    """

    x: torch.dtype
    q_out: torch.dtype
    k_out: torch.dtype
    gamma_q: torch.dtype | None = None
    gamma_k: torch.dtype | None = None
    norm: NormKind = "none"
    turn: Turn | None = None
    placing: Placing = "none"
    slots: torch.dtype | None = None
    starts: torch.dtype | None = None
    k_scaled: bool = False
    v_scaled: bool = False
    rounding: Rounding = "once"


qk_cache_spec: Final = cache(QkCacheSpec)
"""The interned `QkCacheSpec` with these properties."""


class QkCacheRows(NamedTuple):
    """Sizes, then strides in elements: between sequences, between tokens, and between heads.

    ``limit`` is the number of rows of a table of angles, ``first`` is added to every start. With ``folded`` all tensors step through
    tokens as through one dimension, and only the strides between tokens matter. A cache has strides between pages,
    entries and heads.
    """

    tokens: int
    sequence: int
    q_heads: int
    k_heads: int
    head: int
    value: int
    pages: int
    entries: int
    limit: int
    folded: int
    first: int
    q_outer: int
    q_token: int
    q_head: int
    k_outer: int
    k_token: int
    k_head: int
    v_outer: int
    v_token: int
    v_head: int
    q_out_outer: int
    q_out_token: int
    q_out_head: int
    k_out_outer: int
    k_out_token: int
    k_out_head: int
    slots_outer: int
    slots_token: int
    positions_outer: int
    positions_token: int
    cos_outer: int
    cos_token: int
    sin_outer: int
    sin_token: int
    freqs_row: int
    start_step: int
    k_page: int
    k_entry: int
    k_step: int
    v_page: int
    v_entry: int
    v_step: int


NO_ROWS: Final = QkCacheRows(*[0] * len(QkCacheRows._fields))
"""The rows of a call whose layout is not known yet."""


class QkCacheCall(NamedTuple):
    """One call: its spec, tensors and numbers, all validated. Tensors that the kernel does not need are None."""

    spec: QkCacheSpec
    q: Tensor
    k: Tensor
    v: Tensor | None
    gamma_q: Tensor | None
    gamma_k: Tensor | None
    freqs: Tensor | None
    positions: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    slots: Tensor | None
    starts: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    q_out: Tensor
    k_out: Tensor | None
    k_cache: Tensor | None
    v_cache: Tensor | None
    eps: float
    weight_offset: float
    rows: QkCacheRows = NO_ROWS

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""
        return self.q.get_device()


_ABSENT = (0, 0, 0, 0)


class QkCacheArguments(Protocol):
    """Validated arguments of `qk_norm_rope_cache`."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    gamma_q: Tensor | None
    gamma_k: Tensor | None
    freqs: Tensor | None
    positions: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    slots: Tensor | None
    starts: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_cache: Tensor | None
    v_cache: Tensor | None
    eps: float
    weight_offset: float
    per_head: bool
    style: RopeStyle
    dim: int | None
    first: int
    layout: CacheLayout
    rounding: Rounding
    q_out: Tensor
    k_out: Tensor | None


def run_qk_cache(contract: Contract, call: QkCacheCall, first: int, layout: CacheLayout) -> None:
    """Launch once, unless there are no tokens."""
    q, k, v, freqs, starts = call.q, call.k, call.v, call.freqs, call.starts
    launch = launch_for("qk_cache", q)
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
