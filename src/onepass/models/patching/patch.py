"""``onepass.patch(model)``: run a transformers model's norms on onepass's kernels, and undo it."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from typing import Any, Final, Literal, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ...core.contract import describe, require_bool
from ...errors import ContractError
from ...formats import FLOATS, Rounding
from ...ops.rms_norm.launch import GATE_ACTIVATIONS, GateActivation
from ..forwards.attention import Turn
from ..forwards.latent import LatentRecord
from ..forwards.norm import FUSED_ROWS, NormRecord, OtherNormRecord
from .decode import EXPERTS_WHAT, WHAT, attention_record, layer_record, patch_decode
from .forms import TORCH, Attention, Form, Layer, Match, Mla, Norm, OtherNorm, match, rotation_of
from .report import (
    AFTER_MLP,
    OTHER_NORM,
    REPLACED_BEFORE,
    ROTATION,
    Change,
    Patched,
    missing,
    norm_record,
    reasons,
    unless,
    why_not,
)

NEXT_LAYER: Final = "the norm that follows this addition belongs to the next layer's forward"
SUM_IS_ROUNDED: Final = 'the model rounds the sum before the norm, but one launch does not (needs rounding="once")'
POST_NORM_JOINS: Final = "on CPUs in the launch of the norm that follows, with the model's rounding"
NORM_BEFORE_ADD: Final = "no norm follows these additions within the layer"
ROPE_ROUNDS: Final = "the model rounds between the norm and a rotation in float32, but one launch does not"
ROPE_OTHER: Final = "its code is not one of the supported rotations"
TWO_ROUNDINGS: Final = 'the model rounds between projection and norm, but one launch does not (needs rounding="once")'
OWN_CALL: Final = "its class replaces __call__"
CACHE_LAYOUT: Final = "transformers' caches separate latent and rotated key, but one launch writes them as one entry"

_TORCH_NORMS: Final = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    nn.modules.batchnorm._NormBase,  # batch norms and instance norms
)
"""torch's norms that are not RMSNorms, which onepass cannot replace."""
_LOOKS_LIKE_A_NORM: Final = re.compile(r"norm(?!al|ed)", re.IGNORECASE)


class NothingPatchedWarning(UserWarning):
    """`patch` replaced nothing in a model, or with ``decode=True`` no layer; the model runs as before."""


def patch(
    model: nn.Module,
    *,
    rounding: Rounding = "hf",
    fuse: bool = True,
    strict: bool = False,
    decode: bool = False,
    batch_invariant: bool = False,
    weights: Literal["fp8"] | None = None,
    keep_weights: bool = True,
) -> Patched:
    """Replace the norms of a transformers model in place; returns a handle with ``.undo()``.

    Modules are matched by what their code does; docs/models.md lists models, and `onepass.models.register` adds code::

        RMSNorm, gated RMSNorm                              rms_norm
        LayerNorm (Cohere)                                  layer_norm
        h = x + residual; norm(h)                           rms_norm(x, residual=)
        rope(q_norm(q)), rope(k_norm(k))                    qk_norm_rope_cache
        projections, activations, additions                 linear, with decode=True

    Weights, buffers and state dict are untouched. There is no backward: call the patched model under
    ``torch.inference_mode()`` or ``no_grad()``, otherwise it raises.

    Args:
        model: The model. Hooks keep working, including those added later: if a fused launch would skip a module that has a
            forward hook or pre-hook, the modules are called one by one until the hook is removed.
        rounding: "hf" or "once", see below.
        fuse: False replaces norms only.
        strict: Raise if nothing was replaced or a norm that may be an RMSNorm was left, and leave the model unchanged. With
            ``batch_invariant`` also raise if a layer, a projection or experts were left. Otherwise `patch` only issues a
            `NothingPatchedWarning` if it replaced nothing.
        decode: Also replace projections. For up to 16 tokens a decoder layer is then a chain of calls of `linear`, each with
            the norm before it and the activation or the residual after it. Weights with the same input are merged once, and
            the model's parameters become views of the merged ones.
        batch_invariant: With ``decode``, use that chain for any number of tokens, and replace every other
            `torch.nn.Linear`, so that a token's result does not depend on the batch. On a CPU, attention then sums
            only the keys that a query sees, in prompts and in steps. On a GPU, attention that onepass's kernel does not
            cover uses a torch kernel that does not split the context, where there is one.
        weights: With ``decode``, "fp8" quantizes the projections of layers, with a scale per row, and uses them for any number
            of tokens. If the model's weights change, they are quantized again.
        keep_weights: False frees the model's own weights as they are quantized. State dicts and ``undo`` then have the
            dequantized values, in the model's dtype.

    Returns:
        A handle, also a context manager. ``print(handle)`` shows what was replaced, what was left, and why.

    Raises:
        ContractError: With ``strict``, and for arguments that exclude each other.

    Rounding:
        "hf" rounds where the model's own modules do: 16-bit results are the model's, except that float32 sums are added in
        a different order. "once" rounds each kernel's result once, which allows more fusion: additions in families whose norms
        round once, and MLA's down projections with their norms.

    >>> import torch, onepass
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8))
    >>> with onepass.patch(model) as handle, torch.inference_mode():
    ...     print(handle)
    ...     y = model(torch.ones(2, 8))
    Sequential: 1 replaced, 0 left
      replaced 1 x RMSNorm norm: rms_norm, rounding once
    """
    if not isinstance(model, nn.Module):
        raise ContractError(f"patch: `model` must be a torch.nn.Module, got {type(model).__name__}")
    if rounding not in ("hf", "once"):
        raise ContractError(f"patch: `rounding` must be 'hf' or 'once', got {describe(rounding)}")
    require_bool("patch", "fuse", fuse)
    require_bool("patch", "strict", strict)
    require_bool("patch", "decode", decode)
    require_bool("patch", "batch_invariant", batch_invariant)
    require_bool("patch", "keep_weights", keep_weights)
    if weights not in (None, "fp8"):
        raise ContractError(f"patch: `weights` must be None or 'fp8', got {describe(weights)}")
    for name, used in (("batch_invariant", batch_invariant), ("weights", weights is not None)):
        if used and not decode:
            raise ContractError(f"patch: `{name}` must not be given without decode=True")
    if not keep_weights and weights is None:
        raise ContractError("patch: `keep_weights` must be True without weights='fp8', got False")
    if decode and not fuse:
        raise ContractError("patch: `fuse` must be True with decode=True, got False")
    if strict and batch_invariant and not keep_weights:  # raise before weights are freed, which could not be restored
        patch(model, rounding=rounding, strict=True, decode=True, batch_invariant=True, weights=weights).undo()
    handle = Patched(model, rounding, keep_weights)
    matches: Callable[..., Match] = cache(match)  # for this call only, because classes may be changed later
    modules = list(model.named_modules())
    for where, module in modules:  # norms first, because fused modules rely on them
        if _may_be_a_norm(module):
            _norm(handle, where, module, *(matches(type(module), kind) for kind in (Norm, OtherNorm)))
    for where, module in modules if fuse else ():
        for kind, (bind, names) in _STEPS.items():
            if _may_be(kind, names, module):
                bind(handle, where, module, matches(type(module), kind))
    if decode and not (strict and handle.left_norms()):  # these raise below, and freed weights could not be restored
        patch_decode(handle, modules, matches, "fp8_row" if weights == "fp8" else None, batch_invariant)
    nothing = " No weight is fp8." if weights == "fp8" and not handle.fp8 else ""
    _warn_or_raise(handle, strict, nothing)
    if decode:
        _warn_or_raise_decode(handle, strict, nothing)
    if batch_invariant and strict:
        _raise_if_variant(handle)
    return handle


def _warn_or_raise(handle: Patched, strict: bool, nothing: str) -> None:
    """Warn if nothing was patched. If ``strict``, raise instead, also if norms were left. ``nothing`` is said too."""
    left, name = reasons(handle.left_norms()), type(handle.model).__name__
    norms = left or "it has no norm that could be replaced"
    if strict and (left or not handle.replaced):
        what = "norms were left in" if left else "nothing was replaced in"
        _undo_and_raise(handle, f"{what} {name}, which is unchanged ({norms})")
    if not handle.replaced:
        warnings.warn(
            f"onepass.patch replaced nothing in {name}, which runs as before ({norms}). docs/models.md explains what can be "
            f"replaced; strict=True makes this an error.{nothing}",
            NothingPatchedWarning,
            stacklevel=3,
        )


def _warn_or_raise_decode(handle: Patched, strict: bool, nothing: str) -> None:
    """Warn if no layer runs as a decode step. If ``strict``, raise instead."""
    if not handle.replaced or any(change.what == WHAT for change in handle.replaced):
        return
    left = reasons(change for change in handle.left if change.what == WHAT) or "none has a self_attn"
    why = f"no layer of {type(handle.model).__name__} runs as a decode step ({left})"
    if strict:
        _undo_and_raise(handle, f"{why}, and the model is unchanged")
    warnings.warn(
        f"onepass.patch(decode=True): {why}.{nothing} Everything else is patched.", NothingPatchedWarning, stacklevel=3
    )


def _raise_if_variant(handle: Patched) -> None:
    """Raise if the model's own products run somewhere, whose results depend on the batch."""
    left = reasons(change for change in handle.left if change.what in (WHAT, EXPERTS_WHAT))
    if left:
        _undo_and_raise(handle, f"{type(handle.model).__name__} is not batch-invariant, and is unchanged ({left})")


def _undo_and_raise(handle: Patched, why: str) -> NoReturn:
    handle.undo()
    raise ContractError(f"patch: `strict=True`, but {why}")


def _may_be_a_norm(module: nn.Module) -> bool:
    """Whether it has a weight and no submodules, or is named like a norm. torch's modules have to be named so."""
    leaf = "weight" in module._parameters and not module._modules
    ours = not type(module).__module__.startswith("torch.")
    return (leaf and ours) or _looks_like_a_norm(module)


def _looks_like_a_norm(module: nn.Module) -> bool:
    """Decide by the name of its class. A block that only contains norms does not count."""
    named = _LOOKS_LIKE_A_NORM.search(type(module).__name__) is not None
    return named and (bool(module._parameters) or not module._modules)


def _may_be(kind: type[Form], names: set[str], module: nn.Module) -> bool:
    """Whether a module has the submodules that one of this kind has, among them a norm that was patched."""
    children = module._modules
    norms = children.values() if kind is Layer else map(children.get, names)
    return names <= children.keys() and any(map(norm_record, norms))


def _norm(handle: Patched, where: str, module: nn.Module, match: Match, other: Match) -> None:
    form = match.form
    if isinstance(other.form, OtherNorm) or (form is TORCH and getattr(module, "weight", None) is None):
        _other_norm(handle, where, module, match if other.form is None else other)
        return
    if not isinstance(form, Norm):
        if _looks_like_a_norm(module):
            torchs = isinstance(module, _TORCH_NORMS)
            handle._leave(where, module, "norm", OTHER_NORM if torchs else why_not(module, match))
        return
    eps = _eps_of(module, form.eps)
    objection = (
        why_not(module, match, form.flag)
        or unless(type(module).__call__ is nn.Module.__call__, OWN_CALL)
        or _weight_objection(module)
        or _eps_objection(module, form.eps)
    )
    if objection:
        handle._leave(where, module, "norm", objection)
        return
    rounding = "once" if handle.rounding == "once" else form.rounding
    handle._bind(
        where, module, NormRecord(float(eps), form.weight_offset, rounding), "norm", f"rms_norm, rounding {rounding}"
    )


def _eps_of(module: nn.Module, name: str) -> Any:
    """A norm's epsilon; torch's default where torch's norm has none."""
    eps = getattr(module, name, None)
    torchs = type(module).forward is nn.RMSNorm.forward
    return torch.finfo(torch.float32).eps if eps is None and torchs else eps


def _eps_objection(module: nn.Module, name: str) -> str:
    eps = _eps_of(module, name)
    return missing(module, name) or unless(type(eps) in (float, int), f"its epsilon, {name}, is {describe(eps)}")


def _weight_objection(module: nn.Module, heads: bool = False) -> str:
    """Why an op cannot use the weight, which may be one of each head."""
    weight = cast(Any, getattr(module, "weight", None))
    dims, what = ((1, 2), "1-D or 2-D") if heads else ((1,), "1-D")
    return (
        unless(weight is not None and weight.dim() in dims, f"it has no {what} weight")
        or unless(type(weight) in (Tensor, Parameter), f"its weight is a {type(weight).__name__}")
        or unless(weight.dtype in FLOATS, f"its weight is {weight.dtype}")
    )


def _other_norm(handle: Patched, where: str, module: nn.Module, match: Match) -> None:
    form = match.form if isinstance(match.form, OtherNorm) else OtherNorm(weighted=False)
    attributes = (form.gates_norm, form.activation, form.groups, form.group_size)
    grouped = bool(form.groups or form.group_size)
    activation = cast(GateActivation, getattr(module, form.activation, None) if form.activation else "silu")
    objection = (
        why_not(module, match)
        or unless(type(module).__call__ is nn.Module.__call__, OWN_CALL)
        or (_weight_objection(module, heads=not grouped) if form.weighted else "")
        # torch's norm without a weight may be over several dimensions
        or unless(form.weighted or len(getattr(module, "normalized_shape", (1,))) == 1, "it norms several dimensions")
        or _eps_objection(module, form.eps)
        or missing(module, *attributes)
        or unless(activation in GATE_ACTIVATIONS, f"its gate is neither {' nor '.join(GATE_ACTIVATIONS)}")
    )
    groups = 1 if objection else _groups(module, form)
    objection = objection or unless(groups > 0, "its groups do not divide its columns")
    if objection:
        handle._leave(where, module, "norm", objection)
        return
    gate = form.gate
    if form.gates_norm:
        gate = "after" if getattr(module, form.gates_norm) else "before"
    rounding = "once" if handle.rounding == "once" else form.rounding
    centered = form.statistic == "layer"
    eps = float(_eps_of(module, form.eps))
    record = OtherNormRecord(eps, rounding, centered, form.weighted, gate, groups, form.squeezes, activation)
    record = record._replace(weight_offset=form.weight_offset, same_dtype=form.same_dtype)
    op = "layer_norm" if centered else "rms_norm"
    gated = f"gate {gate}" if activation == "silu" else f"{activation} gate {gate}"
    parts = [op, *[gated] * bool(gate), *[f"{groups} groups"] * (groups > 1)]
    heads = form.weighted and cast(Tensor, module.weight).dim() == 2
    parts += [*["no weight"] * (not form.weighted), *["weight per head"] * heads, f"rounding {rounding}"]
    handle._bind(where, module, record, "norm", ", ".join(parts))


def _groups(module: nn.Module, form: OtherNorm) -> int:
    """The number of groups of columns that are normed separately; 0 if they do not divide them."""
    if not form.groups and not form.group_size:
        return 1
    columns, size = cast(Tensor, module.weight).numel(), getattr(module, form.groups or form.group_size)
    if size is None and form.group_size:
        return 1
    if type(size) is not int or size < 1 or columns % size:
        return 0
    return size if form.groups else columns // size


def _layer(handle: Patched, where: str, module: nn.Module, match: Match) -> None:
    layer = match.form
    if not isinstance(layer, Layer):
        handle._leave(where, module, "additions", why_not(module, match))
        return
    if not layer.norm:
        handle._leave(where, module, "additions", NORM_BEFORE_ADD)
        return
    handle._leave(where, module, AFTER_MLP, NEXT_LAYER)
    what = "addition after the attention"
    norm = norm_record(getattr(module, layer.norm, None))
    objection = (
        why_not(module, match)
        or missing(module, *astuple(layer))
        or unless(norm is not None, f"its {layer.norm} was left")
    )
    if objection or norm is None:
        handle._leave(where, module, what, objection)
        return
    fused = handle.rounding == "once" or norm.rounding == "hf"
    joins = bool(layer.after_attention) and norm_record(getattr(module, layer.after_attention)) == norm
    record = layer_record(layer, type(module), fused)._replace(post=joins)
    if fused:
        with_post = f", on CPUs with {layer.after_attention}" if joins else ""
        handle._bind(where, module, record, what, f"in the launch of {layer.norm}{with_post}")
        return
    handle._leave(where, module, what, SUM_IS_ROUNDED)
    if joins:
        handle._bind(where, module, record, f"{layer.after_attention} and {what}", POST_NORM_JOINS)


def _attention(handle: Patched, where: str, module: nn.Module, match: Match) -> None:
    what = "norms of q and k"
    form = match.form
    norm, k_norm = (norm_record(getattr(module, name, None)) for name in ("q_norm", "k_norm"))
    objection = (
        why_not(module, match, form.flag if isinstance(form, Attention) else "")
        or unless(norm is not None and k_norm is not None, "one of them was left")
        or unless(norm == k_norm, "they have different epsilons")
        or _not_importable(match)
        or missing(sys.modules[_namespace(match)], *sorted(Attention.called))
    )
    if objection or norm is None or not isinstance(form, Attention):
        handle._leave(where, module, what, objection)
        return
    rotation = rotation_of(sys.modules[_namespace(match)])
    record = attention_record(form, norm, _namespace(match))
    extent = "per head" if form.per_head else "whole projections"
    if rotation is None or rotation.wide:
        handle._bind(where, module, record, what, f"qk_rms_norm, {extent}, rounding {norm.rounding}")
        handle._leave(where, module, ROTATION, ROPE_OTHER if rotation is None else ROPE_ROUNDS)
        return
    record = record._replace(turn=Turn(rotation.style, False, True, "hf" if norm.rounding == "hf" else "hf_rope"))
    why = f"qk_norm_rope_cache with the rotation, {extent}, rounding {norm.rounding}"
    handle._bind(where, module, record, what, why)


def _mla(handle: Patched, where: str, module: nn.Module, match: Match) -> None:
    write = "norm of the latent, rotation and cache write"
    what = "down projections and their norms"
    if match.form is None:
        handle._leave(where, module, what, why_not(module, match))
        return
    handle._leave(where, module, f"{write}, other caches", CACHE_LAYOUT)
    norms = [norm_record(getattr(module, name, None)) for name in ("q_a_layernorm", "kv_a_layernorm")]
    linears = [getattr(module, name, None) for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    plain = all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
    objection = (
        why_not(module, match)
        or unless(linears[0] is not None, "queries have no down projection in this model")
        or unless(handle.rounding == "once", TWO_ROUNDINGS)
        or unless(all(norms), "one of these norms was left")
        or unless(not any(norm.weight_offset for norm in norms if norm), "their weights have an offset")
        or unless(plain, "they are not plain torch.nn.Linear modules without bias")
        or unless(not any("forward" in vars(linear) for linear in linears), REPLACED_BEFORE)
        or _not_importable(match)
    )
    if objection:
        handle._leave(where, module, what, objection)
        return
    record = LatentRecord(_namespace(match), fused=True)
    handle._bind(where, module, record, what, f"gemv_and_partial_norm for up to {FUSED_ROWS} tokens, one launch each")
    why = "fused_rope_rmsnorm_quantization, if past_key_values is an onepass.models.MlaCache"
    handle.replaced.append(Change(where, type(module).__name__, write, why))


def _namespace(match: Match) -> str:
    """The Python module in which the forward looks up its functions."""
    return match.code.module if match.code is not None else ""


def _not_importable(match: Match) -> str:
    return unless(bool(_namespace(match)), "its Python module is not in sys.modules")


_STEPS: Final[dict[type[Form], tuple[Callable[..., None], set[str]]]] = {
    Layer: (_layer, {"self_attn"}),
    Attention: (_attention, {"q_norm", "k_norm"}),
    Mla: (_mla, {"kv_a_layernorm"}),
}
"""What binds modules of each kind, and the submodules that they have. Only modules that have them are compared with the forms."""
