"""`tools.soak.growth` at a small size, and that it can fail; the committed run is of a million calls by each path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llvmlite")

from onepass.core import native
from onepass.core.op import MAX_REMEMBERED
from tools.soak import growth, watch

DATA = Path(__file__).parents[2] / "benchmarks/cpu/growth.json"


@pytest.mark.full  # 420 calls; tests/all_ops/test_native.py repeats fewer
def test_calls_are_recorded_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    found = growth.measure(360, "cpu")
    assert found["passed"] and len(found["samples"]) == growth.SAMPLES and found["most remembered"]["options"] > 0
    if native.describe() == "on":
        assert found["repeated in C"] >= 100 and found["most remembered"]["calls in C"] > 0
    monkeypatch.setattr(growth, "MAX_REMEMBERED", 1)
    assert not growth.measure(60, "cpu")["passed"]


@pytest.mark.full  # another measurement that fails stays
def test_memory_that_grows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before, taken = watch.read, 0

    def read(device: str) -> Any:
        nonlocal taken
        taken += watch.MIB
        reading = before(device)
        return reading._replace(resident=reading.resident + taken)

    monkeypatch.setattr(growth, "read", read)
    assert not growth.measure(60, "cpu")["passed"]


def test_the_committed_run() -> None:
    paths = json.loads(DATA.read_text())["paths"]
    for name, state in (("C", "on"), ("Python", "off (ONEPASS_NATIVE=0)")):
        found = paths[name]
        assert found["passed"] and found["calls"] >= 1_000_000 and found["path in C"] == state
        assert max(found["most remembered"].values()) <= MAX_REMEMBERED
    assert paths["C"]["repeated in C"] > 300_000
