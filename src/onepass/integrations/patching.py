"""``onepass.patch(model)``: put onepass's kernels where a transformers model norms, and take them out again."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
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
SUM_IS_ROUNDED: Final = (
    'the model rounds the sum, then norms in one rounding; one launch norms the unrounded sum (rounding="once")'
)
NORM_BEFORE_ADD: Final = "no norm follows these additions within the layer"
ROPE_ROUNDS: Final = (
    "the model rounds every product of its rotation; rotated in the launch of the norms it would round once"
)
TWO_ROUNDINGS: Final = (
    'the model rounds between projection and norm; one launch rounds once (rounding="once")'
)  # fmt: skip
CACHE_LAYOUT: Final = (
    "transformers' caches keep the latent and the rotated key apart; one launch writes them as one entry"
)
OTHER_CODE: Final = "its forward is not the one this was written for (transformers 5.17)"
REPLACED_BEFORE: Final = "its forward has been replaced by something else"
PATCHED_BEFORE: Final = "patched already"
NO_ROW: Final = "no family has a row for this class"
OTHER_NORM: Final = "it is not an RMSNorm"
NOT_AS_PATCHED: Final = "a hook, or a forward or module put there later, waits for the calls that this would save"

_TORCH_NORMS: Final = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    nn.modules.batchnorm._NormBase,  # batch norms and instance norms
)
"""torch's norms that are no RMSNorm: nothing here could replace them."""
_LOOKS_LIKE_A_NORM: Final = re.compile(r"norm(?!al|ed)", re.IGNORECASE)


class NothingPatchedWarning(UserWarning):
    """`patch` found nothing to replace in a model: it runs as before."""


@dataclass(frozen=True)
class Change:
    """Something in a model: where, of which class, what was done with it (or would be), and how or why not."""

    where: str
    cls: str
    what: str
    why: str = ""


class Patched:
    """What `patch` did; `undo` it, or use it as a context manager.

    ``replaced`` and ``left`` list every module and addition that was looked at. ``repr(handle)``, and so ``print(handle)``,
    is the report: what was replaced, what was left and why, by kind. It also counts the fused modules that run unfused at the
    moment because of hooks.
    """

    def __init__(self, model: nn.Module, rounding: PatchRounding) -> None:
        self.model = model
        self.rounding = rounding
        self.replaced: list[Change] = []
        self.left: list[Change] = []
        self._bound: list[tuple[str, nn.Module, Any]] = []

    def _bind(self, where: str, module: nn.Module, call: Any, what: str, how: str) -> None:
        forward = partial(FORWARDS[type(call)], module)  # unlike a method, it can be pickled with the module
        module.__dict__[_MARK] = call
        module.__dict__["forward"] = forward
        self._bound.append((where, module, forward))
        self.replaced.append(Change(where, type(module).__name__, what, how))

    def _leave(self, where: str, module: nn.Module, what: str, why: str) -> None:
        self.left.append(Change(where, type(module).__name__, what, why))

    def undo(self) -> None:
        """Give every module the forward it had. A second call does nothing."""
        foreign = []
        for where, module, forward in self._bound:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"], module.__dict__[_MARK]
            else:
                foreign.append(where)
        self._bound.clear()
        if foreign:
            raise ContractError(
                f"undo: the forward of {', '.join(foreign)} was replaced after patch; all others are as they were"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "model": type(self.model).__name__,
            "rounding": self.rounding,
            "replaced": [asdict(change) for change in self.replaced],
            "left": [asdict(change) for change in self.left],
        }

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        undone = "" if self._bound or not self.replaced else ", undone"
        lines = [f"{type(self.model).__name__}: {len(self.replaced)} replaced, {len(self.left)} left{undone}"]
        waiting = {where for where, module, _ in self._bound if not runs_fused(module)}
        unfused = [Change(c.where, c.cls, c.what, NOT_AS_PATCHED) for c in self.replaced if c.where in waiting]
        for title, changes in (("replaced", self.replaced), ("unfused now", unfused), ("left", self.left)):
            lines += [f"  {title} {count} x {what}: {why}" for (what, why), count in _counted(changes)]
        return "\n".join(lines)

    def left_norms(self) -> list[Change]:
        """The norms that were left and may be RMSNorms: all but torch's own norms of other kinds."""
        return [change for change in self.left if change.what == "norm" and change.why != OTHER_NORM]


def _counted(changes: Iterable[Change]) -> Iterator[tuple[tuple[str, str], int]]:
    counts: dict[tuple[str, str], int] = {}
    for change in changes:
        key = (f"{change.cls} {change.what}", change.why)
        counts[key] = counts.get(key, 0) + 1
    yield from counts.items()


def patch(model: nn.Module, *, rounding: PatchRounding = "model", fuse: bool = True, strict: bool = False) -> Patched:
    """Replace the norm-family work of a transformers model in place; returns a handle with ``.undo()``.

    Replaced are RMSNorms (`rms_norm`), the addition before a norm together with it, and norms of queries and keys
    (`qk_rms_norm`, one launch for both). ``print(handle)`` says what was replaced and what was left, and why: docs/models.md
    has it as a table of families. Weights, buffers and state dict are untouched.

    Hooks see what they see in the unpatched model, those added later too: where a fused launch would skip a module that has
    a forward hook or pre-hook, the modules are called one by one. Without the hook the next call is fused again.

    A model in which nothing was replaced gives a `NothingPatchedWarning`. ``strict=True`` raises a `ContractError` instead, also
    when any norm was left that may be an RMSNorm, and leaves the model as it was.

    ``rounding="model"`` rounds where the model's own modules do: 16-bit results are its, but for sums that float32 adds in
    another order. "once" rounds each kernel's result once, which allows more to be fused: additions in families that norm
    in one rounding, and MLA's projections with their norms. ``fuse=False`` replaces norms alone.

    There is no backward: call the patched model under ``torch.inference_mode()`` or ``no_grad()``, otherwise it raises.

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
    for where, module, row in found:  # norms first: what is fused relies on them
        if row is None:
            if _looks_like_a_norm(module):
                handle._leave(where, module, "norm", OTHER_NORM if isinstance(module, _TORCH_NORMS) else NO_ROW)
        elif row[1] is None:
            _norm(handle, where, module, row[0])
    for where, module, row in found:
        if row is not None and row[1] is not None and fuse:
            steps[type(row[1])](handle, where, module, *row)
    _judge(handle, strict)
    return handle


def _judge(handle: Patched, strict: bool) -> None:
    """Warn, or raise if ``strict``, about a model that was not patched as its owner may think."""
    reasons = [f"{count} x {what}: {why}" for (what, why), count in _counted(handle.left_norms())]
    norms = "; ".join(reasons) if reasons else "it has no norm that could be replaced"
    name = type(handle.model).__name__
    if strict and (reasons or not handle.replaced):
        handle.undo()
        what = "norms were left in" if reasons else "nothing was replaced in"
        raise ContractError(f"patch: `strict=True`, and {what} {name}, which is as it was before ({norms})")
    if not handle.replaced:
        warnings.warn(
            f"onepass.patch replaced nothing in {name}, which runs as before ({norms}). docs/models.md lists the model "
            "families that it knows; strict=True makes this an error.",
            NothingPatchedWarning,
            stacklevel=3,
        )


def _looks_like_a_norm(module: nn.Module) -> bool:
    """By its name; and it is not a block that only contains norms."""
    named = _LOOKS_LIKE_A_NORM.search(type(module).__name__) is not None
    return named and (bool(module._parameters) or not module._modules)


def _class(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__


def _objection(module: nn.Module, expected: str) -> str:
    """Why a module's forward cannot be replaced; "" if it can."""
    if "forward" in module.__dict__:
        return PATCHED_BEFORE if _MARK in module.__dict__ else REPLACED_BEFORE
    return OTHER_CODE if expected and fingerprint(type(module).forward) != expected else ""


def _norm(handle: Patched, where: str, module: nn.Module, family: Family) -> None:
    weight = getattr(module, "weight", None)
    objection = _objection(module, family.fingerprint)
    if objection:
        pass
    elif weight is None or weight.dim() != 1:
        objection = "it has no weight of one dimension"
    elif type(weight) not in (Tensor, Parameter):
        objection = f"its weight is a {type(weight).__name__}"
    elif weight.dtype not in FLOATS:
        objection = f"its weight is {weight.dtype}"
    if objection:
        handle._leave(where, module, "norm", objection)
        return
    call = _norm_call(handle, module, family)
    handle._bind(where, module, call, "norm", f"rms_norm, rounding {call.rounding}")


def _norm_call(handle: Patched, module: nn.Module, family: Family) -> NormCall:
    eps = eps_of(module, family.eps)
    rounding: Rounding = "once" if handle.rounding == "once" else family.rounding
    return NormCall(torch.finfo(torch.float32).eps if eps is None else eps, family.weight_offset, rounding)


def _ours(module: nn.Module | None) -> bool:
    return module is not None and isinstance(module.__dict__.get(_MARK), NormCall)


def _layer(handle: Patched, where: str, module: nn.Module, family: Family, layer: Layer) -> None:
    if not layer.norm:
        handle._leave(where, module, "additions", NORM_BEFORE_ADD)
        return
    handle._leave(where, module, "addition after the MLP", NEXT_LAYER)
    what = "addition after the attention"
    objection = _objection(module, layer.fingerprint)
    norm = getattr(module, layer.norm, None)
    if not objection and not _ours(norm):
        objection = f"its {layer.norm} was left"
    if not objection and family.rounding == "once" and handle.rounding == "model":
        objection = SUM_IS_ROUNDED
    if objection:
        handle._leave(where, module, what, objection)
        return
    call = LayerCall(*_parameters(type(module)), layer.norm, layer.after_attention, layer.after_mlp)
    handle._bind(where, module, call, what, f"in the launch of {layer.norm}")


def _parameters(cls: type[nn.Module]) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """The parameters of a layer's forward after ``self`` and the hidden states; and those that have defaults, with them."""
    every = list(inspect.signature(cls.forward).parameters.values())[2:]
    named = [parameter for parameter in every if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return tuple(p.name for p in named), tuple((p.name, p.default) for p in named if p.default is not p.empty)


def _attention(handle: Patched, where: str, module: nn.Module, family: Family, attention: Attention) -> None:
    what = "norms of q and k"
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    objection = _objection(module, attention.fingerprint)
    if not objection and not all(map(_ours, norms)):
        objection = "one of them was left"
    if not objection and norms[0]._onepass != norms[1]._onepass:  # type: ignore[union-attr]
        objection = "they have different epsilons"
    if objection:
        handle._leave(where, module, what, objection)
        return
    norm = _norm_call(handle, norms[0], family)  # type: ignore[arg-type]
    extent = "per head" if attention.per_head else "whole projections"
    call = AttentionCall(*norm, attention.per_head, attention.window)
    handle._bind(where, module, call, what, f"qk_rms_norm, {extent}, rounding {norm.rounding}")
    handle._leave(where, module, "rotation of q and k", ROPE_ROUNDS)


def _mla(handle: Patched, where: str, module: nn.Module, family: Family, mla: Mla) -> None:
    write = "norm of the latent, rotation and cache write"
    handle._leave(where, module, f"{write}, other caches", CACHE_LAYOUT)
    what = "projections down and their norms"
    norms = [getattr(module, name, None) for name in ("q_a_layernorm", "kv_a_layernorm")]
    linears = [getattr(module, name, None) for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    objection = _objection(module, mla.fingerprint)
    if not objection and linears[0] is None:
        objection = "queries have no projection down in this model"
    if not objection and handle.rounding == "model":
        objection = TWO_ROUNDINGS
    if not objection and not all(map(_ours, norms)):
        objection = "a norm of theirs was left"
    if not objection and not all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
        objection = "they are no plain torch.nn.Linear without bias"
    if not objection and any("forward" in linear.__dict__ for linear in linears if linear is not None):
        objection = REPLACED_BEFORE
    if objection:
        handle._leave(where, module, what, objection)
        return
    call = MlaCall(*(norm._onepass.eps for norm in norms))  # type: ignore[union-attr]
    handle._bind(where, module, call, what, f"gemv_and_partial_norm for up to {FUSED_ROWS} tokens, a launch each")
    how = "fused_rope_rmsnorm_quantization, where past_key_values is an onepass.integrations.MlaCache"
    handle.replaced.append(Change(where, type(module).__name__, write, how))
