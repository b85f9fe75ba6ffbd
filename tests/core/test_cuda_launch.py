"""Direct launches, with a stand-in for CUDA's driver that reads arguments as the real one does."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from onepass.core import cuda_launch
from onepass.core.cuda_launch import Direct, direct
from onepass.gpu.compile import compile_build
from tests.rms_norm.cases import CASES
from tools.evidence import proof, records

KINDS = ("*bf16", "i64", "i32", "fp32", "*fp32")
VALUES = (0x7F0000000010, -5, 2**31 - 1, 0.75, None)


class Driver:
    """Records the arguments of each launch."""

    def __init__(self) -> None:
        self.error = 0
        self.launched: list[tuple[Any, ...]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:
        given = config._obj
        formats = ("<Q", "<q", "<i4x", "<f4x", "<Q", "<Q", "<Q")
        words = [ctypes.string_at(pointers[i], 8) for i in range(len(formats))]
        values = tuple(struct.unpack(f, w)[0] for f, w in zip(formats, words, strict=True))
        assert extra is None and (given.grid_y, given.grid_z, given.block_y, given.block_z) == (1, 1, 1, 1)
        attributes = [(a.id, a.value) for a in given.attributes[: given.count]]
        self.launched.append(
            (function.value, given.grid_x, given.block_x, given.shared, given.stream, attributes, values)
        )
        return self.error

    def cuGetErrorString(self, error: int, text: Any) -> None:
        text._obj.value = b"out of memory"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = Driver()
    monkeypatch.setattr(cuda_launch, "driver", lambda: fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    cuda_launch._writer.cache_clear()
    yield fake
    cuda_launch._writer.cache_clear()


def never(*addresses: int) -> None:
    raise AssertionError("left to Triton's launcher")


def test_every_argument_arrives_and_addresses_change(driver: Driver) -> None:
    launch = Direct(1234, KINDS, 4, 1024, True, 3).prepare(9, VALUES, [4, 0], never)
    launch(0xABCDEF0123, 0x7F0000000400)
    launch(16, 32)
    about = (1234, 9, 128, 1024, 73, [(6, 1)])
    assert driver.launched == [
        (*about, (0x7F0000000400, -5, 2**31 - 1, 0.75, 0xABCDEF0123, 0, 0)),
        (*about, (32, -5, 2**31 - 1, 0.75, 16, 0, 0)),
    ]


def test_no_attribute_without_dependent_launch(driver: Driver) -> None:
    Direct(1, KINDS, 1, 0, False, 3).prepare(1, VALUES, [], never)()
    assert driver.launched == [(1, 1, 32, 0, 73, [], (*VALUES[:4], 0, 0, 0))]


def test_another_device_is_made_current(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextlib.contextmanager
    def device(index: int) -> Any:
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    Direct(1, KINDS, 1, 0, True, 0).prepare(1, VALUES, [], never)()
    assert entered == [0] and driver.launched[0][4] == 70


def test_a_failed_launch_is_an_error(driver: Driver) -> None:
    driver.error = 2
    with pytest.raises(RuntimeError, match="CUDA error 2, out of memory"):
        Direct(1, KINDS, 1, 0, True, 3).prepare(1, VALUES, [0], never)(64)


def test_thread_without_a_context_gets_one(driver: Driver) -> None:
    left: list[tuple[int, ...]] = []
    driver.error = 201
    launch = Direct(1, KINDS, 1, 0, True, 3).prepare(1, VALUES, [0, 4], lambda *addresses: left.append(addresses))
    launch(64, 128)
    driver.error = 0
    launch(256, 512)
    assert left == [(64, 128)] and driver.launched[1][-1][0] == 256


def test_threads_do_not_share_arguments(driver: Driver) -> None:
    launch = Direct(1, KINDS, 1, 0, True, 3).prepare(1, VALUES, [0, 4], never)
    start = threading.Barrier(4, timeout=600)

    def work(me: int) -> None:
        start.wait()
        for turn in range(2000):
            launch(me * 100_000 + turn, me)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    found = sorted((values[0], values[4]) for *_, values in driver.launched)
    assert found == [(me * 100_000 + turn, me) for me in range(1, 5) for turn in range(2000)]


def test_unexpected_parameters_are_left_to_triton(driver: Driver) -> None:
    """Triton's launcher runs kernels whose parameters are not the expected ones."""
    case = next(case for case in CASES if case.n == 512)
    build, *_ = proof.builds(case, records.H200)
    compiled = compile_build(build, records.H200)
    kinds = [kind for _, _, kind in build.leaves() if kind != "constexpr"]

    def made(kinds: Any, **changes: Any) -> Direct | None:
        facts = {"num_ctas": 1, "launch_cooperative_grid": False, "shared": 64} | changes
        kernel = SimpleNamespace(asm=compiled.asm, metadata=SimpleNamespace(**facts), function=5)
        return direct(kernel, kinds, build.warps, build.pdl, 3)

    assert made(kinds) is not None
    for wrong in (kinds[:-1], [*kinds, "i32"], [*kinds[:-1], "i64"], ["fp32", *kinds[1:]], []):
        assert made(wrong) is None, wrong
    assert made(kinds, num_ctas=2) is None and made(kinds, launch_cooperative_grid=True) is None
