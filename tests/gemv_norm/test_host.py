"""Host work around a GEMV launch: timestamps for a buffer that only has `store`, and the counter in debug mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.errors import ContractError
from onepass.testing.tensors import same_bytes
from onepass.trace import GemvEvent, GmemTrace, NullTrace, TraceBuf

ROOT = Path(__file__).resolve().parents[2]
I32 = torch.int32


class Listed(TraceBuf):
    """A buffer with only what the reference's interface requires."""

    def __init__(self) -> None:
        self.stamps: list[tuple[int, int]] = []

    def store(self, offset: int, ts: int) -> None:
        self.stamps.append((offset, ts))


def inputs(m: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(m, 256), torch.randn(200, 256), torch.randn(96), torch.randn(64)


def scratch(trace: TraceBuf, m: int = 3, counter: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    act, weight, first, second = inputs(m)
    outs = torch.zeros(m, 96), torch.zeros(m, 64), torch.zeros(m, 40)
    counter = torch.zeros(2, dtype=I32) if counter is None else counter
    onepass.gemv_and_partial_norm_with_scratch(
        outs[0], outs[2], act, weight, first, 1e-6, counter, trace, segments=[second], segment_outputs=[outs[1]]
    )
    return outs


def slots_of(events: Tensor) -> dict[int, int]:
    """The number of blocks that reached each slot."""
    return {slot: int((events[:, slot] > 0).sum()) for slot in range(16)}


def test_buffer_with_only_store_receives_every_timestamp_in_order() -> None:
    listed = Listed()
    act, weight, first, second = inputs()
    blocks = onepass.gemv_trace_blocks(act, weight, first, [second])
    outs = scratch(listed)
    offsets = [offset for offset, _ in listed.stamps]
    assert offsets == sorted(set(offsets)) and offsets[0] >= 0 and offsets[-1] < 16 * blocks
    assert all(isinstance(ts, int) and ts > 0 for _, ts in listed.stamps)
    memory = GmemTrace.allocate(blocks, "cpu")
    assert all(same_bytes(a, b) for a, b in zip(outs, scratch(memory), strict=True))
    events = torch.zeros(blocks, 16, dtype=torch.int64)
    for offset, ts in listed.stamps:
        events.view(-1)[offset] = ts
    # which block arrives last differs from call to call; how many blocks reach each event does not
    assert slots_of(events) == slots_of(memory.events())
    assert slots_of(events)[GemvEvent.ENTER] == blocks and slots_of(events)[GemvEvent.APPLY_END] == 2
    assert (events[:, GemvEvent.ENTER] <= events[:, GemvEvent.EXIT]).all()


def test_timestamps_are_stored_after_the_results() -> None:
    results: list[bool] = []
    act, weight, gamma, _ = inputs(1)
    normed, unnormed, counter = torch.zeros(1, 96), torch.zeros(1, 104), torch.zeros(1, dtype=I32)
    expected = onepass.gemv_and_partial_norm(act, weight, gamma)

    class Looking(TraceBuf):
        def store(self, offset: int, ts: int) -> None:
            results.append(same_bytes(normed, expected[0]) and same_bytes(unnormed, expected[1]) and not counter.any())

    onepass.gemv_and_partial_norm_with_scratch(normed, unnormed, act, weight, gamma, 1e-6, counter, Looking())
    assert results and all(results)


def test_memory_written_by_the_kernel_is_not_stored_again() -> None:
    class Both(TraceBuf):
        def __init__(self, memory: GmemTrace) -> None:
            self.memory = memory

        def store(self, offset: int, ts: int) -> None:
            raise AssertionError("the kernel writes this")

        def tensors(self) -> tuple[Any, Any]:
            return self.memory.tensors()

    both = Both(GmemTrace.allocate(onepass.gemv_trace_blocks(*inputs()[:3], [inputs()[3]]), "cpu"))
    scratch(both)
    assert both.memory.events().any()
    assert [buf.stored_by_host for buf in (both, both.memory, NullTrace(), Listed())] == [False, False, False, True]


def test_no_rows_no_timestamps() -> None:
    listed = Listed()
    scratch(listed, m=0)
    assert listed.stamps == []


def test_bad_call_stores_nothing() -> None:
    listed, (act, weight, gamma, _) = Listed(), inputs()
    with pytest.raises(ContractError, match="_with_scratch: `weight` must have shape"):
        onepass.gemv_and_partial_norm_with_scratch(
            torch.zeros(3, 96), torch.zeros(3, 104), act, weight[:, 1:], gamma, 1e-6, torch.zeros(1, dtype=I32), listed
        )
    with pytest.raises(ContractError, match="_with_scratch: `act` must be a tensor"):
        wrong: Any = [1.0]
        onepass.gemv_and_partial_norm_with_scratch(
            torch.zeros(3, 96), torch.zeros(3, 104), wrong, weight, gamma, 1e-6, torch.zeros(1, dtype=I32), listed
        )
    assert listed.stamps == []


# --- the counter in debug mode ---------------------------------------------------------------------------------------


def test_nonzero_counter_is_rejected_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_DEBUG", "1")
    scratch(NullTrace())
    for counter, shown in (
        (torch.tensor([0, 3], dtype=I32), r"\[0, 3\]"),
        (torch.tensor([-1, 0], dtype=I32), r"\[-1, 0\]"),
    ):
        with pytest.raises(
            ContractError,
            match=rf"^gemv_and_partial_norm_with_scratch: `finish_counter` must be zero when a call begins, got {shown}$",
        ):
            scratch(NullTrace(), counter=counter)
    scratch(NullTrace(), counter=torch.tensor([0, 0, 9], dtype=I32))  # no segment counts in the third


def test_counter_is_not_read_outside_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEPASS_DEBUG", raising=False)
    counter = torch.tensor([1, 0], dtype=I32)
    scratch(NullTrace(), counter=counter)
    assert counter[0] != 0, "no block arrived last"


def test_recorded_calls_are_checked_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEPASS_DEBUG", raising=False)
    counter = torch.zeros(2, dtype=I32)
    for _ in range(4):
        scratch(NullTrace(), counter=counter)
    monkeypatch.setenv("ONEPASS_DEBUG", "1")
    scratch(NullTrace(), counter=counter)
    with pytest.raises(ContractError, match="`finish_counter` must be zero"):
        scratch(NullTrace(), counter=torch.ones(2, dtype=I32))


INTERPRETED = """
import torch, onepass
from onepass.testing.runner import running_on
torch.manual_seed(0)
act, weight, gamma = torch.randn(1, 128), torch.randn(24, 128), torch.randn(16)
counter = torch.ones(1, dtype=torch.int32)
with running_on("interpreter"):
    try:
        onepass.gemv_and_partial_norm_with_scratch(torch.zeros(1, 16), torch.zeros(1, 8), act, weight, gamma, 1e-6, counter)
    except onepass.ContractError as error:
        print(error)
"""


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
def test_gpu_backend_checks_the_counter_too() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1", "ONEPASS_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "gemv_and_partial_norm_with_scratch: `finish_counter` must be zero" in done.stdout, done.stdout + done.stderr
