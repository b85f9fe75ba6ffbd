"""``decode=True`` of `onepass.patch`: which layers of a model run as decode steps, and with which weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, cast

from torch import nn
from torch.nn import functional as F

from ..errors import ContractError
from ..formats import FLOATS, Rounding
from ..ops.linear.launch import Activation
from ..weights import Scheme
from .angles import AnglesStep, Frequencies, angles_of
from .decode_latent import has_latent_kernels
from .forms import Attention, Form, Layer, Match, Mla, Mlp, PlainAttention, rotation_of
from .forwards import FUSED_ROWS, AttentionCall, LayerCall, MlaCall, NormCall, parameters_of
from .projections import Projection, SpotCheck, mergeable, shared_storages
from .report import AFTER_MLP, MARK, ROTATION, Change, Patched, bound_before, missing, unless, why_not
from .steps import AttentionStep, LatentStep, LayerStep, LinearStep, MlpStep, Watch
from .unsplit import has_kernels

WHAT: Final = "decode"
_SILU: Final = ("SiLUActivation", "SiLU")
_GELU: Final = ("GELUActivation", "GELUTanh", "PytorchGELUTanh", "GELU")


class Decoding(NamedTuple):
    """What `patch` was asked for, and what it found on its way.

    ``parts`` are the layers of all projections, with the projection and their place in it.
    """

    handle: Patched
    matches: Callable[[type, type[Form]], Match]
    scheme: Scheme | None
    invariant: bool
    shared: set[int]
    parts: dict[int, tuple[Projection, int]]

    @property
    def rounding(self) -> Rounding:
        """How activations and additions round."""
        return "once" if self.handle.rounding == "once" else "hf"

    @property
    def always(self) -> bool:
        """Whether the steps run for any number of tokens, so that a token's bytes do not depend on it."""
        return self.invariant or self.scheme is not None

    @property
    def tokens(self) -> str:
        """For how many tokens the steps run, as in the report."""
        return "for any number of tokens" if self.always else f"for up to {FUSED_ROWS} tokens"


def patch_decode(
    handle: Patched,
    modules: Iterable[tuple[str, nn.Module]],
    matches: Callable[[type, type[Form]], Match],
    scheme: Scheme | None,
    invariant: bool,
) -> None:
    """Bind the decode steps of a model whose norms and additions are patched."""
    modules = list(modules)
    decoding = Decoding(handle, matches, scheme, invariant, shared_storages(handle.model), {})
    for where, module in modules:
        if "self_attn" in module._modules:
            _layer(decoding, where, module)
    head = _head(handle.model)
    for where, module in modules:
        _linear(decoding, where, module, module is head)
    if any(change.what == WHAT for change in handle.replaced):
        for where, module in modules:
            _angles(decoding, where, module)
    copied = [projection for projection in _projections(decoding) if not projection.shares and projection.codes is None]
    if copied:
        copied[0].spot_check = SpotCheck(copied)
    for parameter in handle.model.parameters():
        has_kernels(parameter)  # asked now, so that compiled steps need not
    decoded = {change.where for change in handle.replaced if change.what.startswith(WHAT)}
    handle.left = [made for change in handle.left if (made := _still_left(decoding, change, decoded)) is not None]


def _projections(decoding: Decoding) -> list[Projection]:
    """The projections of layers, in the order of the model."""
    return list({id(projection): projection for projection, _ in decoding.parts.values()}.values())


def _still_left(decoding: Decoding, change: Change, decoded: set[str]) -> Change | None:
    """What a decode step does not do either. What it does is left for more tokens only."""
    if change.where not in decoded or change.what not in (AFTER_MLP, ROTATION):
        return change
    return None if decoding.always else replace(change, what=f"{change.what}, more than {FUSED_ROWS} tokens")


def _layer(decoding: Decoding, where: str, module: nn.Module) -> None:
    handle, found = decoding.handle, decoding.matches(type(module), Layer)
    form = found.form
    call = module.__dict__.get(MARK)
    fused = isinstance(call, LayerCall) and _bound_by(handle, module)
    if not isinstance(form, Layer):
        handle._leave(where, module, WHAT, why_not(module, found))
        return
    names = (form.norm, form.before, form.mlp, form.after_attention, form.after_mlp, form.multiplier)
    objection = "" if fused else why_not(module, found) or missing(module, *names)
    if objection:
        handle._leave(where, module, WHAT, objection)
        return
    inputs = _attention(decoding, f"{where}.self_attn", module.self_attn)
    gate_up = _mlp(decoding, f"{where}.{form.mlp}", getattr(module, form.mlp))
    if not inputs and not gate_up:
        return
    if not fused:
        call = LayerCall(*parameters_of(type(module)), *names)
    step = LayerStep(cast(LayerCall, call), fused, decoding.rounding, decoding.always)
    launches = []
    if inputs:
        launches += [
            _with_norm(module, form.before, "", inputs),
            _with_residual(module, form, form.after_attention, "o"),
        ]
    if gate_up:
        launches += [_with_norm(module, form.norm, step.rounding, gate_up)]
        launches += [_with_residual(module, form, form.after_mlp, "down")]
    handle._bind_decode(where, module, step, WHAT, f"{', '.join(launches)}: one linear each, {decoding.tokens}")


def _with_norm(module: nn.Module, name: str, rounding: str, what: str) -> str:
    """A projection as in the report, with its norm if that is part of the launch."""
    call = getattr(module, name).__dict__.get(MARK) if name else None
    fused = isinstance(call, NormCall) and rounding in ("", call.rounding)
    return f"norm + {what}" if fused else what


def _with_residual(module: nn.Module, form: Layer, after: str, what: str) -> str:
    """A projection as in the report, with the residual if nothing is between them."""
    adds = not form.multiplier and (not after or type(getattr(module, after)) is nn.Dropout)
    return f"{what} + residual" if adds else what


def _bound_by(handle: Patched, module: nn.Module) -> bool:
    return any(bound is module for _, bound, _ in handle._bound)


def _attention(decoding: Decoding, where: str, module: Any) -> str:
    """Bind an attention's step. Returns what it projects first, or "" if it was left."""
    kinds: tuple[type[Form], ...] = (Mla, PlainAttention, Attention)
    every = [decoding.matches(type(module), kind) for kind in kinds]
    found = next((match for match in every if match.form is not None), every[-1])
    latent = isinstance(found.form, Mla)
    made = (_latent_step if latent else _attention_step)(decoding, module, found)
    if isinstance(made, str):
        decoding.handle._leave(where, module, WHAT, made)
        return ""
    absorbs = isinstance(made, LatentStep) and (not made.invariant or has_latent_kernels(module.kv_b_proj.weight))
    kept = "attention to latents" if absorbs else "attention without copies"
    how = f"linear {' + '.join(made.names[:-1])}, {_launches(made)}, {kept}, linear {made.names[-1]}"
    decoding.handle._bind_decode(where, module, made, f"{WHAT} attention", how)
    return "latents" if latent else "qkv"


def _launches(step: AttentionStep | LatentStep) -> str:
    """What runs between the projections and the attention, as in the report."""
    if isinstance(step, LatentStep):
        return "qk_norm_rope_cache"
    if step.turn is None:
        return f"{'q/k norm, ' if step.norm is not None else ''}rotation, cache"
    alone = step.norm is not None and not step.norms_in_turn
    return f"{'q/k norm, ' if alone else ''}qk_norm_rope_cache"


def _attention_step(decoding: Decoding, module: Any, found: Match) -> AttentionStep | str:
    form = found.form
    call = module.__dict__.get(MARK)
    fused = isinstance(call, AttentionCall) and _bound_by(decoding.handle, module)
    if not isinstance(form, Attention | PlainAttention):
        return why_not(module, found)
    packed = form.packed if isinstance(form, PlainAttention) else ""
    names = (packed, "o_proj") if packed else ("q_proj", "k_proj", "v_proj", "o_proj")
    objection = (
        ("" if fused else why_not(module, found))
        or unless(fused or isinstance(form, PlainAttention), "its norms of q and k were left")
        or missing(module, *names, "head_dim", "scaling", "layer_idx", "config")
        or _not_linear(decoding, [getattr(module, name) for name in names])
    )
    if objection or found.code is None:
        return objection
    *inputs, out = (getattr(module, name) for name in names)
    try:
        qkv, output = _project(decoding, inputs, [out])
    except ContractError as error:
        return str(error)
    turn = rotation_of(sys.modules.get(found.code.module))
    return AttentionStep(
        qkv,
        output,
        _columns(module, qkv.sizes),
        NormCall(*call[:3]) if fused else None,
        per_head=getattr(form, "per_head", True),
        gated=getattr(form, "gated", False),
        turn=turn,
        norms_in_turn=fused and turn is not None and not (turn.wide and decoding.rounding == "hf"),
        rotates=getattr(form, "rotates", ""),
        window=_window(form),
        softcap=getattr(form, "softcap", ""),
        cache_position=getattr(form, "cache_position", False),
        fused=fused,
        rounding=decoding.rounding,
        always=decoding.always,
        invariant=decoding.invariant,
        home=found.code.module,
        names=names,
        projections=(qkv, output),
        watch=Watch(),
    )


def _window(form: Attention | PlainAttention) -> str:
    """The attribute that is passed as ``sliding_window``."""
    if isinstance(form, PlainAttention):
        return form.window
    return "sliding_window" if form.window else ""


def _columns(module: Any, sizes: Sequence[int]) -> tuple[int, int, int]:
    """The columns of q, k and v in their projection."""
    if len(sizes) == 3:
        return sizes[0], sizes[1], sizes[2]
    keys = module.num_key_value_heads * module.head_dim
    return sizes[0] - 2 * keys, keys, keys


def _latent_step(decoding: Decoding, module: Any, found: Match) -> LatentStep | str:
    fused = isinstance(module.__dict__.get(MARK), MlaCall) and _bound_by(decoding.handle, module)
    ranked = getattr(module, "q_a_proj", None) is not None
    names = (
        ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj")
        if ranked
        else ("q_proj", "kv_a_proj_with_mqa", "o_proj")
    )
    norms = [module._modules.get(name) for name in ("q_a_layernorm", "kv_a_layernorm")[not ranked :]]
    objection = (
        ("" if fused else why_not(module, found))
        or missing(module, *names)
        or unless(
            all(norm is not None and isinstance(norm.__dict__.get(MARK), NormCall) for norm in norms), "a norm was left"
        )
        or _not_linear(decoding, [getattr(module, name) for name in names])
    )
    if objection or found.code is None:
        return objection
    linears = [getattr(module, name) for name in names]
    try:
        down, *others = _project(decoding, linears[:2], *([layer] for layer in linears[2:]))
    except ContractError as error:
        return str(error)
    q_up = others[0] if ranked else None
    # Its float weight is used for single heads, or by the model's own expand_kv for the whole cache. That is too many rows
    # to gain by quantizing it here.
    codes = module.kv_b_proj.weight.dtype not in FLOATS
    if codes and not _not_linear(decoding, [module.kv_b_proj]):
        _project(decoding, [module.kv_b_proj])
    options = (fused, decoding.rounding, decoding.always, found.code.module, names, (down, *others), Watch())
    return LatentStep(down, q_up, others[-1], decoding.invariant, *options)


def _mlp(decoding: Decoding, where: str, module: Any) -> str:
    """Bind an MLP's step. Returns its first launch as in the report, or "" if it was left."""
    made = _mlp_step(decoding, module)
    if isinstance(made, str):
        decoding.handle._leave(where, module, WHAT, made)
        return ""
    how = f"linear {' + '.join(made.names[:-1])} with {made.activation}, linear {made.names[-1]}"
    decoding.handle._bind_decode(where, module, made, f"{WHAT} MLP", how)
    return f"gate-up + {made.activation}"


def _mlp_step(decoding: Decoding, module: Any) -> MlpStep | str:
    found = decoding.matches(type(module), Mlp)
    form = found.form
    if not isinstance(form, Mlp):
        return why_not(module, found)
    names = (form.packed, form.down) if form.packed else (form.gate, form.up, form.down)
    objection = (
        why_not(module, found)
        or missing(module, *names, form.act)
        or unless(_activation(getattr(module, form.act, None)) is not None, "its activation is not SiLU or GELU")
        or _not_linear(decoding, [getattr(module, name) for name in names])
    )
    if objection:
        return objection
    *inputs, out = (getattr(module, name) for name in names)
    try:
        gate_up, down = _project(decoding, inputs, [out])
    except ContractError as error:
        return str(error)
    activation = cast(Activation, _activation(getattr(module, form.act)))
    return MlpStep(
        gate_up, down, activation, decoding.rounding, decoding.always, form.act, names, (gate_up, down), Watch()
    )


def _activation(act: object) -> Activation | None:
    """The activation that a module computes; None if `linear` does not have it."""
    name, home = type(act).__name__, type(act).__module__
    if not isinstance(act, nn.Module) or not home.startswith(("torch.nn.", "transformers.activations")):
        return None
    if name in _SILU:
        return "silu_mul"
    if name not in _GELU:
        return None
    function = getattr(act, "act", None)
    approximate = getattr(act, "approximate", None)
    if isinstance(function, partial) and function.func is F.gelu:
        approximate = function.keywords.get("approximate")
    elif function is F.gelu:
        approximate = "none"
    return {"tanh": "gelu_tanh_mul", "none": "gelu_mul"}.get(str(approximate))  # type: ignore[return-value]


def _not_linear(decoding: Decoding, linears: list[Any]) -> str:
    """Why these layers cannot be projections of their own; "" if they can."""
    for linear in linears:
        if bound_before(linear):
            return f"a projection: {bound_before(linear)}"
    return mergeable(linears, decoding.shared)


def _project(decoding: Decoding, *groups: Sequence[nn.Module]) -> list[Projection]:
    """The projections of these layers, which are remembered for calls of the layers themselves; all or none."""
    made: list[Projection] = []
    try:
        for linears in groups:
            made.append(Projection(linears, decoding.scheme))
    except ContractError:
        for projection in made:
            projection.release()
        raise
    for projection in made:
        if not decoding.handle.keep_weights:
            projection.free()
        for place, linear in enumerate(projection.linears):
            decoding.parts[id(linear)] = projection, place
    return made


def _head(model: Any) -> nn.Module | None:
    """The layer that computes logits."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None


def _linear(decoding: Decoding, where: str, module: nn.Module, is_head: bool) -> None:
    """Bind a layer of its own: the head, and with `batch_invariant` or codes every other one."""
    known = decoding.parts.get(id(module))
    if known is not None:
        if decoding.always or known[0].quantized:
            _bind_linear(decoding, where, module, *known)
        return
    if type(module) is not nn.Linear or not (is_head or decoding.invariant):
        return
    objection = bound_before(module) or mergeable([module], decoding.shared)
    if objection:
        decoding.handle._leave(where, module, WHAT, objection)
        return
    _bind_linear(decoding, where, module, Projection([module]), 0)


def _angles(decoding: Decoding, where: str, module: nn.Module) -> None:
    """Bind a rotary embedding; every other module is left alone."""
    form = angles_of(module)
    if form is None:
        return
    what = f"{WHAT} cosines and sines"
    objection = bound_before(module)
    if objection or isinstance(form, str):
        decoding.handle._leave(where, module, what, objection or str(form))
        return
    frequencies = Frequencies()
    for name, buffer in module._buffers.items():
        if buffer is not None and name.endswith("inv_freq") and "original" not in name:
            frequencies.of(name.removesuffix("inv_freq"), buffer)  # a first step may be on any stream
    how = f"three launches, for up to {FUSED_ROWS} tokens"
    decoding.handle._bind_decode(where, module, AnglesStep(form, frequencies), what, how)


def _bind_linear(decoding: Decoding, where: str, module: nn.Module, projection: Projection, place: int) -> None:
    always = decoding.invariant or projection.quantized
    tokens = "for any number of tokens" if always else f"for up to {FUSED_ROWS} tokens"
    alone = len(projection.linears) == 1 or projection.codes is not None
    followed = (projection,) if alone else ()  # otherwise the parent's record has it
    step = LinearStep(projection, place, always, followed)
    decoding.handle._bind_decode(where, module, step, f"{WHAT} layer", f"linear, {tokens}")
