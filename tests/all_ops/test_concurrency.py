"""Threads, forks, processes that share a cache, kills and interrupts: no wrong byte, no deadlock, no damaged cache.

What processes do is in concurrency_workers.py; each has a time limit of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

from onepass.core import recording
from onepass.cpu import threads as _parallel
from onepass.testing.tensors import same_bytes
from tools import concurrency

ROOT = Path(__file__).parents[2]


def process(*command: str, cache: Path | None = None, seconds: float = 900) -> Any:
    """Run `tests.all_ops.concurrency_workers` in a separate process and return its report."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    if cache is not None:
        environment["ONEPASS_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-m", "tests.all_ops.concurrency_workers", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "together", [pytest.param(False, marks=pytest.mark.full, id="own order"), pytest.param(True, id="same call")]
)
def test_threads_do_not_change_results(together: bool) -> None:
    assert concurrency.at_once("cpu", rounds=1, together=together) is None


def test_comparison_detects_one_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last thread's results are corrupted, which the check must report."""
    original = concurrency._compare

    def spoil(work: Any, given: Any, found: Any, rounds: int) -> str | None:
        found[concurrency.THREADS - 1, 0, 3][0].view(-1)[7:8].fill_(2.5)
        return original(work, given, found, rounds)

    monkeypatch.setattr(concurrency, "_compare", spoil)
    assert "thread 7, round 0 differs" in str(concurrency.at_once("cpu", rounds=1))


def test_work_of_a_thread_that_cannot_start_goes_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = "declare i32 @pthread_create(ptr, ptr, ptr, ptr)"
    refusing = "define i32 @pthread_create(ptr %a, ptr %b, ptr %c, ptr %d) {\n  ret i32 11\n}"
    assert declared in _parallel._THREADS
    expected = [concurrency.results(job, "cpu") for job in concurrency.jobs()]
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "off")
    monkeypatch.setattr(_parallel, "_THREADS", _parallel._THREADS.replace(declared, refusing))
    team = _parallel._own_team.__wrapped__()
    entered: list[int] = []

    def counted(function: int, block: int, threads: int) -> None:
        entered.append(threads)
        team(function, block, threads)

    monkeypatch.setattr(_parallel, "_team", lambda: ("refusing", counted))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(recording.switch, "on", False)  # the path in C has torch's own team
    for job, results in zip(concurrency.jobs(), expected, strict=True):
        assert all(same_bytes(a, b) for a, b in zip(concurrency.results(job, "cpu"), results, strict=True))
    assert len(entered) == 8, "the calls that have enough work for a team"


@pytest.mark.full  # threads with a warm cache stay
def test_first_calls_from_eight_threads(tmp_path: Path) -> None:
    told = process("cold_threads", cache=tmp_path)
    assert told["wrong"] is None
    assert told["linkers"] == 1, "code of a second linker would be freed with it"
    assert told["files"] >= len(concurrency.jobs())


def test_forked_children_run_every_op(cache: Path) -> None:
    """Forked after the import, after calls, by a child, while threads work, from a thread, while a thread compiles."""
    told = process("forks", cache=cache)
    assert len(told) == 10
    assert {name: right for name, right in told.items() if right is not True} == {}


@pytest.mark.full  # the tests with threads and forks stay
def test_two_spawned_processes_share_a_cold_cache(tmp_path: Path) -> None:
    told = process("spawn", cache=tmp_path)
    assert told == {"same": True, "files": 4, "left": 0}


@pytest.mark.full  # the tests with threads and forks stay
def test_processes_fill_one_cache_concurrently(tmp_path: Path) -> None:
    rounds = process("cold_caches", "3", cache=tmp_path)
    assert len(rounds) == 3
    for same, files, left in rounds:
        assert same == rounds[0][0] and len(same) == files == 3 and not left


@pytest.mark.full  # cpu/test_object_cache.py has damaged files
def test_process_killed_while_writing(tmp_path: Path) -> None:
    """Killed with the file empty, half written, complete but not renamed, and renamed: the next process works."""
    told = process("killed", cache=tmp_path)
    assert list(told) == ["created", "half written", "before the rename", "renamed"]
    for moment, (died, left, whole, right, kept, again, files, after) in told.items():
        assert died == "ended with status 9"
        assert (left, whole) == ((0, 1) if moment == "renamed" else (1, 0))
        assert right and again and files == 3
        assert kept == left, "a file that may still be written is left alone"
        assert after == 0, "and removed when its writer must be dead"


@pytest.mark.full  # the tests with threads and forks stay
def test_interrupts(tmp_path: Path) -> None:
    """An interrupt during a first call or a kernel raises KeyboardInterrupt, and the next call is correct."""
    told = process("interrupts", "15", cache=tmp_path)
    assert told["wrong"] is None
    assert told["warm"] == 30 and told["cold"] > 0
