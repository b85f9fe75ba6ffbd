"""The attention of a decode step to latents, for `onepass.patch`. A token's result depends on neither its batch nor the run.

An entry of the context has a latent c, which is also its value, and a rotated key r. With the two queries of one token and
head, q and q_rot::

    s   = scale * (q . c + q_rot . r) + mask   float32; a mask of -inf excludes an entry
    p   = round(exp(s - max(s)))               to the latents' dtype
    out = round(sum(p * c) / sum(p))           sums in float32; 0 if all entries are excluded

Both products of a score are cut into `PIECES` pieces of columns, which are added from the first to the last. The context
is summed in splits, as in `ops.attention`, and masks, longer caches and other tokens matter as little as there. Only GPUs
have the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.backend import launch_for
from ...core.op import define
from ...errors import Unsupported
from ..attention.launch import SPLIT, attention_spec
from ..attention.op import LOG2E, aligned, described, mask_fits, mask_kind, mask_steps, steps
from .launch import MAX_LATENT, MAX_ROTATED, LatentCall, LatentRows


def attends_latents(q: Tensor | None, q_rot: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend_latents` takes these tensors, as far as dtypes, shapes and memory are concerned.

    Without q, whether it takes them with a contiguous one.
    """
    dtype, tensors = q_rot.dtype, (q_rot, latent, k_rot) if q is None else (q, q_rot, latent, k_rot)
    if dtype not in (torch.bfloat16, torch.float16) or any(t.dtype is not dtype or t.dim() != 4 for t in tensors):
        return False
    batch, keys, context, rotated = k_rot.shape
    columns = latent.shape[3]
    if keys != 1 or not context or latent.shape[:3] != k_rot.shape[:3] or q_rot.shape[::3] != (batch, rotated):
        return False
    if q is not None and q.shape != (*q_rot.shape[:3], columns):
        return False
    if columns > MAX_LATENT or rotated > MAX_ROTATED or columns % 8 or rotated % 8:
        return False
    return all(map(aligned, tensors)) and mask_fits(q_rot, context, mask)


def attend_latents(
    q: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of queries to a cache of latents, in one launch. The module has the equation.

    Args:
        q: [batch, heads, tokens, columns], bfloat16 or float16.
        q_rot: [batch, heads, tokens, columns of a rotated key].
        latent: [batch, 1, context, columns].
        k_rot: [batch, 1, context, columns of a rotated key].
        mask: [batch or 1, 1, tokens, context] in q's dtype, added to scores. Required for more than one token.
        scale: Factor of the products.

    Returns:
        [batch, tokens, heads, columns].

    Raises:
        Unsupported: If `attends_latents` is false for these tensors.
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.onepass.attend_latents.default(q, q_rot, latent, k_rot, mask, scale)
        return out
    return _attend(q, q_rot, latent, k_rot, mask, scale)


def _attend(q: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if not attends_latents(q, q_rot, latent, k_rot, mask):
        named = zip(("q", "q_rot", "latent", "k_rot", "mask"), (q, q_rot, latent, k_rot, mask), strict=True)
        told = ", ".join(f"{name} {described(t)}" for name, t in named)
        raise Unsupported(f"attend_latents: no kernel takes {told}")
    out = _fake(q, q_rot, latent, k_rot, mask, scale)
    if not out.numel():
        return out
    batch, heads, tokens, columns = q.shape
    context, rotated = k_rot.shape[2:]
    sizes = (batch, 1, heads, tokens, context, columns, rotated, -(-context // SPLIT))
    strides = (*steps(q), *steps(q_rot), *steps(latent)[::2], *steps(k_rot)[::2], *mask_steps(mask))
    spec, rows = attention_spec(q.dtype, mask_kind(mask)), LatentRows(*sizes, *strides)
    launch_for("latent_attention", q)(LatentCall(spec, q, q_rot, latent, k_rot, mask, out, scale * LOG2E, rows))
    return out


def _fake(q: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, tokens, columns = q.shape
    return q.new_empty(batch, tokens, heads, columns)


define(
    "attend_latents(Tensor q, Tensor q_rot, Tensor latent, Tensor k_rot, Tensor? mask, float scale) -> Tensor",
    _attend,
    _fake,
)
