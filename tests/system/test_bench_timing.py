"""How benchmarks measure: memory streams as the roofline, contenders in turns, and a busy machine measured again."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.suite import (
    streams,
    timing,
    workload,
)


def test_halving_stream_reads_and_writes_everything() -> None:
    source = torch.randint(0, 2**15, (37, 64), dtype=torch.int16)
    target = torch.full((37, 64), 0xAB, dtype=torch.uint8)
    streams.halve(source.view(torch.bfloat16), target)
    assert torch.equal(target, source.to(torch.uint8))


def test_copying_stream_copies_everything() -> None:
    source = torch.randint(0, 256, (2**18 + 256,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    streams.copy(source, target)
    assert torch.equal(source, target)


@pytest.mark.parametrize("place", [(0, 0), (47, 4095), (16, 512)])
def test_reading_stream_sees_every_row(place: tuple[int, int]) -> None:
    """The sink is the OR of all rows, so one set bit anywhere shows in one of the sinks."""
    source = torch.zeros(48, 4096, dtype=torch.uint8)
    sink = torch.zeros(32, dtype=torch.int32)
    source[place] = 64
    seen = 0
    for first in range(0, 48, 16):
        streams.read(source[first : first + 16], sink)
        seen += int(sink.ne(0).any())
    assert seen == 1


@pytest.mark.parametrize(("kind", "parts"), [("copy", 2), ("halve", 3), ("read", 1)])
def test_streams_have_the_size_asked_for(kind: workload.Stream, parts: int) -> None:
    calls = streams.calls(kind, 3_000_000, 2)
    assert len(calls) == 2
    tensors: Any = calls[0].args  # type: ignore[attr-defined]
    moved = sum(t.nbytes for t in tensors) if kind != "read" else tensors[0].nbytes
    assert 0.9 * 3_000_000 < moved <= 3_000_000 + 256
    for call in calls:
        call()


def test_contenders_take_turns_over_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_clocks", lambda: (0.0, 0.0, 0.0))  # a busy machine would be measured again
    order: list[str] = []
    calls: dict[str, list[workload.Call]] = {
        name: [lambda name=name, i=i: order.append(f"{name}{i}") for i in range(2)]  # type: ignore[misc]
        for name in ("a", "b")
    }
    monkeypatch.setattr(timing, "IN_A_ROW", 1)
    times, others = timing.turns(calls, seconds=0.0, least=3)
    once = ["a0", "b1", "a1", "b0", "a0", "b1"]
    assert order == ["a0", "b0", "a1", "b1", *once, *once]
    assert set(times) == {"a", "b"} and all(len(us) == 2 and min(us) > 0 for us in times.values()) and others == 0


def test_a_turn_of_short_calls_is_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_clocks", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(timing, "IN_A_ROW", 3)
    order: list[str] = []
    calls: dict[str, list[workload.Call]] = {"a": [lambda: order.append("a")], "b": [lambda: order.append("b")]}
    timing.turns(calls, seconds=0.0, least=1)
    assert "".join(order) == "ab" + "ab" + 2 * "aaabbb"
    order.clear()
    monkeypatch.setattr(timing, "SHORT_US", 0.0)
    timing.turns(calls, seconds=0.0, least=1)
    assert "".join(order) == "ab" + "ab" + 2 * "ab"


def test_a_busy_machine_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes use 40, then 20, then 30 % of two cores: the second of three attempts counts."""
    monkeypatch.setattr(timing, "IN_A_ROW", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    readings = iter(
        [(0.0, 0.0, 0.0), (1.0, 1.8, 1.0), (2.0, 3.0, 2.0), (3.0, 3.9, 2.5), (4.0, 5.0, 3.0), (5.0, 6.0, 3.4)]
    )
    monkeypatch.setattr(timing, "_clocks", lambda: next(readings))
    now, count = [0.0], iter(range(99))

    def call() -> None:
        now[0] += 0.001 * (next(count) // 7)  # an attempt has seven calls: 1 ms each in the second

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda seconds: None))
    times, others = timing.turns({"a": [call]}, seconds=0.0, least=3, attempts=3)
    assert others == pytest.approx(0.2) and times["a"] == pytest.approx([1000.0, 1000.0])
    assert next(count) == 22


def test_other_processes_are_seen() -> None:
    """A process that uses one second of a core, however long that takes."""
    busy = [sys.executable, "-c", "import time\nwhile time.process_time() < 1.0: pass"]
    before = timing._clocks()
    subprocess.run(busy, check=True)
    after = timing._clocks()
    wall = after[0] - before[0]
    assert timing.others(before, after) * (os.cpu_count() or 1) * wall > 0.9
