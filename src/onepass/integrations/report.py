"""What `onepass.patch` did to a model: `Change`, and `Patched`, the handle that reports and undoes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Literal, Self

from torch import nn

from ..errors import ContractError
from .decode import STEPS, runs_decode
from .forms import Match
from .forwards import FORWARDS, runs_fused
from .projections import applied, loaded, saved, saves_codes

PatchRounding = Literal["model", "once"]
MARK: Final = "_onepass"
DECODE: Final = "_onepass_decode"
_METHODS: Final = ("forward", "_apply", "_save_to_state_dict", "_load_from_state_dict")
"""What is bound to an instance."""

AFTER_MLP: Final = "addition after the MLP"
ROTATION: Final = "rotation of q and k"
REPLACED_BEFORE: Final = "its forward was replaced by other code"
REPLACED_METHOD: Final = "one of its methods was replaced by other code"
PATCHED_BEFORE: Final = "already patched"
OTHER_NORM: Final = "it is not an RMSNorm"
NOT_AS_PATCHED: Final = "a module that it would skip has a hook, or was replaced after patch"


@dataclass(frozen=True)
class Change:
    """A part of a model: its path, its class, what was replaced or left, and how or why not."""

    where: str
    cls: str
    what: str
    why: str = ""


class Patched:
    """What `patch` did, with `undo`; also a context manager.

    ``replaced`` and ``left`` list every module and addition that `patch` considered, ``fp8`` the modules whose
    projections have 8-bit weights, with the names of these.
    ``print(handle)`` shows the report: what was replaced, what was left and why, what is fp8, grouped by kind.
    It also counts the fused modules that currently run unfused because of hooks.
    """

    def __init__(self, model: nn.Module, rounding: PatchRounding, keep_weights: bool = True) -> None:
        self.model = model
        self.rounding = rounding
        self.replaced: list[Change] = []
        self.left: list[Change] = []
        self.fp8: list[Change] = []
        self.keep_weights = keep_weights
        self._bound: list[tuple[str, nn.Module, Any]] = []

    def _bind(self, where: str, module: nn.Module, call: Any, what: str, how: str) -> None:
        forward = partial(FORWARDS[type(call)], module)  # can be pickled with the module, unlike a method
        module.__dict__[MARK] = call
        module.__dict__["forward"] = forward
        self._bound.append((where, module, forward))
        self.replaced.append(Change(where, type(module).__name__, what, how))

    def _bind_decode(self, where: str, module: nn.Module, step: Any, what: str, how: str) -> None:
        """Bind a module's forward for few tokens, which may call the one that was bound before."""
        forward = partial(STEPS[type(step)], module)
        module.__dict__[DECODE] = step
        module.__dict__["forward"] = forward
        if step.projections:
            module.__dict__["_apply"] = partial(applied, module)
        if saves_codes(step):
            module.__dict__["_save_to_state_dict"] = partial(saved, module)
            module.__dict__["_load_from_state_dict"] = partial(loaded, module)
        self._bound = [entry for entry in self._bound if entry[1] is not module]
        self._bound.append((where, module, forward))
        self.replaced.append(Change(where, type(module).__name__, what, how))

        names = _fp8_names(step)
        if names:
            self.fp8.append(Change(where, type(module).__name__, "weights", ", ".join(names)))

    def _leave(self, where: str, module: nn.Module, what: str, why: str) -> None:
        self.left.append(Change(where, type(module).__name__, what, why))

    def refresh(self) -> None:
        """Quantize the weights of ``weights="fp8"`` again, and merge again those that were replaced.

        Calls of the model notice changed weights themselves, except those that are compiled, and replays of a CUDA
        graph. New codes are written over the old ones, so both use them from then on.
        """
        for _, module, _ in self._bound:
            for projection in getattr(module.__dict__.get(DECODE), "projections", ()):
                projection.refresh()

    def undo(self) -> None:
        """Restore every module's own forward, and the memory of merged weights. A second call does nothing.

        Weights that were freed (``keep_weights=False``) get the values that their codes stand for.
        """
        foreign = []
        for where, module, forward in self._bound:
            own = module.__dict__
            if own.get("forward") is forward:
                step = own.pop(DECODE, None)
                for projection in step.projections if step is not None else ():
                    projection.release()
                for name in (MARK, *_METHODS):
                    own.pop(name, None)
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
            "fp8": [asdict(change) for change in self.fp8],
        }

    def __repr__(self) -> str:
        undone = "" if self._bound or not self.replaced else ", undone"
        counts = f"{len(self.replaced)} replaced, {len(self.left)} left"
        if self.fp8:
            counts += f", {sum(len(change.why.split(', ')) for change in self.fp8)} projections fp8"
            counts += " without 16-bit copies" * (not self.keep_weights)
        lines = [f"{type(self.model).__name__}: {counts}{undone}"]
        bound = {where: module for where, module, _ in self._bound}
        unfused = [
            Change(c.where, c.cls, c.what, NOT_AS_PATCHED)
            for c in self.replaced
            if c.where in bound and not _fused(c, bound[c.where])
        ]
        listed = (("replaced", self.replaced), ("unfused now", unfused), ("left", self.left), ("fp8", self.fp8))
        for title, changes in listed:
            lines += [f"  {title} {count} x {what}: {why}" for (what, why), count in counted(changes)]
        return "\n".join(lines)

    def left_norms(self) -> list[Change]:
        """The norms that were left and may be RMSNorms: not torch's norms of other kinds."""
        return [change for change in self.left if change.what == "norm" and change.why != OTHER_NORM]


def _fp8_names(step: Any) -> list[str]:
    """The layers of a step whose weights are codes. Those of layers are listed with their attention or MLP."""
    names = iter(getattr(step, "names", ()))
    named = [(next(names, ""), projection) for projection in step.projections for _ in projection.linears]
    return [name for name, projection in named if name and projection.quantized]


def _fused(change: Change, module: nn.Module) -> bool:
    """Whether a change is in effect now."""
    if change.what.startswith("decode"):
        return DECODE not in module.__dict__ or runs_decode(module)
    return MARK not in module.__dict__ or runs_fused(module)


def counted(changes: Iterable[Change]) -> Iterable[tuple[tuple[str, str], int]]:
    """What was changed and how, each with its number."""
    return Counter((f"{change.cls} {change.what}", change.why) for change in changes).items()


def why_not(module: nn.Module, found: Match, flag: str = "") -> str:
    """Why a module's forward cannot be replaced; "" if it can."""
    if bound_before(module):
        return bound_before(module)
    if found.form is None:
        return found.why
    if found.code is not None and any(name in module.__dict__ for name in found.code.methods):
        return REPLACED_METHOD
    return unless(not flag or getattr(module, flag, False) is True, f"its {flag} is not True")


def bound_before(module: nn.Module) -> str:
    """Who replaced a module's forward; "" if nobody did."""
    if "forward" not in module.__dict__:
        return ""
    return PATCHED_BEFORE if {MARK, DECODE} & module.__dict__.keys() else REPLACED_BEFORE


def unless(condition: bool, why: str) -> str:
    """The reason, if the condition does not hold."""
    return "" if condition else why


def missing(module: object, *names: str) -> str:
    """Which of these attributes an object lacks. Registered forms may name anything."""
    absent = [name for name in names if name and not hasattr(module, name)]
    return unless(not absent, f"it has no {' and no '.join(absent)}")
