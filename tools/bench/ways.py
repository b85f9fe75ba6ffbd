"""The ways in which `tools.bench.models` runs a model: patched or not, compiled or not, and with which weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import onepass


class Way(NamedTuple):
    """How a step is run: the options of `onepass.patch` or none, a mode of torch.compile or none, with an `MlaCache` or not."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    mode: str = ""
    latent: bool = False

    @property
    def ours(self) -> bool:
        """Whether onepass alone runs it, so that a failure is ours."""
        return bool(self.options) and not self.mode


def _way(name: str, mode: str = "", latent: bool = False, **options: Any) -> Way:
    return Way(name, tuple(options.items()), mode, latent)


BASELINE = "unpatched"
_MAX = "max-autotune-no-cudagraphs"
WAYS: dict[str, Way] = {
    "eager": _way(BASELINE),
    "patched": _way("patched", rounding="hf"),
    "once": _way("patched, once", rounding="once"),
    "latent": _way("patched, once, MlaCache", latent=True, rounding="once"),
    "compile": _way("torch.compile", "default"),
    "compile-patched": _way("torch.compile, patched", "default", rounding="hf"),
    "max-autotune": _way("max-autotune", _MAX),
    "max-autotune-patched": _way("max-autotune, patched", _MAX, rounding="hf"),
    "decode": _way("decode", decode=True),
    "decode-compile": _way("torch.compile, decode", "default", decode=True),
    "fp8": _way("decode, fp8", decode=True, weights="fp8"),
    "invariant": _way("decode, batch invariant", decode=True, batch_invariant=True),
}
"""What ``--contender`` names. The baseline is always measured."""
NAMES = {way.name: way for way in WAYS.values()}
EXTRA = ("max-autotune", "max-autotune-patched", "decode-compile", "invariant")
"""Left out unless they are named: slow to prepare, or of interest to few."""


def chosen(names: Iterable[str] | None, latent: bool) -> tuple[Way, ...]:
    """The ways to measure, the baseline first. Those with an `MlaCache` need a model with latent attention."""
    wanted = {"eager", *names} if names else {name for name in WAYS if name not in EXTRA}
    return tuple(way for name, way in WAYS.items() if name in wanted and (latent or not way.latent))


def effort(way: Way) -> int:
    """How long it takes to prepare a way, to sort by: not compiled, compiled, tuned."""
    return 0 if not way.mode else 2 if way.mode == _MAX else 1


class Models:
    """A model and its patched copies. Copies share its weights, unless `patch` moves them. Quantized weights are new.

    A captured graph reads weights where they were, so copies stay patched until all is measured.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.copies: dict[tuple[tuple[str, Any], ...], tuple[Any, onepass.models.Patched]] = {}

    def of(self, way: Way) -> tuple[Any, onepass.models.Patched | None]:
        """The model for a way, and what was patched in it."""
        if not way.options:
            return self.model, None
        if way.options not in self.copies:
            options: Any = dict(way.options)
            moves = "decode" in options and "weights" not in options
            shared = {} if moves else {id(p): p for p in self.model.parameters()}
            made = copy.deepcopy(self.model, shared)
            self.copies[way.options] = made, onepass.patch(made, **options)
        return self.copies[way.options]


def first_line(error: BaseException) -> str:
    """The class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
