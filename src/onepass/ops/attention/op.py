"""The attention of a decode step, for `onepass.patch`. A token's result depends on neither its batch nor the run.

With the queries q of one token, and the keys k and values v of its context::

    s   = scale * (q . k) + mask             float32; a mask of -inf excludes an entry
    p   = round(exp(s - max(s)))             to v's dtype
    out = round(sum(p * v) / sum(p))         sums in float32; 0 if all entries are excluded

Each split of `SPLIT` entries is summed by itself, relative to its own largest score. Then splits are added from the first
to the last. A mask of zeros, a longer cache whose further entries are excluded, other sequences and other tokens of a step
do not change a token's bits. Keys and values of excluded entries must be finite, as for torch's attention.
Only GPUs have the kernel.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from ...core.backend import launch_for
from ...core.op import define
from ...errors import Unsupported
from .launch import MAX_COLUMNS, SPLIT, AttentionCall, AttentionRows, MaskKind, attention_spec

LOG2E: Final = math.log2(math.e)
"""Kernels compute powers of two."""
ALIGNED: Final = 16
"""Rows of q, k and v start at multiples of this many bytes."""


def attends(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` takes these tensors, as far as dtypes, shapes and memory are concerned."""
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype is not q.dtype or v.dtype is not q.dtype:
        return False
    batch, heads, _, columns = q.shape
    keys, context = k.shape[1:3]
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != columns or heads % keys or not context:
        return False
    if columns > MAX_COLUMNS or columns % 8 or not all(map(aligned, (q, k, v))):
        return False
    return mask_fits(q, context, mask)


def mask_fits(q: Tensor, context: int, mask: Tensor | None) -> bool:
    """Whether a mask is one for queries [batch, heads, tokens, columns]. Only one token needs none."""
    batch, _, tokens, _ = q.shape
    if mask is None:
        return tokens == 1
    return (
        mask.dtype is q.dtype
        and mask.dim() == 4
        and mask.shape[0] in (1, batch)
        and mask.shape[1:] == (1, tokens, context)
        and mask.stride(-1) == 1
    )


def aligned(t: Tensor) -> bool:
    """Whether rows of the last dimension can be loaded 16 bytes at a time. While compiling, addresses are unknown."""
    if t.stride(-1) != 1 or any(step * t.element_size() % ALIGNED for step in steps(t)):
        return False
    return torch.compiler.is_compiling() or t.data_ptr() % ALIGNED == 0


def steps(t: Tensor) -> tuple[int, ...]:
    """The strides of all dimensions but the last. The stride of a dimension of one element means nothing, and is 0 here."""
    return tuple([0 if size == 1 else step for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True)])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of queries to a cache, in one launch: ``softmax(scale * (q @ k.T) + mask) @ v``. The module has the rounding.

    Args:
        q: [batch, heads, tokens, columns], bfloat16 or float16.
        k: [batch, heads of keys, context, columns].
        v: Like k.
        mask: [batch or 1, 1, tokens, context] in q's dtype, added to scores. Required for more than one token.
        scale: Factor of the products.

    Returns:
        [batch, tokens, heads, columns].

    Raises:
        Unsupported: If `attends` is false for these tensors.
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.onepass.attend.default(q, k, v, mask, scale)
        return out
    return _attend(q, k, v, mask, scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if not attends(q, k, v, mask):
        q_, k_, v_, mask_ = map(described, (q, k, v, mask))
        raise Unsupported(f"attend: no kernel takes q {q_}, k {k_} and v {v_} with mask {mask_}")
    batch, heads, tokens, columns = q.shape
    out = q.new_empty(batch, tokens, heads, columns)
    if not out.numel():
        return out
    keys, context = k.shape[1:3]
    strides = (*steps(q), *steps(k), *steps(v), *mask_steps(mask))
    rows = AttentionRows(batch, keys, heads // keys, tokens, context, columns, -(-context // SPLIT), *strides)
    call = AttentionCall(attention_spec(q.dtype, mask_kind(mask)), q, k, v, mask, out, scale * LOG2E, rows)
    launch_for("attention", q)(call)
    return out


def mask_kind(mask: Tensor | None) -> MaskKind:
    """What a kernel loads of a mask."""
    return "none" if mask is None else "one" if mask.shape[2] == 1 else "many"


def mask_steps(mask: Tensor | None) -> tuple[int, int]:
    """The strides of a mask between sequences and between tokens."""
    return (0, 0) if mask is None else (steps(mask)[0], steps(mask)[2])


def described(t: Tensor | None) -> str:
    """A tensor in an error message."""
    return "None" if t is None else f"{t.dtype} {list(t.shape)} with strides {list(t.stride())}"


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, tokens, columns = q.shape
    return q.new_empty(batch, tokens, heads, columns)


define("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor", _attend, _fake)
