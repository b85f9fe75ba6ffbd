"""Running a kernel on torch's own threads.

torch's operators run on an OpenMP team. Kernels enter the same team through ``GOMP_parallel``, so that no second pool
competes with it. A call starts and joins its own threads if torch has no such runtime, and in a forked child, where
the team's threads are missing and GNU OpenMP would wait for them forever.

Either way a call is one C function that returns when all threads are done: an interrupt waits until then, and no thread
works on memory that its caller has released.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

from ..core.process import forked
from . import compile as compiler

Team = Callable[[int, int, int], None]
"""``team(function address, argument address, threads)``: call the function on every thread and wait."""


def _openmp_libraries() -> list[str]:
    """OpenMP runtimes mapped into this process, torch's own first."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    libraries = sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp")))
    home = str(Path(torch.__file__).parent)
    return sorted(libraries, key=lambda path: not path.startswith(home))


def _openmp_team(path: str | None) -> Team | None:
    """The team of one OpenMP runtime (None: any that the process exports), if it has the GNU entry point."""
    try:
        entry = ctypes.CDLL(path).GOMP_parallel
    except (OSError, AttributeError, TypeError):
        return None
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return lambda function, block, threads: entry(function, block, threads, 0)


_OWN: Final = "threads of each call"


@cache
def _team() -> tuple[str, Team]:
    for path in (*_openmp_libraries(), None):
        team = _openmp_team(path)
        if team is not None:
            return f"OpenMP ({path or 'process'})", team
    return _OWN, _own_team()


@dataclass(frozen=True)
class _OwnThreads:
    """The cache key of `_THREADS`."""


_THREADS: Final = """
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(i64, ptr)

define void @team(ptr %function, ptr %block, i64 %others) {
entry:
  %threads = alloca i64, i64 %others
  br label %more
more:
  %count = phi i64 [ 0, %entry ], [ %counted, %make ]
  %enough = icmp eq i64 %count, %others
  br i1 %enough, label %work, label %make
make:
  %next = getelementptr i64, ptr %threads, i64 %count
  %failed = call i32 @pthread_create(ptr %next, ptr null, ptr %function, ptr %block)
  %counted = add i64 %count, 1
  %made = icmp eq i32 %failed, 0
  br i1 %made, label %more, label %work
work:
  call void %function(ptr %block)
  br label %wait
wait:
  %left = phi i64 [ %count, %work ], [ %last, %join ]
  %done = icmp eq i64 %left, 0
  br i1 %done, label %end, label %join
join:
  %last = sub i64 %left, 1
  %at = getelementptr i64, ptr %threads, i64 %last
  %thread = load i64, ptr %at
  call i32 @pthread_join(i64 %thread, ptr null)
  br label %wait
end:
  ret void
}
"""
"""The caller and ``others`` more threads run a function that takes work until none is left. If a thread cannot be
started, the others do its share."""


@cache
def _own_team() -> Team:
    code = compiler.linked(_OwnThreads(), lambda features: _THREADS, "team")
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(code["team"])

    def team(function: int, block: int, threads: int, _alive: compiler.Code = code) -> None:
        entry(function, block, threads - 1)

    return team


def run(function: int, block: bytes, threads: int) -> None:
    """Run ``function`` on ``threads`` threads. They count rows in the block, so it is copied."""
    memory = ctypes.create_string_buffer(block, len(block))
    team = _own_team() if forked() else _team()[1]
    team(function, ctypes.addressof(memory), threads)


@cache
def entry() -> int:
    """The address of ``GOMP_parallel`` in the runtime that `run` uses, or 0 if each call starts its own threads."""
    for path in (*_openmp_libraries(), None):
        if _openmp_team(path) is not None:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


def describe() -> str:
    """The name of the thread layer."""
    return _OWN if forked() else _team()[0]
