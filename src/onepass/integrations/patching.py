"""``onepass.patch(model)``: run a transformers model's norms on onepass's kernels, and undo it."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Final, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..contract.declaration import describe, require_bool
from ..errors import ContractError
from ..formats import FLOATS
from .forms import TORCH, Attention, Form, Layer, Match, Mla, Norm, match
from .forwards import FORWARDS, FUSED_ROWS, AttentionCall, LayerCall, MlaCall, NormCall, runs_fused

PatchRounding = Literal["model", "once"]
_MARK: Final = "_onepass"

NEXT_LAYER: Final = "the norm that follows this addition belongs to the next layer's forward"
SUM_IS_ROUNDED: Final = 'the model rounds the sum before the norm, but one launch does not (needs rounding="once")'
NORM_BEFORE_ADD: Final = "no norm follows these additions within the layer"
ROPE_ROUNDS: Final = "the model rounds every product of its rotation, but one launch would round once"
TWO_ROUNDINGS: Final = 'the model rounds between projection and norm, but one launch does not (needs rounding="once")'
CACHE_LAYOUT: Final = "transformers' caches separate latent and rotated key, but one launch writes them as one entry"
REPLACED_BEFORE: Final = "its forward was replaced by other code"
REPLACED_METHOD: Final = "one of its methods was replaced by other code"
PATCHED_BEFORE: Final = "already patched"
OTHER_NORM: Final = "it is not an RMSNorm"
NOT_AS_PATCHED: Final = "a module that it would skip has a hook, or was replaced after patch"

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
    """`patch` found nothing to replace in a model, which runs as before."""


@dataclass(frozen=True)
class Change:
    """A part of a model: its path, its class, what was replaced or left, and how or why not."""

    where: str
    cls: str
    what: str
    why: str = ""


class Patched:
    """What `patch` did, with `undo`; also a context manager.

    ``replaced`` and ``left`` list every module and addition that `patch` considered.
    ``print(handle)`` shows the report: what was replaced, what was left and why, grouped by kind.
    It also counts the fused modules that currently run unfused because of hooks.
    """

    def __init__(self, model: nn.Module, rounding: PatchRounding) -> None:
        self.model = model
        self.rounding = rounding
        self.replaced: list[Change] = []
        self.left: list[Change] = []
        self._bound: list[tuple[str, nn.Module, Any]] = []

    def _bind(self, where: str, module: nn.Module, call: Any, what: str, how: str) -> None:
        forward = partial(FORWARDS[type(call)], module)  # can be pickled with the module, unlike a method
        module.__dict__[_MARK] = call
        module.__dict__["forward"] = forward
        self._bound.append((where, module, forward))
        self.replaced.append(Change(where, type(module).__name__, what, how))

    def _leave(self, where: str, module: nn.Module, what: str, why: str) -> None:
        self.left.append(Change(where, type(module).__name__, what, why))

    def undo(self) -> None:
        """Restore every module's own forward. A second call does nothing."""
        foreign = []
        for where, module, forward in self._bound:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"], module.__dict__[_MARK]
            else:
                foreign.append(where)
        self._bound.clear()
        if foreign:
            raise ContractError(
                f"undo: the forward of {', '.join(foreign)} was replaced after patch; all others were restored"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "model": type(self.model).__name__,
            "rounding": self.rounding,
            "replaced": [asdict(change) for change in self.replaced],
            "left": [asdict(change) for change in self.left],
        }

    def __repr__(self) -> str:
        undone = "" if self._bound or not self.replaced else ", undone"
        lines = [f"{type(self.model).__name__}: {len(self.replaced)} replaced, {len(self.left)} left{undone}"]
        unfused_at = {where for where, module, _ in self._bound if not runs_fused(module)}
        unfused = [Change(c.where, c.cls, c.what, NOT_AS_PATCHED) for c in self.replaced if c.where in unfused_at]
        for title, changes in (("replaced", self.replaced), ("unfused now", unfused), ("left", self.left)):
            lines += [f"  {title} {count} x {what}: {why}" for (what, why), count in _counted(changes)]
        return "\n".join(lines)

    def left_norms(self) -> list[Change]:
        """The norms that were left and may be RMSNorms: not torch's norms of other kinds."""
        return [change for change in self.left if change.what == "norm" and change.why != OTHER_NORM]


def _counted(changes: Iterable[Change]) -> Iterable[tuple[tuple[str, str], int]]:
    return Counter((f"{change.cls} {change.what}", change.why) for change in changes).items()


def patch(model: nn.Module, *, rounding: PatchRounding = "model", fuse: bool = True, strict: bool = False) -> Patched:
    """Replace the norms of a transformers model in place; returns a handle with ``.undo()``.

    It replaces RMSNorms (`rms_norm`), the addition before a norm together with it, and the norms of
    queries and keys (`qk_rms_norm`, one launch for both). Modules are matched by what their code
    does; docs/models.md lists models, and `onepass.integrations.register` adds code. ``print(handle)``
    shows what was replaced, what was left, and why. Weights, buffers and state dict are untouched.

    Hooks see what they see in the unpatched model, including those added later: if a fused launch
    would skip a module that has a forward hook or pre-hook, the modules are called one by one. Once
    the hook is removed, the next call is fused again.

    If nothing can be replaced, `patch` issues a `NothingPatchedWarning`. With ``strict=True`` it
    raises a `ContractError` instead, also if it left a norm that may be an RMSNorm, and leaves the
    model unchanged.

    ``rounding="model"`` rounds where the model's own modules do: 16-bit results are the model's,
    except that float32 sums are added in another order. "once" rounds each kernel's result once,
    which allows more fusion: additions in families whose norms round once, and MLA's down
    projections with their norms. ``fuse=False`` replaces norms only.

    There is no backward: call the patched model under ``torch.inference_mode()`` or ``no_grad()``,
    otherwise it raises.

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
    if rounding not in ("model", "once"):
        raise ContractError(f"patch: `rounding` must be 'model' or 'once', got {describe(rounding)}")
    require_bool("patch", "fuse", fuse)
    require_bool("patch", "strict", strict)
    handle = Patched(model, rounding)
    matches: Callable[..., Match] = cache(match)  # for this call only, because classes may be changed later
    modules = list(model.named_modules())
    for where, module in modules:  # norms first, because fused modules rely on them
        if _may_be_a_norm(module):
            _norm(handle, where, module, matches(type(module), Norm))
    for where, module in modules if fuse else ():
        for kind, step in _STEPS.items():
            if _may_be(kind, module):
                step(handle, where, module, matches(type(module), kind))
    _warn_or_raise(handle, strict)
    return handle


def _warn_or_raise(handle: Patched, strict: bool) -> None:
    """Warn if nothing was patched. If ``strict``, raise instead, also if norms were left."""
    reasons = [f"{count} x {what}: {why}" for (what, why), count in _counted(handle.left_norms())]
    norms = "; ".join(reasons) if reasons else "it has no norm that could be replaced"
    name = type(handle.model).__name__
    if strict and (reasons or not handle.replaced):
        handle.undo()
        what = "norms were left in" if reasons else "nothing was replaced in"
        raise ContractError(f"patch: `strict=True`, but {what} {name}, which is unchanged ({norms})")
    if not handle.replaced:
        warnings.warn(
            f"onepass.patch replaced nothing in {name}, which runs as before ({norms}). docs/models.md explains what can be "
            "replaced; strict=True makes this an error.",
            NothingPatchedWarning,
            stacklevel=3,
        )


def _may_be_a_norm(module: nn.Module) -> bool:
    """Whether it has a weight and no submodules, or is named like a norm. torch's modules have to be named so."""
    leaf = "weight" in module._parameters and not module._modules
    ours = not type(module).__module__.startswith("torch.")
    return (leaf and ours) or _looks_like_a_norm(module)


def _looks_like_a_norm(module: nn.Module) -> bool:
    """Decide by the name of its class. A block that only contains norms does not count."""
    named = _LOOKS_LIKE_A_NORM.search(type(module).__name__) is not None
    return named and (bool(module._parameters) or not module._modules)


def _may_be(kind: type[Form], module: nn.Module) -> bool:
    """Whether a module has submodules that one of this kind has, among them a norm that was patched."""
    children = module._modules
    if not _MARKS[kind] <= children.keys():
        return False
    norms = children.values() if kind is Layer else map(children.get, _MARKS[kind])
    return any(map(_patched_norm, norms))


def _objection(module: nn.Module, found: Match, flag: str = "") -> str:
    """Why a module's forward cannot be replaced; "" if it can."""
    if "forward" in module.__dict__:
        return PATCHED_BEFORE if _MARK in module.__dict__ else REPLACED_BEFORE
    if found.form is None:
        return found.why
    if found.code is not None and any(name in module.__dict__ for name in found.code.methods):
        return REPLACED_METHOD
    return _unless(not flag or getattr(module, flag, False) is True, f"its {flag} is not True")


def _unless(condition: bool, why: str) -> str:
    return "" if condition else why


def _missing(module: object, *names: str) -> str:
    """Which of these attributes an object lacks. Registered forms may name anything."""
    absent = [name for name in names if name and not hasattr(module, name)]
    return _unless(not absent, f"it has no {' and no '.join(absent)}")


def _norm(handle: Patched, where: str, module: nn.Module, found: Match) -> None:
    form = found.form
    if not isinstance(form, Norm):
        if _looks_like_a_norm(module):
            other = isinstance(module, _TORCH_NORMS)
            handle._leave(where, module, "norm", OTHER_NORM if other else _objection(module, found))
        return
    weight, eps = getattr(module, "weight", None), cast(Any, getattr(module, form.eps, None))
    if eps is None and form is TORCH:
        eps = torch.finfo(torch.float32).eps
    objection = (
        _objection(module, found, form.flag)
        or _unless(type(module).__call__ is nn.Module.__call__, "its class replaces __call__")
        or _unless(weight is not None and weight.dim() == 1, "it has no 1-D weight")
        or _unless(type(weight) in (Tensor, Parameter), f"its weight is a {type(weight).__name__}")
        or _unless(weight.dtype in FLOATS, f"its weight is {weight.dtype}")  # type: ignore[union-attr]
        or _missing(module, form.eps)
        or _unless(type(eps) in (float, int), f"its epsilon, {form.eps}, is {describe(eps)}")
    )
    if objection:
        handle._leave(where, module, "norm", objection)
        return
    rounding = "once" if handle.rounding == "once" else form.rounding
    handle._bind(
        where, module, NormCall(float(eps), form.weight_offset, rounding), "norm", f"rms_norm, rounding {rounding}"
    )


def _patched_norm(module: Any) -> bool:
    return module is not None and isinstance(module.__dict__.get(_MARK), NormCall)


def _layer(handle: Patched, where: str, module: nn.Module, found: Match) -> None:
    layer = found.form
    if not isinstance(layer, Layer):
        handle._leave(where, module, "additions", _objection(module, found))
        return
    if not layer.norm:
        handle._leave(where, module, "additions", NORM_BEFORE_ADD)
        return
    handle._leave(where, module, "addition after the MLP", NEXT_LAYER)
    what = "addition after the attention"
    norm: Any = getattr(module, layer.norm, None)
    names = (layer.norm, layer.before, layer.mlp, layer.after_attention, layer.after_mlp, layer.multiplier)
    objection = (
        _objection(module, found)
        or _missing(module, *names)
        or _unless(_patched_norm(norm), f"its {layer.norm} was left")
        or _unless(norm._onepass.rounding == "hf" or handle.rounding == "once", SUM_IS_ROUNDED)
    )
    if objection:
        handle._leave(where, module, what, objection)
        return
    call = LayerCall(*_parameters(type(module)), *names)
    handle._bind(where, module, call, what, f"in the launch of {layer.norm}")


def _parameters(cls: type[nn.Module]) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """The parameters of a layer's forward after the hidden states, and their defaults."""
    every = list(inspect.signature(cls.forward).parameters.values())[2:]
    named = [parameter for parameter in every if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return tuple(p.name for p in named), tuple((p.name, p.default) for p in named if p.default is not p.empty)


def _attention(handle: Patched, where: str, module: nn.Module, found: Match) -> None:
    what = "norms of q and k"
    form = found.form
    q_norm, k_norm = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    objection = (
        _objection(module, found, form.flag if isinstance(form, Attention) else "")
        or _unless(_patched_norm(q_norm) and _patched_norm(k_norm), "one of them was left")
        or _unless(q_norm._onepass == k_norm._onepass, "they have different epsilons")  # type: ignore[union-attr]
        or _not_importable(found)
        or _missing(sys.modules[_home(found)], *sorted(Attention.called))
    )
    if objection or not isinstance(form, Attention):
        handle._leave(where, module, what, objection)
        return
    norm: NormCall = q_norm._onepass  # type: ignore[union-attr]
    extent = "per head" if form.per_head else "whole projections"
    options = (form.per_head, form.window, form.cache_position, form.gated)
    call = AttentionCall(*norm, *options, _home(found))
    handle._bind(where, module, call, what, f"qk_rms_norm, {extent}, rounding {norm.rounding}")
    handle._leave(where, module, "rotation of q and k", ROPE_ROUNDS)


def _mla(handle: Patched, where: str, module: nn.Module, found: Match) -> None:
    write = "norm of the latent, rotation and cache write"
    what = "down projections and their norms"
    if found.form is None:
        handle._leave(where, module, what, _objection(module, found))
        return
    handle._leave(where, module, f"{write}, other caches", CACHE_LAYOUT)
    norms: list[Any] = [getattr(module, name, None) for name in ("q_a_layernorm", "kv_a_layernorm")]
    linears = [getattr(module, name, None) for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    objection = (
        _objection(module, found)
        or _unless(linears[0] is not None, "queries have no down projection in this model")
        or _unless(handle.rounding == "once", TWO_ROUNDINGS)
        or _unless(all(map(_patched_norm, norms)), "one of these norms was left")
        or _unless(not any(norm._onepass.weight_offset for norm in norms), "their weights have an offset")
        or _unless(all(map(_is_linear, linears)), "they are not plain torch.nn.Linear modules without bias")
        or _unless(not any("forward" in vars(linear) for linear in linears), REPLACED_BEFORE)
        or _not_importable(found)
    )
    if objection:
        handle._leave(where, module, what, objection)
        return
    call = MlaCall(norms[0]._onepass.eps, norms[1]._onepass.eps, _home(found))
    handle._bind(where, module, call, what, f"gemv_and_partial_norm for up to {FUSED_ROWS} tokens, one launch each")
    how = "fused_rope_rmsnorm_quantization, if past_key_values is an onepass.integrations.MlaCache"
    handle.replaced.append(Change(where, type(module).__name__, write, how))


def _home(found: Match) -> str:
    """The Python module in which the forward looks up its functions."""
    return found.code.module if found.code is not None else ""


def _not_importable(found: Match) -> str:
    return _unless(bool(_home(found)), "its Python module is not in sys.modules")


def _is_linear(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear and module.bias is None


_STEPS: Final[dict[type[Form], Callable[..., None]]] = {Layer: _layer, Attention: _attention, Mla: _mla}
_MARKS: Final[dict[type[Form], set[str]]] = {
    Layer: {"self_attn"},
    Attention: {"q_norm", "k_norm"},
    Mla: {"kv_a_layernorm"},
}
"""The submodules that each kind has. Only modules that have them are compared with the forms."""
