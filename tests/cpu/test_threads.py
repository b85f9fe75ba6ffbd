"""Threads of the CPU kernels: how many a call uses, what each takes, and that results do not depend on them."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

import onepass
from onepass.cpu import threads as thread_layer
from onepass.ops.mla_cache import cpu as mla_cache
from onepass.ops.mla_cache.launch import mla_spec
from onepass.ops.rms_norm import cpu as rms_norm
from onepass.ops.rms_norm.launch import row_spec
from tests.cpu.reference import BF16, F32, SPECS, Case


@pytest.mark.parametrize("name", ["norm_bf16", "fp8", "everything_hf"])
def test_result_is_independent_of_threads_and_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[name]
    m, n = 301, 1000
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(Case(spec, m, n).run().bytes())
        monkeypatch.setattr(thread_layer, "_team", lambda: ("own", thread_layer._own_team()))
        results.append(Case(spec, m, n).run().bytes())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    if spec.prologue is None:
        whole, alone = Case(spec, m, n), Case(spec, 1, n)
        alone.gamma = whole.gamma
        for row in (0, 157, 300):
            alone.x.copy_(whole.x[row : row + 1])
            alone.run()
            assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone.bytes(), results[0], strict=True))


def test_torchs_threads_are_used() -> None:
    described = rms_norm.describe()
    assert set(described) == {"cpu", "vector", "threads", "cache"}
    if sys.platform == "linux":
        assert "OpenMP" in described["threads"]


@pytest.mark.parametrize(("forked", "expected"), [(False, "torch's"), (True, "our own")])
def test_a_forked_child_does_not_use_torchs_threads(
    forked: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not inherited them: entering their team would never return."""
    entered: list[str] = []
    monkeypatch.setattr(thread_layer, "forked", lambda: forked)
    monkeypatch.setattr(thread_layer, "_team", lambda: ("", lambda *_: entered.append("torch's")))
    monkeypatch.setattr(thread_layer, "_own_team", lambda: lambda *_: entered.append("our own"))
    thread_layer.run(0, b"", 2)
    assert entered == [expected]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_number_of_own_threads(threads: int) -> None:
    called: list[int] = []
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
    address = ctypes.cast(work, ctypes.c_void_p).value
    assert address is not None
    thread_layer._own_team()(address, 7, threads)
    assert called == [7] * threads


def shared_out(
    call: Callable[[], object], threads: int, monkeypatch: pytest.MonkeyPatch, at: int = 16
) -> tuple[int, int] | None:
    """The number of threads of a call, and of rows or tokens that each takes at a time; None if it is serial."""
    seen: list[tuple[int, int]] = []

    def note(function: int, block: bytes, team: int) -> None:
        seen.append((team, struct.unpack_from("=q", block, at)[0]))

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(thread_layer, "run", note)
    call()
    return seen[0] if seen else None


@pytest.mark.parametrize(
    ("rows", "n", "threads", "expected"),
    [
        (1, 131072, 4, None),
        (2, 32767, 4, None),
        (2, 32768, 4, (2, 1)),
        (16, 4096, 2, (2, 8)),
        (32, 4096, 4, (4, 8)),
        (64, 4096, 4, (4, 4)),
        (33, 4096, 64, (9, 4)),
        (16384, 128, 4, (4, 256)),
    ],
)
def test_threads_and_chunks_of_rows(
    rows: int, n: int, threads: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread takes all its rows at once, or at least a quarter of them. A residual is an input too."""
    x = torch.zeros(rows, n, dtype=BF16)
    assert shared_out(lambda: onepass.rms_norm(x, x[0]), threads, monkeypatch) == expected
    if rows == 16:
        half = x[:8]
        call = partial(onepass.rms_norm, half, x[0])
        assert shared_out(call, threads, monkeypatch) is None
        assert shared_out(partial(call, residual=half), threads, monkeypatch) == (2, 4)


@pytest.mark.parametrize(
    ("rows", "n", "threads", "expected"),
    [
        (1, 131072, 4, None),
        (2, 65534, 4, None),
        (2, 65536, 4, (2, 1)),
        (32, 4096, 4, (4, 4)),
        (33, 4096, 64, (9, 4)),
        (16384, 128, 4, (4, 256)),
    ],
)
def test_threads_and_chunks_of_q_and_k(
    rows: int, n: int, threads: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of q and k count together."""
    x = torch.zeros(rows, n, dtype=BF16)
    halves = x[:, : n // 2], x[:, n // 2 :]
    call = partial(onepass.qk_rms_norm, *halves, halves[0][0], halves[1][0])
    assert shared_out(call, threads, monkeypatch) == expected


@pytest.mark.parametrize(
    ("tokens", "threads", "expected"),
    [(1, 4, None), (31, 4, None), (32, 4, (4, 4)), (33, 64, (9, 4)), (512, 4, (4, 8))],
)
def test_threads_and_chunks_of_tokens(
    tokens: int, threads: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In MLA's cache write, 31 heads and the entry of a token have 4096 columns."""
    q, kv = torch.zeros(tokens, 31, 64, dtype=BF16), torch.zeros(tokens, 2048 + 64, dtype=BF16)
    cache, slots = onepass.PagedKVCache(torch.zeros(tokens, 1, 2048 + 64, dtype=BF16)), torch.arange(tokens)

    def call() -> Tensor:
        return onepass.fused_rope_rmsnorm_quantization(
            None, q, kv, None, None, kv[0, :2048], cache, rope_dim=0, slot_mapping=slots
        )

    assert (
        shared_out(
            call, threads, monkeypatch, at=mla_cache.layout(mla_spec(BF16, BF16, BF16, BF16, BF16)).offsets["chunk"]
        )
        == expected
    )


def test_many_callers_at_once() -> None:
    spec = row_spec(BF16, F32, None, F32, "once")
    cases = [Case(spec, 3, 300, seed) for seed in range(8)]
    callers = [threading.Thread(target=case.run) for case in cases]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for case in cases:
        case.check()
