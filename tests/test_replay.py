"""Launches remembered: calls like an earlier one launch what that one did, on their own tensors, and nothing else does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import replay
from onepass.checker import compile_call
from onepass.contract import Arg, Contract, Option, Out
from onepass.formats import FLOATS

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
    """As much of a loaded kernel as a call needs."""

    addresses = (0, 1, 2, 3)

    def __init__(self) -> None:
        self.grids: list[int] = []
        self.launched: list[tuple[Any, ...]] = []

    def __call__(self, grid: int, arguments: Any) -> None:
        if replay.recording is not None:
            replay.note(self, grid, arguments)
        self.grids.append(grid)
        self.launched.append(tuple(arguments))


class Op:
    """The contract with a kernel that counts how often it is asked; ``scratch`` passes an address of its own."""

    def __init__(self, scratch: bool = False) -> None:
        self.asked = 0
        self.scratch = scratch
        self.launcher = Launcher()
        self.call = compile_call(
            CONTRACT,
            self.kernel,
            watched=lambda: False,
            special=lambda *values: False,
            dispatch=lambda *values: None,
            memory=lambda *values: None,
            on_gpu=lambda tensor: True,
        )

    def kernel(
        self, notes: Any, x: Tensor, y: Tensor | None, places: Tensor | None, factor: float, out: Tensor, sums: Tensor
    ) -> None:
        self.asked += 1
        mine = torch.empty(4).data_ptr() if self.scratch else None
        second = None if y is None else y.data_ptr()
        self.launcher(
            x.shape[0], [x.data_ptr(), second, out.data_ptr(), mine if self.scratch else sums.data_ptr(), factor]
        )

    def __call__(self, x: Tensor, y: Tensor | None = None, places: Tensor | None = None, factor: float = 1.0) -> Any:
        return self.call(x, y, places, factor, None, None)


def test_a_call_like_another_asks_nobody_and_has_its_own_tensors() -> None:
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
def test_whatever_the_launch_depends_on_is_asked_anew(change: Any) -> None:
    op = Op()
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    op(x, y)
    op(*change(x, y))
    assert op.asked == 2
    op(x, y)
    assert op.asked == 2


def test_what_cannot_be_told_apart_is_not_replayed() -> None:
    for op, arguments in (
        (Op(scratch=True), (torch.randn(3, 8), torch.randn(3, 8))),
        (Op(), (torch.randn(3, 8),) * 2),
        (Op(), (torch.randn(3, 8), torch.randn(3, 8), torch.zeros(3, dtype=torch.int64))),
        (Op(), (torch.empty(0, 8), torch.empty(0, 8))),
    ):
        for _ in range(3):
            op(*arguments)
        assert op.asked == 3
    op = Op()
    same = torch.randn(3, 8)
    op(same, same)
    assert op.asked == 1
    op(torch.randn(3, 8), torch.randn(3, 8))
    assert op.asked == 2, "one address twice says nothing about two"


def test_a_remembered_call_still_refuses_gradients() -> None:
    op = Op()
    x = torch.randn(3, 8)
    op(x)
    with pytest.raises(onepass.ContractError, match="scaled_sum"):
        op(x.requires_grad_())
    with torch.no_grad():
        op(x)
    assert op.asked == 1


def test_a_failing_launch_is_not_remembered() -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    call = compile_call(
        CONTRACT, broken, watched=lambda: False, special=lambda *v: False, dispatch=lambda *v: None,
        memory=lambda *v: None, on_gpu=lambda t: True,
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            call(torch.randn(3, 8), None, None, 1.0, None, None)
        assert replay.recording is None


def test_threads_do_not_record_each_other() -> None:
    op = Op()
    inside, done = threading.Event(), threading.Event()

    def slow() -> None:
        def run() -> None:
            inside.set()
            done.wait(10)

        assert replay.record(run, [torch.randn(1)], [torch.randn(1)]) is None

    thread = threading.Thread(target=slow)
    thread.start()
    inside.wait(10)
    op(torch.randn(3, 8))  # while the other records: runs, and is not remembered
    done.set()
    thread.join()
    op(torch.randn(3, 8))
    assert op.asked == 2


def test_the_oldest_are_forgotten() -> None:
    op = Op()
    for rows in range(1, 5000):
        op(torch.empty(rows, 1))
    assert op.asked == 4999
    op(torch.empty(4999, 1))
    assert op.asked == 4999
