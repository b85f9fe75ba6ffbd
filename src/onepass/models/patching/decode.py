"""``decode=True`` of `onepass.patch`: which layers of a model run as decode steps, and with which weights."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Final, NamedTuple, TypeVar, cast

from torch import nn
from torch.nn import functional as F

from ...errors import ContractError
from ...formats import FLOATS, Rounding
from ...ops.linear.launch import Activation
from ...weights import Scheme
from ..forwards.angles import AnglesRecord, Frequencies
from ..forwards.attend import has_kernels
from ..forwards.attention import AttentionRecord, AttentionStep, Turn
from ..forwards.experts import ExpertsRecord, RouterRecord
from ..forwards.latent import LatentRecord, LatentStep, has_latent_kernels
from ..forwards.layer import LayerRecord, MlpRecord
from ..forwards.linear import MARK, LinearRecord, Parts, Projection, SpotCheck, Watch, mergeable, shared_storages
from ..forwards.norm import FUSED_ROWS, NormRecord
from .forms import (
    EXPERTS,
    OTHER_CODE,
    ROUTERS,
    Attention,
    Form,
    Layer,
    Match,
    Mla,
    Mlp,
    PlainAttention,
    angles_of,
    own_forward,
    rotation_of,
)
from .report import AFTER_MLP, ROTATION, Change, Patched, bound_before, missing, norm_record, unless, why_not

WHAT: Final = "decode"
EXPERTS_WHAT: Final = f"{WHAT} experts"
_SILU: Final = ("SiLUActivation", "SiLU")
_GELU: Final = ("GELUActivation", "GELUTanh", "PytorchGELUTanh", "GELU")


Record = TypeVar("Record")


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
        return self.handle.rounding

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
    if invariant:
        for where, module in modules:
            _experts(decoding, where, module)
    head = _head(handle.model)
    for where, module in modules:
        _linear(decoding, where, module, module is head)
    if any(change.what == WHAT for change in handle.replaced):
        for where, module in modules:
            _angles(decoding, where, module)
    projections = dict.fromkeys(projection for projection, _ in decoding.parts.values())  # in the order of the model
    copied = [projection for projection in projections if not projection.shares and projection.codes is None]
    if copied:
        copied[0].spot_check = SpotCheck(copied)
    for parameter in handle.model.parameters():
        has_kernels(parameter)  # asked now, so that compiled steps need not
    decoded = {change.where for change in handle.replaced if change.what.startswith(WHAT)}
    left = [_still_left(decoding, change, decoded) for change in handle.left]
    handle.left = [change for change in left if change is not None]


def _still_left(decoding: Decoding, change: Change, decoded: set[str]) -> Change | None:
    """What a decode step does not do either. What it does is left for more tokens only."""
    if change.what == WHAT and f"{change.where}.experts" in decoded:
        return None
    if change.where not in decoded or change.what not in (AFTER_MLP, ROTATION):
        return change
    return None if decoding.always else replace(change, what=f"{change.what}, more than {FUSED_ROWS} tokens")


def layer_record(form: Layer, cls: type[nn.Module], fused: bool) -> LayerRecord:
    """What a form says about a class of layers. ``fused`` is whether their prompts are fused."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[2:]
    named = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    defaults = tuple((p.name, p.default) for p in named if p.default is not p.empty)
    return LayerRecord(tuple(p.name for p in named), defaults, *astuple(form))._replace(fused=fused)


def _layer(decoding: Decoding, where: str, module: nn.Module) -> None:
    handle, match = decoding.handle, decoding.matches(type(module), Layer)
    form, record = match.form, _record(decoding, module, LayerRecord)
    if not isinstance(form, Layer):
        handle._leave(where, module, WHAT, why_not(module, match))
        return
    objection = "" if record is not None else why_not(module, match) or missing(module, *astuple(form))
    if objection:
        handle._leave(where, module, WHAT, objection)
        return
    inputs = _attention(decoding, f"{where}.self_attn", cast(nn.Module, module.self_attn))
    gate_up = _mlp(decoding, f"{where}.{form.mlp}", getattr(module, form.mlp))
    if not inputs and not gate_up:
        return
    if record is None:
        record = layer_record(form, type(module), fused=False)
    record = record._replace(decode=True, always=decoding.always)
    launches = []
    if inputs:
        launches += [
            _with_norm(module, form.before, "", inputs),
            _with_residual(module, form, form.after_attention, "o"),
        ]
    if gate_up:
        launches += [_with_norm(module, form.norm, decoding.rounding, gate_up)]
        launches += [_with_residual(module, form, form.after_mlp, "down")]
    handle._bind(where, module, record, WHAT, f"{', '.join(launches)}: one linear each, {decoding.tokens}")


def _record(decoding: Decoding, module: nn.Module, kind: type[Record]) -> Record | None:
    """The record of this kind that this call of `patch` gave the module; None if it gave none."""
    record = module.__dict__.get(MARK)
    return record if isinstance(record, kind) and decoding.handle.has_bound(module) else None


def _with_norm(module: nn.Module, name: str, rounding: str, what: str) -> str:
    """A projection as in the report, with its norm if that is part of the launch."""
    norm = norm_record(getattr(module, name)) if name else None
    return f"norm + {what}" if norm is not None and rounding in ("", norm.rounding) else what


def _with_residual(module: nn.Module, form: Layer, after: str, what: str) -> str:
    """A projection as in the report, with the residual if nothing is between them."""
    adds = not form.multiplier and (not after or type(getattr(module, after)) is nn.Dropout)
    return f"{what} + residual" if adds else what


def _attention(decoding: Decoding, where: str, module: nn.Module) -> str:
    """Bind an attention's step. Returns what it projects first, or "" if it was left."""
    kinds: tuple[type[Form], ...] = (Mla, PlainAttention, Attention)
    every = [decoding.matches(type(module), kind) for kind in kinds]
    match = next((match for match in every if match.form is not None), every[-1])
    latent = isinstance(match.form, Mla)
    record = (_latent_record if latent else _attention_record)(decoding, module, match)
    if isinstance(record, str) or record.step is None:
        decoding.handle._leave(where, module, WHAT, str(record))
        return ""
    step = record.step
    absorbs = isinstance(step, LatentStep) and (not step.invariant or has_latent_kernels(_up(module).weight))
    kept = "attention to latents" if absorbs else "attention without copies"
    *inputs, out = step.parts.names
    why = f"linear {' + '.join(inputs)}, {_launches(record)}, {kept}, linear {out}"
    decoding.handle._bind(where, module, record, f"{WHAT} attention", why)
    return "latents" if latent else "qkv"


def _launches(record: AttentionRecord | LatentRecord) -> str:
    """What runs between the projections and the attention, as in the report."""
    if isinstance(record, LatentRecord) or record.step is None:
        return "qk_norm_rope_cache"
    turn = record.step.turn
    norms = record.norm is not None and (turn is None or not turn.norms)
    return "q/k norm, " * norms + ("rotation, cache" if turn is None else "qk_norm_rope_cache")


def attention_record(form: Attention | PlainAttention, norm: NormRecord | None, namespace: str) -> AttentionRecord:
    """What a form says about an attention whose norms of q and k are computed so."""
    if isinstance(form, PlainAttention):
        attributes = (form.rotates, form.window, form.softcap, form.cache_position)
        return AttentionRecord(norm, True, False, *attributes, namespace)
    window = "sliding_window" if form.window else ""
    return AttentionRecord(norm, form.per_head, form.gated, "", window, "", form.cache_position, namespace)


def _attention_record(decoding: Decoding, module: nn.Module, match: Match) -> AttentionRecord | str:
    form, record = match.form, _record(decoding, module, AttentionRecord)
    if not isinstance(form, Attention | PlainAttention):
        return why_not(module, match)
    packed = form.packed if isinstance(form, PlainAttention) else ""
    names = (packed, "o_proj") if packed else ("q_proj", "k_proj", "v_proj", "o_proj")
    objection = (
        ("" if record is not None else why_not(module, match))
        or unless(record is not None or isinstance(form, PlainAttention), "its norms of q and k were left")
        or missing(module, *names, "head_dim", "scaling", "layer_idx", "config")
        or _not_linear(decoding, [getattr(module, name) for name in names])
    )
    if objection or match.code is None:
        return objection
    *inputs, out = (getattr(module, name) for name in names)
    projections = _project(decoding, inputs, [out])
    if isinstance(projections, str):
        return projections
    qkv, output = projections
    record = record or attention_record(form, None, match.code.module)
    norms = ("q_norm", "k_norm") if record.norm is not None else ()
    step = AttentionStep(
        qkv,
        output,
        columns=_columns(module, qkv.sizes),
        turn=_turn(decoding, record),
        rounding=decoding.rounding,
        invariant=decoding.invariant,
        parts=Parts(names, (qkv, output), norms, (), decoding.always, Watch()),
    )
    return record._replace(step=step)


def _turn(decoding: Decoding, record: AttentionRecord) -> Turn | None:
    """How a step rotates; None if the model's own function does."""
    rotation, norm = rotation_of(sys.modules.get(record.namespace)), record.norm
    if rotation is None:
        return None
    norms = norm is not None and not (rotation.wide and decoding.rounding == "hf")
    if rotation.wide or decoding.rounding == "once":
        return Turn(rotation.style, rotation.wide, norms, "once")
    return Turn(rotation.style, False, norms, "hf" if norm is None or norm.rounding == "hf" else "hf_rope")


def _columns(module: nn.Module, sizes: Sequence[int]) -> tuple[int, int, int]:
    """The columns of q, k and v in their projection."""
    if len(sizes) == 3:
        return sizes[0], sizes[1], sizes[2]
    keys = cast(int, module.num_key_value_heads) * cast(int, module.head_dim)
    return sizes[0] - 2 * keys, keys, keys


def _latent_record(decoding: Decoding, module: nn.Module, match: Match) -> LatentRecord | str:
    record = _record(decoding, module, LatentRecord)
    ranked = getattr(module, "q_a_proj", None) is not None
    queries = ("q_a_proj", "q_b_proj") if ranked else ("q_proj",)
    names = (queries[0], "kv_a_proj_with_mqa", *queries[1:], "o_proj")
    norms = ("kv_a_layernorm", "q_a_layernorm") if ranked else ("kv_a_layernorm",)
    objection = (
        ("" if record is not None else why_not(module, match))
        or missing(module, *names)
        or unless(all(norm_record(module._modules.get(name)) for name in norms), "a norm was left")
        or _not_linear(decoding, [getattr(module, name) for name in names])
    )
    if objection or match.code is None:
        return objection
    linears = [getattr(module, name) for name in names]
    groups = [linears[:2], *([layer] for layer in linears[2:])]
    # Its float weight is used for single heads, or by the model's own expand_kv for the whole cache. That is too many rows
    # to gain by quantizing it here.
    up = _up(module)
    codes = [[up]] if up.weight.dtype not in FLOATS and not _not_linear(decoding, [up]) else []
    projections = _project(decoding, *groups, *codes)
    if isinstance(projections, str):
        return projections
    down, *others = projections[: len(groups)]
    parts = Parts(names, (down, *others), norms, (), decoding.always, Watch())
    q_up = others[0] if ranked else None
    step = LatentStep(down, q_up, others[-1], decoding.rounding, decoding.invariant, parts)
    record = record or LatentRecord(match.code.module, fused=False)
    return record._replace(step=step)


def _up(module: nn.Module) -> nn.Linear:
    """The layer that makes keys and values of latents."""
    return cast(nn.Linear, module.kv_b_proj)


def _mlp(decoding: Decoding, where: str, module: nn.Module) -> str:
    """Bind an MLP's step. Returns its first launch as in the report, or "" if it was left."""
    record = _mlp_record(decoding, module)
    if isinstance(record, str):
        decoding.handle._leave(where, module, WHAT, record)
        return ""
    *inputs, down = record.parts.names
    why = f"linear {' + '.join(inputs)} with {record.activation}, linear {down}"
    decoding.handle._bind(where, module, record, f"{WHAT} MLP", why)
    return f"gate-up + {record.activation}"


def _mlp_record(decoding: Decoding, module: nn.Module) -> MlpRecord | str:
    match = decoding.matches(type(module), Mlp)
    form = match.form
    if not isinstance(form, Mlp):
        return why_not(module, match)
    names = (form.packed, form.down) if form.packed else (form.gate, form.up, form.down)
    activation = _activation(getattr(module, form.act, None))
    objection = (
        why_not(module, match)
        or missing(module, *names, form.act)
        or unless(activation is not None, "its activation is not SiLU or GELU")
        or _not_linear(decoding, [getattr(module, name) for name in names])
    )
    if objection or activation is None:
        return objection
    *inputs, out = (getattr(module, name) for name in names)
    projections = _project(decoding, inputs, [out])
    if isinstance(projections, str):
        return projections
    gate_up, down = projections
    parts = Parts(names, (gate_up, down), (), (form.act,), decoding.always, Watch())
    return MlpRecord(gate_up, down, activation, decoding.rounding, parts)


def _experts(decoding: Decoding, where: str, module: nn.Module) -> None:
    """Bind the experts of a mixture, their router and the MLPs beside them; every other module is left alone."""
    experts, router = module._modules.get("experts"), module._modules.get("gate")
    if experts is None or isinstance(experts, nn.ModuleList):  # a list has layers of its own
        return
    activation = _activation(getattr(experts, "act_fn", None))
    objection = (
        bound_before(experts)
        or unless(own_forward(type(experts)) in EXPERTS, OTHER_CODE)
        or unless(activation is not None, "its activation is not SiLU or GELU")
        or unless(router is not None and own_forward(type(router)) in ROUTERS, "the code of its router is not known")
        or unless(all(weight.is_cpu for weight in experts.parameters()), "experts run row by row on a CPU only")
    )
    if objection or activation is None or router is None:
        decoding.handle._leave(f"{where}.experts", experts, EXPERTS_WHAT, objection)
        return
    why = f"linear with {activation}, linear down, for each expert"
    decoding.handle._bind(f"{where}.experts", experts, ExpertsRecord(activation, decoding.rounding), EXPERTS_WHAT, why)
    decoding.handle._bind(f"{where}.gate", router, RouterRecord(), f"{WHAT} router", "linear, token by token")
    for name, child in module._modules.items():
        if child is not None and decoding.matches(type(child), Mlp).form is not None:
            _mlp(decoding, f"{where}.{name}", child)


def _activation(act: object) -> Activation | None:
    """The activation that a module computes; None if `linear` does not have it."""
    name, module = type(act).__name__, type(act).__module__
    if not isinstance(act, nn.Module) or not module.startswith(("torch.nn.", "transformers.activations")):
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


def _not_linear(decoding: Decoding, linears: list[nn.Module]) -> str:
    """Why these layers cannot be projections of their own; "" if they can."""
    for linear in linears:
        if bound_before(linear):
            return f"a projection: {bound_before(linear)}"
    return mergeable(linears, decoding.shared)


def _project(decoding: Decoding, *groups: Sequence[nn.Module]) -> list[Projection] | str:
    """The projections of these layers, which are remembered for calls of the layers themselves; or why there is none."""
    projections: list[Projection] = []
    try:
        for linears in groups:
            projections.append(Projection(linears, decoding.scheme))
    except ContractError as error:
        for projection in projections:
            projection.release()
        return str(error)
    for projection in projections:
        if not decoding.handle.keep_weights:
            projection.free()
        for place, linear in enumerate(projection.linears):
            decoding.parts[id(linear)] = projection, place
    return projections


def _head(model: nn.Module) -> object:
    """The layer that computes logits."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None


def _linear(decoding: Decoding, where: str, module: nn.Module, is_head: bool) -> None:
    """Bind a layer of its own: the head, and with `batch_invariant` or codes every other one."""
    part = decoding.parts.get(id(module))
    if part is not None:
        if decoding.always or part[0].quantized:
            _bind_linear(decoding, where, module, *part)
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
    why = f"three launches, for up to {FUSED_ROWS} tokens"
    decoding.handle._bind(where, module, AnglesRecord(form, frequencies), what, why)


def _bind_linear(decoding: Decoding, where: str, module: nn.Module, projection: Projection, place: int) -> None:
    always = decoding.invariant or projection.quantized
    tokens = "for any number of tokens" if always else f"for up to {FUSED_ROWS} tokens"
    alone = len(projection.linears) == 1 or projection.codes is not None
    followed = (projection,) if alone else ()  # otherwise the parent's record has it
    record = LinearRecord(projection, place, always, followed)
    decoding.handle._bind(where, module, record, f"{WHAT} layer", f"linear, {tokens}")
