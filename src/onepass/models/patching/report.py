"""What `onepass.patch` did to a model: `Change`, and `Patched`, the handle that reports and undoes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Self, cast

from torch import nn

from ...errors import ContractError
from ...formats import Rounding
from ..forwards.layer import FORWARDS, runs_decode, runs_fused
from ..forwards.linear import MARK, LinearModule, LinearRecord, applied, loaded, parts_of, projections_of, saved
from ..forwards.norm import NormRecord
from .forms import Match

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
    """A part of a model that `patch` replaced or left.

    Args:
        where: Path of the module.
        cls: Name of its class.
        what: What was replaced or left, such as "norm".
        why: What replaced it, or why it was left.
    """

    where: str
    cls: str
    what: str
    why: str = ""


class Patched:
    """What `patch` did, with `undo`; also a context manager.

    ``print(handle)`` groups the report by kind. It also counts the fused modules that currently run unfused because of
    hooks.

    Attributes:
        model: The patched model.
        rounding: "hf" or "once".
        replaced: Every module and addition that `patch` replaced.
        left: Every module and addition that it considered and left.
        fp8: The modules whose projections have 8-bit weights, and the names of these projections.
        keep_weights: Whether the model keeps its own weights next to the codes.

    >>> import torch, onepass
    >>> handle = onepass.patch(torch.nn.Sequential(torch.nn.RMSNorm(8)))
    >>> handle.replaced
    [Change(where='0', cls='RMSNorm', what='norm', why='rms_norm, rounding once')]
    >>> handle.undo()
    >>> print(handle)
    Sequential: 1 replaced, 0 left, undone
      replaced 1 x RMSNorm norm: rms_norm, rounding once
    """

    def __init__(self, model: nn.Module, rounding: Rounding, keep_weights: bool = True) -> None:
        self.model = model
        self.rounding = rounding
        self.replaced: list[Change] = []
        self.left: list[Change] = []
        self.fp8: list[Change] = []
        self.keep_weights = keep_weights
        self._bound: dict[int, tuple[str, nn.Module, object]] = {}

    def _bind(self, where: str, module: nn.Module, record: tuple[object, ...], what: str, why: str) -> None:
        """Give a module a record and the forward for it. A record replaces the one that this handle gave before."""
        own = module.__dict__
        own[MARK] = record
        if not self.has_bound(module):
            forward = partial(FORWARDS[type(record)], module)  # can be pickled with the module, unlike a method
            own["forward"] = forward
            self._bound[id(module)] = where, module, forward
        if projections_of(module):
            own["_apply"] = partial(applied, module)
        if isinstance(record, LinearRecord) and record.projection.codes is not None:
            own["_save_to_state_dict"] = partial(saved, cast(LinearModule, module))
            own["_load_from_state_dict"] = partial(loaded, cast(LinearModule, module))
        self.replaced.append(Change(where, type(module).__name__, what, why))
        names = _fp8_names(module)
        if names:
            self.fp8.append(Change(where, type(module).__name__, "weights", ", ".join(names)))

    def has_bound(self, module: nn.Module) -> bool:
        """Whether this handle replaced the module's forward."""
        return id(module) in self._bound

    def _leave(self, where: str, module: nn.Module, what: str, why: str) -> None:
        self.left.append(Change(where, type(module).__name__, what, why))

    def refresh(self) -> None:
        """Quantize the weights of ``weights="fp8"`` again, and merge again those that were replaced.

        Calls of the model notice changed weights themselves, except compiled calls and replays of a CUDA graph. The new codes
        overwrite the old ones, so compiled calls and replays use them too.
        """
        for _, module, _ in self._bound.values():
            for projection in projections_of(module):
                projection.refresh()

    def undo(self) -> None:
        """Restore every module's own forward, and the memory of merged weights. A second call does nothing.

        Weights that were freed (``keep_weights=False``) get the dequantized values.

        Raises:
            ContractError: If other code replaced a module's forward after `patch`. All others are restored.
        """
        foreign = []
        for where, module, forward in self._bound.values():
            own = module.__dict__
            if own.get("forward") is forward:
                for projection in projections_of(module):
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
        """The report as plain data.

        Returns:
            "model", "rounding", and lists of changes: "replaced", "left" and "fp8".
        """
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
        bound = {where: module for where, module, _ in self._bound.values()}
        unfused = [
            Change(c.where, c.cls, c.what, NOT_AS_PATCHED)
            for c in self.replaced
            if c.where in bound and not _in_effect(c, bound[c.where])
        ]
        listed = (("replaced", self.replaced), ("unfused now", unfused), ("left", self.left), ("fp8", self.fp8))
        for title, changes in listed:
            lines += [f"  {title} {count} x {what}: {why}" for (what, why), count in counted(changes)]
        return "\n".join(lines)

    def left_norms(self) -> list[Change]:
        """The norms that were left and may be RMSNorms; torch's other norms are not listed.

        Returns:
            These entries of ``left``.
        """
        return [change for change in self.left if change.what == "norm" and change.why != OTHER_NORM]


def _fp8_names(module: nn.Module) -> list[str]:
    """The layers of an attention or MLP whose weights are codes."""
    parts = parts_of(module)
    if parts is None:
        return []
    projections = [projection for projection in parts.projections for _ in projection.linears]
    return [name for name, projection in zip(parts.names, projections, strict=True) if projection.quantized]


def _in_effect(change: Change, module: nn.Module) -> bool:
    """Whether a change is in effect now."""
    if MARK not in module.__dict__:
        return True
    return runs_decode(module) if change.what.startswith("decode") else runs_fused(module)


def counted(changes: Iterable[Change]) -> Iterable[tuple[tuple[str, str], int]]:
    """What was changed and how, each with its number."""
    return Counter((f"{change.cls} {change.what}", change.why) for change in changes).items()


def reasons(changes: Iterable[Change]) -> str:
    """What was left and why, as in an error."""
    return "; ".join(f"{count} x {what}: {why}" for (what, why), count in counted(changes))


def why_not(module: nn.Module, match: Match, flag: str = "") -> str:
    """Why a module's forward cannot be replaced; "" if it can."""
    if bound_before(module):
        return bound_before(module)
    if match.form is None:
        return match.why
    if match.code is not None and any(name in module.__dict__ for name in match.code.methods):
        return REPLACED_METHOD
    return unless(not flag or getattr(module, flag, False) is True, f"its {flag} is not True")


def bound_before(module: nn.Module) -> str:
    """Who replaced a module's forward; "" if nobody did."""
    if "forward" not in module.__dict__:
        return ""
    return PATCHED_BEFORE if MARK in module.__dict__ else REPLACED_BEFORE


def norm_record(module: nn.Module | None) -> NormRecord | None:
    """How a patched norm is computed; None for other modules."""
    record = None if module is None else module.__dict__.get(MARK)
    return record if isinstance(record, NormRecord) else None


def unless(condition: bool, why: str) -> str:
    """The reason, if the condition does not hold."""
    return "" if condition else why


def missing(module: object, *names: str) -> str:
    """Which of these attributes an object lacks. Registered forms may name anything."""
    absent = [name for name in names if name and not hasattr(module, name)]
    return unless(not absent, f"it has no {' and no '.join(absent)}")
