"""Promises: guarantees about results that are tested without an oracle, on any device.

``python -m tools.checks --promises`` runs them; names are keys in benchmarks/<chip>/promises.json.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress

from onepass.testing.runner import Result, matches, timed
from tests.ops import each
from tests.oracle.runner import running_on
from tests.rms_norm.format_promises import format_promises
from tests.rms_norm.promises import Promise
from tools.concurrency import thread_promises
from tools.determinism import determinism_promises
from tools.vllm_bytes import vllm_promises

_ALL = (*each("promises", "promises"), format_promises, determinism_promises, vllm_promises, thread_promises)

_LONG = ("launches over", "2**3", "thousand times", "fused is separate", "sizes and numbers of blocks")
"""Words in the names of promises that take longest."""


def promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise that can be tested on ``device``."""
    for family in _ALL:
        yield from family(device)


def run_promises(
    device: str, progress: Callable[[Result], None] | None = None, match: str = "", done: Container[str] = ()
) -> list[Result]:
    """Test every promise whose name contains ``match`` and is not ``done``."""
    results = []
    with running_on(device):
        for name, test in promises(device):
            if not matches(name, match) or name in done:
                continue
            result = timed("promises", name, device, test)
            results.append(result)
            if progress is not None:
                progress(result)
    return results


def groups_of(names: Iterable[str]) -> list[list[str]]:
    """Names in groups of promises that need the same machine code; those that take longest first.

    A name ends with what it is about: ``... : 512 columns of bfloat16``.

    >>> groups_of(["a: x, 1 columns", "b: y", "c: x, 2 columns", "d: more than 2**31"])
    [['d: more than 2**31'], ['a: x, 1 columns', 'c: x, 2 columns'], ['b: y']]
    """
    found: dict[str, list[str]] = {}
    for name in names:
        about = name.rsplit(": ", 1)[-1]
        found.setdefault(re.sub(r", \d+ columns$", "", about), []).append(name)
    return sorted(found.values(), key=lambda group: not any(word in group[0] for word in _LONG))


def serve(device: str, lines: Iterable[str], progress: Callable[[Result], None]) -> None:
    """Test the promises that each line lists, as JSON; what a process of `run_promises_in_groups` does."""
    with running_on(device):
        tests = dict(promises(device))
        for line in lines:
            for name in json.loads(line):
                progress(timed("promises", name, device, tests[name]))


def run_promises_in_groups(
    device: str,
    jobs: int,
    progress: Callable[[Result], None],
    match: str = "",
    done: Container[str] = (),
    limit: float = math.inf,
) -> list[Result]:
    """`run_promises` in ``jobs`` processes. Each tests one group after another, so that no two compile the same code at once.

    A promise whose process ends is broken, and another process continues. No group starts after ``limit`` seconds.
    """
    start, lock = time.perf_counter(), threading.Lock()
    waiting = deque(groups_of(name for name, _ in promises(device) if matches(name, match) and name not in done))
    results: list[Result] = []

    def add(result: Result) -> None:
        with lock:
            results.append(result)
            progress(result)

    def next_group() -> list[str] | None:
        with lock:
            return waiting.popleft() if waiting and time.perf_counter() - start < limit else None

    def follow() -> None:
        worker = None
        while (group := next_group()) is not None:
            worker = worker or _Worker(device)
            for name, result in zip(group, worker.run(group), strict=True):
                add(result or Result("promises", name, device, False, f"the process ended: {worker.status()}", 0.0))
            if worker.status() is not None or worker.spoilt:
                worker.end()
                worker = None
        if worker is not None:
            worker.end()

    followers = [threading.Thread(target=follow) for _ in range(jobs)]
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join()
    return results


class _Worker:
    """A process that tests promises. It is ``spoilt`` after an error of the GPU, which all later calls would repeat."""

    def __init__(self, device: str) -> None:
        command = [sys.executable, "-m", "tools.checks", f"--device={device}", "--promises", "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.spoilt = False

    def run(self, names: list[str]) -> Iterator[Result | None]:
        """The result of each; None for those that the process did not live to test."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(names) + "\n")
            self._process.stdin.flush()
        for _ in names:
            line = next((text for text in self._process.stdout if text.startswith("{")), "")  # others may print too
            if not line:
                self._process.wait()
            result = Result(**json.loads(line)) if line else None
            self.spoilt = self.spoilt or (result is not None and "CUDA error" in result.message)
            yield result

    def status(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
