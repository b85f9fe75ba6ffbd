"""An op's calls in Python: validated, allocated and launched each time, and recorded for nobody but the call itself."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core import native, recording
from onepass.core.op import MAX_REMEMBERED, check_memory
from tests.core.fast_path import NO_OPTIONS, Op


@pytest.fixture(autouse=True)
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extension, whether it was built or not."""
    monkeypatch.setattr(native, "table", lambda contract: None)


def rows() -> Tensor:
    return torch.randn(3, 8)


def negated(shape: tuple[int, ...]) -> Tensor:
    """A negated view of ones: -1, with other elements in between."""
    return torch.complex(torch.zeros(shape), torch.ones(shape)).conj().imag


def test_each_call_launches_on_its_own_tensors() -> None:
    op = Op()
    for asked in (1, 2, 3):
        x, y = rows(), rows()
        out, sums = op.of(x, y)
        assert op.table is None and op.asked == asked
        assert op.launcher.slow[-1] == (x.data_ptr(), y.data_ptr(), out.data_ptr(), sums.data_ptr())
        assert (out.shape, out.dtype, sums.shape, sums.dtype) == ((3, 8), torch.float32, (3, 1), torch.float32)


def test_a_call_may_come_while_the_table_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread; here loading itself makes it."""
    op = Op()
    op._loaded, op.repeat = False, op._first_repeat
    del op.__dict__["_own_table"]
    loads: list[Any] = []

    def table(contract: Any) -> None:
        loads.append(contract)
        if len(loads) == 1:
            assert op.repeat() is None

    monkeypatch.setattr(native, "table", table)
    assert op.repeat() is None and len(loads) == 2


def test_specs_belong_to_a_combination_of_options() -> None:
    seen: list[Any] = []
    op = Op(lambda op, a: seen.append(id(op.kept)))
    for options in (NO_OPTIONS, NO_OPTIONS, (2.0, 0, "", None), (1.0, 0, "", torch.float32), NO_OPTIONS):
        op.of(rows(), options=options)
    assert seen[0] == seen[1] == seen[4] and len(set(seen)) == 3


def test_numbers_of_other_types_are_converted() -> None:
    factors: list[Any] = []
    op = Op(lambda op, a: factors.append(a.factor))
    for factor in (torch.tensor(2.0).numpy()[()], 2.0):
        op.of(rows(), options=(factor, *NO_OPTIONS[1:]))
    assert factors == [2.0, 2.0] and [type(f) for f in factors] == [float, float]


def test_negated_views_are_refused() -> None:
    op = Op()
    for x in (negated((4, 1)), negated((4, 1)).flatten().unsqueeze(1), torch._neg_view(torch.randn(4, 8))):
        assert x.is_neg()
        with pytest.raises(onepass.ContractError, match="`x` must not be a negated view"):
            op.of(x)
    with pytest.raises(onepass.ContractError, match="`sums_out` must not be a negated view"):
        op.of(rows(), None, None, rows(), negated((3, 1)))
    assert not op.launcher.slow


class TestTheCallersOutputs:
    def test_are_written_and_returned(self) -> None:
        op = Op()
        x, out, sums = rows(), rows(), torch.empty(3, 1)
        for version in (1, 2, 3):
            results = op.of(x, None, None, out, sums)
            assert results[0] is out and results[1] is sums
            assert op.launcher.slow[-1] == (x.data_ptr(), None, out.data_ptr(), sums.data_ptr())
            assert (x._version, out._version, sums._version) == (0, version, version)

    def test_are_compared_with_the_inputs(self) -> None:
        judged: list[Any] = []
        op = Op(memory=lambda inputs, outputs: judged.append((inputs[0], *outputs)))
        x, out, sums = rows(), rows(), torch.empty(3, 1)
        op.of(x)
        assert not judged, "outputs that were just allocated overlap nothing"
        op.of(x, None, None, out, sums)
        op.of(x, None, None, out, sums)
        assert [[a is b for a, b in zip(each, (x, out, sums), strict=True)] for each in judged] == [[True] * 3] * 2

    @pytest.mark.parametrize("shift", [-20, -16, -8, 8, 16, 20])
    def test_must_not_overlap_an_input(self, shift: int) -> None:
        """Tensors of 3 x 8 do not overlap from 24 elements on."""
        op = Op()
        parent = torch.randn(128)
        x = parent[32:56].view(3, 8)
        with pytest.raises(onepass.ContractError, match="`out` must not overlap `x`"):
            call_with(op, x, parent[32 + shift : 56 + shift].view(3, 8))
        call_with(op, x, parent[56:80].view(3, 8))

    def test_of_inference_mode_are_refused_outside(self) -> None:
        op = Op()
        with torch.inference_mode():
            out = rows()
            call_with(op, rows(), out)
        with pytest.raises(onepass.ContractError, match="`out` must not be an inference tensor"):
            call_with(op, rows(), out)


def call_with(subject: Op, x: Tensor, out: Tensor) -> None:
    """Call an op that compares its outputs with its inputs as all registered ones do."""
    subject._memory = partial(check_memory, subject.contract)
    subject.of(x, None, None, out, torch.empty(3, 1))


def test_gradients_are_refused() -> None:
    op = Op()
    x = rows()
    op.of(x)
    with pytest.raises(onepass.ContractError, match="scaled_sum: `x` must not require a gradient"):
        op.of(x.requires_grad_())
    with torch.no_grad():
        op.of(x)
    assert op.asked == 2


def test_errors_name_the_argument() -> None:
    op = Op()
    for call, message in (
        (lambda: op.of(3), "`x` must be a tensor, got 3"),
        (lambda: op(rows(), None, None, rows(), *NO_OPTIONS, None, None), "`others` must be a list of tensors"),
        (lambda: op.of(rows(), options=(1.0, True, "", None)), "`count` must be an int, got True"),
        (lambda: op.of(rows(), options=([], 0, "", None)), r"`factor` must be a number, got \[\]"),
    ):
        with pytest.raises(onepass.ContractError, match=f"scaled_sum: {message}"):
            call()
    assert op.asked == 0


def test_a_failed_launch_is_reported_as_it_is() -> None:
    def broken(op: Op, a: Any) -> None:
        raise RuntimeError("out of memory")

    op = Op(broken)
    out = rows()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            op.of(rows(), None, None, out, torch.empty(3, 1))
        assert not recording.tape.on and out._version == 0


def test_number_of_combinations_is_limited() -> None:
    op = Op(lambda op, a: None)
    for count in range(MAX_REMEMBERED + 100):
        op.of(rows(), options=(1.0, count, "", None))
    assert len(op.specs) == 100


# --- recordings -----------------------------------------------------------------------------------------------------


def test_threads_do_not_record_each_other() -> None:
    """Two threads record at the same time: each recording contains only its own launches."""
    for launches in ((1, 1), (1, 2), (2, 1)):
        ops = [Op(), Op()]
        steps = threading.Barrier(2, timeout=600)
        results: list[Any] = [None, None]

        def work(me: int, launches: Any = launches, ops: Any = ops, steps: Any = steps, results: Any = results) -> None:
            def run() -> None:
                for step in range(2):
                    steps.wait()
                    if step < launches[me]:
                        ops[me].launcher(me, [me])
                steps.wait()

            results[me] = recording.traced(run)[0]

        threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert [len(each) for each in results] == list(launches)
        assert all(grid == me and arguments == [me] for me in (0, 1) for _, grid, arguments in results[me])
        assert not recording.tape.on


def test_many_threads_call_an_op() -> None:
    """Eight threads with own and shared shapes: every launch has the addresses of its own call."""
    op = Op()
    wrong: list[Any] = []
    start = threading.Barrier(8, timeout=600)

    def work(me: int) -> None:
        start.wait()
        for turn in range(50):
            x, y = torch.empty(1 + (me + turn) % 5, 8), torch.empty(1 + (me + turn) % 5, 8)
            out, sums = op.of(x, y)
            expected = (x.data_ptr(), y.data_ptr(), out.data_ptr(), sums.data_ptr())
            if expected not in op.launcher.slow or out.shape != x.shape or len(sums) != len(x):
                wrong.append((me, turn))

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not wrong and len(op.launcher.slow) == op.asked == 400
