"""The forwards that `onepass.patch` puts in place of a model's own: one a kind of module, none a model.

Each is a function of the module it is bound to; what it must know besides is in the module's ``_onepass``. They take and
return what the forwards they replace do, and run the same projections, caches and attention functions in the same order.

A fused launch does the work of several modules without calling them. Somebody may be waiting for such a call: a hook, or a
forward or module that was put there after `patch`. So each fused forward first looks at the modules that it would not call
(`runs_fused`). If one of them is not as `patch` left it, they are called one by one as the unpatched model calls them, in
an attention by running the forward of its class. This is decided at every call: hooks can come and go.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..errors import ContractError
from ..formats import Rounding
from ..nn import gamma_of
from ..ops.gemv_norm import gemv_and_partial_norm
from ..ops.mla_cache import fused_rope_rmsnorm_quantization
from ..ops.qk_norm import qk_rms_norm
from ..ops.rms_norm import rms_norm
from ..specs.gemv_norm import MAX_ROWS

FUSED_ROWS: Final = MAX_ROWS
"""Tokens up to which projection and norm are one launch; up to as many as it takes that is faster (docs/performance.md)."""


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module would run hooks: its own, or those registered for all modules.

    Backward hooks do not count. Without gradients torch does not run them, and with gradients a patched model raises.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
    )


def is_plain(norm: Any) -> bool:
    """Whether a call of the norm would run `norm_forward` and nothing else."""
    return getattr(norm.forward, "func", None) is norm_forward and not hooked(norm)


def is_plain_linear(linear: Any) -> bool:
    """Whether a call of the linear layer would multiply by its weight and do nothing else."""
    return type(linear) is nn.Linear and linear.bias is None and "forward" not in linear.__dict__ and not hooked(linear)


def refuse_gradient(module: nn.Module, *tensors: Tensor) -> None:
    """Raise where autograd would record the call: the kernels have no backward."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ContractError(
            f"{type(module).__name__}: this module was patched by onepass.patch, whose kernels have no backward, and it was "
            "called with gradients enabled: call the model under torch.inference_mode() or torch.no_grad(), or give it its "
            "own code back with handle.undo()"
        )


class NormCall(NamedTuple):
    """How a norm is computed."""

    eps: float
    weight_offset: float
    rounding: Rounding


def norm_forward(self: Any, x: Tensor | None = None, /, **named: Tensor) -> Tensor:
    """``y = norm(x)``. Families call the argument by different names, so any name will do."""
    if x is None:
        (x,) = named.values()
    how: NormCall = self._onepass
    gamma = gamma_of(self.weight)
    refuse_gradient(self, x, gamma)
    return rms_norm(x, gamma, how.eps, weight_offset=how.weight_offset, rounding=how.rounding)


def add_norm(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)`` in one launch."""
    how: NormCall = norm._onepass
    gamma = gamma_of(norm.weight)
    refuse_gradient(norm, x, gamma, residual)
    return rms_norm(
        x, gamma, how.eps, weight_offset=how.weight_offset, residual=residual, rounding=how.rounding
    )  # fmt: skip


class LayerCall(NamedTuple):
    """The attributes of a decoder layer; see `families.Layer`.

    ``names`` are the parameters of its forward after the first, ``defaults`` the values of those that have one. The models'
    layers hand all of them to the attention by name.
    """

    names: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    norm: str
    after_attention: str
    after_mlp: str


def layer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A decoder layer, its first addition and the norm behind it as one launch::

    residual = h + after_attention(attention(input_layernorm(h)))
    return residual + after_mlp(mlp(norm(residual)))
    """
    how: LayerCall = self._onepass
    kwargs = {**dict(how.defaults), **dict(zip(how.names, args, strict=False)), **kwargs}
    x = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
    if how.after_attention:
        x = getattr(self, how.after_attention)(x)
    if runs_fused(self):
        x, residual = add_norm(getattr(self, how.norm), x, hidden_states)
    else:
        residual = hidden_states + x
        x = getattr(self, how.norm)(residual)
    x = self.mlp(x)
    if isinstance(x, tuple):  # a mixture of experts may return its scores too
        x = x[0]
    if how.after_mlp:
        x = getattr(self, how.after_mlp)(x)
    return cast(Tensor, residual + x)


class AttentionCall(NamedTuple):
    """How q and k are normed; whether the attention function is told a window."""

    eps: float
    weight_offset: float
    rounding: Rounding
    per_head: bool
    window: bool


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention whose norms of queries and keys are one launch."""
    how: AttentionCall = self._onepass
    if not runs_fused(self):
        own = type(self).forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        return cast(tuple[Tensor, Tensor | None], own)
    lead = hidden_states.shape[:-1]
    heads = (*lead, -1, self.head_dim)
    q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
    if how.per_head:
        q, k = q.view(heads), k.view(heads)
    q_gamma, k_gamma = gamma_of(self.q_norm.weight), gamma_of(self.k_norm.weight)
    refuse_gradient(self, q, k, q_gamma, k_gamma)
    q, k = qk_rms_norm(
        q,
        k,
        q_gamma,
        k_gamma,
        how.eps,
        weight_offset=how.weight_offset,
        rounding=how.rounding,
        per_head=how.per_head,
    )
    q, k, v = (t.view(heads).transpose(1, 2) for t in (q, k, v))
    model = sys.modules[type(self).__module__]
    q, k = model.apply_rotary_pos_emb(q, k, *position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    if how.window:
        kwargs["sliding_window"] = self.sliding_window
    return _attend(self, model, q, k, v, attention_mask, **kwargs)


def _attend(
    self: Any, model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function that the model is configured for, and the projection behind it."""
    function = model.ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, model.eager_attention_forward
    )
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = function(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)
    lead = (q.shape[0], q.shape[2])
    return self.o_proj(out.reshape(*lead, -1).contiguous()), weights


class MlaCall(NamedTuple):
    """The epsilons of MLA's two norms."""

    q_eps: float
    kv_eps: float


def mla_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A latent attention whose projections down and their norms are one launch each, for up to `FUSED_ROWS` tokens.

    Over an `MlaCache` the norm of the latent, the rotations and the cache write are one launch for any number of tokens.
    """
    if not runs_fused(self):
        own = type(self).forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        return cast(tuple[Tensor, Tensor | None], own)
    skipped = (self.q_a_proj, self.q_a_layernorm, self.kv_a_proj_with_mqa, self.kv_a_layernorm)
    refuse_gradient(self, hidden_states, *(module.weight for module in skipped))
    model = sys.modules[type(self).__module__]
    if getattr(past_key_values, "onepass_mla", False):
        q, latent, k_rot = _write_entries(self, hidden_states, position_embeddings, past_key_values)
    else:
        q, latent, k_rot = _rotate(self, model, hidden_states, position_embeddings)
        if past_key_values is not None:
            latent, k_rot = past_key_values.update(latent, k_rot, self.layer_idx)
    k, v = self.expand_kv(latent, k_rot)
    return _attend(self, model, q, k, v, attention_mask, **kwargs)


def _write_entries(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [batch, heads, tokens, columns], rotated in place, and the latents and rotated keys of all tokens."""
    how: MlaCall = self._onepass
    batch, length = hidden_states.shape[:-1]
    rank, rope = self.kv_lora_rank, self.qk_rope_head_dim
    q = self.q_b_proj(_q_latent(self, hidden_states)).view(batch * length, -1, self.qk_head_dim)
    kv = self.kv_a_proj_with_mqa(hidden_states).view(batch * length, rank + rope)
    layer = cache.layers[self.layer_idx]
    layer.require(length)
    paged = layer.allocate(batch, rank, rope, kv.dtype, kv.device)
    layer.arrange(pairs=self.config.rope_interleave)
    offsets, freqs, rows = cache.angles(*position_embeddings, batch)
    turning = q[..., self.qk_nope_head_dim :]
    fused_rope_rmsnorm_quantization(
        turning,
        turning,
        kv,
        offsets,
        freqs,
        gamma_of(self.kv_a_layernorm.weight),
        paged,
        how.kv_eps,
        rope_style="interleaved" if self.config.rope_interleave else "half",
        positions=rows,
    )
    return q.view(batch, length, -1, self.qk_head_dim).transpose(1, 2), *layer.written(length)


def _rotate(
    self: Any, model: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, latents [batch, 1, tokens, rank] and rotated keys of these tokens, rotated by the model's own code."""
    how: MlaCall = self._onepass
    batch, length = hidden_states.shape[:-1]
    sizes = [self.kv_lora_rank, self.qk_rope_head_dim]
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    if rows.shape[0] > FUSED_ROWS:
        latent, k_rot = self.kv_a_proj_with_mqa(hidden_states).split(sizes, dim=-1)
        latent = self.kv_a_layernorm(latent)
    else:
        gamma = gamma_of(self.kv_a_layernorm.weight)
        latent, k_rot = gemv_and_partial_norm(rows, self.kv_a_proj_with_mqa.weight, gamma, how.kv_eps)
    latent, k_rot = (t.view(batch, 1, length, n) for t, n in zip((latent, k_rot), sizes, strict=True))
    q = self.q_b_proj(_q_latent(self, hidden_states)).view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
    q_pass, q_rot = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    rotate = model.apply_rotary_pos_emb_interleave if self.config.rope_interleave else model.apply_rotary_pos_emb
    q_rot, k_rot = rotate(q_rot, k_rot, *position_embeddings)
    return torch.cat((q_pass, q_rot), dim=-1), latent, k_rot


def _q_latent(self: Any, hidden_states: Tensor) -> Tensor:
    """The normed latents of queries."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    if rows.shape[0] > FUSED_ROWS:
        return cast(Tensor, self.q_a_layernorm(self.q_a_proj(hidden_states)))
    gamma = gamma_of(self.q_a_layernorm.weight)
    q, _ = gemv_and_partial_norm(rows, self.q_a_proj.weight, gamma, self._onepass.q_eps)
    return q.view(*hidden_states.shape[:-1], -1)


FORWARDS: Final[dict[type, Any]] = {
    NormCall: norm_forward,
    LayerCall: layer_forward,
    AttentionCall: attention_forward,
    MlaCall: mla_forward,
}
"""Which forward a module gets, by what its ``_onepass`` is."""


def runs_fused(module: Any) -> bool:
    """Whether the next call of a patched module will be fused: the modules it would skip are as `patch` left them."""
    how = module._onepass
    if type(how) is LayerCall:
        return is_plain(getattr(module, how.norm))
    if type(how) is AttentionCall:
        return is_plain(module.q_norm) and is_plain(module.k_norm)
    if type(how) is MlaCall:
        norms, linears = (module.q_a_layernorm, module.kv_a_layernorm), (module.q_a_proj, module.kv_a_proj_with_mqa)
        return all(is_plain(norm) for norm in norms) and all(is_plain_linear(linear) for linear in linears)
    return True
