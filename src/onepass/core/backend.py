"""Finds an op's launch function by the device of its tensors. Backends are imported at first use and can be replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, Protocol, TypeVar

from torch import Tensor

from ..errors import Unsupported
from . import recording

Spec = TypeVar("Spec", covariant=True)


class SomeCall(Protocol[Spec]):
    """A validated call of an op."""

    @property
    def spec(self) -> Spec:
        """What the kernel computes: everything but sizes that affects its machine code."""

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""


Launch = Callable[..., None]
"""Runs a validated call of an op."""
Choose = Callable[[str], Launch]

PACKAGE: Final = __name__.removesuffix(".core.backend")
"""This package's name: "onepass", or what Hugging Face kernels calls its copy of the package."""
_BACKENDS: Final = {"cpu": "cpu", "cuda": "gpu"}
_COMPILERS: Final = {"cpu": "llvmlite", "cuda": "triton"}
_launches: Final[dict[tuple[str, str], Launch]] = {}
"""The launch functions used so far, by op and kind of device."""
_choosers: Final[list[Choose]] = []
"""Those of open `launching_with`, the innermost last."""


def launch_for(op: str, tensor: Tensor) -> Launch:
    """``launch`` of ``onepass.ops.<op>.cpu`` or ``.gpu``, by the tensor's device. Attention has only the second."""
    return _launches.get((op, "cpu" if tensor.is_cpu else "cuda")) or _load(op, tensor.device.type)


def _load(op: str, device: str) -> Launch:
    if _choosers:
        stand_in = _chosen_later(_choosers[-1], op)
        _launches[op, "cpu"] = _launches[op, "cuda"] = stand_in
        return stand_in
    module = _backend(op, device)
    if find_spec(module) is None:
        raise Unsupported(f"{op}: there is no kernel for {device}")
    launch: Launch = import_module(module).launch
    _launches[op, device] = launch
    return launch


def _backend(op: str, device: str) -> str:
    return f"{PACKAGE}.ops.{op}.{_BACKENDS[device]}"


@cache
def can_launch(op: str, device: str) -> bool:
    """Whether this installation has the op's kernels for a kind of device, and what compiles them."""
    return device in _BACKENDS and None not in (find_spec(_COMPILERS[device]), find_spec(_backend(op, device)))


def tiles_for(op: str, tensor: Tensor) -> ModuleType:
    """The module that divides calls of an op on the tensor's device, which needs neither Triton nor llvmlite.

    The GPU backend also answers for devices without kernels (meta).
    """
    return import_module(f"{PACKAGE}.ops.{op}.{'cpu' if tensor.is_cpu else 'gpu_tile'}")


def extension(name: str) -> Any:
    """The package ``onepass.<name>``, imported at first use."""
    return sys.modules.get(f"{PACKAGE}.{name}") or import_module(f"{PACKAGE}.{name}")


@contextmanager
def launching_with(choose: Choose) -> Iterator[None]:
    """Pass every launch of an op to ``choose(op)`` instead of a backend: an interpreter, a recorder, a stub.

    An op's is chosen at its first launch.
    """
    saved = dict(_launches)
    recording.switch.on = False
    _choosers.append(choose)
    _launches.clear()
    try:
        yield
    finally:
        recording.switch.on = True
        _choosers.remove(choose)
        _launches.clear()
        _launches.update(saved)


def _chosen_later(choose: Choose, op: str) -> Launch:
    chosen: list[Launch] = []

    def launch(*arguments: object) -> None:
        if not chosen:
            chosen.append(choose(op))
        chosen[0](*arguments)

    return launch
