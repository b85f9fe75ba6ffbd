"""Promises about threads, part of ``python -m tools.checks --promises``: concurrent calls of all ops change no byte."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from math import gcd
from typing import Any, Final

import torch
from torch import Tensor

from onepass.testing.tensors import same_bytes
from tests.ops import each
from tests.oracle.runner import MODULES

Promise = Callable[[], str | None]
THREADS: Final = 8
TIMEOUT: Final = 600.0
"""Seconds after which threads count as deadlocked."""
Job = tuple[Any, Any]
"""A module of cases and one of its cases."""


def jobs() -> list[Job]:
    """What tests/<op>/cases.py has for threads, of every op."""
    return [(MODULES[case.op], case) for case in chain(*each("cases", "THREADED"))]


def results(job: Job, device: str, seed: int = 0) -> tuple[Tensor, ...]:
    """What the job's call returns for inputs of that seed."""
    module, case = job
    found: tuple[Tensor, ...] = module.call(case, module.inputs(case, device, seed))
    return found


def thread_promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise that can be tested on ``device``."""
    if device == "interpreter":
        return  # it runs one kernel at a time
    yield f"{THREADS} threads at once change no byte: all ops, each thread in its own order", partial(at_once, device)
    yield f"{THREADS} threads at once change no byte: all in the same call", partial(at_once, device, together=True)


def at_once(device: str, rounds: int = 3, together: bool = False) -> str | None:
    """Call every op from all threads and compare with calls of one thread, made afterwards.

    On a GPU, odd threads use their own streams.
    """
    work = jobs()
    module_inputs = [[m.inputs(c, device, seed) for m, c in work] for seed in range(THREADS)]
    if device == "cuda":
        torch.cuda.synchronize()
    found: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
    errors: list[str] = []
    gate = threading.Barrier(THREADS, timeout=TIMEOUT)
    stride = next(n for n in (5, 7, 11, 13) if gcd(n, len(work)) == 1)  # so that it reaches every job

    def call_all(me: int) -> None:
        try:
            for turn in range(rounds):
                for step in range(len(work)):
                    index = step if together else (step * stride + me * 3 + turn) % len(work)
                    if together or step == 0:
                        gate.wait()
                    module, case = work[index]
                    found[me, turn, index] = module.call(case, module_inputs[me][index])
        except BaseException as error:
            errors.append(f"thread {me}: {type(error).__name__}: {error}")
            gate.abort()

    def thread(me: int) -> None:
        if device == "cuda" and me % 2:
            with torch.cuda.stream(torch.cuda.Stream()):
                call_all(me)
        else:
            call_all(me)

    threads = [threading.Thread(target=thread, args=(me,), daemon=True) for me in range(THREADS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(TIMEOUT)
    if any(one.is_alive() for one in threads):
        return f"threads are stuck after {TIMEOUT:.0f} s"
    if errors:
        return errors[0]
    if device == "cuda":
        torch.cuda.synchronize()
    return _compare(work, module_inputs, found, rounds)


def _compare(
    work: list[Job],
    given: list[list[dict[str, Any]]],
    found: dict[tuple[int, int, int], tuple[Tensor, ...]],
    rounds: int,
) -> str | None:
    for me, arguments in enumerate(given):
        for index, (module, case) in enumerate(work):
            alone = module.call(case, arguments[index])
            if me == 0 and (wrong := module.verify(case, arguments[index], alone)):
                return f"{case.op}, {case.name}, alone: {wrong}"
            for turn in range(rounds):
                for a, b in zip(found[me, turn, index], alone, strict=True):
                    if not same_bytes(a, b):
                        return f"{case.op}, {case.name}: thread {me}, round {turn} differs"
    return None
