"""Attentions for few tokens: one projection of q, k and v, rotation, cache, attention without copies, output.

The forwards are bound by ``onepass.patch(model, decode=True)``; `decode.py` explains how.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..nn import gamma_of
from ..ops.qk_cache import qk_norm_rope_cache
from ..ops.qk_norm import qk_rms_norm
from .counts import count, settle
from .forwards import Attended, add_norm, attention_forward, attention_function, mla_forward, refuse_gradient
from .steps import AttentionStep, LatentStep, is_ready, no_global_hooks, project, takes


def attention_step(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Attended:
    """An attention for few tokens."""
    how: AttentionStep | LatentStep = self._onepass_decode
    latent = type(how) is LatentStep
    arguments = (hidden_states, position_embeddings, attention_mask, past_key_values)
    here = takes(how, how.projections[0], hidden_states) and no_global_hooks() and is_ready(self)
    if here and not getattr(past_key_values, "onepass_mla", False):
        return (attend_latent if latent else attend_heads)(self, *arguments, **kwargs)
    settle(past_key_values)
    if how.fused:
        return (mla_forward if latent else attention_forward)(self, *arguments, **kwargs)  # type: ignore[arg-type]
    return cast(Attended, type(self).forward(self, *arguments, **kwargs))


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
    out, weights = _attend(self, how.home, (q, k, v), attention_mask, kwargs)
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
    layer = _dense_layer(cache, self.layer_idx, k) if known else None
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
        options["rope"] = (*angles, how.turn.style)
    if layer is None:
        return qk_norm_rope_cache(*states, **options)
    options |= {"start": layer.cumulative_length, "layout": "dense"}
    return qk_norm_rope_cache(*states, layer.keys, layer.values, **options)


def _dense_layer(cache: Any, index: int, k: Tensor) -> Any:
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


class _Biases(threading.local):
    """Masks as what is added to scores, converted once per step and thread instead of once per layer.

    A compiler finds equal expressions itself. Layers are called in order, so a layer that is not behind the last one
    starts a new step. A mask may have been changed since the step before.
    """

    def __init__(self) -> None:
        self.last = -1
        self.made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, mask: Tensor, dtype: torch.dtype, layer: int) -> Tensor:
        """The bias of a mask that is True where attention is allowed, as torch's attention computes it."""
        if layer <= self.last:
            self.made.clear()
        self.last = layer
        source, bias = self.made.get(id(mask), (None, mask))
        if source is not mask or bias.dtype is not dtype:
            # The logarithm of one is zero, and that of zero is -inf: one launch.
            bias = torch.log(mask, out=torch.empty_like(mask, dtype=dtype))
            self.made[id(mask)] = mask, bias
        return bias


_biases = _Biases()


def _attend(
    self: Any, home: str, states: tuple[Tensor, Tensor, Tensor], mask: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The attention function that the model is configured for, as rows [batch, tokens, columns].

    torch's attention needs no copies of keys and values for groups of query heads. transformers makes
    them if there is a mask. Where it relies on causality instead, or has other arguments, its function is
    called.
    """
    q, k, v = states
    batch, _, length, _ = q.shape
    plain = self.config._attn_implementation == "sdpa" and (length == 1 or mask is not None)
    if plain and kwargs.get("softcap") is None and kwargs.get("position_bias") is None:
        grouped = q.shape[1] != k.shape[1]
        if mask is not None and mask.dtype is torch.bool and not torch.compiler.is_compiling():
            mask = _biases.of(mask, q.dtype, self.layer_idx)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(batch, length, -1), None
    function = attention_function(self, sys.modules[home])
    out, weights = function(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)
    return out.reshape(batch, length, -1), weights


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
    k, v = self.expand_kv(latent, k_rot)
    out, weights = _attend(self, how.home, (q.transpose(1, 2), k, v), attention_mask, kwargs)
    out = out if shape is None else out.view(batch * length, -1)
    return project(how.out, out, rounding=how.rounding, add=add), weights


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
    options: dict[str, Any] = {"rope": (*angles, "half"), "rounding": how.rounding}
    layer = _dense_layer(cache, self.layer_idx, latent)
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
