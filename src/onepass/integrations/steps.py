"""The data of a decode step, one record per kind of module, and what its forwards share.

``projections`` of a record are those that follow the parameters of its module, ``names`` those of their layers.

`decode.py`, `decode_attention.py` and `decode_latent.py` have the forwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from ..formats import Rounding
from ..nn import gamma_of
from ..ops.linear.launch import Activation
from ..ops.linear.op import linear
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


class Watch:
    """The submodules that a step skips, as they were when the step was found to be ready.

    To compare them costs a tenth of what it costs to decide again. Copies and pickles start without a record.
    """

    __slots__ = ("children", "entries")

    def __init__(self) -> None:
        self.children: dict[str, Any] = {}
        self.entries: list[tuple[str, Any, dict[str, Any], Any]] = []

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()

    def keep(self, module: Any, names: Iterable[str]) -> None:
        """Record the submodules of these names. None of them has hooks."""
        self.children = module._modules
        found = [(name, module._modules[name]) for name in names]
        self.entries = [(name, child, child.__dict__, child.__dict__.get("forward")) for name, child in found]

    def holds(self, module: Any) -> bool:
        """Whether no submodule was replaced since, has another forward, or a hook."""
        children = module._modules
        if children is not self.children:
            return False
        for name, child, own, forward in self.entries:
            if (
                children.get(name) is not child
                or own.get("forward") is not forward
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
            ):
                return False
        return True


class AttentionStep(NamedTuple):
    """An attention: its projections, norms of q and k, rotation, and what is passed on; see `forms`.

    ``norms_in_turn`` is whether the norms are in the launch of the rotation: not where the model rounds between them.
    ``invariant`` is whether a token's bytes must not depend on the batch.
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
    invariant: bool
    home: str
    names: tuple[str, ...]
    projections: tuple[Projection, ...]
    watch: Watch


class LatentStep(NamedTuple):
    """A latent attention: the down projections of q and kv as one, q's up projection if there is one, and o.

    ``invariant`` is whether a token's bytes must not depend on the batch.
    """

    down: Projection
    q_up: Projection | None
    out: Projection
    invariant: bool
    fused: bool
    rounding: Rounding
    always: bool
    home: str
    names: tuple[str, ...]
    projections: tuple[Projection, ...]
    watch: Watch


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
    watch: Watch


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
    if module.training:
        return False
    if torch.compiler.is_compiling():
        return _intact(module, how.names, how.projections) and _others_are_plain(module, how)
    if how.watch.holds(module):
        for projection in how.projections:  # noqa: SIM110 (a generator would cost every step 300 ns)
            if not projection.unchanged() and not projection.current():
                return False
        return True
    if not _intact(module, how.names, how.projections) or not _others_are_plain(module, how):
        return False
    how.watch.keep(module, (*how.names, *_others(how)))
    return True


def _others(how: AttentionStep | LatentStep | MlpStep) -> tuple[str, ...]:
    """The submodules that a step skips, besides its projections."""
    if type(how) is MlpStep:
        return (how.act,)
    if type(how) is LatentStep:
        return ("kv_a_layernorm",) if how.q_up is None else ("kv_a_layernorm", "q_a_layernorm")
    return ("q_norm", "k_norm") if type(how) is AttentionStep and how.norm is not None else ()


def _others_are_plain(module: Any, how: AttentionStep | LatentStep | MlpStep) -> bool:
    others = [getattr(module, name) for name in _others(how)]
    return all(is_own(other, None) for other in others) if type(how) is MlpStep else all(map(is_plain, others))


def takes(how: Any, weight: Projection, x: Tensor) -> bool:
    """Whether this many rows of this dtype are computed here."""
    if not (how.always or weight.quantized or math.prod(x.shape[:-1]) <= FUSED_ROWS):
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    if weight.spot_check is not None and not torch.compiler.is_compiling() and x.dim() == 3 and x.shape[1] > 1:
        weight.spot_check.run(x)
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

    All tensors are rows [tokens, columns], or [batch, tokens, columns]. Those are passed as rows, which costs the
    host less.
    """
    options: dict[str, Any] = {"bias": projection.bias, "weight_scale": projection.scale, "rounding": rounding}
    if norm is not None:
        call: NormCall = norm._onepass
        options |= {"gamma": gamma_of(norm.weight), "eps": call.eps, "weight_offset": call.weight_offset}
    options |= {"activation": activation, "static_weight": True}
    if x.dim() == 2:
        x = x if x.stride(1) == 1 else x.contiguous()
        return linear(x, projection.weight, residual=residual, add=add, **options)
    batch, length = x.shape[:2]
    others = [None if t is None else t.flatten(0, 1) for t in (residual, add)]
    made: Any = linear(as_rows(x), projection.weight, residual=others[0], add=others[1], **options)
    if residual is None:
        return made.view(batch, length, made.shape[-1])
    return made[0].view(batch, length, made[0].shape[-1]), made[1].view(residual.shape)


def as_rows(x: Tensor) -> Tensor:
    """Tokens as rows with contiguous columns."""
    return (x if x.stride(-1) == 1 else x.contiguous()).flatten(0, 1)


def linear_step(self: Any, input: Tensor) -> Tensor:
    """A linear layer for few rows."""
    how: LinearStep = self._onepass_decode
    if not takes(how, how.projection, input) or not how.projection.current():
        if how.projection.codes is None:
            return cast(Tensor, type(self).forward(self, input))
        refuse_gradient(self, input, self.weight)
        return F.linear(input, how.projection.dequantized(how.place), self.bias)
    refuse_gradient(self, input, self.weight)
    weight, scale = how.projection.part(how.place)
    x = input if input.stride(-1) == 1 else input.contiguous()
    return linear(x, weight, weight_scale=scale, bias=self.bias, static_weight=True)
