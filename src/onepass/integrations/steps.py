"""The data of a decode step, one record per kind of module, and what its forwards share.

``projections`` of a record are those that follow the parameters of its module, ``names`` those of their layers.

`decode.py` and `decode_attention.py` have the forwards.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from ..formats import Rounding
from ..nn import gamma_of
from ..ops.linear import linear
from ..specs.linear import Activation
from .forms import Rotation
from .forwards import FUSED_ROWS, LayerCall, NormCall, is_plain, refuse_gradient
from .projections import Projection


class LayerStep(NamedTuple):
    """A decoder layer. ``fused`` is whether `patch` also installed `layer_forward`.

    ``rounding`` is that of activations and additions. ``always`` is whether steps of any number of tokens
    run here.
    """

    call: LayerCall
    fused: bool
    rounding: Rounding
    always: bool
    projections: tuple[Projection, ...] = ()


class AttentionStep(NamedTuple):
    """An attention: its projections, norms of q and k, rotation, and what is passed on; see `forms`.

    ``norms_in_turn`` is whether the norms are in the launch of the rotation: not where the model rounds between them.
    """

    qkv: Projection
    out: Projection
    columns: tuple[int, int, int]
    norm: NormCall | None
    per_head: bool
    gated: bool
    turn: Rotation | None
    norms_in_turn: bool
    rotates: str
    window: str
    softcap: str
    cache_position: bool
    fused: bool
    rounding: Rounding
    always: bool
    home: str
    names: tuple[str, ...]
    projections: tuple[Projection, ...]


class LatentStep(NamedTuple):
    """A latent attention: the down projections of q and kv as one, q's up projection if there is one, and o."""

    down: Projection
    q_up: Projection | None
    out: Projection
    fused: bool
    rounding: Rounding
    always: bool
    home: str
    names: tuple[str, ...]
    projections: tuple[Projection, ...]


class MlpStep(NamedTuple):
    """A gated MLP: the projections of gate and up as one, and that of the product."""

    gate_up: Projection
    down: Projection
    activation: Activation
    rounding: Rounding
    always: bool
    act: str
    names: tuple[str, ...]
    projections: tuple[Projection, ...]


class LinearStep(NamedTuple):
    """A linear layer of its own: number ``place`` of a projection's layers."""

    projection: Projection
    place: int
    always: bool
    projections: tuple[Projection, ...]


Step: TypeAlias = LayerStep | AttentionStep | LatentStep | MlpStep | LinearStep


def quiet(module: Any) -> bool:
    """Whether no hook of the module's own would run."""
    return not module._forward_hooks and not module._forward_pre_hooks


def no_global_hooks() -> bool:
    """Whether torch has no hooks for all modules."""
    return not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks


def is_own(module: Any, step: Any) -> bool:
    """Whether a call of the module would run this function, or its class's forward, and nothing else."""
    forward = module.__dict__.get("forward")
    return quiet(module) and (forward is None or (step is not None and getattr(forward, "func", None) is step))


def _intact(module: Any, names: tuple[str, ...], projections: tuple[Projection, ...]) -> bool:
    """Whether the layers of the projections are as `patch` left them. ``names`` are theirs, in order."""
    children = module._modules
    place = 0
    for projection in projections:
        for layer in projection.linears:
            if children.get(names[place]) is not layer or not is_own(layer, linear_step):
                return False
            place += 1
        if not projection.current():
            return False
    return True


def is_ready(module: Any) -> bool:
    """Whether an attention's or MLP's own calls can be skipped."""
    how = module._onepass_decode
    if module.training or not _intact(module, how.names, how.projections):
        return False
    if type(how) is AttentionStep and how.norm is not None:
        return is_plain(module.q_norm) and is_plain(module.k_norm)
    if type(how) is LatentStep:
        return is_plain(module.kv_a_layernorm) and (how.q_up is None or is_plain(module.q_a_layernorm))
    if type(how) is MlpStep:
        return is_own(getattr(module, how.act), None)
    return True


def takes(how: Any, weight: Projection, x: Tensor) -> bool:
    """Whether this many rows of this dtype are computed here."""
    if not (how.always or weight.quantized or math.prod(x.shape[:-1]) <= FUSED_ROWS):
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    if weight.layer is not None and (weight.quantized or weight.weight.dtype is x.dtype):
        return True
    return weight.current() and (weight.quantized or weight.weight.dtype is x.dtype)


def project(
    projection: Projection,
    x: Tensor,
    norm: Any = None,
    *,
    rounding: Rounding,
    residual: Tensor | None = None,
    add: Tensor | None = None,
    activation: Activation | None = None,
) -> Any:
    """`linear` with a projection's weight, and with a patched norm before it.

    Tensors [batch, tokens, columns] are passed as rows, which costs the host less.
    """
    options: dict[str, Any] = {"bias": projection.bias, "weight_scale": projection.scale, "rounding": rounding}
    if norm is not None:
        call: NormCall = norm._onepass
        options |= {"gamma": gamma_of(norm.weight), "eps": call.eps, "weight_offset": call.weight_offset}
    batch, length = x.shape[:2]
    rows = [None if t is None else t.flatten(0, 1) for t in (residual, add)]
    made: Any = linear(_rows(x), projection.weight, residual=rows[0], add=rows[1], activation=activation, **options)
    if residual is None:
        return made.view(batch, length, made.shape[-1])
    return made[0].view(batch, length, made[0].shape[-1]), made[1].view(residual.shape)


def _rows(x: Tensor) -> Tensor:
    """Tokens as rows with contiguous columns."""
    return (x if x.stride(-1) == 1 else x.contiguous()).flatten(0, 1)


def linear_step(self: Any, input: Tensor) -> Tensor:
    """A linear layer for few rows."""
    how: LinearStep = self._onepass_decode
    if not takes(how, how.projection, input) or not how.projection.current():
        return cast(Tensor, type(self).forward(self, input))
    refuse_gradient(self, input, self.weight)
    weight, scale = how.projection.part(how.place)
    x = input if input.stride(-1) == 1 else input.contiguous()
    return linear(x, weight, weight_scale=scale, bias=self.bias)
