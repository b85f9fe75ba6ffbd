"""The attention of a decode step, for `onepass.patch`: the bytes of a token depend on neither its batch nor the run.

With the queries q of one token, and the keys k and values v of its context::

    s   = scale * (q . k) + mask             float32; an entry whose mask is -inf does not count
    p   = round(exp(s - max(s)))             to v's dtype
    out = round(sum(p * v) / sum(p))         sums in float32; 0 where no entry counts

Each split of `SPLIT` entries is summed by itself, relative to its own largest score. Then splits are added from the first
to the last. A mask of zeros, a longer cache whose further entries do not count, other sequences and other tokens of a step
leave a token's bytes as they are. Keys and values of entries that do not count must be finite, as for torch's attention.
Only GPUs have the kernel.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import Unsupported
from ..specs.attention import MAX_COLUMNS, SPLIT, AttentionCall, AttentionRows, attention_spec
from .dispatch import Family
from .registration import define

_family: Final = Family("attention")
_LOG2E: Final = math.log2(math.e)
ALIGNED: Final = 16
"""Rows of q, k and v start at multiples of this many bytes."""


def attends(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` takes these tensors, as far as dtypes, shapes and memory are concerned."""
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype is not q.dtype or v.dtype is not q.dtype:
        return False
    batch, heads, tokens, columns = q.shape
    keys, context = k.shape[1:3]
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != columns or heads % keys or not context:
        return False
    if columns > MAX_COLUMNS or columns % 8 or not all(map(_aligned, (q, k, v))):
        return False
    if mask is None:
        return tokens == 1
    return (
        mask.dtype is q.dtype
        and mask.dim() == 4
        and mask.shape[0] in (1, batch)
        and mask.shape[1:] == (1, tokens, context)
        and mask.stride(-1) == 1
    )


def _aligned(t: Tensor) -> bool:
    """Whether rows of the last dimension can be loaded 16 bytes at a time. A compiler does not know addresses."""
    if t.stride(3) != 1 or any(step * t.element_size() % ALIGNED for step in _steps(t)):
        return False
    return torch.compiler.is_compiling() or t.data_ptr() % ALIGNED == 0


def _steps(t: Tensor) -> tuple[int, ...]:
    """The strides of all dimensions but the last. That of a single element means nothing, and is 0 here."""
    return tuple([0 if size == 1 else step for size, step in zip(t.shape[:3], t.stride()[:3], strict=True)])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention [batch, tokens, heads, columns] of queries [batch, heads, tokens, columns] to a cache, in one launch.

    ``k`` and ``v`` are [batch, heads of keys, context, columns]. ``mask``, [batch or 1, 1, tokens, context] in q's dtype, is
    added to scores. Several tokens need one. `attends` tells what is possible. The module says what is computed.
    """
    if torch.compiler.is_compiling():
        made: Tensor = torch.ops.onepass.attend.default(q, k, v, mask, scale)
        return made
    return _attend(q, k, v, mask, scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if not attends(q, k, v, mask):
        q_, k_, v_, mask_ = map(_described, (q, k, v, mask))
        raise Unsupported(f"attend: no kernel takes q {q_}, k {k_} and v {v_} with mask {mask_}")
    batch, heads, tokens, columns = q.shape
    out = q.new_empty(batch, tokens, heads, columns)
    if not out.numel():
        return out
    keys, context = k.shape[1:3]
    kind: Any = "none" if mask is None else "one" if tokens == 1 else "many"
    of_mask = (0, 0, 0) if mask is None else _steps(mask)
    strides = (*_steps(q), *_steps(k), *_steps(v), of_mask[0], of_mask[2])
    rows = AttentionRows(batch, keys, heads // keys, tokens, context, columns, -(-context // SPLIT), *strides)
    call = AttentionCall(attention_spec(q.dtype, kind), q, k, v, mask, out, scale * _LOG2E, rows)
    _family.launch(q)(call)
    return out


def _described(t: Tensor | None) -> str:
    return "None" if t is None else f"{t.dtype} {list(t.shape)} with strides {list(t.stride())}"


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, tokens, columns = q.shape
    return q.new_empty(batch, tokens, heads, columns)


define("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor", _attend, _fake)
