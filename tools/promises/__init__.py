"""Promises: guarantees about results that are tested without an oracle, on any device.

``python -m tools.checks --promises`` runs them; names are keys in benchmarks/<chip>/promises.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterator
from itertools import islice
from pathlib import Path

from onepass.testing.runner import Result, matches, running_on, timed
from tools.concurrency import thread_promises
from tools.determinism import determinism_promises
from tools.promises.gemv_norm import gemv_promises
from tools.promises.linear import linear_promises
from tools.promises.mla_cache import mla_promises
from tools.promises.qk_cache import qk_cache_promises
from tools.promises.qk_norm import qk_promises
from tools.promises.rms_norm import Promise, rms_promises
from tools.vllm_bytes import vllm_promises

_ALL = (
    rms_promises,
    determinism_promises,
    gemv_promises,
    linear_promises,
    qk_promises,
    mla_promises,
    qk_cache_promises,
    vllm_promises,
    thread_promises,
)


def promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise that can be tested on ``device``."""
    for family in _ALL:
        yield from family(device)


def run_promises(
    device: str,
    progress: Callable[[Result], None] | None = None,
    match: str = "",
    done: Container[str] = (),
    share: int = 0,
    of: int = 1,
) -> list[Result]:
    """Test every ``of``-th promise whose name contains ``match`` and is not ``done``, starting with number ``share``."""
    results = []
    with running_on(device):
        chosen = ((name, test) for name, test in promises(device) if matches(name, match) and name not in done)
        for name, test in islice(chosen, share, None, of):
            result = timed("promises", name, device, test)
            results.append(result)
            if progress is not None:
                progress(result)
    return results


def run_promises_in_shares(
    device: str, jobs: int, progress: Callable[[Result], None], match: str = "", done: Path | None = None
) -> list[Result]:
    """`run_promises` in ``jobs`` processes, each with a share; a process that ends early is a failure."""
    command = [sys.executable, "-m", "tools.checks", f"--device={device}", "--promises", f"--match={match}"]
    command += [f"--resume={done}"] if done else []
    results: list[Result] = []
    lock = threading.Lock()

    def add(result: Result) -> None:
        with lock:
            results.append(result)
            progress(result)

    def follow(share: int) -> None:
        with subprocess.Popen([*command, f"--share={share}/{jobs}"], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                add(Result(**json.loads(line)))
        if process.returncode:
            add(Result("promises", f"share {share} of {jobs}", device, False, f"status {process.returncode}", 0.0))

    followers = [threading.Thread(target=follow, args=(share,)) for share in range(jobs)]
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join()
    return results
