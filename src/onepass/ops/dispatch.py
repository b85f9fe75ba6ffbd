"""Which backend runs a kernel family: by device, imported when a tensor first needs it, replaceable as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor

from ..fastpath import replay

_families: list[Launch] = []


class Launch:
    """The ``launch`` functions of ``onepass.cpu.<family>`` and ``onepass.triton.<family>``."""

    def __init__(self, family: str) -> None:
        self.family = family
        self._found: dict[str, Any] = {}
        _families.append(self)

    def on(self, tensor: Tensor) -> Any:
        """The launch function of the tensor's device."""
        return self._found.get("cpu" if tensor.is_cpu else "cuda") or self._load(tensor.device.type)

    def _load(self, device: str) -> Any:
        backend = {"cpu": "cpu", "cuda": "triton"}[device]
        found = self._found[device] = import_module(f"onepass.{backend}.{self.family}").launch
        return found


@contextmanager
def launching_with(choose: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    """Hand every launch of a family to ``choose(family)`` instead of a backend: the interpreter's, a recorder's, a stub."""
    saved = [(launch, dict(launch._found)) for launch in _families]
    replay.switch.on = False
    for launch, _ in saved:
        chosen = choose(launch.family)
        launch._found.update(cpu=chosen, cuda=chosen)
    try:
        yield
    finally:
        replay.switch.on = True
        for launch, found in saved:
            launch._found.clear()
            launch._found.update(found)
