"""`tools.bench.prepare`: what is compiled before a run, in which order, and what is left out when time is short."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime import benchmarking

from benchmarks.suite import peers
from benchmarks.suite.run import Plan, cases
from tools.bench import prepare

OPTIONS = argparse.Namespace(
    device="cpu", op=["rms_norm"], shapes="2x64,3x64", peers="torch.compile", match="", slow=None
)


def test_default_mode_comes_first_and_every_size_has_one_row_first() -> None:
    plan = Plan("cuda", ("linear",), match="^linear ", slow="^linear (1|8)x")
    found = prepare.jobs(plan)
    names = [job.peer for job in found]
    assert names == sorted(names) and set(names) == {"torch.compile", "torch.compile max"}
    default = [job.workload.shape for job in found if job.peer == "torch.compile"]
    assert [m for m, *_ in default] == [m for m in (1, 8, 16, 4, 2) for _ in range(9)]
    assert {job.workload.shape[0] for job in found if job.peer == "torch.compile max"} == {1, 8}
    assert prepare.jobs(Plan("cuda", ("linear",), peers="cuBLAS")) == []


def test_other_processes_make_the_same_plan() -> None:
    (text,) = prepare.options_of(OPTIONS)
    again = prepare.plan_of(json.loads(text.removeprefix("--plan=")))
    plan = Plan("cpu", ("rms_norm",), "2x64,3x64", "torch.compile")
    assert [job.name for job in prepare.jobs(again)] == [job.name for job in prepare.jobs(plan)]
    assert [job.name for job in prepare.jobs(plan)] == [
        "torch.compile: rms_norm 2x64",
        "torch.compile: rms_norm 3x64",
    ]


def test_a_process_writes_what_it_has_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    def compile_it(p: Any) -> Any:
        if p.arguments[0].shape[0] == 3:
            raise RuntimeError("cannot")
        return lambda: made.append(tuple(p.arguments[0].shape))

    monkeypatch.setitem(peers.PEERS, "torch.compile", peers.Peer("torch.compile", compile_it))
    plan = Plan("cpu", ("rms_norm",), "2x64,3x64,4x64", "torch.compile")
    checked: list[str] = []
    monkeypatch.setattr(prepare, "run_cases", lambda found, device: checked.extend(case.name for case in found))
    prepare.work(plan, "0/2", tmp_path / "lock", tmp_path / "done", 100.0)
    prepare.work(plan, "1/2", tmp_path / "lock", tmp_path / "done", 100.0)
    assert sorted((tmp_path / "done").read_text().splitlines()) == sorted(job.name for job in prepare.jobs(plan))
    assert sorted(made) == [(2, 64), (4, 64)]
    assert sorted(checked) == sorted(case.name for case in cases("rms_norm"))
    prepare.work(plan, "0/1", tmp_path / "lock", tmp_path / "none", -1.0)
    assert (tmp_path / "none").read_text() == ""


@pytest.mark.parametrize(("end", "limit", "done"), [("exit 0", 600.0, 2), ("exec sleep 600", 0.0, 0)])
def test_processes_end_by_themselves_or_at_the_limit(
    end: str, limit: float, done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = 'echo "torch.compile max: a" >> ${last#--done=}' if done else ":"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nfor last; do :; done\n{said}\n{end}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(prepare, "GRACE", 0.0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    found = prepare.prepare(Plan("cpu", ("rms_norm",), "2x64"), 2, limit, [])
    assert found == ["torch.compile max: a"] * done
    assert not done or prepare.slow_peers(found[:1]) == "^(a)$"


def test_candidates_are_timed_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, seen = tmp_path / "lock", list[bool]()

    def timed(self: Any, *args: Any) -> float:
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                seen.append(False)
            except BlockingIOError:
                seen.append(True)
        return 1.5

    monkeypatch.setattr(benchmarking.InductorBenchmarker, "benchmark_gpu", timed)
    with prepare._one_at_a_time(lock):
        assert benchmarking.InductorBenchmarker().benchmark_gpu(torch.ones) == 1.5
    benchmarking.InductorBenchmarker().benchmark_gpu(torch.ones)
    assert seen == [True, False]
