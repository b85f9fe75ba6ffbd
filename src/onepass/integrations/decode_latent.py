"""Latent attentions for few tokens: projections, rotation, cache, attention, output.

An entry of the cache is a latent, from which ``kv_b_proj`` makes keys and values of all heads, and a rotated key. To make
them for the whole cache in every step costs more than the rest of the step. Both products are linear, so they can be
moved to the other side of the attention::

    score = (q W_K) . latent + rotated q . rotated key
    out   = W_V (sum of p latent)

Then nothing is computed per entry but the scores and the sum. This rounds ``q W_K`` and the sum to the dtype of the model
instead of keys and values. On a GPU these are three kernels of onepass's own, whose bytes do not depend on the batch.
torch's calls take their place elsewhere, and for long contexts, where they are faster. Their bytes do depend on the batch, so with
``batch_invariant=True`` the kernels are used for every context, and elsewhere keys and values are made as in the model.
"""

from __future__ import annotations

import sys
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from ..ops.head_product.op import head_product, multiplies_heads
from ..ops.latent_attention.op import attend_latents, attends_latents
from ..ops.qk_cache.op import qk_norm_rope_cache
from ..rope import Rope
from .biases import biases
from .counts import count, settle
from .decode_attention import attend, dense_layer
from .forwards import FUSED_ROWS, Attended, add_norm, refuse_gradient
from .steps import LatentStep, is_own, linear_step, project
from .unsplit import has_kernels

SHORT: Final = 256
"""Entries of the context up to which onepass's kernels take less time than torch's calls on an H200."""


def attend_latent(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    norm: Any = None,
    add: Tensor | None = None,
    shape: tuple[int, int] | None = None,
    **kwargs: Any,
) -> Attended:
    """``o_proj(attention(norm(h))) + add`` with latents, which are normed and rotated as in the model."""
    how: LatentStep = self._onepass_decode
    refuse_gradient(self, hidden_states, how.down.weight, how.out.weight)
    batch, length = hidden_states.shape[:2] if shape is None else shape
    rounding = how.rounding if norm is None else norm._onepass.rounding
    down = project(how.down, hidden_states, norm, rounding=rounding)
    q, latent, k_rot = down.split_with_sizes([how.down.sizes[0], self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
    if how.q_up is not None:
        q = project(how.q_up, q, self.q_a_layernorm, rounding=self.q_a_layernorm._onepass.rounding)
    latent = add_norm(self.kv_a_layernorm, latent).view(batch, length, 1, -1)
    q, k_rot = q.view(batch, length, -1, self.qk_head_dim), k_rot.view(batch, length, 1, -1)
    latent, k_rot = _rotate_latent(self, q, k_rot, latent, position_embeddings, past_key_values)
    out, weights = None, None
    if _absorbs(self, q, attention_mask, kwargs):
        if how.invariant or latent.shape[2] <= SHORT:
            out = latents_in_splits(self, q, latent, k_rot, attention_mask)
        if out is None and not how.invariant:
            out = latents_by_torch(self, q, latent.squeeze(1), k_rot.squeeze(1), attention_mask)
    if out is None:
        k, v = self.expand_kv(latent, k_rot)
        out, weights = attend(self, how.home, (q.transpose(1, 2), k, v), attention_mask, kwargs, how.invariant)
    out = out if shape is None else out.view(batch * length, -1)
    return project(how.out, out, rounding=how.rounding, add=add), weights


def _absorbs(self: Any, q: Tensor, mask: Any, kwargs: dict[str, Any]) -> bool:
    """Whether queries [batch, tokens, heads, columns] may attend to the latents themselves.

    This does not depend on the batch. Many tokens of a sequence share the keys and values that are made for them.
    """
    length = q.shape[1]
    if length > FUSED_ROWS or self.config._attn_implementation != "sdpa":
        return False
    up = self._modules["kv_b_proj"]
    known = type(up) is nn.Linear and type(up.weight) is nn.Parameter and up.bias is None and is_own(up, linear_step)
    known = known and up.weight.dtype is q.dtype
    plain = kwargs.get("softcap") is None and kwargs.get("position_bias") is None
    return known and plain and (length == 1 or mask is not None) and "expand_kv" not in self.__dict__


def has_latent_kernels(weight: Tensor) -> bool:
    """Whether onepass has kernels for latents whose ``kv_b_proj`` has this weight."""
    return weight.dtype in (torch.bfloat16, torch.float16) and has_kernels(weight)


def _halves(self: Any, heads: int, columns: int) -> tuple[Tensor, Tensor]:
    """The weights that make keys and values of a latent, [heads, columns of a head, columns of a latent]."""
    weight = self.kv_b_proj.weight.view(heads, -1, columns)
    w_k, w_v = weight.split_with_sizes([self.qk_nope_head_dim, self.v_head_dim], dim=1)
    return w_k, w_v


def latents_in_splits(self: Any, q: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None) -> Tensor | None:
    """`latents_by_torch` by onepass's kernels, whose bytes do not depend on the batch; None where they cannot run.

    ``latent`` and ``k_rot`` are [batch, 1, entries, columns].
    """
    if not has_latent_kernels(self.kv_b_proj.weight):
        return None
    batch, length, heads, _ = q.shape
    w_k, w_v = _halves(self, heads, latent.shape[-1])
    w_v = w_v.transpose(1, 2)
    q_pass, q_rot = q.split_with_sizes([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    q_pass, q_rot = q_pass.flatten(0, 1), q_rot.transpose(1, 2)
    bias = None if mask is None else biases.of(mask, q.dtype, self.layer_idx)
    if not (multiplies_heads(q_pass, w_k) and multiplies_heads(None, w_v)):
        return None
    if not attends_latents(None, q_rot, latent, k_rot, bias):
        return None
    q_latent = head_product(q_pass, w_k).view(batch, length, heads, -1).transpose(1, 2)
    out = attend_latents(q_latent, q_rot, latent, k_rot, bias, self.scaling)
    return head_product(out.flatten(0, 1), w_v).view(batch, length, -1)


def latents_by_torch(self: Any, q: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None) -> Tensor:
    """Rows [batch, tokens, columns] of queries [batch, tokens, heads, columns] that attend to all entries.

    Scores and probabilities are float32.
    """
    batch, length, heads, _ = q.shape
    w_k, w_v = _halves(self, heads, latent.shape[-1])
    q_pass, q_rot = q.split_with_sizes([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    q_latent = torch.bmm(q_pass.flatten(0, 1).transpose(0, 1), w_k)  # [heads, batch * tokens, columns]
    q_latent = q_latent.view(heads, batch, length, -1).transpose(0, 1).flatten(1, 2)
    q_rot = q_rot.transpose(1, 2).flatten(1, 2)
    scores = _product(q_latent, latent) + _product(q_rot, k_rot)
    scores = scores.view(batch, heads, length, -1)
    if mask is None:
        scores = scores * self.scaling
    else:
        scores = torch.add(biases.finite(mask, self.layer_idx), scores, alpha=self.scaling)
    shares = scores.softmax(-1).to(q.dtype).flatten(1, 2)
    out = torch.bmm(shares, latent).view(batch, heads, length, -1).transpose(0, 1).flatten(1, 2)
    return torch.bmm(out, w_v.transpose(1, 2)).view(heads, batch, length, -1).permute(1, 2, 0, 3).flatten(2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.mT`` of a batch of matrices, in float32."""
    if a.is_cuda and a.dtype is not torch.float32:
        return torch.bmm(a, b.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float().transpose(1, 2))


def _rotate_latent(self: Any, q: Tensor, k: Tensor, latent: Tensor, angles: Any, cache: Any) -> tuple[Tensor, Tensor]:
    """Rotate the last columns of queries in place, and the key; write it and the latent into the cache.

    All have the shape [batch, tokens, heads, columns]. Returns the latents and keys to attend to, [batch, 1, tokens, columns].
    One launch rotates and writes. transformers moves both columns of a pair apart, which takes a copy before.
    """
    how: LatentStep = self._onepass_decode
    rotated = q[..., self.qk_nope_head_dim :]
    if angles[0].dtype is not q.dtype:  # the model would not round its products to this dtype
        return _rotate_as_the_model(self, rotated, k, latent, angles, cache)
    turned = (_apart(rotated), _apart(k)) if self.config.rope_interleave else (rotated, k)
    options: dict[str, Any] = {"rope": Rope(cos=angles[0], sin=angles[1]), "rounding": how.rounding}
    layer = dense_layer(cache, self.layer_idx, latent)
    if layer is not None:
        options |= {"start": layer.cumulative_length, "layout": "dense", "out": rotated}
        # transformers stores the latent as keys and the rotated key as values
        qk_norm_rope_cache(*turned, latent, layer.values, layer.keys, **options)
        count(cache, self.layer_idx, layer, k.shape[1])
        return layer.keys, layer.values
    k_turned = qk_norm_rope_cache(*turned, out=(rotated, None), **options)[1]
    assert k_turned is not None
    return _updated(self, cache, latent, k_turned.transpose(1, 2))


def _rotate_as_the_model(
    self: Any, rotated: Tensor, k: Tensor, latent: Tensor, angles: Any, cache: Any
) -> tuple[Tensor, Tensor]:
    """The same by the model's own functions."""
    model = sys.modules[self._onepass_decode.home]
    rotate = model.apply_rotary_pos_emb_interleave if self.config.rope_interleave else model.apply_rotary_pos_emb
    turned, k = rotate(rotated.transpose(1, 2), k.transpose(1, 2), *angles)
    rotated.copy_(turned.transpose(1, 2))
    return _updated(self, cache, latent, k)


def _updated(self: Any, cache: Any, latent: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The latents and keys to attend to, by the cache's own update."""
    latent = latent.transpose(1, 2)
    if cache is None:
        return latent, k
    settle(cache)
    return cast(tuple[Tensor, Tensor], cache.update(latent, k, self.layer_idx))


def _apart(x: Tensor) -> Tensor:
    """The first columns of all pairs, then the second ones."""
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
