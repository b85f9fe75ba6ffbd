"""Traces: the meaning of the slots, and a timeline's numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from onepass.errors import ContractError
from onepass.trace import GEMV_TRACE_EVENTS_PER_BLOCK, PHASES, GemvEvent, GmemTrace, NullTrace, TraceBuf
from tests.trace.recorded import BESIDE, FOUR, LAST, TAIL, timeline_of

# --- buffers --------------------------------------------------------------------------------------------------------


def test_event_slots() -> None:
    assert GEMV_TRACE_EVENTS_PER_BLOCK == 16
    assert [(event.value, event.name) for event in GemvEvent] == [
        (0, "ENTER"),
        (1, "K_LOOP_START"),
        (2, "K_LOOP_END"),
        (3, "BEFORE_ARRIVE"),
        (4, "AFTER_ARRIVE"),
        (5, "APPLY_START"),
        (6, "LOADS_DONE"),
        (7, "REDUCE_DONE"),
        (8, "APPLY_END"),
        (9, "EXIT"),
    ]


def test_null_trace_has_no_tensors() -> None:
    trace = NullTrace()
    assert isinstance(trace, TraceBuf)
    trace.store(0, 5)
    assert trace.tensors() == (None, None)
    assert repr(trace) == "NullTrace()"


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_gmem_trace(dtype: torch.dtype) -> None:
    trace = GmemTrace(torch.zeros(48, dtype=dtype), torch.zeros(3, dtype=torch.int32))
    assert isinstance(trace, TraceBuf)
    assert trace.blocks == 3
    trace.store(16 * 2 + GemvEvent.EXIT, 1 << 62)
    events = trace.events()
    assert (events.dtype, events.shape) == (torch.int64, (3, 16))
    assert events[2, 9] == 1 << 62
    assert events.count_nonzero() == 1
    assert trace.tensors()[0] is trace.buffer
    trace.tensors()[1].fill_(7)  # type: ignore[union-attr]
    trace.clear()
    assert events[2, 9] == 1 << 62, "events() must be a copy"
    assert not trace.events().any()
    assert trace.units is not None
    assert not trace.units.any()


def test_allocate_has_room_for_every_block() -> None:
    trace = GmemTrace.allocate(5, "cpu")
    assert trace.blocks == 5
    assert trace.buffer.numel() == 5 * 16
    assert trace.units is not None
    assert trace.units.shape == (5,)
    assert not trace.buffer.any()
    assert not trace.units.any()
    assert repr(trace) == "GmemTrace(blocks=5, device='cpu', units=True)"


LONG = torch.zeros(32, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LONG.float(),), "GmemTrace: `buffer` must be int64 or uint64, got float32"),
        ((LONG.view(2, 16),), "GmemTrace: `buffer` must be 1-D, got shape [2, 16]"),
        ((torch.zeros(64, dtype=torch.int64)[::2],), "GmemTrace: `buffer` must be contiguous, got strides [2]"),
        ((LONG[:20],), "GmemTrace: `buffer` must hold 16 slots per block, got 20 elements"),
        ((LONG, LONG[:2]), "GmemTrace: `units` must be int32, got int64"),
        ((LONG, LONG[:1].int()[0]), "GmemTrace: `units` must be 1-D, got shape []"),
        ((LONG, LONG[:4].int()[::2]), "GmemTrace: `units` must be contiguous, got strides [2]"),
        (
            (LONG, LONG[:3].int()),
            "GmemTrace: `units` must have one element for each of the 2 blocks of `buffer`, got 3",
        ),
        ((LONG, LONG[:2].int().to("meta")), "GmemTrace: `units` must be on cpu like `buffer`, got meta"),
    ],
)
def test_bad_buffers_are_rejected(arguments: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(ContractError) as error:
        GmemTrace(*arguments)
    assert str(error.value) == message


# --- numbers --------------------------------------------------------------------------------------------------------


def test_summary() -> None:
    summary = timeline_of(FOUR, bytes_read=5400).summary()
    everything = 300 + 4300 + 230 + 200 + 300 + 200 + 400 + 110
    expected = {
        "start": (4, 0.075, 0.1, 300),
        "stream": (4, 1.05, 1.2, 4300),
        "store": (4, 0.05, 0.1, 230),
        "arrive": (2, 0.1, 0.1, 200),
        "load y": (1, 0.3, 0.3, 300),
        "reduce": (1, 0.2, 0.2, 200),
        "apply": (1, 0.4, 0.4, 400),
        "exit": (2, 0.055, 0.09, 110),
    }
    assert [row.phase for row in summary.phases] == list(expected) == [phase.name for phase in PHASES]
    for row in summary.phases:
        count, median, longest, ns = expected[row.phase]
        assert row.count == count
        assert (row.median, row.max, row.share) == pytest.approx((median, longest, ns / everything))
    assert summary.total == pytest.approx(2.7)
    assert summary.start_spread == pytest.approx(1.3)
    assert summary.drain == pytest.approx(0.25)
    assert summary.apply_tail == pytest.approx(0.91)
    assert summary.gigabytes_a_second == pytest.approx(2.0)
    assert summary.figures() == (
        ("total", "2.70 us", "first block in to last block out"),
        ("read", "2.0 GB/s", "bytes to be read, over that total"),
        ("start spread", "1.30 us", "first block in to last block in"),
        ("drain", "0.25 us", "after the last K loop ends, 9.3% of the total"),
        ("norm", "0.91 us", "last arrival to normed output, 33.7% of the total"),
    )


def test_apply_tail_is_that_of_the_last_segment() -> None:
    early = {slot: ns // 2 for slot, ns in LAST.items()}
    assert timeline_of([(0, LAST), (1, early)]).summary().apply_tail == pytest.approx(0.91)


def test_block_kinds() -> None:
    assert [b.kind for b in timeline_of(FOUR).blocks] == ["normed", "normed, last to arrive", "tail", "tail"]


def test_blocks_that_wrote_nothing_are_omitted() -> None:
    found = timeline_of([(0, {}), (1, TAIL), (0, {}), (1, BESIDE)])
    assert [(block.index, block.unit) for block in found.blocks] == [(1, 1), (3, 1)]
    assert found.blocks[1].begin == 0, "time starts at the earliest event"
    assert found.total == 2100


def test_missing_slots() -> None:
    """Phases without both ends are omitted; the others are unaffected."""
    no_loop_start = {slot: ns for slot, ns in LAST.items() if slot != 1}
    no_exit = {slot: ns for slot, ns in TAIL.items() if slot != 9}
    found = timeline_of([(0, no_loop_start), (0, no_exit), (1, {0: 500})])
    assert [[span.phase for span in block.spans] for block in found.blocks] == [
        ["store", "arrive", "load y", "reduce", "apply", "exit"],
        ["start", "stream"],
        [],
    ]
    summary = found.summary()
    assert {row.phase: row.count for row in summary.phases}["stream"] == 1
    assert summary.total == pytest.approx(2.5)
    alone = timeline_of([(0, {0: 500})]).summary()
    assert (alone.phases, alone.total, alone.drain, alone.apply_tail) == ((), 0, None, None)
    assert [label for label, *_ in alone.figures()] == ["total", "start spread"]


def test_reserved_slots_are_not_events() -> None:
    assert timeline_of([(0, TAIL | {10: 9000, 15: 1})]).total == 1200


def test_time_is_monotonic_within_a_block() -> None:
    (block,) = timeline_of([(0, {0: 0, 1: 100, 2: 90, 9: 200})]).blocks
    assert [(span.begin, span.end) for span in block.spans] == [(0, 100), (100, 100), (100, 200)]


def test_empty_traces_are_rejected() -> None:
    with pytest.raises(ContractError, match=r"^Timeline: `trace` must hold a launch, got timestamps that are all 0$"):
        timeline_of([(0, {}), (1, {})])
