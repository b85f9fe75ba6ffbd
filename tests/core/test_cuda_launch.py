"""A kernel's arguments as the words that C launches it with, and kernels that are left to Triton's launcher."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from onepass.core import cuda_launch
from onepass.core.cuda_launch import Direct, direct
from onepass.gpu.compile import compile_build
from tests.rms_norm.cases import CASES
from tools.evidence import proof, records

KINDS = ("*bf16", "i64", "i32", "fp32", "*fp32")
VALUES = (0x7F0000000010, -5, 2**31 - 1, 0.75, None)


def test_a_step_has_every_argument_as_a_word() -> None:
    head, words = Direct(1234, KINDS, 4, 1024, True, 3).step(9, VALUES)
    assert head == (1234, 9, 128, 1024, True, 3)
    assert struct.unpack("<Qqi4xf4xQQQ", words) == (0x7F0000000010, -5, 2**31 - 1, 0.75, 0, 0, 0)


def test_a_step_without_dependent_launch() -> None:
    assert Direct(1, KINDS, 1, 0, False, 0).step(1, VALUES)[0] == (1, 1, 32, 0, False, 0)


def test_a_rejected_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(error: int, text: Any) -> None:
        text._obj.value = b"out of memory"

    monkeypatch.setattr(cuda_launch, "driver", lambda: SimpleNamespace(cuGetErrorString=describe))
    with pytest.raises(RuntimeError, match="CUDA error 2, out of memory"):
        cuda_launch.fail(2)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that has the launch function, on a machine without a GPU."""
    monkeypatch.setattr(cuda_launch, "driver", lambda: SimpleNamespace())


def test_unexpected_parameters_are_left_to_triton(driver: None) -> None:
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
