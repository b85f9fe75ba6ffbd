"""What `torch.compile` compiles for a benchmark, compiled beforehand by several processes.

A run measures in one process, where compiling takes a few seconds per row, and with max-autotune up to a minute. Here
processes share the rows, compile each peer once and leave the result in inductor's cache, where the run finds it. Our
kernels and those of the checks are compiled with them. They do so until a deadline. Candidates of max-autotune are timed by
one process at a time, so that the choice is that of a quiet GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from benchmarks.suite.peers import PEERS
from benchmarks.suite.results import COMPILED
from benchmarks.suite.run import Plan, cases
from benchmarks.suite.workload import Workload
from tests.oracle.runner import run_cases

FIRST: Final = (1, 8, 16, 4, 2)
"""The order of numbers of rows: if time is short, each size has these first."""
GRACE: Final = 3.0
"""Seconds for a process to end by itself."""
_ENVIRONMENT: Final = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOTUNE_LOCAL_CACHE": "1"}
_METHODS: Final = ("benchmark_gpu", "benchmark_gpu_with_cuda_graph")


class Job(NamedTuple):
    """A peer that is to be compiled for a workload."""

    peer: str
    workload: Workload

    @property
    def name(self) -> str:
        """What identifies it in every process."""
        return f"{self.peer}: {self.workload.where}"


def jobs(plan: Plan) -> list[Job]:
    """What a run of this plan compiles: default mode for all workloads first, then max-autotune."""
    usable = {name: peer for name, peer in plan.chosen.items() if name in COMPILED and not peer.why_not(plan.device)}
    found = [Job(name, workload) for workload in plan.workloads for name in plan.peers_of(workload, usable)]
    place = {m: number for number, m in enumerate(FIRST)}
    return sorted(found, key=lambda job: (COMPILED.index(job.peer), place.get(job.workload.shape[0], len(place))))


def prepare(plan: Plan, workers: int, limit: float, line: Sequence[str]) -> list[str]:
    """The names of the jobs that were done before ``limit`` seconds had passed.

    ``line``: the options of `tools.bench` from which every process makes the same plan.
    """
    environment = {**os.environ, **_ENVIRONMENT}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
    }
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="onepass-prepare-") as folder:
        files = [Path(folder) / f"{worker}.json" for worker in range(workers)]
        command = [sys.executable, "-m", "tools.bench.prepare", *line, f"--lock={folder}/lock", f"--limit={limit}"]
        with (Path(folder) / "log").open("wb") as log:
            running = [
                subprocess.Popen(
                    [*command, f"--share={worker}/{workers}", f"--done={file}"],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
                for worker, file in enumerate(files)
            ]
        while any(process.poll() is None for process in running) and time.monotonic() < end + GRACE:
            time.sleep(0.05)
        for process in running:
            process.kill()
            process.wait()
        found = [name for file in files if file.exists() for name in file.read_text().splitlines()]
        failed = [process.returncode for process in running if process.returncode not in (0, -9)]
        if failed:
            print((Path(folder) / "log").read_text(errors="replace")[-2000:], flush=True)
    os.environ.update(_ENVIRONMENT)
    return found


def slow_peers(done: Sequence[str]) -> str:
    r"""An expression for `Plan.slow`: the workloads for which max-autotune is ready.

    >>> slow_peers(["torch.compile: linear 1x2x3", "torch.compile max: linear 1x2x3", "torch.compile max: linear 8x2x3"])
    '^(linear\\ 1x2x3|linear\\ 8x2x3)$'
    """
    head = f"{COMPILED[1]}: "
    ready = [re.escape(name.removeprefix(head)) for name in done if name.startswith(head)]
    return f"^({'|'.join(ready)})$"


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Let inductor time its candidates only while no other process does."""
    from torch._inductor.runtime import benchmarking

    def locked(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if held:
                return method(*args, **named)
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                held.append(True)
                try:
                    return method(*args, **named)
                finally:
                    held.pop()

        return call

    held: list[bool] = []
    classes = [kind for kind in vars(benchmarking).values() if isinstance(kind, type)]
    saved = [(kind, name, vars(kind)[name]) for kind in classes for name in _METHODS if name in vars(kind)]
    for kind, name, method in saved:
        setattr(kind, name, locked(method))
    try:
        yield
    finally:
        for kind, name, method in saved:
            setattr(kind, name, method)


def work(plan: Plan, share: str, lock: Path, done: Path, limit: float) -> None:
    """Compile a share of the jobs; the name of each is written when it is done."""
    mine, of = map(int, share.split("/"))
    end = time.monotonic() + limit
    checked = list(dict.fromkeys(op for workload in plan.workloads for op in workload.checked))
    run_cases([case for op in checked for case in cases(op)][mine::of], plan.device)  # the run tells what fails
    with torch.inference_mode(), _one_at_a_time(lock), done.open("a") as file:
        for job in jobs(plan)[mine::of]:
            if time.monotonic() > end:
                break
            try:
                problems = job.workload.problems(plan.device, 1)
                for call in (*problems[0].ours.values(), *PEERS[job.peer].calls(problems)):
                    call()
                if plan.device == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:  # the run will report it
                print(f"{job.name}: {type(error).__name__}: {error}", flush=True)
            file.write(f"{job.name}\n")
            file.flush()


def plan_of(line: dict[str, Any]) -> Plan:
    """The plan that options of `tools.bench` describe."""
    return Plan(
        line["device"], tuple(line["op"]), line["shapes"], line["peers"], match=line["match"], slow=line["slow"]
    )


def options_of(options: argparse.Namespace) -> list[str]:
    """The command line from which `main` makes the plan of `tools.bench`'s options."""
    kept = {name: getattr(options, name) for name in ("device", "op", "shapes", "peers", "match", "slow")}
    return [f"--plan={json.dumps(kept)}"]


def main() -> None:
    """One process of `prepare`."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.prepare", description=__doc__)
    parser.add_argument("--plan", type=json.loads, required=True)
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--done", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    options = parser.parse_args()
    work(plan_of(options.plan), options.share, options.lock, options.done, options.limit)


if __name__ == "__main__":
    main()
