"""Launches without a GPU: kernels that only note what they are given."""

from __future__ import annotations

from typing import Any

import pytest

from onepass.gpu import compile as compiler
from onepass.gpu import launch as launcher
from onepass.gpu.compile import Build
from onepass.gpu.launch import GpuKernels
from tools.evidence import records


class Recorder:
    """Stands in for a loaded kernel; see `record`. ``broken`` ones cannot be launched."""

    made: list[Build]
    calls: list[tuple[int, dict[str, Any]]]
    broken = False

    def __init__(self, build: Build, device: int) -> None:
        self.build = build
        Recorder.made.append(build)

    def __call__(self, grid: int, arguments: Any) -> None:
        if Recorder.broken:
            raise RuntimeError("out of resources")
        values = compiler.flat(self.build.shape, tuple(arguments))
        names = (name for name, _, _ in self.build.leaves())
        Recorder.calls.append((grid, dict(zip(names, values, strict=True))))


def record(monkeypatch: pytest.MonkeyPatch, *ops: GpuKernels[Any, Any, Any, Any]) -> None:
    """Give `Recorder` the launches of these kernels, which forget earlier ones. The first GPU is an H200."""
    Recorder.made, Recorder.calls = [], []
    monkeypatch.setattr(Recorder, "broken", False)
    monkeypatch.setattr(compiler, "Launcher", Recorder)
    monkeypatch.setattr(compiler, "_loaded", {})
    for kernels in ops:
        monkeypatch.setattr(kernels, "plans", {})
    monkeypatch.setitem(launcher.chips, 0, records.H200)
