"""Promises about threads, part of ``python -m tools.checks --promises``: concurrent calls of all ops change no byte."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from onepass.formats import FLOATS
from onepass.testing.tensors import same_bytes
from tests.gemv_norm import checks as gemv_norm
from tests.linear import checks as linear
from tests.mla_cache import checks as mla_cache
from tests.mla_cache.checks import MlaCase
from tests.oracle.case import Case
from tests.qk_cache import checks as qk_cache
from tests.qk_cache.checks import QkCacheCase
from tests.qk_norm import checks as qk_norm
from tests.qk_norm.checks import QkCase, Turn
from tests.rms_norm import checks as rms_norm

Promise = Callable[[], str | None]
THREADS: Final = 8
TIMEOUT: Final = 600.0
"""Seconds after which threads count as deadlocked."""
BF16, _, F32 = FLOATS

Job = tuple[Any, Any]
"""A module of cases and one of its cases."""


def jobs() -> list[Job]:
    """Each op with little work, which the calling thread does, and with enough to split on a CPU."""
    rows = [
        Case("rms_norm", "threads", (7,), 640),
        Case("rms_norm", "threads", (150,), 1024, F32, residual=F32),
        Case("rms_norm_fused_fp8", "threads", (3,), 512, residual=BF16),
        Case("rms_norm_fused_fp8", "threads", (140,), 1024, options={"group_size": 128}),
    ]
    gemvs = [
        gemv_norm.Case("threads", 3, 96, 320, (64,)),
        gemv_norm.Case("threads", 2, 400, 700, (130, 129)),
    ]
    linears = [
        linear.Case("threads", 3, 96, 320),
        linear.Case("threads", 2, 400, 700, gamma=BF16, residual=F32, options={"activation": "silu_mul"}),
        linear.Case("threads", 40, 300, 400, weight=torch.float8_e4m3fn, scale="block", gamma=F32),
    ]
    qks = [QkCase(op, "threads", (5,), 256, 64) for op in (qk_norm.SUMS, qk_norm.MEANS, qk_norm.APPLY, qk_norm.FUSED)]
    qks.append(QkCase(qk_norm.FUSED, "threads", (70,), 1536, 512, turn=Turn("half", 32, 64)))
    mlas = [MlaCase("threads"), MlaCase("threads", ((0, 70), (3, 50)), heads=16, scale="token", style="half")]
    writes = [QkCacheCase("threads"), QkCacheCase("threads", (4, 60), 16, 4, norm="whole", layout="dense")]
    return [
        *((rms_norm, case) for case in rows),
        *((gemv_norm, case) for case in gemvs),
        *((linear, case) for case in linears),
        *((qk_norm, case) for case in qks),
        *((mla_cache, case) for case in mlas),
        *((qk_cache, case) for case in writes),
    ]


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

    def call_all(me: int) -> None:
        try:
            for turn in range(rounds):
                for step in range(len(work)):
                    index = step if together else (step * 5 + me * 3 + turn) % len(work)  # 5 shares no factor with 16
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
