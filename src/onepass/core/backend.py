"""Selects a kernel family's backend by device. Backends are imported at first use and can be replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from torch import Tensor

from ..errors import Unsupported
from . import replay

_BACKENDS: Final = {"cpu": "cpu", "cuda": "gpu"}
_families: Final[list[Family]] = []


class Family:
    """A kernel family: the modules ``cpu`` and ``gpu`` of ``onepass.ops.<name>``. Attention has only the second."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._launch: dict[str, Any] = {}
        _families.append(self)

    def launch(self, tensor: Tensor) -> Any:
        """The launch function for the tensor's device."""
        return self._launch.get("cpu" if tensor.is_cpu else "cuda") or self._load(tensor.device.type)

    def _load(self, device: str) -> Any:
        module = f"onepass.ops.{self.name}.{_BACKENDS[device]}"
        if find_spec(module) is None:
            raise Unsupported(f"{self.name}: there is no kernel for {device}")
        found = self._launch[device] = import_module(module).launch
        return found

    def config(self, tensor: Tensor, name: str) -> Any:
        """A function of the backend's ``cpu_tile`` or ``gpu_tile``, which needs neither Triton nor llvmlite.

        The GPU backend also answers for devices without kernels (meta).
        """
        backend = _BACKENDS.get(tensor.device.type, "gpu")
        return getattr(import_module(f"onepass.ops.{self.name}.{backend}_tile"), name)


def extension(name: str) -> Any:
    """The package ``onepass.<name>``, imported at first use."""
    return sys.modules.get(f"onepass.{name}") or import_module(f"onepass.{name}")


@contextmanager
def launching_with(choose: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    """Pass every launch of a family to ``choose(family)`` instead of a backend: an interpreter, a recorder, a stub.

    A family's is chosen at its first launch.
    """
    saved = [(family, dict(family._launch)) for family in _families]
    replay.switch.on = False
    for family, _ in saved:
        chosen = _chosen_later(choose, family.name)
        family._launch.update(cpu=chosen, cuda=chosen)
    try:
        yield
    finally:
        replay.switch.on = True
        for family, found in saved:
            family._launch.clear()
            family._launch.update(found)


def _chosen_later(choose: Callable[[str], Callable[..., None]], name: str) -> Callable[..., None]:
    found: list[Callable[..., None]] = []

    def launch(*arguments: Any) -> None:
        if not found:
            found.append(choose(name))
        found[0](*arguments)

    return launch
