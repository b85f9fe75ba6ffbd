"""The forwards that `onepass.patch` installs: one per kind of module, none per model.

Each is a function of the module it is bound to and of the data in the module's ``_onepass``. It has
the signature of the forward it replaces, and runs the same projections, caches and attention
functions in the same order.

A fused launch does the work of several modules without calling them. Such a call may matter:
the module may have a hook, or it or its forward may have been replaced after `patch`. So each fused
forward first checks the modules that it would skip (`runs_fused`). If one of them is not as `patch`
left it, they are called one by one as in the unpatched model; an attention then runs the forward of
its class. This is decided at every call, because hooks can be added and removed.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..errors import ContractError
from ..formats import Rounding
from ..nn import gamma_of
from ..ops.gemv_norm.launch import MAX_ROWS
from ..ops.gemv_norm.op import gemv_and_partial_norm
from ..ops.mla_cache.op import fused_rope_rmsnorm_quantization
from ..ops.qk_cache.op import qk_norm_rope_cache
from ..ops.qk_norm.op import qk_rms_norm
from ..ops.rms_norm.launch import GateActivation
from ..ops.rms_norm.op import layer_norm, rms_norm
from ..rope import Rope, RopeStyle

FUSED_ROWS: Final = MAX_ROWS
"""The op's limit; up to this many tokens one launch is faster (docs/performance.md)."""

Attended: TypeAlias = tuple[Tensor, Tensor | None]
"""What an attention returns: its output and, if available, the attention weights."""


class NormCall(NamedTuple):
    """How a norm is computed."""

    eps: float
    weight_offset: float
    rounding: Rounding


class OtherNormCall(NamedTuple):
    """How a norm of another kind is computed; see `forms.OtherNorm`. ``gate`` is "" if there is none."""

    eps: float
    rounding: Rounding
    centered: bool
    weighted: bool
    gate: Literal["", "after", "before"]
    groups: int
    squeezes: bool
    gate_activation: GateActivation = "silu"
    weight_offset: float = 0.0
    same_dtype: bool = False


class LayerCall(NamedTuple):
    """The attributes of a decoder layer; see `forms.Layer`.

    ``names`` are the parameters of its forward after the first, ``defaults`` those that have a
    default, with its value. The models' layers pass all of them to the attention by name.
    """

    names: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    norm: str
    before: str
    mlp: str
    after_attention: str
    after_mlp: str
    multiplier: str


class AttentionCall(NamedTuple):
    """How q and k are normed, and what is passed on; see `forms.Attention`.

    ``home`` is the Python module whose functions the model's own forward calls. ``style`` is which columns form a pair where
    the launch of the norms also rotates with the model's rounding; "" means that the model's own function rotates.
    """

    eps: float
    weight_offset: float
    rounding: Rounding
    per_head: bool
    window: bool
    cache_position: bool
    gated: bool
    home: str
    style: RopeStyle | Literal[""] = ""


class MlaCall(NamedTuple):
    """The epsilons of MLA's two norms, and the Python module of the model's functions."""

    q_eps: float
    kv_eps: float
    home: str


def parameters_of(cls: type[nn.Module]) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """The parameters of a layer's forward after the hidden states, and their defaults."""
    every = list(inspect.signature(cls.forward).parameters.values())[2:]
    named = [parameter for parameter in every if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return tuple(p.name for p in named), tuple((p.name, p.default) for p in named if p.default is not p.empty)


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module would run hooks: its own, or global ones.

    Backward hooks do not count. Without gradients torch does not run them, and with gradients a
    patched model raises.
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


def runs_fused(module: Any) -> bool:
    """Whether the next call will be fused: the modules it would skip are as `patch` left them."""
    how = module._onepass
    if type(how) is LayerCall:
        return is_plain(getattr(module, how.norm))
    if type(how) is AttentionCall:
        return is_plain(module.q_norm) and is_plain(module.k_norm)
    if type(how) is MlaCall:
        norms, linears = (module.q_a_layernorm, module.kv_a_layernorm), (module.q_a_proj, module.kv_a_proj_with_mqa)
        return all(is_plain(norm) for norm in norms) and all(is_plain_linear(linear) for linear in linears)
    return True


def refuse_gradient(module: nn.Module, *tensors: Tensor | None) -> None:
    """Raise if autograd would record the call: the kernels have no backward."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ContractError(
            f"{type(module).__name__}: this module was patched by onepass.patch, whose kernels have no backward, and was "
            "called with gradients enabled: call the model under torch.inference_mode() or torch.no_grad(), or restore "
            "its own code with handle.undo()"
        )


def norm_forward(self: Any, x: Tensor | None = None, /, **named: Tensor) -> Tensor:
    """``y = norm(x)``. The argument's name differs between families, so any name is accepted."""
    if x is None:
        (x,) = named.values()
    return cast(Tensor, add_norm(self, x))


def other_norm_forward(self: Any, *args: Tensor | None, **named: Tensor | None) -> Tensor:
    """``norm(x)`` or ``norm(x, gate)``. The name of x differs between families, that of the gate does not."""
    how: OtherNormCall = self._onepass
    gate = named.pop("gate", None)
    x, *rest = (*args, *named.values())
    gate = rest[0] if rest else gate
    token = how.squeezes and x is not None and x.dim() == 3 and x.shape[1] == 1
    if x is None or (gate is not None and (gate.shape != x.shape or (token and how.gate == "after"))):
        return cast(Tensor, type(self).forward(self, x, gate))
    gamma = gamma_of(self.weight) if how.weighted else None
    if gamma is not None and not _takes(how, gamma, x):
        return cast(Tensor, type(self).forward(self, x, *[gate] * (gate is not None)))
    refuse_gradient(self, x, gamma, gate)
    x = x if x.stride(-1) == 1 else x.contiguous()
    if how.centered:
        return layer_norm(x, gamma, eps=how.eps)
    if gate is not None and gate.stride(-1) != 1:
        gate = gate.contiguous()
    options: dict[str, Any] = {"rounding": how.rounding, "weight_offset": how.weight_offset}
    options |= {"gate_order": how.gate or "after", "gate_activation": how.gate_activation}
    if how.groups == 1:
        y = rms_norm(x, gamma, how.eps, gate=gate, **options)
    else:
        x, gate, gamma = (t if t is None else t.unflatten(-1, (how.groups, -1)) for t in (x, gate, gamma))
        y = rms_norm(cast(Tensor, x), gamma, how.eps, gate=gate, **options).flatten(-2)
    return cast(Tensor, y.squeeze(1) if token else y)


def _takes(how: OtherNormCall, gamma: Tensor, x: Tensor) -> bool:
    """Whether an op computes what the model does with this weight: not if it is broadcast, or decides the dtype."""
    if gamma.dim() == 2 and gamma.shape != x.shape[-2:]:
        return False
    return gamma.dtype == x.dtype or not how.same_dtype


def add_norm(norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """``norm(x)``, or with a residual ``(norm(x + residual), x + residual)``, in one launch.

    Rows that are not contiguous are copied. Models norm such rows after a convolution.
    """
    how: NormCall = norm._onepass
    gamma = gamma_of(norm.weight)
    if x.stride(-1) != 1:
        x = x.contiguous()
    refuse_gradient(norm, x, gamma, residual)
    options: dict[str, Any] = {"weight_offset": how.weight_offset, "rounding": how.rounding}
    return rms_norm(x, gamma, how.eps, residual=residual, **options)


def layer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A decoder layer with its first addition and the norm after it in one launch::

    residual = h + multiplier * after_attention(attention(before(h)))
    return residual + multiplier * after_mlp(mlp(norm(residual)))
    """
    if self.training and getattr(self, "gradient_checkpointing", False):  # the class's forward may do it
        return cast(Tensor, type(self).forward(self, hidden_states, *args, **kwargs))
    how: LayerCall = self._onepass
    kwargs = {**dict(how.defaults), **dict(zip(how.names, args, strict=False)), **kwargs}
    x = self.self_attn(hidden_states=getattr(self, how.before)(hidden_states), **kwargs)[0]
    if how.after_attention:
        x = getattr(self, how.after_attention)(x)
    if how.multiplier:
        x = x * getattr(self, how.multiplier)
    if runs_fused(self):
        x, residual = add_norm(getattr(self, how.norm), x, hidden_states)
    else:
        residual = hidden_states + x
        x = getattr(self, how.norm)(residual)
    x = getattr(self, how.mlp)(x)
    if isinstance(x, tuple):  # a mixture of experts may also return its scores
        x = x[0]
    if how.after_mlp:
        x = getattr(self, how.after_mlp)(x)
    if how.multiplier:
        x = x * getattr(self, how.multiplier)
    return cast(Tensor, residual + x)


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Attended:
    """An attention that norms and rotates queries and keys in one launch."""
    how: AttentionCall = self._onepass
    if not runs_fused(self):
        own = type(self).forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        return cast(Attended, own)
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
    gate = None
    if how.gated:
        q, gate = torch.chunk(q.view(*hidden_states.shape[:-1], -1, 2 * self.head_dim), 2, dim=-1)
    if how.per_head:
        q, k = q.view(heads), k.view(heads)
    gammas = gamma_of(self.q_norm.weight), gamma_of(self.k_norm.weight)
    refuse_gradient(self, q, k, *gammas)
    model = sys.modules[how.home]
    cos, sin = position_embeddings
    if how.style and cos.dtype is q.dtype:
        q, k = _normed_and_rotated(how, q.view(heads), k.view(heads), gammas, Rope(style=how.style, cos=cos, sin=sin))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.view(heads).transpose(1, 2)
    else:
        options: dict[str, Any] = {"weight_offset": how.weight_offset, "rounding": how.rounding}
        q, k = qk_rms_norm(q, k, *gammas, how.eps, per_head=how.per_head, **options)
        q, k, v = (t.view(heads).transpose(1, 2) for t in (q, k, v))
        q, k = model.apply_rotary_pos_emb(q, k, cos, sin)
    more: tuple[Any, ...] = ()
    if how.cache_position:
        more = ({"sin": sin, "cos": cos, "cache_position": kwargs.pop("cache_position", None)},)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx, *more)
    if how.window:
        kwargs["sliding_window"] = self.sliding_window
    return _attend(self, model, (q, k, v), attention_mask, gate, **kwargs)


def _normed_and_rotated(
    how: AttentionCall, q: Tensor, k: Tensor, gammas: tuple[Tensor, Tensor], rope: Rope
) -> tuple[Tensor, Tensor]:
    """Heads [batch, tokens, heads, columns] after norms and rotation, with the bits of the model's own rotation."""
    options: dict[str, Any] = {"eps": how.eps, "weight_offset": how.weight_offset, "per_head": how.per_head}
    rounding: Rounding = "hf" if how.rounding == "hf" else "hf_rope"
    made = qk_norm_rope_cache(q, k, gamma_q=gammas[0], gamma_k=gammas[1], rope=rope, rounding=rounding, **options)
    return cast(tuple[Tensor, Tensor], made)


def _attend(
    self: Any,
    model: Any,
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    gate: Tensor | None = None,
    **kwargs: Any,
) -> Attended:
    """The attention function that the model is configured for, the gate and the output projection."""
    function = attention_function(self, model)
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = function(self, *states, mask, dropout=dropout, scaling=self.scaling, **kwargs)
    out = out.reshape(states[0].shape[0], states[0].shape[2], -1).contiguous()
    if gate is not None:
        out = out * torch.sigmoid(gate.reshape(out.shape))
    return self.o_proj(out), weights


def attention_function(self: Any, model: Any) -> Any:
    """The attention function that the model is configured for."""
    functions, implementation = model.ALL_ATTENTION_FUNCTIONS, self.config._attn_implementation
    if hasattr(functions, "get_interface"):
        return functions.get_interface(implementation, model.eager_attention_forward)
    # transformers 4.57
    return model.eager_attention_forward if implementation == "eager" else functions[implementation]


def mla_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Attended:
    """A latent attention with fused down projections and norms for up to `FUSED_ROWS` tokens.

    With an `MlaCache` the norm of the latent, the rotations and the cache write are one launch for
    any number of tokens.
    """
    if not runs_fused(self):
        own = type(self).forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        return cast(Attended, own)
    skipped = (self.q_a_proj, self.q_a_layernorm, self.kv_a_proj_with_mqa, self.kv_a_layernorm)
    refuse_gradient(self, hidden_states, *(module.weight for module in skipped))
    model = sys.modules[self._onepass.home]
    if getattr(past_key_values, "onepass_mla", False):
        q, latent, k_rot = _write_entries(self, hidden_states, position_embeddings, past_key_values)
    else:
        q, latent, k_rot = _rotate(self, model, hidden_states, position_embeddings)
        if past_key_values is not None:
            latent, k_rot = past_key_values.update(latent, k_rot, self.layer_idx)
    k, v = self.expand_kv(latent, k_rot)
    return _attend(self, model, (q, k, v), attention_mask, **kwargs)


def _write_entries(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [batch, heads, tokens, columns], and the latents and rotated keys of all tokens."""
    how: MlaCall = self._onepass
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
    gamma = gamma_of(self.kv_a_layernorm.weight)
    style: Any = {"rope_style": "interleaved" if interleaved else "half", "positions": rows}
    fused_rope_rmsnorm_quantization(q_rot, q_rot, kv, offsets, freqs, gamma, paged, how.kv_eps, **style)
    return q.view(batch, length, -1, self.qk_head_dim).transpose(1, 2), *layer.written(length)


def _rotate(
    self: Any, model: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, latents [batch, 1, tokens, rank] and keys, rotated by the model's own code."""
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
    OtherNormCall: other_norm_forward,
    LayerCall: layer_forward,
    AttentionCall: attention_forward,
    MlaCall: mla_forward,
}
"""The forward of a patched module, by the type of its ``_onepass``."""
