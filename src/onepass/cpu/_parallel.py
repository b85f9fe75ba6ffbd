"""Running a kernel on torch's own threads.

torch's operators run on an OpenMP team; entering the same team through ``GOMP_parallel`` means no second pool
competes with it. Where torch brings no such runtime, a pool of Python threads (ctypes releases the GIL) does the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch

Team = Callable[[int, int, int], None]
"""``team(function address, argument address, threads)``: call the function on every thread and wait."""


def _openmp_libraries() -> list[str]:
    """OpenMP runtimes mapped into this process, torch's own first."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    found = sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp")))
    home = str(Path(torch.__file__).parent)
    return sorted(found, key=lambda path: not path.startswith(home))


def _openmp_team(path: str | None) -> Team | None:
    """The team of one OpenMP runtime (None: whatever the process exports), if it has the GNU entry point."""
    try:
        entry: Any = ctypes.CDLL(path).GOMP_parallel
    except (OSError, AttributeError, TypeError):
        return None
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return lambda function, block, threads: entry(function, block, threads, 0)


@cache
def _team() -> tuple[str, Team]:
    for path in (*_openmp_libraries(), None):
        team = _openmp_team(path)
        if team is not None:
            return f"OpenMP ({path or 'process'})", team
    return "Python threads", _pool_team


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="onepass")


def _pool_team(function: int, block: int, threads: int) -> None:
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    done = [_pool(threads).submit(call, block) for _ in range(threads - 1)]
    call(block)
    wait(done)


def run(function: int, block: bytes, threads: int) -> None:
    """Run ``function`` on ``threads`` threads; the block is copied, since the threads count rows in it."""
    memory = ctypes.create_string_buffer(block, len(block))
    _team()[1](function, ctypes.addressof(memory), threads)


def describe() -> str:
    """The thread layer in words."""
    return _team()[0]
