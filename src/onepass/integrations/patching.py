"""``onepass.patch(model)``: run a transformers model's norms on onepass's kernels, and undo it."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..contract.declaration import describe, require_bool
from ..errors import ContractError
from ..formats import FLOATS, Rounding
from ..nn import eps_of
from .families import Attention, Family, Layer, Mla, classes, fingerprint
from .forwards import FORWARDS, FUSED_ROWS, AttentionCall, LayerCall, MlaCall, NormCall, runs_fused

PatchRounding = Literal["model", "once"]
_MARK: Final = "_onepass"

NEXT_LAYER: Final = "the norm that follows this addition belongs to the next layer's forward"
SUM_IS_ROUNDED: Final = 'the model rounds the sum before the norm, but one launch does not (needs rounding="once")'
NORM_BEFORE_ADD: Final = "no norm follows these additions within the layer"
ROPE_ROUNDS: Final = "the model rounds every product of its rotation, but one launch would round once"
TWO_ROUNDINGS: Final = 'the model rounds between projection and norm, but one launch does not (needs rounding="once")'
CACHE_LAYOUT: Final = "transformers' caches separate latent and rotated key, but one launch writes them as one entry"
OTHER_CODE: Final = "its forward differs from the one that is supported (transformers 5.17)"
REPLACED_BEFORE: Final = "its forward was replaced by other code"
PATCHED_BEFORE: Final = "already patched"
NO_ROW: Final = "no supported family has this class"
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
    queries and keys (`qk_rms_norm`, one launch for both). ``print(handle)`` shows what was
    replaced, what was left, and why. docs/models.md has a table of families. Weights, buffers and
    state dict are untouched.

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
    steps: dict[type, Callable[..., None]] = {Layer: _layer, Attention: _attention, Mla: _mla}
    found = [(where, module, classes().get(_class(module))) for where, module in model.named_modules()]
    for where, module, row in found:  # norms first, because fused modules rely on them
        if row is None:
            if _looks_like_a_norm(module):
                handle._leave(where, module, "norm", OTHER_NORM if isinstance(module, _TORCH_NORMS) else NO_ROW)
        elif row[1] is None:
            _norm(handle, where, module, row[0])
    for where, module, row in found:
        if row is not None and row[1] is not None and fuse:
            steps[type(row[1])](handle, where, module, *row)
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
            f"onepass.patch replaced nothing in {name}, which runs as before ({norms}). docs/models.md lists the supported "
            "model families; strict=True makes this an error.",
            NothingPatchedWarning,
            stacklevel=3,
        )


def _looks_like_a_norm(module: nn.Module) -> bool:
    """Decide by the name of its class. A block that only contains norms does not count."""
    named = _LOOKS_LIKE_A_NORM.search(type(module).__name__) is not None
    return named and (bool(module._parameters) or not module._modules)


def _class(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__


def _objection(module: nn.Module, expected: str) -> str:
    """Why a module's forward cannot be replaced; "" if it can."""
    if "forward" in module.__dict__:
        return PATCHED_BEFORE if _MARK in module.__dict__ else REPLACED_BEFORE
    return OTHER_CODE if expected and fingerprint(type(module).forward) != expected else ""


def _unless(condition: bool, why: str) -> str:
    return "" if condition else why


def _norm(handle: Patched, where: str, module: nn.Module, family: Family) -> None:
    weight = getattr(module, "weight", None)
    objection = (
        _objection(module, family.fingerprint)
        or _unless(weight is not None and weight.dim() == 1, "it has no 1-D weight")
        or _unless(type(weight) in (Tensor, Parameter), f"its weight is a {type(weight).__name__}")
        or _unless(weight.dtype in FLOATS, f"its weight is {weight.dtype}")  # type: ignore[union-attr]
    )
    if objection:
        handle._leave(where, module, "norm", objection)
        return
    call = _norm_call(handle, module, family)
    handle._bind(where, module, call, "norm", f"rms_norm, rounding {call.rounding}")


def _norm_call(handle: Patched, module: nn.Module, family: Family) -> NormCall:
    eps = eps_of(module, family.eps)
    rounding: Rounding = "once" if handle.rounding == "once" else family.rounding
    return NormCall(torch.finfo(torch.float32).eps if eps is None else eps, family.weight_offset, rounding)


def _patched_norm(module: Any) -> bool:
    return module is not None and isinstance(module.__dict__.get(_MARK), NormCall)


def _layer(handle: Patched, where: str, module: nn.Module, family: Family, layer: Layer) -> None:
    if not layer.norm:
        handle._leave(where, module, "additions", NORM_BEFORE_ADD)
        return
    handle._leave(where, module, "addition after the MLP", NEXT_LAYER)
    what = "addition after the attention"
    objection = (
        _objection(module, layer.fingerprint)
        or _unless(_patched_norm(getattr(module, layer.norm, None)), f"its {layer.norm} was left")
        or _unless(family.rounding == "hf" or handle.rounding == "once", SUM_IS_ROUNDED)
    )
    if objection:
        handle._leave(where, module, what, objection)
        return
    call = LayerCall(*_parameters(type(module)), layer.norm, layer.after_attention, layer.after_mlp)
    handle._bind(where, module, call, what, f"in the launch of {layer.norm}")


def _parameters(cls: type[nn.Module]) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """The parameters of a layer's forward after the hidden states, and their defaults."""
    every = list(inspect.signature(cls.forward).parameters.values())[2:]
    named = [parameter for parameter in every if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return tuple(p.name for p in named), tuple((p.name, p.default) for p in named if p.default is not p.empty)


def _attention(handle: Patched, where: str, module: nn.Module, family: Family, attention: Attention) -> None:
    what = "norms of q and k"
    q_norm, k_norm = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    objection = (
        _objection(module, attention.fingerprint)
        or _unless(_patched_norm(q_norm) and _patched_norm(k_norm), "one of them was left")
        or _unless(q_norm._onepass == k_norm._onepass, "they have different epsilons")  # type: ignore[union-attr]
    )
    if objection:
        handle._leave(where, module, what, objection)
        return
    norm = _norm_call(handle, q_norm, family)  # type: ignore[arg-type]
    extent = "per head" if attention.per_head else "whole projections"
    call = AttentionCall(*norm, attention.per_head, attention.window)
    handle._bind(where, module, call, what, f"qk_rms_norm, {extent}, rounding {norm.rounding}")
    handle._leave(where, module, "rotation of q and k", ROPE_ROUNDS)


def _mla(handle: Patched, where: str, module: nn.Module, family: Family, mla: Mla) -> None:
    write = "norm of the latent, rotation and cache write"
    handle._leave(where, module, f"{write}, other caches", CACHE_LAYOUT)
    what = "down projections and their norms"
    norms = [getattr(module, name, None) for name in ("q_a_layernorm", "kv_a_layernorm")]
    linears = [getattr(module, name, None) for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    objection = (
        _objection(module, mla.fingerprint)
        or _unless(linears[0] is not None, "queries have no down projection in this model")
        or _unless(handle.rounding == "once", TWO_ROUNDINGS)
        or _unless(all(map(_patched_norm, norms)), "one of these norms was left")
        or _unless(all(map(_is_linear, linears)), "they are not plain torch.nn.Linear modules without bias")
        or _unless(not any("forward" in vars(linear) for linear in linears), REPLACED_BEFORE)
    )
    if objection:
        handle._leave(where, module, what, objection)
        return
    call = MlaCall(*(norm._onepass.eps for norm in norms))  # type: ignore[union-attr]
    handle._bind(where, module, call, what, f"gemv_and_partial_norm for up to {FUSED_ROWS} tokens, one launch each")
    how = "fused_rope_rmsnorm_quantization, if past_key_values is an onepass.integrations.MlaCache"
    handle.replaced.append(Change(where, type(module).__name__, write, how))


def _is_linear(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear and module.bias is None
