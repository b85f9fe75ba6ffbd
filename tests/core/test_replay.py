"""Replay: calls like an earlier one repeat its launch on their own tensors, and no other calls do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core import replay
from onepass.core.contract import Arg, Contract, Option, Out
from onepass.formats import FLOATS
from tests.core.fast_path import Memory, unwatched_call

CONTRACT = Contract(
    "scaled_sum",
    args={
        "x": Arg("M N", "rows", FLOATS),
        "y": Arg("M N", "rows", "(x.dtype,)", optional=True),
        "places": Arg("M", "indices", (torch.int64,), optional=True, sample="index"),
    },
    options={"factor": Option("float", 1.0, "factor")},
    outs={
        "total": Out("M N", "x.dtype", "factor * (x + y)", "out"),
        "sums": Out("M 1", "torch.float32", "sums", "sums_out"),
    },
    rules=(),
    rounding="none",
)


class Launcher:
    """A stand-in for a loaded kernel."""

    addresses = (0, 1, 2, 3)

    broken = False

    def __init__(self) -> None:
        self.grids: list[int] = []
        self.launched: list[tuple[Any, ...]] = []

    def __call__(self, grid: int, arguments: Any) -> None:
        if replay.tape.on:
            replay.note(self, grid, arguments)
        if self.broken:
            raise RuntimeError("device lost")
        self.grids.append(grid)
        self.launched.append(tuple(arguments))

    def prepare(self, grid: int, arguments: Any, places: Any) -> Any:
        def launch(*addresses: int) -> None:
            changed = dict(zip(places, addresses, strict=True))
            self(grid, [changed.get(i, a) for i, a in enumerate(arguments)])

        return launch


class Op:
    """The contract with a kernel that counts its calls; ``scratch`` passes an address of unknown origin."""

    def __init__(
        self,
        scratch: bool = False,
        source: replay.Source | None = None,
        memory: Callable[..., None] | None = None,
    ) -> None:
        self.asked = 0
        self.scratch = scratch
        self.source = source
        self.launcher = Launcher()
        self.call = unwatched_call(CONTRACT, self.kernel, memory)

    def kernel(self, spec_cache: Any, a: Any) -> None:
        self.asked += 1
        mine = 0
        if self.source is not None:
            mine = self.source[0]()[0].data_ptr()
            replay.mark(mine, self.source)
        elif self.scratch:
            mine = torch.empty(4).data_ptr()
        second = None if a.y is None else a.y.data_ptr()
        last = mine if self.scratch else a.sums_out.data_ptr()
        self.launcher(a.x.shape[0], [a.x.data_ptr(), second, a.out.data_ptr(), last, a.factor])

    def __call__(self, x: Tensor, y: Tensor | None = None, places: Tensor | None = None, factor: float = 1.0) -> Any:
        return self.call(x, y, places, factor, None, None)


def test_like_call_skips_the_kernel_function_and_uses_its_own_tensors() -> None:
    op = Op()
    first, second = torch.randn(3, 8), torch.randn(3, 8)
    a = op(first, second)
    b = op(second, first)
    assert op.asked == 1 and op.launcher.grids == [3, 3]
    assert op.launcher.launched[0] == (first.data_ptr(), second.data_ptr(), a[0].data_ptr(), a[1].data_ptr(), 1.0)
    assert op.launcher.launched[1] == (second.data_ptr(), first.data_ptr(), b[0].data_ptr(), b[1].data_ptr(), 1.0)
    for mine, other in zip(a, b, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (other.shape, other.stride(), other.dtype)
        assert mine.data_ptr() != other.data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (torch.randn(4, 8), torch.randn(4, 8), None, 1.0),
        lambda x, y: (x.bfloat16(), y.bfloat16(), None, 1.0),
        lambda x, y: (torch.randn(3, 16)[:, :8], y, None, 1.0),
        lambda x, y: (torch.randn(25)[1:].view(3, 8), y, None, 1.0),
        lambda x, y: (x, None, None, 1.0),
        lambda x, y: (x, y, None, 2.0),
        lambda x, y: (x, y, torch.zeros(3, dtype=torch.int64), 1.0),
    ],
    ids=["rows", "dtype", "strides", "alignment", "absent", "option", "indices"],
)
def test_different_calls_are_not_replayed(change: Any) -> None:
    op = Op()
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    op(x, y)
    op(*change(x, y))
    assert op.asked == 2
    op(x, y)
    assert op.asked == 2


def test_launches_with_unknown_addresses_are_not_replayed() -> None:
    op = Op(scratch=True)
    for _ in range(3):
        op(torch.randn(3, 8), torch.randn(3, 8))
    assert op.asked == 3


def test_same_tensor_twice_is_replayed_only_as_such() -> None:
    op = Op()
    same, other = torch.randn(3, 8), torch.randn(3, 8)
    for tensor in (same, other):
        op(tensor, tensor)
        assert op.launcher.launched[-1][:2] == (tensor.data_ptr(), tensor.data_ptr())
    assert op.asked == 1
    op(same, other)
    assert op.asked == 2 and op.launcher.launched[-1][:2] == (same.data_ptr(), other.data_ptr())


def test_inputs_may_overlap_anywhere() -> None:
    """Distances between tensors that are only read do not matter."""
    op = Op()
    for place in (4, 8, 12):
        parent = torch.randn(3, 32)
        x, y = parent[:, :8], parent[:, place : place + 8]
        op(x, y)
        assert op.asked == 1 and op.launcher.launched[-1][:2] == (x.data_ptr(), y.data_ptr())


def negated(shape: tuple[int, ...]) -> Tensor:
    """A negated view of ones: -1, with other elements in between."""
    return torch.complex(torch.zeros(shape), torch.ones(shape)).conj().imag


def test_negated_view_is_not_replayed() -> None:
    """With one column it has the shape and strides of a valid call."""
    op = Op()
    for asked in (1, 1):
        op(torch.randn(4, 2)[:, :1])
        assert op.asked == asked
    view = negated((4, 1))
    assert view.is_neg() and view.stride() == (2, 2) and len(op.launcher.launched) == 2
    op(torch.randn(4, 8))
    for x in (view, view.flatten().unsqueeze(1), torch._neg_view(torch.randn(4, 8))):
        with pytest.raises(onepass.ContractError, match="`x` must not be a negated view"):
            op(x)
    assert len(op.launcher.launched) == 3


class TestTheCallersOutputs:
    def test_are_written_and_returned(self) -> None:
        op = Op()
        for asked in (1, 1):
            x, out, sums = torch.randn(3, 8), torch.empty(3, 8), torch.empty(3, 1)
            results = op.call(x, None, None, 1.0, out, sums)
            assert op.asked == asked and results[0] is out and results[1] is sums
            assert op.launcher.launched[-1] == (x.data_ptr(), None, out.data_ptr(), sums.data_ptr(), 1.0)

    def test_have_new_versions(self) -> None:
        op = Op()
        x, out, sums = torch.randn(3, 8), torch.empty(3, 8), torch.empty(3, 1)
        for version in (1, 2, 3):
            op.call(x, None, None, 1.0, out, sums)
            assert (x._version, out._version, sums._version, op.asked) == (0, version, version, 1)

    def test_of_inference_mode_are_validated_again(self) -> None:
        judged: list[Any] = []
        op = Op(memory=lambda inputs, outputs: judged.append(outputs))
        x, sums = torch.randn(3, 8), torch.empty(3, 1)
        with torch.inference_mode():
            out = torch.empty(3, 8)
            for _ in range(2):
                op.call(x, None, None, 1.0, out, sums)
        assert len(judged) == 1
        op.call(x, None, None, 1.0, out, sums)
        assert len(judged) == 2

    def test_in_place_and_out_of_place_are_different_calls(self) -> None:
        op = Op()
        x, out, sums = torch.randn(3, 8), torch.empty(3, 8), torch.empty(3, 1)
        op.call(x, None, None, 1.0, x, sums)
        op.call(out, None, None, 1.0, out, sums)
        assert op.asked == 1 and op.launcher.launched[-1][0] == op.launcher.launched[-1][2] == out.data_ptr()
        op.call(x, None, None, 1.0, out, sums)
        assert op.asked == 2

    @pytest.mark.parametrize("shift", [-20, -16, -8, 8, 16, 20])
    def test_overlap_is_validated_again(self, shift: int) -> None:
        """Tensors of 3 x 8 do not overlap from 24 elements on; closer ones must be validated again."""
        judged: list[Any] = []
        op = Op(memory=lambda inputs, outputs: judged.append(outputs))
        parent, sums = torch.randn(128), torch.empty(3, 1)
        x = parent[32:56].view(3, 8)
        op.call(x, None, None, 1.0, parent[72:96].view(3, 8), sums)
        op.call(x, None, None, 1.0, parent[56:80].view(3, 8), sums)
        assert len(judged) == 1
        op.call(x, None, None, 1.0, parent[32 + shift : 56 + shift].view(3, 8), sums)
        assert len(judged) == 2

    def test_negated_view_is_rejected_after_a_valid_call(self) -> None:
        op = Op()
        x, out = torch.randn(3, 8), torch.empty(3, 8)
        op.call(x, None, None, 1.0, out, torch.empty(3, 2)[:, :1])
        with pytest.raises(onepass.ContractError, match="`sums_out` must not be a negated view"):
            op.call(x, None, None, 1.0, out, negated((3, 1)))
        assert len(op.launcher.launched) == 1

    def test_slices_of_one_parent_must_keep_their_distance(self) -> None:
        op = Op()
        sums = torch.empty(3, 1)
        for asked, places in ((1, (0, 8)), (1, (0, 8)), (2, (0, 12)), (3, (8, 0))):
            parent = torch.randn(3, 32)
            x, out = (parent[:, place : place + 8] for place in places)
            op.call(x, None, None, 1.0, out, sums)
            assert op.asked == asked, places


def test_marked_memory_is_allocated_again() -> None:
    memory = Memory()
    op, pieces = Op(scratch=True, source=memory.source), memory.pieces
    for _ in range(3):
        op(torch.randn(3, 8))
    assert op.asked == 1 and [a[3] for a in op.launcher.launched] == [p.data_ptr() for p in pieces] and len(pieces) == 3
    op.launcher.broken = True
    with pytest.raises(RuntimeError, match="lost"):
        op(torch.randn(3, 8))
    assert memory.discarded == [4]


def test_debug_mode_replays_nothing_with_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Op()
    places = torch.zeros(3, dtype=torch.int64)
    op(torch.randn(3, 8), None, places)
    op(torch.randn(3, 8), None, places)
    assert op.asked == 1
    monkeypatch.setenv("ONEPASS_DEBUG", "1")
    op(torch.randn(3, 8), None, places)
    assert op.asked == 2


def test_replayed_call_still_rejects_gradients() -> None:
    op = Op()
    x = torch.randn(3, 8)
    op(x)
    with pytest.raises(onepass.ContractError, match="scaled_sum"):
        op(x.requires_grad_())
    with torch.no_grad():
        op(x)
    assert op.asked == 1


def test_failed_launch_is_not_recorded() -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    call = unwatched_call(CONTRACT, broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            call(torch.randn(3, 8), None, None, 1.0, None, None)
        assert not replay.tape.on


def test_threads_do_not_record_each_other() -> None:
    """Two threads record at the same time: each recording contains only its own launch."""
    op = Op()
    inside, done = threading.Event(), threading.Event()
    x, out = torch.randn(3, 8), torch.randn(3, 8)
    slow = Launcher()
    replays: list[Any] = []

    def record_slowly() -> None:
        def run() -> None:
            inside.set()
            assert done.wait(600)
            slow(7, [x.data_ptr(), None, out.data_ptr(), None, 1.0])

        replays.append(replay.record(run, [x, None], [x, out], [1], 1))

    thread = threading.Thread(target=record_slowly)
    thread.start()
    assert inside.wait(600)
    op(torch.randn(3, 8))  # while the other records
    op(torch.randn(3, 8))
    assert op.asked == 1, "remembered although another thread was recording"
    done.set()
    thread.join(600)
    (remembered,) = replays
    assert remembered is not None and not replay.tape.on
    other = torch.randn(3, 8)
    (made,) = remembered(other, None)
    assert slow.grids == [7, 7] and op.launcher.grids == [3, 3]
    assert slow.launched[1] == (other.data_ptr(), None, made.data_ptr(), None, 1.0)


def test_launches_of_other_threads_are_not_recorded() -> None:
    """Threads that record at the same time, in every order, record a call of one launch and never one of two."""
    for launches in ((1, 1), (1, 2), (2, 1)):
        tensors = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in launches]
        launchers = [Launcher(), Launcher()]
        steps = threading.Barrier(2, timeout=600)
        found: list[Any] = [None, None]

        def work(
            me: int,
            launches: Any = launches,
            tensors: Any = tensors,
            launchers: Any = launchers,
            steps: Any = steps,
            found: Any = found,
        ) -> None:
            x, out = tensors[me]

            def run() -> None:
                for step in range(2):
                    steps.wait()
                    if step < launches[me]:
                        launchers[me](me, [x.data_ptr(), None, out.data_ptr(), None, 1.0])
                steps.wait()

            found[me] = replay.record(run, [x, None], [x, out], [1], 1)

        threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert [remembered is not None for remembered in found] == [count == 1 for count in launches]
        assert not replay.tape.on


def test_many_threads_record_and_replay() -> None:
    """Eight threads with own and shared shapes: every launch has the addresses of its own call."""
    op = Op()
    wrong: list[Any] = []
    start = threading.Barrier(8, timeout=600)

    def work(me: int) -> None:
        start.wait()
        for turn in range(200):
            x, y = torch.empty(1 + (me + turn) % 5, 8), torch.empty(1 + (me + turn) % 5, 8)
            out, sums = op(x, y)
            expected = (x.data_ptr(), y.data_ptr(), out.data_ptr(), sums.data_ptr(), 1.0)
            if expected not in op.launcher.launched or out.shape != x.shape or len(sums) != len(x):
                wrong.append((me, turn))

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not wrong and len(op.launcher.grids) == 1600
    assert op.asked <= 5 * 8 and not replay.tape.on
    asked = op.asked
    for rows in range(1, 6):
        op(torch.empty(rows, 8), torch.empty(rows, 8))
    assert op.asked == asked, "all five are remembered"


def test_number_of_recordings_is_limited() -> None:
    op = Op()
    for rows in range(1, 5000):
        op(torch.empty(rows, 1))
    assert op.asked == 4999
    op(torch.empty(4999, 1))
    assert op.asked == 4999
