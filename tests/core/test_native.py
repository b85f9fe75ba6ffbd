"""The path in C: calls like an earlier one repeat its launches on their own tensors, and no other calls do.

Launches are those of a stand-in for CUDA's driver, which reads arguments as the real one does.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass.core import native, recording
from tests.core.fast_path import NO_OPTIONS, Driver, Op, rows

pytestmark = pytest.mark.skipif(native.describe() != "on", reason=f"the extension: {native.describe()}")


def test_a_call_is_noted_then_recorded_then_repeated(driver: Driver) -> None:
    op = Op()
    for asked, launched in ((1, 0), (2, 0), (2, 1), (2, 2)):
        x, y = rows(), rows()
        out, sums = op.of(x, y)
        assert (op.asked, len(driver.launched)) == (asked, launched)
    assert driver.launched[-1][:5] == (1234, 3, 128, 512, [(6, 0, 1)]) and driver.launched[-1][-1] == 77
    assert driver.addresses == (x.data_ptr(), y.data_ptr(), out.data_ptr(), sums.data_ptr())
    assert op.table.counts() == {"hits": 2, "misses": 2, "refused": 0, "entries": 1}
    assert (out.shape, out.dtype, sums.shape, sums.dtype) == ((3, 8), torch.float32, (3, 1), torch.float32)


CHANGES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "rows": lambda: (torch.randn(4, 8), torch.randn(4, 8)),
    "dtype": lambda: (rows().bfloat16(), rows().bfloat16()),
    "strides": lambda: (torch.randn(3, 16)[:, :8], rows()),
    "alignment": lambda: (torch.randn(25)[1:].view(3, 8), rows()),
    "absent": lambda: (rows(), None),
    "indices": lambda: (rows(), rows(), torch.zeros(3, dtype=torch.int64)),
    "output": lambda: (rows(), rows(), None, rows(), None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_tensors_are_another_call(driver: Driver, change: Any) -> None:
    op = Op()
    op.learn(rows(), rows())
    assert not op.known(*change()) and op.known(rows(), rows())
    op.of(*change())
    assert op.known(*change()) and op.known(rows(), rows()) and op.asked == 4


def test_options_are_compared_by_type_and_value(driver: Driver) -> None:
    op = Op()
    op.learn(rows(), options=(0.5, 1, "once", torch.float32))
    same = (float("0.5"), int("1"), "".join(["on", "ce"]), torch.float32)
    assert op.known(rows(), options=same)
    different: list[tuple[Any, ...]] = [(0.25, 1, "once", torch.float32), (0.5, 2, "once", torch.float32)]
    different += [(0.5, 1, "onces", torch.float32), (0.5, 1, "once", torch.float16), (0.5, 1, "once", None)]
    for options in different:
        assert not op.known(rows(), options=options), options
    one = Op()
    one.learn(rows(), options=(1.0, 0, "", None))
    assert not one.known(rows(), options=(1, 0, "", None))
    assert one.known(rows(), options=(1.0, 0, "", None))
    with pytest.raises(onepass.ContractError, match="`count` must be an int"):
        one.of(rows(), options=(1.0, False, "", None))


class TestOverlap:
    def test_in_place_is_a_call_of_its_own(self, driver: Driver) -> None:
        op = Op()
        op.learn(rows(), None, None, rows(), torch.empty(3, 1))
        x, sums = rows(), torch.empty(3, 1)
        op.learn(x, None, None, x, sums)
        assert op.known(x, None, None, x, sums) and driver.addresses == (x.data_ptr(), 0, x.data_ptr(), sums.data_ptr())
        x, out = rows(), rows()
        assert op.known(x, None, None, out, sums) and driver.addresses[:3] == (x.data_ptr(), 0, out.data_ptr())

    def test_same_tensor_twice(self, driver: Driver) -> None:
        op = Op()
        x, other = rows(), rows()
        op.learn(x, x)
        assert op.known(other, other) and driver.addresses[:2] == (other.data_ptr(),) * 2
        assert not op.known(x, other)

    @pytest.mark.parametrize("shift", [-20, -16, -8, 8, 16, 20])
    def test_is_validated_again(self, driver: Driver, shift: int) -> None:
        judged: list[Any] = []
        op = Op(memory=lambda inputs, outputs: judged.append(outputs))
        parent, sums = torch.randn(128), torch.empty(3, 1)
        x = parent[32:56].view(3, 8)
        op.learn(x, None, None, parent[72:96].view(3, 8), sums)
        assert op.known(x, None, None, parent[56:80].view(3, 8), sums) and len(judged) == 2
        assert not op.known(x, None, None, parent[32 + shift : 56 + shift].view(3, 8), sums) and len(judged) == 3

    def test_of_inputs_does_not_matter(self, driver: Driver) -> None:
        op = Op()
        parent = torch.randn(3, 32)
        op.learn(parent[:, :8], parent[:, 4:12])
        assert op.known(parent[:, :8], parent[:, 12:20])


def negated(shape: tuple[int, ...]) -> Tensor:
    return torch.complex(torch.zeros(shape), torch.ones(shape)).conj().imag


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


class TestInterception:
    @pytest.mark.parametrize("mode", [Mode, FunctionMode])
    def test_modes(self, driver: Driver, mode: Any) -> None:
        op = Op()
        op.learn(rows())
        with mode():
            assert not op.known(rows())
        assert op.known(rows())

    def test_transforms_and_dual_numbers(self, driver: Driver) -> None:
        op = Op()
        op.learn(rows())
        seen: list[bool] = []
        tensor = rows()

        def mapped(x: Tensor) -> Tensor:
            seen.append(op.known(tensor))
            return x

        torch.func.vmap(mapped)(torch.ones(2))
        with torch.autograd.forward_ad.dual_level():
            seen.append(op.known(tensor))
        assert seen == [False, False] and op.known(rows())

    def test_tracer(self, driver: Driver) -> None:
        op = Op()
        op.learn(rows())
        seen: list[bool] = []

        def traced(x: Tensor) -> Tensor:
            seen.append(op.known(torch.zeros(3, 8)))
            return x + 1

        torch.jit.trace(traced, torch.ones(2), check_trace=False)
        assert seen == [False] and op.known(rows())

    def test_subclasses_and_other_things(self, driver: Driver) -> None:
        op = Op()
        op.learn(rows())
        assert not op.known(rows().as_subclass(Subclass))
        assert op.known(torch.nn.Parameter(rows(), requires_grad=False))
        for thing in (None, 3, "x", [rows()]):
            with pytest.raises(onepass.ContractError, match="`x` must be a tensor"):
                op.of(thing)
        with pytest.raises(onepass.ContractError, match="`x` must"):
            op.of(rows().to_sparse())
        assert op.known(rows())

    def test_gradients(self, driver: Driver) -> None:
        op = Op()
        op.learn(rows())
        with pytest.raises(onepass.ContractError, match="`x` must not require a gradient"):
            op.of(rows().requires_grad_())
        with torch.no_grad():
            assert op.known(rows().requires_grad_())

    def test_negated_views(self, driver: Driver) -> None:
        op = Op()
        op.learn(torch.randn(4, 2)[:, :1])
        view = negated((4, 1))
        assert view.is_neg() and view.stride() == (2, 2)
        with pytest.raises(onepass.ContractError, match="`x` must not be a negated view"):
            op.of(view)
        assert op.known(torch.randn(4, 2)[:, :1])

    def test_debug_mode(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        op = Op()
        op.learn(rows())
        monkeypatch.setenv("ONEPASS_DEBUG", "1")
        assert not op.known(rows())
        monkeypatch.setenv("ONEPASS_DEBUG", "0")
        assert op.known(rows())

    def test_the_switch(self, driver: Driver) -> None:
        op = Op()
        op.learn(rows())
        recording.switch.on = False
        try:
            assert not op.known(rows())
        finally:
            recording.switch.on = True
        assert op.known(rows())

    def test_lists_of_tensors(self, driver: Driver) -> None:
        op = Op()
        x, other = rows(), rows()
        for _ in range(4):
            op(x, None, None, [other], *NO_OPTIONS, None, None)
        assert op.table.counts()["refused"] == 4 and not driver.launched

    def test_a_call_within_a_recording_is_not_repeated(self, driver: Driver) -> None:
        """Its launch would be missing from the recording."""
        inner = Op()
        inner.learn(rows())

        def kernel(op: Op, a: Any) -> None:
            inner.of(rows())
            op.one_launch(a)

        outer = Op(kernel)
        for asked in (2, 3, 3):
            outer.of(rows())
            assert inner.asked == asked
        assert outer.asked == 3 and inner.known(rows())


def test_empty_tensors_may_have_sizes_whose_product_overflows(driver: Driver) -> None:
    """`make sanitize-native` would report it."""
    op = Op()
    for x in (torch.empty(0, 1, 1).expand(0, 2**40, 2**40), torch.empty(0).as_strided((0, 2**40), (1, 2**40))):
        with pytest.raises(onepass.ContractError):
            op.of(x)


def test_calls_are_forgotten_at_a_limit(driver: Driver) -> None:
    op = Op()
    for count in range(1, 4200):
        op.of(torch.empty(count, 1))
    assert op.table.counts()["entries"] == 4199 - 4096
    op.learn(rows())
    assert op.known(rows())


def test_tables_are_freed(driver: Driver) -> None:
    op = Op()
    op.learn(rows())
    kept = op.launcher
    assert len([r for r in gc.get_referrers(kept) if isinstance(r, tuple)]) == 1, "the plan keeps it"
    op.table.clear()
    assert not [r for r in gc.get_referrers(kept) if isinstance(r, tuple)]


def test_threads_repeat_and_forget(driver: Driver) -> None:
    """Every launch has the addresses of its own call, also while another thread forgets all calls."""
    op = Op()
    wrong: list[Any] = []
    start = threading.Barrier(5, timeout=600)

    def work(me: int) -> None:
        start.wait()
        for turn in range(300):
            x, y = torch.empty(1 + (me + turn) % 5, 8), torch.empty(1 + (me + turn) % 5, 8)
            out, sums = op.of(x, y)
            expected = (x.data_ptr(), y.data_ptr(), out.data_ptr(), sums.data_ptr())
            if expected not in op.launcher.slow and expected not in [entry[-5:-1] for entry in driver.launched]:
                wrong.append((me, turn))

    def forget() -> None:
        start.wait()
        for _ in range(100):
            op.table.clear()

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)] + [threading.Thread(target=forget)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not wrong and len(op.launcher.slow) + len(driver.launched) == 1200 and driver.launched
