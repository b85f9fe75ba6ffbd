"""``python -m tools.fuzz``: random calls of every op against the oracle.

``--seed S --only INDEX`` runs one case again and tries simpler ones like it. Needs only torch and a backend.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.linear.fuzz import LinearCase
from tests.oracle.runner import running_on
from tools import compact
from tools.fuzz.cases import CONFIGURATIONS, OPS, numbered, run, run_all, shrink

SHOWN = 20
"""Failures that are shrunk and printed; more are only counted."""
GRACE = 20.0
"""Seconds that the last case of a process may take; what it reported before still counts."""
EVERY = 5.0
"""Seconds between two writes of partial results."""
TOGETHER = 32
"""Cases that share one wait for a GPU."""
INTERPRETED = 1024
"""Results of `linear` up to which the interpreter runs a case."""


def main() -> int:
    """Run the cases; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda", "interpreter"), default="cpu")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", action="append", choices=tuple(OPS), default=[])
    parser.add_argument("--only", type=int, help="run only the case with this number")
    parser.add_argument("--minutes", type=float, help="start no case after this long")
    parser.add_argument("--jobs", type=int, default=1, help="split the configurations among this many processes")
    parser.add_argument(
        "--configurations", type=int, default=CONFIGURATIONS, help="kernels per op to draw from; each is compiled"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is not yet
    if options.only is not None:
        return _run_alone(options)
    found = _run_jobs(options) if options.jobs > 1 else _run_share(options)
    if options.json:
        _write(options.json, found)
    print(
        f"{sum(found['cases'].values()) - found['failed']} passed, {found['failed']} failed on {options.device} "
        f"in {found['seconds']:.0f} s: {', '.join(f'{op} {n}' for op, n in found['cases'].items())}"
    )
    return 1 if found["failed"] or not found["cases"] else 0


def _case(options: argparse.Namespace, index: int, share: tuple[int, int] = (0, 1)) -> Any:
    return numbered(options.seed, index, tuple(options.op or OPS), options.configurations, _bounded(options), share)


def _bounded(options: argparse.Namespace) -> bool:
    """Whether sizes affect machine code that must be compiled."""
    return bool(options.device == "cuda")


def _where(options: argparse.Namespace) -> str:
    return "cuda" if options.device == "cuda" else "cpu"


def _interpretable(case: Any) -> bool:
    """Triton's interpreter misreads subnormal bfloat16 numbers, and takes up to a minute for many products."""
    large = isinstance(case, LinearCase) and math.prod(case.lead) * case.columns > INTERPRETED
    return "subnormal" not in repr(case) and not large


def _run_alone(options: argparse.Namespace) -> int:
    with running_on(options.device):
        case = _case(options, options.only)
        print(f"{case}: {run(case, _where(options)) or 'passed'}")
        simplest, message = shrink(case, _where(options))
        if message is not None:
            print(f"simplest found: {simplest}: {message}")
    return 1 if message is not None else 0


def _run_share(options: argparse.Namespace) -> dict[str, Any]:
    """Run this process's cases; failures are printed as they occur."""
    mine, of = map(int, options.share.split("/"))
    torch.set_num_threads(1)
    start = shown = time.perf_counter()
    counts, failures, failed = Counter[str](), list[dict[str, Any]](), 0

    def found() -> dict[str, Any]:
        return {
            "device": options.device,
            "machine": torch.cuda.get_device_name() if options.device == "cuda" else _cpu(),
            "torch": torch.__version__,
            "seed": options.seed,
            "first": options.first,
            "configurations": options.configurations,
            "cases": dict(sorted(counts.items())),
            "failed": failed,
            "failures": failures,
            "seconds": round(time.perf_counter() - start, 1),
        }

    def check(batch: list[tuple[int, Any]]) -> None:
        nonlocal failed
        for (index, case), wrong in zip(batch, run_all([case for _, case in batch], _where(options)), strict=True):
            counts[case.op] += 1
            if wrong is not None:
                failed += 1
                if len(failures) < SHOWN:
                    failures.append(_failure(options, index, case, wrong))

    batch: list[tuple[int, Any]] = []
    together = TOGETHER if options.device == "cuda" else 1
    written = start
    with running_on(options.device):
        for index in range(options.first, options.first + options.cases):
            if options.minutes and time.perf_counter() - start > 60 * options.minutes:
                break
            case = _case(options, index, (mine, of))
            if case is None or (options.device == "interpreter" and not _interpretable(case)):
                continue
            batch.append((index, case))
            if len(batch) < together:
                continue
            check(batch)
            batch = []
            now = time.perf_counter()
            if options.json and now - written > EVERY:  # a run that is cut off leaves what it has
                written = now
                _write(options.json, found())
            if now - shown > 30:
                shown = now
                done = index + 1 - options.first
                print(f"{done} of {options.cases}, {failed} failed, {now - start:.0f} s", file=sys.stderr, flush=True)
        check(batch)
    return found()


def _write(path: Path, found: dict[str, Any]) -> None:
    """Write atomically."""
    half = path.with_name(path.name + ".half")
    half.write_text(compact.dumps(found))
    half.replace(path)


def _cpu() -> str:
    from onepass.cpu.compile import host

    return host()[0]


def _failure(options: argparse.Namespace, index: int, case: Any, wrong: str) -> dict[str, Any]:
    simplest, message = shrink(case, _where(options))
    again = f"--device {options.device} --seed {options.seed} --configurations {options.configurations}"
    again += "".join(f" --op {op}" for op in options.op) + f" --only {index}"
    print(f"FAILED {wrong}\n  {case}\n  simplest: {simplest}: {message}\n  again: {again}", flush=True)
    return {"index": index, "op": case.op, "message": wrong, "simplest": f"{simplest}: {message}", "again": again}


def _run_jobs(options: argparse.Namespace) -> dict[str, Any]:
    """Run the configurations in several processes.

    What they have found is written every few seconds, so that a run that is killed leaves it. A process that runs long after
    the deadline is stopped, and so are all when this process is asked to end; neither is a failure.
    """
    start, stopped = time.perf_counter(), threading.Event()
    by = start + 60 * options.minutes + GRACE if options.minutes else math.inf
    with tempfile.TemporaryDirectory() as folder, _asked_to_end(stopped):
        files = [Path(folder) / f"{job}.json" for job in range(options.jobs)]
        common = [sys.executable, "-m", "tools.fuzz", f"--device={options.device}", f"--cases={options.cases}"]
        common += [f"--first={options.first}", f"--seed={options.seed}", f"--configurations={options.configurations}"]
        common += [f"--op={op}" for op in options.op] + ([f"--minutes={options.minutes}"] if options.minutes else [])
        jobs = [
            subprocess.Popen([*common, "--share", f"{job}/{options.jobs}", "--json", str(file)], stdout=sys.stderr)
            for job, file in enumerate(files)
        ]
        written = start
        while any(job.poll() is None for job in jobs):
            now = time.perf_counter()
            if now > by or stopped.is_set():
                break
            if options.json and now - written > EVERY:
                written = now
                _write(options.json, _merged(options, files, now - start))
            stopped.wait(0.2)
        crashed = [job.returncode for job in jobs if job.returncode not in (None, 0, 1)]
        for job in jobs:
            job.kill()
            job.wait()
        merged = _merged(options, files, time.perf_counter() - start)
    if crashed:
        if options.json:
            _write(options.json, merged | {"crashed": crashed})
        raise SystemExit(f"a process crashed: exit statuses {crashed}")
    return merged


@contextmanager
def _asked_to_end(stopped: threading.Event) -> Iterator[None]:
    """Set the event when this process receives SIGTERM, as `timeout` sends it."""
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _merged(options: argparse.Namespace, files: list[Path], seconds: float) -> dict[str, Any]:
    """What all processes have found so far."""
    parts = [json.loads(file.read_text()) for file in files if file.exists()]
    counts = sum((Counter[str](part["cases"]) for part in parts), Counter[str]())
    return {
        **(parts[0] if parts else {"device": options.device, "seed": options.seed}),
        "cases": dict(sorted(counts.items())),
        "failed": sum(part["failed"] for part in parts),
        "failures": [failure for part in parts for failure in part["failures"]],
        "seconds": round(seconds, 1),
        "jobs": options.jobs,
    }


if __name__ == "__main__":
    sys.exit(main())
