"""Attentions for few tokens: one projection of q, k and v, rotation, cache, attention without copies, output.

`decode.py` has the forwards that call this, `decode_latent.py` attentions with latents.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ..nn import gamma_of
from ..ops.attention.launch import ROWS, SPLIT
from ..ops.attention.op import attend as attend_in_splits
from ..ops.attention.op import attends
from ..ops.qk_cache.op import qk_norm_rope_cache
from ..ops.qk_norm.op import qk_rms_norm
from ..rope import Rope
from .biases import biases
from .counts import count, settle
from .forwards import FUSED_ROWS, Attended, attention_function, refuse_gradient
from .steps import AttentionStep, project
from .unsplit import attend_unsplit, has_kernels, takes

SHORT: Final = 128
"""Programs up to which onepass's kernel, with what it saves around it, takes less time than torch's on an H200."""


def attend_heads(
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
    """``o_proj(attention(norm(h))) + add``.

    If ``shape`` is given, (batch, tokens), ``hidden_states``, ``add`` and the result are rows.
    """
    how: AttentionStep = self._onepass_decode
    refuse_gradient(self, hidden_states, how.qkv.weight, how.out.weight)
    rounding = how.rounding if norm is None else norm._onepass.rounding
    batch, length = hidden_states.shape[:2] if shape is None else shape
    qkv = project(how.qkv, hidden_states, norm, rounding=rounding).view(batch, length, -1, self.head_dim)
    q, k, v = states = qkv.split_with_sizes([columns // self.head_dim for columns in how.columns], dim=2)
    gate = None
    if how.gated:
        q, gate = q.reshape(batch, length, -1, 2 * self.head_dim).chunk(2, dim=-1)
        states = q, k, v
    if how.window:
        owner = self.config if how.window.startswith("config.") else self
        kwargs["sliding_window"] = getattr(owner, how.window.removeprefix("config."), None)
    if how.softcap:
        kwargs["softcap"] = getattr(self, how.softcap)
    q, k, v = _rotate_and_store(self, states, position_embeddings, past_key_values, kwargs)
    out, weights = attend(self, how.home, (q, k, v), attention_mask, kwargs, how.invariant)
    if gate is not None:
        out = out * torch.sigmoid(gate.reshape(out.shape))
    out = out if shape is None else out.view(batch * length, -1)
    return project(how.out, out, rounding=how.rounding, add=add), weights


def _rotate_and_store(
    self: Any, states: tuple[Tensor, Tensor, Tensor], angles: Any, cache: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate heads [batch, tokens, heads, columns] and write keys and values.

    Returns queries, and the keys and values to attend to, [batch, heads, tokens, columns].
    """
    how: AttentionStep = self._onepass_decode
    q, k, v = states
    turns = not how.rotates or bool(getattr(self, how.rotates))
    known = how.turn is not None and (not turns or how.turn.wide or angles[0].dtype is q.dtype)
    if how.norm is not None and not (known and how.norms_in_turn):
        q, k = _normed(self, how, q, k)
    layer = dense_layer(cache, self.layer_idx, k) if known else None
    if layer is not None:
        q, _ = _turned(self, how, (q, k, v), angles if turns else None, layer)
        count(cache, self.layer_idx, layer, k.shape[1])
        return q.transpose(1, 2), layer.keys, layer.values
    if known:
        q, k = _turned(self, how, (q, k, None), angles if turns else None)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if turns and not known:
        q, k = sys.modules[how.home].apply_rotary_pos_emb(q, k, *angles)
    more: tuple[Any, ...] = ()
    if how.cache_position:
        more = ({"sin": angles[1], "cos": angles[0], "cache_position": kwargs.pop("cache_position", None)},)
    if cache is not None:
        settle(cache)
        k, v = cache.update(k, v, self.layer_idx, *more)
    return q, k, v


def _turned(
    self: Any, how: AttentionStep, states: tuple[Any, Any, Any], angles: Any, layer: Any = None
) -> tuple[Any, Any]:
    """Queries and keys after the norms that belong to this launch and the rotation; or written to the layer's tensors."""
    assert how.turn is not None
    rounding = "hf" if how.norm is None or how.norm.rounding == "hf" else "hf_rope"
    options: dict[str, Any] = {"rounding": "once" if how.turn.wide or how.rounding == "once" else rounding}
    if how.norm is not None and how.norms_in_turn:
        eps, weight_offset, _ = how.norm
        options |= {"gamma_q": gamma_of(self.q_norm.weight), "gamma_k": gamma_of(self.k_norm.weight)}
        options |= {"eps": eps, "weight_offset": weight_offset, "per_head": how.per_head}
    if angles is not None:
        options["rope"] = Rope(style=how.turn.style, cos=angles[0], sin=angles[1])
    if layer is None:
        return qk_norm_rope_cache(*states, **options)
    options |= {"start": layer.cumulative_length, "layout": "dense"}
    return qk_norm_rope_cache(*states, layer.keys, layer.values, **options)


def dense_layer(cache: Any, index: int, k: Tensor) -> Any:
    """The layer of transformers' static cache that keys are written into directly; None for other caches.

    A layer with a sliding window qualifies until its window is full. Then it moves its entries itself.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if cache is None or caches is None or type(cache) is not caches.StaticCache or cache.offloading:
        return None
    layer = cache.layers[index]
    if not layer.is_initialized or not isinstance(getattr(layer, "cumulative_length", None), Tensor):
        return None  # transformers 4.57 counts on the host
    if type(layer) is caches.StaticSlidingWindowLayer:
        if layer.cumulative_length_int + k.shape[1] > layer.max_cache_len:
            return None
    elif type(layer) is not caches.StaticLayer:
        return None
    fits = layer.keys.dtype is k.dtype and layer.keys.shape[0] == k.shape[0] and layer.keys.device == k.device
    return layer if fits else None


def _normed(self: Any, how: AttentionStep, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys after their norms, per head or over all heads."""
    assert how.norm is not None
    eps, weight_offset, rounding = how.norm
    gammas = gamma_of(self.q_norm.weight), gamma_of(self.k_norm.weight)
    options: dict[str, Any] = {"weight_offset": weight_offset, "rounding": rounding, "per_head": how.per_head}
    if how.per_head:
        q, k = qk_rms_norm(q, k, *gammas, eps, **options)
        return q, k
    rows = qk_rms_norm(q.flatten(-2), k.flatten(-2), *gammas, eps, **options)
    return rows[0].view(q.shape), rows[1].view(k.shape)


def attend(
    self: Any,
    home: str,
    states: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    kwargs: dict[str, Any],
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that the model is configured for, as rows [batch, tokens, columns].

    onepass's kernel is used for short contexts, and for any context if the bytes must not depend on the batch,
    ``invariant``. Next comes torch's attention, which needs no copies of keys and values for groups of query heads.
    transformers makes them if there is a mask. Where it relies on causality instead, or has other arguments, its
    function is called.
    """
    q, k, v = states
    batch, _, length, _ = q.shape
    plain = self.config._attn_implementation == "sdpa" and (length == 1 or mask is not None)
    if plain and kwargs.get("softcap") is None and kwargs.get("position_bias") is None:
        if length <= FUSED_ROWS and (invariant or _is_short(q, k)) and has_kernels(q):
            bias = None if mask is None else biases.of(mask, q.dtype, self.layer_idx)
            if attends(q, k, v, bias):
                return attend_in_splits(q, k, v, bias, self.scaling).view(batch, length, -1), None
        if invariant and takes(q, v, mask):
            return attend_unsplit(q, k, v, mask, self.scaling, self.layer_idx), None
        if mask is not None and mask.dtype is torch.bool and not torch.compiler.is_compiling():
            mask = biases.of(mask, q.dtype, self.layer_idx)
        if length == 1 and q.device.type == "cpu" and (mask is None or mask.shape[1] == 1):
            return _attend_in_groups(q, k, v, mask, self.scaling).reshape(batch, length, -1), None
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(batch, length, -1), None
    function = attention_function(self, sys.modules[home])
    out, weights = function(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)
    return out.reshape(batch, length, -1), weights


def _is_short(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel would have few programs."""
    batch, heads, context, _ = k.shape
    rows = q.shape[1] // heads * q.shape[2]
    return batch * heads * -(-rows // ROWS) * -(-context // SPLIT) <= SHORT


def _attend_in_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """torch's attention of one query per head on a CPU, as heads of keys whose queries are a group of heads.

    With rows of one query torch takes five to twelve times as long for groups of heads, and its float32 results for a
    sequence depend on the batch. Without groups each 16-bit query is there twice, which takes half as long as once.
    """
    batch, heads, _, columns = q.shape
    rows = q.view(batch, k.shape[1], heads // k.shape[1], columns)
    if rows.shape[2] == 1 and q.dtype is not torch.float32:
        rows = rows.repeat(1, 1, 2, 1)
        return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scaling)[:, :, :1]
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scaling)
