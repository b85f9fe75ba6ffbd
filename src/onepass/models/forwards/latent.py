"""Latent attentions: down projections and norms, rotation, cache, attention, output.

In a prompt the norm of the latent, the rotations and the write of an `MlaCache` are one launch for any number of tokens.

An entry of the cache is a latent, from which ``kv_b_proj`` makes keys and values of all heads, and a rotated key. To make
them for the whole cache in a decode step costs more than the rest of the step. Both products are linear, so they can be
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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...formats import Rounding
from ...nn import gamma_of
from ...ops.gemv_norm.op import gemv_and_partial_norm
from ...ops.head_product.op import head_product, multiplies_heads
from ...ops.latent_attention.op import attend_latents, attends_latents
from ...ops.mla_cache.op import fused_rope_rmsnorm_quantization
from ...ops.qk_cache.op import qk_norm_rope_cache
from ...rope import Rope, RopeStyle
from .attend import Attended, AttentionModule, CosSin, attend, attend_as_model, biases, has_kernels
from .cache import Cache, count, dense_layer, is_mla_cache, settle
from .linear import Parts, Projection, linear_forward, project
from .norm import FUSED_ROWS, NormModule, add_norm, is_own, is_plain, no_global_hooks, quiet, refuse_gradient

if TYPE_CHECKING:
    from ..generation.mla_cache import MlaCache

SHORT: Final = 256
"""Entries of the context up to which onepass's kernels take less time than torch's calls on an H200."""


class LatentStep(NamedTuple):
    """What a step of few tokens has: the down projections of q and kv as one, q's up projection if there is one, and o.

    ``invariant`` is whether a token's bytes must not depend on the batch.
    """

    down: Projection
    q_up: Projection | None
    out: Projection
    rounding: Rounding
    invariant: bool
    parts: Parts


class LatentRecord(NamedTuple):
    """A latent attention. ``namespace`` is the Python module of the model's functions, ``fused`` is whether prompts are fused."""

    namespace: str
    fused: bool
    step: LatentStep | None = None


class LatentModule(AttentionModule):
    """What is read of a latent attention."""

    kv_lora_rank: int
    qk_head_dim: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_a_proj: nn.Linear
    q_a_layernorm: NormModule
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Linear
    kv_a_layernorm: NormModule
    kv_b_proj: nn.Linear
    o_proj: nn.Module
    expand_kv: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    _onepass: LatentRecord


def fuses_latents(self: LatentModule) -> bool:
    """Whether the down projections and their norms need not be called."""
    if not self._onepass.fused:
        return False
    linears = (self.q_a_proj, self.kv_a_proj_with_mqa)
    return is_plain(self.q_a_layernorm) and is_plain(self.kv_a_layernorm) and all(map(_is_plain_linear, linears))


def _attend_prompt(
    self: LatentModule,
    hidden_states: Tensor,
    angles: CosSin,
    mask: Tensor | None,
    cache: Cache | None,
    kwargs: dict[str, object],
) -> Attended:
    """A latent attention with fused down projections and norms for up to `FUSED_ROWS` tokens."""
    skipped = (self.q_a_proj, self.q_a_layernorm, self.kv_a_proj_with_mqa, self.kv_a_layernorm)
    refuse_gradient(self, hidden_states, *(module.weight for module in skipped))
    if is_mla_cache(cache):
        q, latent, k_rot = _write_entries(self, hidden_states, angles, cast("MlaCache", cache))
    else:
        q, latent, k_rot = _rotated_as_model(self, hidden_states, angles)
        if cache is not None:
            latent, k_rot = cache.update(latent, k_rot, self.layer_idx)
    k, v = self.expand_kv(latent, k_rot)
    out, weights = attend_as_model(self, self._onepass.namespace, (q, k, v), mask, kwargs)
    return self.o_proj(out), weights


def _is_plain_linear(linear: nn.Module) -> bool:
    """Whether a call of the linear layer would multiply by its weight and do nothing else."""
    plain = type(linear) is nn.Linear and linear.bias is None and "forward" not in linear.__dict__
    return plain and quiet(linear) and no_global_hooks()


def _write_entries(
    self: LatentModule, hidden_states: Tensor, position_embeddings: CosSin, cache: MlaCache
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [batch, heads, tokens, columns], and the latents and rotated keys of all tokens."""
    batch, length = hidden_states.shape[:-1]
    rank, rope = self.kv_lora_rank, self.qk_rope_head_dim
    interleaved = self.config.rope_interleave
    q = self.q_b_proj(_q_latent(self, hidden_states)).view(batch * length, -1, self.qk_head_dim)
    kv = self.kv_a_proj_with_mqa(hidden_states).view(batch * length, rank + rope)
    layer = cache.layers[self.layer_idx]
    layer.require(length)
    paged = layer.allocate(batch, rank, rope, kv.dtype, kv.device)
    layer.arrange(pairs=interleaved)
    offsets, freqs, rows = cache.angles(*position_embeddings, batch)
    q_rot = q[..., self.qk_nope_head_dim :]
    gamma, eps = gamma_of(self.kv_a_layernorm.weight), self.kv_a_layernorm._onepass.eps
    style: RopeStyle = "interleaved" if interleaved else "half"
    fused_rope_rmsnorm_quantization(
        q_rot, q_rot, kv, offsets, freqs, gamma, paged, eps, rope_style=style, positions=rows
    )
    return q.view(batch, length, -1, self.qk_head_dim).transpose(1, 2), *layer.written(length)


def _rotated_as_model(
    self: LatentModule, hidden_states: Tensor, position_embeddings: CosSin
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, latents [batch, 1, tokens, rank] and keys, rotated by the model's own code."""
    batch, length = hidden_states.shape[:-1]
    sizes = [self.kv_lora_rank, self.qk_rope_head_dim]
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    norm = self.kv_a_layernorm
    if rows.shape[0] > FUSED_ROWS:
        latent, k_rot = self.kv_a_proj_with_mqa(hidden_states).split(sizes, dim=-1)
        latent = norm(latent)
    else:
        weight = self.kv_a_proj_with_mqa.weight
        latent, k_rot = gemv_and_partial_norm(rows, weight, gamma_of(norm.weight), norm._onepass.eps)
    latent, k_rot = (t.view(batch, 1, length, n) for t, n in zip((latent, k_rot), sizes, strict=True))
    q = self.q_b_proj(_q_latent(self, hidden_states)).view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
    q_pass, q_rot = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    q_rot, k_rot = _model_rotation(self)(q_rot, k_rot, *position_embeddings)
    return torch.cat((q_pass, q_rot), dim=-1), latent, k_rot


def _model_rotation(self: LatentModule) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function of the model that rotates queries and keys."""
    name = "apply_rotary_pos_emb_interleave" if self.config.rope_interleave else "apply_rotary_pos_emb"
    return cast(Callable[..., tuple[Tensor, Tensor]], getattr(sys.modules[self._onepass.namespace], name))


def _q_latent(self: LatentModule, hidden_states: Tensor) -> Tensor:
    """The normed latents of queries."""
    rows, norm = hidden_states.reshape(-1, hidden_states.shape[-1]), self.q_a_layernorm
    if rows.shape[0] > FUSED_ROWS:
        return cast(Tensor, norm(self.q_a_proj(hidden_states)))
    q, _ = gemv_and_partial_norm(rows, self.q_a_proj.weight, gamma_of(norm.weight), norm._onepass.eps)
    return q.view(*hidden_states.shape[:-1], -1)


# --- steps of few tokens --------------------------------------------------------------------------------------------


def attend_latent(
    self: LatentModule,
    step: LatentStep | None,
    hidden_states: Tensor,
    position_embeddings: CosSin,
    attention_mask: Tensor | None = None,
    past_key_values: Cache | None = None,
    norm: NormModule | None = None,
    add: Tensor | None = None,
    shape: tuple[int, int] | None = None,
    **kwargs: Any,
) -> Attended:
    """``o_proj(attention(norm(h))) + add`` with latents; ``norm``, ``add`` and ``shape`` as in `attend_heads`."""
    if step is None:
        return _attend_prompt(self, hidden_states, position_embeddings, attention_mask, past_key_values, kwargs)
    refuse_gradient(self, hidden_states, step.down.weight, step.out.weight)
    batch, length = hidden_states.shape[:2] if shape is None else shape
    rounding = step.rounding if norm is None else norm._onepass.rounding
    down = project(step.down, hidden_states, norm, rounding=rounding)
    q, latent, k_rot = down.split_with_sizes([step.down.sizes[0], self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
    if step.q_up is not None:
        q = project(step.q_up, q, self.q_a_layernorm, rounding=self.q_a_layernorm._onepass.rounding)
    latent = add_norm(self.kv_a_layernorm, latent).view(batch, length, 1, -1)
    q, k_rot = q.view(batch, length, -1, self.qk_head_dim), k_rot.view(batch, length, 1, -1)
    latent, k_rot = _rotate_latent(self, q, k_rot, latent, position_embeddings, past_key_values)
    out: Tensor | None = None
    weights: Tensor | None = None
    if _absorbs(self, q, attention_mask, kwargs):
        if step.invariant or latent.shape[2] <= SHORT:
            out = latents_in_splits(self, q, latent, k_rot, attention_mask)
        if out is None and not step.invariant:
            out = latents_by_torch(self, q, latent.squeeze(1), k_rot.squeeze(1), attention_mask)
    if out is None:
        k, v = self.expand_kv(latent, k_rot)
        out, weights = attend(
            self, self._onepass.namespace, (q.transpose(1, 2), k, v), attention_mask, kwargs, step.invariant
        )
    out = out if shape is None else out.view(batch * length, -1)
    return project(step.out, out, rounding=step.rounding, add=add), weights


def _absorbs(self: LatentModule, q: Tensor, mask: Tensor | None, kwargs: dict[str, object]) -> bool:
    """Whether queries [batch, tokens, heads, columns] may attend to the latents themselves.

    This does not depend on the batch. Many tokens of a sequence share the keys and values that are made for them.
    """
    length = q.shape[1]
    if length > FUSED_ROWS or self.config._attn_implementation != "sdpa":
        return False
    up = self._modules["kv_b_proj"]
    if type(up) is not nn.Linear or type(up.weight) is not nn.Parameter or up.bias is not None:
        return False
    own = is_own(up, linear_forward) and up.weight.dtype is q.dtype and "expand_kv" not in self.__dict__
    plain = kwargs.get("softcap") is None and kwargs.get("position_bias") is None
    return own and plain and (length == 1 or mask is not None)


def has_latent_kernels(weight: Tensor) -> bool:
    """Whether onepass has kernels for latents whose ``kv_b_proj`` has this weight."""
    return weight.dtype in (torch.bfloat16, torch.float16) and has_kernels(weight)


def _halves(self: LatentModule, heads: int, columns: int) -> tuple[Tensor, Tensor]:
    """The weights that make keys and values of a latent, [heads, columns of a head, columns of a latent]."""
    weight = self.kv_b_proj.weight.view(heads, -1, columns)
    w_k, w_v = weight.split_with_sizes([self.qk_nope_head_dim, self.v_head_dim], dim=1)
    return w_k, w_v


def latents_in_splits(
    self: LatentModule, q: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None
) -> Tensor | None:
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


def latents_by_torch(self: LatentModule, q: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None) -> Tensor:
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


def _rotate_latent(
    self: LatentModule, q: Tensor, k: Tensor, latent: Tensor, angles: CosSin, cache: Cache | None
) -> tuple[Tensor, Tensor]:
    """Rotate the last columns of queries in place, and the key; write it and the latent into the cache.

    All have the shape [batch, tokens, heads, columns]. Returns the latents and keys to attend to, [batch, 1, tokens, columns].
    One launch rotates and writes. transformers moves both columns of a pair apart, which takes a copy before.
    """
    rotated = q[..., self.qk_nope_head_dim :]
    if angles[0].dtype is not q.dtype:  # the model would not round its products to this dtype
        return _rotate_as_the_model(self, rotated, k, latent, angles, cache)
    turned = (_apart(rotated), _apart(k)) if self.config.rope_interleave else (rotated, k)
    options: dict[str, Any] = {
        "rope": Rope(cos=angles[0], sin=angles[1]),
        "rounding": cast(LatentStep, self._onepass.step).rounding,
    }
    layer = dense_layer(cache, self.layer_idx, latent)
    if layer is not None and cache is not None:
        options |= {"start": layer.cumulative_length, "layout": "dense", "out": rotated}
        # transformers stores the latent as keys and the rotated key as values
        qk_norm_rope_cache(*turned, latent, layer.values, layer.keys, **options)
        count(cache, self.layer_idx, layer, k.shape[1])
        return layer.keys, layer.values
    k_turned = qk_norm_rope_cache(*turned, out=(rotated, None), **options)[1]
    assert k_turned is not None
    return _updated(self, cache, latent, k_turned.transpose(1, 2))


def _rotate_as_the_model(
    self: LatentModule, rotated: Tensor, k: Tensor, latent: Tensor, angles: CosSin, cache: Cache | None
) -> tuple[Tensor, Tensor]:
    """The same by the model's own functions."""
    turned, k = _model_rotation(self)(rotated.transpose(1, 2), k.transpose(1, 2), *angles)
    rotated.copy_(turned.transpose(1, 2))
    return _updated(self, cache, latent, k)


def _updated(self: LatentModule, cache: Cache | None, latent: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The latents and keys to attend to, by the cache's own update."""
    latent = latent.transpose(1, 2)
    if cache is None:
        return latent, k
    settle(cache)
    return cache.update(latent, k, self.layer_idx)


def _apart(x: Tensor) -> Tensor:
    """The first columns of all pairs, then the second ones."""
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
