"""The attention of a decode step, for `onepass.patch`: the bytes of a token depend on neither its batch nor the run.

With the queries q of one token, and the keys k and values v of its context::

    s   = scale * q . k                      float32; -inf where the mask is False
    out = sum(exp(s) * v) / sum(exp(s))      exponents relative to the largest score; 0 where the mask is False everywhere

Splits of `SPLIT` entries of the context are summed separately, then joined from neighbours to all. Powers are rounded to
v's dtype before they are multiplied by v, and not where they are added. Sums are float32, and the result is rounded once.
A mask of True, a longer cache with a mask, other sequences and other tokens of a step leave a token's bytes as they are.
It is a GPU kernel. Values of entries that a mask excludes must be finite, as for torch's attention.
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
    size, steps = t.element_size(), t.stride()
    if steps[3] != 1 or any(step * size % ALIGNED for step in steps[:3]):
        return False
    return torch.compiler.is_compiling() or t.data_ptr() % ALIGNED == 0


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention [batch, tokens, heads, columns] of queries [batch, heads, tokens, columns] to a cache, in one launch.

    ``k`` and ``v`` are [batch, heads of keys, context, columns], and ``mask`` [batch or 1, 1, tokens, context] is True
    where attention is allowed. Several tokens need one. `attends` tells what is possible. The module says what is computed.
    """
    if torch.compiler.is_compiling():
        return torch.ops.onepass.attend.default(q, k, v, mask, scale)  # type: ignore[no-any-return]
    return _attend(q, k, v, mask, scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if not attends(q, k, v, mask):
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (q, k, v) if t is not None)
        raise Unsupported(f"attend: no kernel for q, k and v of {shapes}, with a mask {_described(mask)}")
    batch, heads, tokens, columns = q.shape
    out = q.new_empty(batch, tokens, heads, columns)
    if not out.numel():
        return out
    keys, context = k.shape[1:3]
    kind: Any = "none" if mask is None else "one" if tokens == 1 else "many"
    steps = (0, 0)
    if mask is not None:
        steps = mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *steps)
    rows = AttentionRows(batch, keys, heads // keys, tokens, context, columns, -(-context // SPLIT), *strides)
    call = AttentionCall(attention_spec(q.dtype, kind), q, k, v, mask, out, scale * _LOG2E, rows)
    _family.launch(q)(call)
    return out


def _described(mask: Tensor | None) -> str:
    return "of None" if mask is None else f"{tuple(mask.shape)} {mask.dtype}"


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, tokens, columns = q.shape
    return q.new_empty(batch, tokens, heads, columns)


define("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor", _attend, _fake)
