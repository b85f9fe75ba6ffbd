"""Attentions: projections, norms and rotation of queries and keys, cache, attention, output; `latent.py` has those with latents.

A prompt runs the model's own projections, cache and attention function, and `qk_norm_rope_cache` or `qk_rms_norm` between
them. A step of few tokens has one projection of q, k and v, writes a static cache in the launch of the rotation, and
attends without copies of keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...formats import Rounding
from ...nn import gamma_of
from ...ops.qk_cache.op import qk_norm_rope_cache
from ...ops.qk_norm.op import qk_rms_norm
from ...rope import Rope, RopeStyle
from .attend import Attended, AttentionModule, CosSin, attend, attend_as_model
from .cache import Cache, CacheLayer, count, dense_layer, settle
from .linear import Parts, Projection, project
from .norm import NormModule, NormRecord, is_plain, refuse_gradient

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


class Turn(NamedTuple):
    """How `qk_norm_rope_cache` rotates queries and keys: which columns form a pair, and how it rounds.

    ``wide`` computes in float32 and rounds once, given cosines in float32. Otherwise every product is rounded. ``norms`` is
    whether the norms are in the launch of the rotation: not where the model rounds between them.
    """

    style: RopeStyle
    wide: bool
    norms: bool
    rounding: Rounding


class AttentionStep(NamedTuple):
    """What a step of few tokens has: the projections, with their columns of q, k and v, and its rotation.

    ``invariant`` is whether a token's bytes must not depend on the batch.
    """

    qkv: Projection
    out: Projection
    columns: tuple[int, int, int]
    turn: Turn | None
    rounding: Rounding
    invariant: bool
    parts: Parts


class AttentionRecord(NamedTuple):
    """How q and k are normed and rotated, and what is passed on; see `forms.Attention` and `forms.PlainAttention`.

    ``namespace`` is the Python module whose functions the model's own forward calls. Without ``turn`` the model's own function
    rotates prompts. ``norm`` is None where no norms of q and k are fused, and prompts then run the class's forward.
    """

    norm: NormRecord | None
    per_head: bool
    gated: bool
    rotates: str
    window: str
    softcap: str
    cache_position: bool
    namespace: str
    turn: Turn | None = None
    step: AttentionStep | None = None


class HeadsModule(AttentionModule):
    """What is read of an attention that caches keys and values."""

    head_dim: int
    q_norm: NormModule
    k_norm: NormModule
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    _onepass: AttentionRecord


def fuses_heads(self: HeadsModule) -> bool:
    """Whether the norms of queries and keys need not be called."""
    return self._onepass.norm is not None and is_plain(self.q_norm) and is_plain(self.k_norm)


def attend_heads(
    self: HeadsModule,
    step: AttentionStep | None,
    hidden_states: Tensor,
    position_embeddings: CosSin | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Cache | None = None,
    norm: NormModule | None = None,
    add: Tensor | None = None,
    shape: tuple[int, int] | None = None,
    **kwargs: Any,
) -> Attended:
    """``o_proj(attention(norm(h))) + add``; ``norm`` and ``add`` only in a ``step``, which is None for prompts.

    If ``shape`` is given, (batch, tokens), ``hidden_states``, ``add`` and the result are rows.
    """
    record = self._onepass
    sizes = hidden_states.shape[:2] if shape is None else shape
    states, gate = _projected(self, step, hidden_states, norm, sizes)
    if record.window:
        owner = self.config if record.window.startswith("config.") else self
        kwargs["sliding_window"] = getattr(owner, record.window.removeprefix("config."), None)
    if record.softcap:
        kwargs["softcap"] = getattr(self, record.softcap)
    states = _rotate_and_store(self, step, states, position_embeddings, past_key_values, kwargs)
    if step is None:
        out, weights = attend_as_model(self, record.namespace, states, attention_mask, kwargs)
    else:
        out, weights = attend(self, record.namespace, states, attention_mask, kwargs, step.invariant)
    if gate is not None:
        out = out * torch.sigmoid(gate.reshape(out.shape))
    if step is None:
        return self.o_proj(out), weights
    out = out if shape is None else out.flatten(0, 1)
    return project(step.out, out, rounding=step.rounding, add=add), weights


def _projected(
    self: HeadsModule, step: AttentionStep | None, x: Tensor, norm: NormModule | None, sizes: Sequence[int]
) -> tuple[Heads, Tensor | None]:
    """Heads [*sizes, heads, columns] and the gate: by the model's own layers, or by one projection behind a norm."""
    if step is None:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).view(*sizes, -1, self.head_dim) for layer in layers)
    else:
        refuse_gradient(self, x, step.qkv.weight, step.out.weight)
        rounding = step.rounding if norm is None else norm._onepass.rounding
        qkv = project(step.qkv, x, norm, rounding=rounding).view(*sizes, -1, self.head_dim)
        q, k, v = qkv.split_with_sizes([columns // self.head_dim for columns in step.columns], dim=2)
    gate = None
    if self._onepass.gated:
        q, gate = q.reshape(*sizes, -1, 2 * self.head_dim).chunk(2, dim=-1)
    if step is None:
        refuse_gradient(self, q, k, gamma_of(self.q_norm.weight), gamma_of(self.k_norm.weight))
    return (q, k, v), gate


def _rotate_and_store(
    self: HeadsModule,
    step: AttentionStep | None,
    states: Heads,
    angles: CosSin | None,
    cache: Cache | None,
    kwargs: dict[str, object],
) -> Heads:
    """Norm and rotate heads [batch, tokens, heads, columns] and write keys and values.

    Returns queries, and the keys and values to attend to, [batch, heads, tokens, columns]. A step writes keys and values
    into a static cache in the launch of the rotation.
    """
    record = self._onepass
    q, k, v = states
    turn = record.turn if step is None else step.turn
    rotation = angles if not record.rotates or getattr(self, record.rotates) else None
    if turn is not None and not (rotation is None or turn.wide or rotation[0].dtype is q.dtype):
        turn = None
    if record.norm is not None and (turn is None or not turn.norms):
        q, k = _normed(self, record.norm, q, k)
    layer = dense_layer(cache, self.layer_idx, k) if turn is not None and step is not None else None
    if turn is not None and layer is not None:
        q, _ = turned(self, turn, (q, k, v), rotation, layer)
        count(cast(Cache, cache), self.layer_idx, layer, k.shape[1])
        return q.transpose(1, 2), layer.keys, layer.values
    if turn is not None:
        q, k = turned(self, turn, (q, k, None), rotation)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if turn is None and rotation is not None:
        q, k = sys.modules[record.namespace].apply_rotary_pos_emb(q, k, *rotation)
    more: tuple[object, ...] = ()
    if record.cache_position and angles is not None:
        more = ({"sin": angles[1], "cos": angles[0], "cache_position": kwargs.pop("cache_position", None)},)
    if cache is not None:
        settle(cache)
        k, v = cache.update(k, v, self.layer_idx, *more)
    return q, k, v


def turned(
    self: HeadsModule,
    turn: Turn,
    states: tuple[Tensor, Tensor, Tensor | None],
    angles: CosSin | None,
    layer: CacheLayer | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys after the norms that belong to this launch and the rotation; or written to the layer's tensors."""
    options: dict[str, Any] = {"rounding": turn.rounding}
    if turn.norms:
        eps, weight_offset, _ = cast(NormRecord, self._onepass.norm)
        options |= {"gamma_q": gamma_of(self.q_norm.weight), "gamma_k": gamma_of(self.k_norm.weight)}
        options |= {"eps": eps, "weight_offset": weight_offset, "per_head": self._onepass.per_head}
    if angles is not None:
        options["rope"] = Rope(style=turn.style, cos=angles[0], sin=angles[1])
    if layer is not None:
        options |= {"start": layer.cumulative_length, "layout": "dense"}
        options |= {"k_cache": layer.keys, "v_cache": layer.values}
    return cast(tuple[Tensor, Tensor], qk_norm_rope_cache(*states, **options))


def _normed(self: HeadsModule, norm: NormRecord, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys after their norms, per head or over all heads."""
    eps, weight_offset, rounding = norm
    gammas = gamma_of(self.q_norm.weight), gamma_of(self.k_norm.weight)
    per_head = self._onepass.per_head
    rows = (q, k) if per_head else (q.flatten(-2), k.flatten(-2))
    normed = qk_rms_norm(*rows, *gammas, eps, weight_offset=weight_offset, rounding=rounding, per_head=per_head)
    return (normed[0], normed[1]) if per_head else (normed[0].view(q.shape), normed[1].view(k.shape))
