"""Starts the ranks of a process group on this machine and collects their reports; nothing here can hang.

Every rank is a separate process with a deadline, and a shorter one for its collectives. Ranks that still run then are
killed. Under ``torchrun`` the ranks exist already: `joined` makes this process one of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d


@dataclass(frozen=True)
class Place:
    """A rank's number, device and group. The default group has all ranks."""

    rank: int
    size: int
    device: torch.device
    backend: str


Work = Callable[..., Any]
"""Called as ``work(place, *args)`` on every rank; an importable function that returns plain data."""


@dataclass(frozen=True)
class Report:
    """How a rank ended: what it returned, or an error, or neither if it was killed."""

    rank: int
    exit_code: int | None
    """None: it missed the deadline."""
    value: Any
    error: str


def launch(
    work: Work,
    size: int,
    *args: Any,
    device: str = "cpu",
    backend: str = "gloo",
    seconds: float = 120,
    collective_seconds: float = 30,
) -> list[Report]:
    """Run ``work`` on ``size`` ranks. Returns within ``seconds``, plus a moment."""
    # Ranks are forked from a server that has only imported torch. It keeps the environment of its first use but not this
    # process's sys.path, so the ranks import onepass themselves.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor"])
    with tempfile.TemporaryDirectory(prefix="onepass-ranks-") as directory:
        ranks = [
            context.Process(
                target=_rank,
                args=(work, rank, size, device, backend, collective_seconds, directory, args),
                daemon=True,
            )
            for rank in range(size)
        ]
        deadline = time.monotonic() + seconds
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join(5)
        return [_report(rank, code, Path(directory)) for rank, code in enumerate(codes)]


def _rank(
    work: Work, rank: int, size: int, device: str, backend: str, limit: float, directory: str, args: tuple[Any, ...]
) -> None:
    """One rank's process, from the start of its group to its report in a file."""
    report: dict[str, Any] = {}
    try:
        place = _place(rank, size, device, backend)
        c10d.init_process_group(
            backend,
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=limit),
        )
        report["value"] = work(place, *args)
    except BaseException:
        report["error"] = traceback.format_exc()
    target = Path(directory) / f"{rank}.json"
    target.with_suffix(".part").write_text(json.dumps(report))
    target.with_suffix(".part").rename(target)
    if "error" not in report:
        c10d.destroy_process_group()


def _place(rank: int, size: int, device: str, backend: str) -> Place:
    if device == "cuda":
        where = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    else:
        where = torch.device(device)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    return Place(rank, size, where, backend)


def _report(rank: int, code: int | None, directory: Path) -> Report:
    try:
        left = json.loads((directory / f"{rank}.json").read_text())
    except FileNotFoundError:
        left = {"error": "it left no report"}
    return Report(rank, code, left.get("value"), left.get("error", ""))


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def joined(device: str, backend: str, collective_seconds: float = 60) -> Iterator[Place]:
    """This process as the rank that torchrun's environment defines."""
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
    place = _place(int(os.environ["RANK"]), size, device, backend)
    if device == "cuda":
        where = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(where)
        place = Place(place.rank, size, where, backend)
    c10d.init_process_group(backend, timeout=timedelta(seconds=collective_seconds))
    try:
        yield place
    finally:
        c10d.destroy_process_group()
