"""Rows of `tools.bench.models` prepared by several processes at once, and measured by one at a time.

A process that has prepared its rows creates the file ``ready`` in its folder and waits for the file ``go``. So
nothing else runs on the GPU while a process measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from .limits import over

SHARE: Final = 0.75
"""The part of the time limit in which rows are prepared. The rest is for measuring."""
GRACE: Final = 25.0
"""Seconds for a process to notice that its time is over."""
POLL: Final = 0.05
COMPILE_THREADS: Final = 4


class Job(NamedTuple):
    """What one process measures."""

    model: str
    batches: tuple[int, ...]


class Worker(NamedTuple):
    """A process, its job and its folder."""

    job: Job
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def ready(self) -> bool:
        """Whether it waits for its turn."""
        return (self.folder / "ready").exists()

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None


def jobs(names: Sequence[str], batches: Sequence[int], workers: int) -> list[Job]:
    """Every model and batch size, dealt to processes. Batch sizes of a model share a process if there are too few."""
    each = max(1, min(len(batches), workers // len(names)))
    return [Job(name, tuple(batches[part::each])) for name in names for part in range(each)]


def wait_for_turn(folder: Path) -> None:
    """Say that all is prepared, and wait. The parent may have ended in the meantime."""
    (folder / "ready").touch()
    parent = os.getppid()
    while not (folder / "go").exists():
        if os.getppid() != parent:
            raise SystemExit("the process that measures in turns has ended")
        time.sleep(POLL)


def run(
    jobs: Sequence[Job], workers: int, line: Sequence[str], deadline: float | None, known: Path | None
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """The reports of all jobs, so many processes at once. One that fails prints the end of its log instead.

    With ``--resume`` in the line, a report also has the rows of the file ``known``.
    """
    rounds = [jobs[start : start + workers] for start in range(0, len(jobs), workers)]
    for number, some in enumerate(rounds):
        left = None if deadline is None else (deadline - time.monotonic()) / (len(rounds) - number)
        with ExitStack() as stack:
            yield from _round(stack, some, line, left, known)


def _round(
    stack: ExitStack, jobs: Sequence[Job], line: Sequence[str], seconds: float | None, known: Path | None
) -> Iterator[tuple[Job, dict[str, Any]]]:
    start = time.monotonic()
    share = None if seconds is None else SHARE * seconds
    started = [_start(stack, job, line, share, known) for job in jobs]
    late = None if share is None else start + share + GRACE
    while not over(late) and not all(worker.ready or worker.ended for worker in started):
        time.sleep(POLL)
    print(f"{sum(w.ready for w in started)} of {len(started)} ready after {time.monotonic() - start:.0f} s", flush=True)
    end = None if seconds is None else start + seconds
    for worker in started:
        if worker.ready:
            (worker.folder / "go").touch()
            while not worker.ended and not over(end):
                time.sleep(POLL)
            _stop(worker.process)  # it may have measured some of its rows
        report = worker.folder / "found.json"
        if worker.ended and report.exists():
            yield worker.job, json.loads(report.read_text())
        if worker.process.poll() != 0:
            log = (worker.folder / "log").read_text(errors="replace")
            print(f"{worker.job.model}, batches {worker.job.batches}: {log[-2000:]}", flush=True)


def _start(stack: ExitStack, job: Job, line: Sequence[str], limit: float | None, known: Path | None) -> Worker:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onepass-bench-")))
    report = folder / "found.json"
    if "--resume" in line and known is not None:
        report.write_text(known.read_text())
    command = [sys.executable, "-m", "tools.bench.models", "--model", f"={job.model}", *line]
    command += ["--json", str(report), "--turn", str(folder)]
    command += ["--batch", *map(str, job.batches), *([] if limit is None else [f"--limit={limit}"])]
    threads = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS)}
    log = stack.enter_context((folder / "log").open("wb"))
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **threads})
    stack.callback(_stop, process)
    return Worker(job, process, folder)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
