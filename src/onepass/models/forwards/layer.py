"""Decoder layers, gated MLPs and how a call of an attention runs; and the table of all forwards.

A step of few tokens is a chain of calls of `linear`, each with what surrounds it::

    qkv = linear(h, W_qkv, norm)
    out = attention(cache(rotate(qkv)))
    h = linear(out, W_o, add=h)
    h = linear(linear(h, W_gate_up, norm, activation), W_down, add=h)

In a prompt the first addition and the norm after it are one launch. On a CPU a post-norm before this addition is part of it,
also in steps that norm before they project.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...formats import Rounding
from ...ops.linear.launch import Activation
from .angles import AnglesRecord, angles_forward
from .attend import Attended, CosSin
from .attention import AttentionRecord, HeadsModule, attend_heads, fuses_heads
from .cache import Cache, is_mla_cache, settle
from .experts import ExpertsRecord, RouterRecord, experts_forward, router_forward
from .latent import LatentModule, LatentRecord, attend_latent, fuses_latents
from .linear import (
    MARK,
    LinearRecord,
    Parts,
    Projection,
    as_rows,
    is_ready,
    linear_forward,
    parts_of,
    project,
    project_sum,
    runs_step,
    takes,
)
from .norm import (
    FUSED_ROWS,
    NormModule,
    NormRecord,
    OtherNormRecord,
    add_norm,
    is_own,
    is_plain,
    no_global_hooks,
    norm_forward,
    other_norm_forward,
    post_add_norm,
    quiet,
    refuse_gradient,
)


class LayerRecord(NamedTuple):
    """The attributes of a decoder layer; see `forms.Layer`.

    ``names`` are the parameters of its forward after the first, ``defaults`` those that have a default, with its value. The
    models' layers pass all of them to the attention by name. ``fused`` is whether prompts run here too, ``decode`` whether
    steps of few tokens do, and ``always`` whether those may have any number of tokens. ``post`` is whether the norm after the
    attention, the addition and the next norm may be one launch.
    """

    names: tuple[str, ...]
    defaults: tuple[tuple[str, object], ...]
    norm: str
    before: str
    mlp: str
    after_attention: str
    after_mlp: str
    multiplier: str
    fused: bool = True
    decode: bool = False
    always: bool = False
    post: bool = False


class MlpRecord(NamedTuple):
    """A gated MLP: the projections of gate and up as one, and that of the product."""

    gate_up: Projection
    down: Projection
    activation: Activation
    rounding: Rounding
    parts: Parts


class LayerModule(nn.Module):
    """What is read of a decoder layer."""

    self_attn: HeadsModule | LatentModule
    _onepass: LayerRecord


class MlpModule(nn.Module):
    """What is read of a gated MLP."""

    _onepass: MlpRecord


def layer_forward(self: LayerModule, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
    """A decoder layer::

    residual = h + multiplier * after_attention(attention(before(h)))
    return residual + multiplier * after_mlp(mlp(norm(residual)))
    """
    record = self._onepass
    few = record.decode and (record.always or math.prod(hidden_states.shape[:-1]) <= FUSED_ROWS)
    few = few and not self.training and no_global_hooks()
    checkpoints = self.training and getattr(self, "gradient_checkpointing", False)  # the class's forward may do it
    post = _post_norm(self, hidden_states)
    if not few and (checkpoints or not (record.fused or post is not None)):
        return cast(Tensor, type(self).forward(self, hidden_states, *args, **kwargs))
    kwargs = {**dict(record.defaults), **dict(zip(record.names, args, strict=False)), **kwargs}
    x, residual = _attention_side(self, few, hidden_states, kwargs, post)
    out = _mlp_side(self, few, x, residual, hidden_states.shape, post)
    return out if out.dim() == 3 else out.view(hidden_states.shape)


def _post_norm(self: LayerModule, hidden_states: Tensor) -> NormModule | None:
    """The norm after the attention, if it can be part of the launch that adds and norms: on CPUs, because
    `rms_norm_add_rms_norm` has not run on a GPU yet.
    """
    record = self._onepass
    if not record.post or not hidden_states.is_cpu:
        return None
    post, norm = getattr(self, record.after_attention), getattr(self, record.norm)
    alike = is_plain(post) and is_plain(norm) and post._onepass == norm._onepass
    return post if alike and type(_multiplier(self)) is float else None


def _multiplier(self: LayerModule) -> object:
    """What the outputs of attention and MLP are multiplied by."""
    return getattr(self, self._onepass.multiplier) if self._onepass.multiplier else 1.0


def _scaled(self: LayerModule, x: Tensor) -> Tensor:
    """``x`` times the layer's multiplier, if it has one."""
    return x * getattr(self, self._onepass.multiplier) if self._onepass.multiplier else x


def _attention_side(
    self: LayerModule, few: bool, hidden_states: Tensor, kwargs: dict[str, Any], post: NormModule | None
) -> tuple[Tensor | None, Tensor]:
    """The layer up to its first addition: (None, the sum as rows), or what has to be added first.

    The latter is before the norm ``post``, if that is part of a later launch.
    """
    record, attention = self._onepass, self.self_attn
    norm = getattr(self, record.before) if record.before else None
    after = _after(self, few, record.after_attention)
    plain = few and (norm is None or is_plain(norm)) and not is_mla_cache(kwargs.get("past_key_values"))
    if plain and _is_skipped(attention, hidden_states):
        if after is None and not record.multiplier:
            rows, shape = as_rows(hidden_states), (hidden_states.shape[0], hidden_states.shape[1])
            return None, _attend(attention, rows, norm=norm, add=rows, shape=shape, **kwargs)
        x = _attend(attention, hidden_states, norm=norm, **kwargs)
    else:
        x = attention(hidden_states=hidden_states if norm is None else norm(hidden_states), **kwargs)[0]
    if post is not None:
        return x, hidden_states
    return _scaled(self, x if after is None else after(x)), hidden_states


def _attend(attention: HeadsModule | LatentModule, x: Tensor, **kwargs: Any) -> Tensor:
    """The output of an attention in a step of few tokens."""
    record = attention._onepass
    return ATTENTIONS[type(record)][0](attention, record.step, x, **kwargs)[0]


def _mlp_side(
    self: LayerModule, few: bool, x: Tensor | None, residual: Tensor, shape: torch.Size, post: NormModule | None
) -> Tensor:
    """The layer from its first addition on. ``x`` has to be added to the residual, unless it is None.

    ``post`` is the norm of x, if x was not normed yet. ``shape`` is that of the hidden states. The result has it too, or is rows.
    """
    record = self._onepass
    norm, mlp = getattr(self, record.norm) if record.norm else None, getattr(self, record.mlp)
    after = _after(self, few, record.after_mlp)
    adds = after is None and not record.multiplier
    skipped = few and _is_skipped(mlp, residual)
    projected = skipped and norm is not None and is_plain(norm) and norm._onepass.rounding == mlp._onepass.rounding
    # a launch with a post-norm must give the bits and the dtype of the model's own steps
    if x is not None and post is not None and (projected or not (record.fused or x.dtype == residual.dtype)):
        x, post = _scaled(self, post(x)), None
    if norm is not None and projected:
        if x is None:
            residual = residual if adds else residual.view(shape)
            x = gated(mlp, residual, norm, add=residual if adds else None)
        else:
            x, residual = gated_sum(mlp, x, residual, norm, adds)
        return x if adds else _added(self, x, residual, after)
    residual = residual.view(shape)  # modules take and return hidden states
    if norm is None:
        residual = residual if x is None else residual + x
        x = residual
    elif x is not None and post is not None:
        x, residual = post_add_norm(
            norm, post, x, residual, cast(float, _multiplier(self)), None if record.fused else True
        )
    elif x is not None and record.fused and is_plain(norm):
        x, residual = add_norm(norm, x, residual)
    else:
        residual = residual if x is None else residual + x
        x = norm(residual)
    if skipped:
        x = gated(mlp, x, add=residual if adds else None)
        if adds:
            return x
    else:
        x = mlp(x)
        x = x[0] if isinstance(x, tuple) else x  # a mixture of experts may also return its scores
    return _added(self, x, residual, after)


def _added(self: LayerModule, x: Tensor, residual: Tensor, after: nn.Module | None) -> Tensor:
    """The layer's last steps that are not part of a launch."""
    if after is not None:
        x = after(x)
    return residual + _scaled(self, x)


def _after(self: LayerModule, few: bool, name: str) -> nn.Module | None:
    """The module of this name; None if there is none, or in a step if it is a dropout, which does nothing there."""
    module: nn.Module | None = getattr(self, name) if name else None
    skipped = few and type(module) is nn.Dropout and not module.training and is_own(module)
    return None if skipped else module


def _is_skipped(module: nn.Module, x: Tensor | None = None) -> bool:
    """Whether a layer may do the work of its attention or MLP without calling it, for this input or for few tokens."""
    parts = parts_of(module)
    if parts is None or not is_own(module, FORWARDS[type(module.__dict__[MARK])]):
        return False
    return (x is None or takes(parts.projections[0], x, parts.always)) and is_ready(module, parts)


def attention_forward(
    self: HeadsModule | LatentModule,
    hidden_states: Tensor,
    position_embeddings: CosSin | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Cache | None = None,
    **kwargs: Any,
) -> Attended:
    """An attention: a step of few tokens, a prompt with fused norms and rotations, or as its class computes it."""
    record, arguments = self._onepass, (hidden_states, position_embeddings, attention_mask, past_key_values)
    attend, fuses = ATTENTIONS[type(record)]
    if record.step is not None:
        if runs_step(self, record.step.parts, hidden_states) and not is_mla_cache(past_key_values):
            return attend(self, record.step, *arguments, **kwargs)
        settle(past_key_values)
    if fuses(self):
        return attend(self, None, *arguments, **kwargs)
    return cast(Attended, type(self).forward(self, *arguments, **kwargs))


def mlp_forward(self: MlpModule, x: Tensor | None = None, /, **named: Tensor) -> Tensor:
    """A gated MLP, of few tokens in two launches."""
    if x is None:
        (x,) = named.values()
    if x.dim() == 3 and runs_step(self, self._onepass.parts, x):
        return gated(self, x)
    return cast(Tensor, type(self).forward(self, x))


def gated(self: MlpModule, x: Tensor, norm: NormModule | None = None, add: Tensor | None = None) -> Tensor:
    """``down(act(gate(a)) * up(a)) + add`` with ``a = norm(x)``."""
    gate_up, down, activation, rounding, _ = self._onepass
    refuse_gradient(self, x, gate_up.weight, down.weight)
    y = project(gate_up, x, norm, activation=activation, rounding=rounding)
    return project(down, y, rounding=rounding, add=add)


def gated_sum(self: MlpModule, x: Tensor, residual: Tensor, norm: NormModule, adds: bool) -> tuple[Tensor, Tensor]:
    """`gated` of ``h = x + residual``, and h, which is added if ``adds``."""
    gate_up, down, activation, rounding, _ = self._onepass
    refuse_gradient(self, x, gate_up.weight, down.weight)
    y, h = project_sum(gate_up, x, residual, norm, rounding, activation)
    return project(down, y, rounding=rounding, add=h if adds else None), h


ATTENTIONS: Final[dict[type, tuple[Callable[..., Attended], Callable[..., bool]]]] = {
    AttentionRecord: (attend_heads, fuses_heads),
    LatentRecord: (attend_latent, fuses_latents),
}
"""What computes an attention with a step, or with None for a prompt, and whether prompts are fused; by the type of its record."""
FORWARDS: Final[dict[type, Callable[..., object]]] = {
    NormRecord: norm_forward,
    OtherNormRecord: other_norm_forward,
    LayerRecord: layer_forward,
    AttentionRecord: attention_forward,
    LatentRecord: attention_forward,
    MlpRecord: mlp_forward,
    LinearRecord: linear_forward,
    ExpertsRecord: experts_forward,
    RouterRecord: router_forward,
    AnglesRecord: angles_forward,
}
"""The forward of a patched module, by the type of its record."""


def runs_fused(module: nn.Module) -> bool:
    """Whether the next prompt will be fused: the modules that it would skip are as `patch` left them."""
    record = module.__dict__[MARK]
    if type(record) is LayerRecord:
        names = (record.norm,) if record.fused else (record.norm, record.after_attention)
        return all(is_plain(getattr(module, name)) for name in names)
    return type(record) not in ATTENTIONS or ATTENTIONS[type(record)][1](module)


def runs_decode(module: nn.Module) -> bool:
    """Whether the next step of few tokens will skip the modules whose work it does."""
    record = module.__dict__[MARK]
    if type(record) in (AnglesRecord, ExpertsRecord, RouterRecord):
        return True
    if not no_global_hooks():
        return False
    if type(record) is LayerRecord:
        norms = [getattr(module, name) for name in (record.before, record.norm) if name]
        children = [getattr(module, name) for name in ("self_attn", record.mlp)]
        # a submodule that has no step of its own is always called
        return all(map(is_plain, norms)) and all(parts_of(child) is None or _is_skipped(child) for child in children)
    if type(record) is LinearRecord:
        return quiet(module) and record.projection.current()
    parts = parts_of(module)
    return parts is None or is_ready(module, parts)
