"""The forwards that ``onepass.patch(model, decode=True)`` installs: a decoder layer for few tokens.

A step is a chain of calls of `linear`, each with what surrounds it::

    qkv = linear(h, W_qkv, norm)
    out = attention(cache(rotate(qkv)))
    h = linear(out, W_o, add=h)
    h = linear(linear(h, W_gate_up, norm, activation), W_down, add=h)

Each forward is a function of the module it is bound to and of the data in its ``_onepass_decode``. It
first decides whether it may skip the modules whose work it does: none of them has a hook or was
replaced. Otherwise, and for more tokens, it calls what `onepass.patch` installs without ``decode``,
or the module's own forward.
"""

from __future__ import annotations

import math
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from .angles import AnglesStep, angles_step
from .counts import settle
from .decode_attention import attend_heads
from .decode_latent import attend_latent
from .forwards import (
    FUSED_ROWS,
    Attended,
    LayerCall,
    add_norm,
    attention_forward,
    is_plain,
    layer_forward,
    mla_forward,
    refuse_gradient,
    runs_fused,
)
from .steps import (
    AttentionStep,
    LatentStep,
    LayerStep,
    LinearStep,
    MlpStep,
    as_rows,
    is_own,
    is_ready,
    linear_step,
    no_global_hooks,
    project,
    quiet,
    takes,
)


def layer_step(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A decoder layer for few tokens."""
    how: LayerStep = self._onepass_decode
    few = how.always or math.prod(hidden_states.shape[:-1]) <= FUSED_ROWS
    if not few or self.training or not no_global_hooks():
        if how.fused:
            return layer_forward(self, hidden_states, *args, **kwargs)
        return cast(Tensor, type(self).forward(self, hidden_states, *args, **kwargs))
    call = how.call
    kwargs = {**dict(call.defaults), **dict(zip(call.names, args, strict=False)), **kwargs}
    x, residual = _attention_side(self, hidden_states, kwargs)
    made = _mlp_side(self, x, residual, hidden_states.shape)
    return made if made.dim() == 3 else made.view(hidden_states.shape)


def _attention_side(self: Any, hidden_states: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor]:
    """The layer up to its first addition: (None, the sum as rows), or what has to be added first."""
    call: LayerCall = self._onepass_decode.call
    attention = self.self_attn
    norm = getattr(self, call.before) if call.before else None
    after = _after(self, call.after_attention)
    adds = after is None and not call.multiplier
    if _fusable(attention, hidden_states) and (norm is None or is_plain(norm)) and not _writes_mla(kwargs):
        attend = attend_latent if type(attention._onepass_decode) is LatentStep else attend_heads
        if adds:
            rows, shape = as_rows(hidden_states), (hidden_states.shape[0], hidden_states.shape[1])
            return None, attend(attention, rows, norm=norm, add=rows, shape=shape, **kwargs)[0]
        x, _ = attend(attention, hidden_states, norm=norm, **kwargs)
    else:
        x = attention(hidden_states=hidden_states if norm is None else norm(hidden_states), **kwargs)[0]
    if after is not None:
        x = after(x)
    return x * getattr(self, call.multiplier) if call.multiplier else x, hidden_states


def _mlp_side(self: Any, x: Tensor | None, residual: Tensor, shape: torch.Size) -> Tensor:
    """The layer from its first addition on. ``x`` has to be added to the residual, unless it is None.

    ``shape`` is that of the hidden states. The result has it too, or is rows.
    """
    how: LayerStep = self._onepass_decode
    call = how.call
    norm, mlp = getattr(self, call.norm) if call.norm else None, getattr(self, call.mlp)
    after = _after(self, call.after_mlp)
    adds = after is None and not call.multiplier
    fused = _fusable(mlp, residual)
    if norm is not None and fused and is_plain(norm) and norm._onepass.rounding == mlp._onepass_decode.rounding:
        if x is None:
            residual = residual if adds else residual.view(shape)
            x = gated(mlp, residual, norm, add=residual if adds else None)
        else:
            x, residual = gated(mlp, x, norm, residual, add=residual if adds else None)
        return x if adds else _added(self, x, residual, after)
    residual = residual.view(shape)  # modules take and return hidden states
    if norm is None:
        residual = residual if x is None else residual + x
        x = residual
    elif x is not None and how.fused and runs_fused(self):
        x, residual = add_norm(norm, x, residual)
    else:
        residual = residual if x is None else residual + x
        x = norm(residual)
    if fused:
        x = gated(mlp, x, add=residual if adds else None)
        if adds:
            return x
    else:
        x = mlp(x)
        x = x[0] if isinstance(x, tuple) else x  # a mixture of experts may also return its scores
    return _added(self, x, residual, after)


def _added(self: Any, x: Any, residual: Tensor, after: Any) -> Tensor:
    """The layer's last steps that are not part of a launch."""
    call: LayerCall = self._onepass_decode.call
    if after is not None:
        x = after(x)
    if call.multiplier:
        x = x * getattr(self, call.multiplier)
    return cast(Tensor, residual + x)


def _after(self: Any, name: str) -> Any:
    """The module of this name; None if there is none, or if it is a dropout, which does nothing here."""
    module = getattr(self, name) if name else None
    return None if type(module) is nn.Dropout and not module.training and is_own(module, None) else module


def _fusable(module: Any, x: Tensor) -> bool:
    """Whether a layer may do the work of its attention or MLP without calling it."""
    how = module.__dict__.get("_onepass_decode")
    if how is None or not is_own(module, STEPS[type(how)]):
        return False
    return takes(how, how.projections[0], x) and is_ready(module)


def _writes_mla(kwargs: dict[str, Any]) -> bool:
    """Whether the cache is an `MlaCache`, which another forward writes."""
    return bool(getattr(kwargs.get("past_key_values"), "onepass_mla", False))


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


def mlp_step(self: Any, x: Tensor | None = None, /, **named: Tensor) -> Tensor:
    """A gated MLP for few tokens."""
    how: MlpStep = self._onepass_decode
    if x is None:
        (x,) = named.values()
    if x.dim() != 3 or not (takes(how, how.gate_up, x) and no_global_hooks() and is_ready(self)):
        return cast(Tensor, type(self).forward(self, x))
    return cast(Tensor, gated(self, x))


def gated(self: Any, x: Tensor, norm: Any = None, residual: Tensor | None = None, add: Tensor | None = None) -> Any:
    """``down(act(gate(a)) * up(a)) + add`` with ``a = norm(x + residual)``."""
    how: MlpStep = self._onepass_decode
    refuse_gradient(self, x, how.gate_up.weight, how.down.weight)
    y = project(how.gate_up, x, norm, residual=residual, activation=how.activation, rounding=how.rounding)
    if residual is None:
        return project(how.down, y, rounding=how.rounding, add=add)
    return project(how.down, y[0], rounding=how.rounding, add=y[1] if add is residual else add), y[1]


def runs_decode(module: Any) -> bool:
    """Whether the next step of few tokens will skip the modules whose work it does."""
    how = module._onepass_decode
    if type(how) is AnglesStep:
        return True
    if not no_global_hooks():
        return False
    if type(how) is LayerStep:
        call = how.call
        norms = [getattr(module, name) for name in (call.before, call.norm) if name]
        return all(map(is_plain, norms)) and all(
            _skipped(module._modules.get(name)) for name in ("self_attn", call.mlp)
        )
    if type(how) is LinearStep:
        return quiet(module) and how.projection.current()
    return is_ready(module)


def _skipped(module: Any) -> bool:
    """Whether a submodule needs not be called; one that has no step of its own always is."""
    how = None if module is None else module.__dict__.get("_onepass_decode")
    return how is None or (is_own(module, STEPS[type(how)]) and is_ready(module))


STEPS: Final[dict[type, Any]] = {
    LayerStep: layer_step,
    AttentionStep: attention_step,
    LatentStep: attention_step,
    MlpStep: mlp_step,
    LinearStep: linear_step,
    AnglesStep: angles_step,
}
"""The forward of a module, by the type of its ``_onepass_decode``."""
