"""The attention of a CPU for `onepass.patch` with ``batch_invariant=True``: prompts, chunks of prompts and decode steps.

A query q sees the keys and values that its mask allows, in order. Nothing else is read::

    s   = scale * (q . k) + mask             float32; with a soft cap: cap * tanh(scale * (q . k) / cap) + mask
    p   = exp(s - max(s))                    float32
    out = round(sum(p * v) / sum(p))         sums in float32; 0 where no key is seen

Both sums are made of splits of `SPLIT` keys that the query sees, added from the first to the last. So the bits depend
only on the query and on these keys and values. Padding on either side, other sequences, other queries, the length and kind
of a cache, and the number of threads change nothing.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ...core.backend import launch_for
from ...core.op import define
from .launch import SequenceCall, SequenceRows, sequence_spec

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
WIDENED: Final = 16
"""Tokens from which on 16-bit keys and values are made float32 once, and not for each token. That is exact."""


def attends_sequence(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend_sequence` takes these tensors, as far as devices, dtypes and shapes are concerned."""
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or q.dtype not in _DTYPES:
        return False
    if k.dtype is not q.dtype or v.dtype is not q.dtype or any(t.dim() != 4 for t in (q, k, v)):
        return False
    batch, heads, tokens, columns = q.shape
    if k.shape[:3] != v.shape[:3] or k.shape[0] != batch or k.shape[3] != columns or heads % k.shape[1]:
        return False
    if mask is None:
        return tokens == 1 or tokens <= k.shape[2]
    wanted = (1, tokens, k.shape[2])
    return mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1:] == wanted and mask.is_cpu


def attend_sequence(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float = 0.0) -> Tensor:
    """Attention [batch, tokens, heads, values] of queries [batch, heads, tokens, columns], in one launch.

    ``k`` is [batch, heads of keys, context, columns], and ``v`` has as many heads and entries. ``mask``, [batch or 1, 1, tokens,
    context], is boolean, or added to scores: -inf, or the smallest number of its dtype, hides a key. Without a mask a single
    token sees all keys, and token t of several sees the first t + 1. ``softcap`` is 0 for none. `attends_sequence` tells
    what is supported. The module's docstring has the equation.
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.onepass.attend_sequence.default(q, k, v, mask, scale, softcap)
        return out
    return _attend(q, k, v, mask, scale, softcap)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    batch, heads, tokens, columns = q.shape
    keys, context, values = *k.shape[1:3], v.shape[3]
    out = q.new_empty(batch, tokens, heads, values)
    if not out.numel():
        return out
    if tokens >= WIDENED:
        k, v = k.float(), v.float()
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    kind, mask = "none" if mask is None else "allowed" if mask.dtype is torch.bool else "added", _prepared(mask)
    spec = sequence_spec(q.dtype, k.dtype, kind, softcap != 0)
    seen = context if tokens == 1 else 1
    mask_steps = (0, 0) if mask is None else (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2))
    sizes = (keys, heads // keys, tokens, context, columns, values, seen)
    rows = SequenceRows._make((*sizes, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_steps))
    launch_for("sequence_attention", q)(SequenceCall(spec, q, k, v, mask, out, scale, softcap, rows))
    return out


def _prepared(mask: Tensor | None) -> Tensor | None:
    """A mask as the kernel reads it: bytes, or float32 numbers with -inf for hidden keys; the last dimension contiguous."""
    if mask is None:
        return None
    if mask.dtype is not torch.bool:
        mask = mask.float().masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
    return mask if mask.stride(-1) == 1 else mask.contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


define(
    "attend_sequence(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, float softcap) -> Tensor", _attend, _fake
)
