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
from ...rope import RopeStyle, SectionStyle
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


Scaling = Literal["none", "tensor", "head", "own"]
"""What a cache's values are divided by: nothing, one number, a number for each head, or one that a token's head gets
for itself, which is stored."""


class Axes(NamedTuple):
    """Which pairs turn by the second and by the third position of a token: every ``step``th from ``height`` up to
    ``height_end``, and the same for ``width``. The others turn by the first.
    """

    step: int
    height: int
    height_end: int
    width: int
    width_end: int


def axes_of(style: SectionStyle, pairs: int, height: int, width: int) -> Axes | None:
    """The axes of ``pairs`` pairs; None for tokens with one position."""
    if not height + width:
        return None
    if style == "contiguous":
        return Axes(1, pairs - width - height, pairs - width, pairs - width, pairs)
    return Axes(3, 1, 1 + 3 * height, 2, 2 + 3 * width)


class Turn(NamedTuple):
    """The rotation of the first ``dim`` columns of every head.

    ``pair``: the angles are rows of cosines and of sines, one of each per token. Otherwise they are rows of a table,
    chosen by positions of the dtype ``positions`` or, if that is None, by the token's index in its sequence. ``axes``: by
    three positions per token.
    """

    style: RopeStyle
    dim: int
    angles: torch.dtype
    pair: bool = False
    positions: torch.dtype | None = None
    axes: Axes | None = None


@dataclass(frozen=True, eq=False)
class QkCacheSpec:
    """Everything except sizes that affects the machine code; interned by `qk_cache_spec`, so identity is equality.

    ``k_out`` is the dtype of k's result: the cache's, if there is one. ``values``: v is stored too; ``norm_v``: normed.
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
    k_scale: Scaling = "none"
    v_scale: Scaling = "none"
    rounding: Rounding = "once"
    values: bool = False
    norm_v: bool = False


qk_cache_spec: Final = cache(QkCacheSpec)
"""The interned `QkCacheSpec` with these properties."""


class QkCacheRows(NamedTuple):
    """Sizes, then strides in elements: between sequences, between tokens, and between heads.

    ``limit`` is the number of rows of a table of angles, ``first`` is added to every start. With ``folded`` all tensors step through
    tokens as through one dimension, and only the strides between tokens matter. A cache has strides between pages,
    entries and heads, and so have scales of entries. Those of heads have the last. Positions have one between axes.
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
    k_scale_page: int
    k_scale_entry: int
    k_scale_step: int
    v_scale_page: int
    v_scale_entry: int
    v_scale_step: int
    positions_axis: int


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
    k_scale_out: Tensor | None = None
    v_scale_out: Tensor | None = None

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
    height: int
    width: int
    section_style: SectionStyle
    norm_v: bool
    own_scales: bool
    q_out: Tensor
    k_out: Tensor | None
    k_scale_out: Tensor | None
    v_scale_out: Tensor | None


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
    positions_axis = 0
    if call.spec.turn is not None and call.spec.turn.axes is not None:
        positions_axis, others[1] = others[1][0], others[1][1:]
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
    pages = entries = 0
    if call.k_cache is not None:
        pages, entries = call.k_cache.shape[0], call.k_cache.shape[1 if layout == "NHD" else 2]
    value = 0 if v is None else v.shape[-1]
    sizes = (tokens, sequence, q_heads, k.shape[-2], head, value, pages, entries, limit, int(folded), first)
    rows = QkCacheRows._make((*sizes, *strides, freqs_row, start_step, *_cache_steps(call, layout), positions_axis))
    launch(call._replace(rows=rows, eps=max(call.eps, SMALLEST_EPS)))


def _cache_steps(call: QkCacheCall, layout: CacheLayout) -> list[int]:
    """The strides of both caches and of their scales between pages, entries and heads."""
    entry, by_head = (1, 2) if layout == "NHD" else (2, 1)
    steps: list[int] = []
    for tensor in (call.k_cache, call.v_cache):
        step = _ABSENT if tensor is None else tensor.stride()
        steps += (step[0], step[entry], step[by_head])
    for own, given in ((call.k_scale_out, call.k_scale), (call.v_scale_out, call.v_scale)):
        if own is not None:
            step = own.stride()
            steps += (step[0], step[entry], step[by_head])
        else:
            steps += (0, 0, 0 if given is None or given.numel() == 1 else given.stride(0))
    return steps


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
