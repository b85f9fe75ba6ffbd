"""A kernel's arguments as the words that C launches it with, and kernels that are left to Triton's launcher."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from onepass.core import native
from onepass.gpu.compile import compile_build, direct, words
from tests.rms_norm.cases import CASES
from tools.evidence import proof, records

KINDS = ("*bf16", "i64", "i32", "fp32", "*fp32")
VALUES = (0x7F0000000010, -5, 2**31 - 1, 0.75, None)


def test_every_argument_is_a_word() -> None:
    expected = (0x7F0000000010, -5, 2**31 - 1, 0.75, 0, 0, 0)
    assert struct.unpack("<Qqi4xf4xQQQ", words(KINDS, VALUES)) == expected


def test_a_rejected_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(error: int, text: Any) -> None:
        text._obj.value = b"out of memory"

    monkeypatch.setattr(native, "driver", lambda: SimpleNamespace(cuGetErrorString=describe))
    with pytest.raises(RuntimeError, match="CUDA error 2, out of memory"):
        native.fail(2)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that has the launch function, on a machine without a GPU."""
    monkeypatch.setattr(native, "driver", lambda: SimpleNamespace())


def test_unexpected_parameters_are_left_to_triton(driver: None) -> None:
    """Triton's launcher runs kernels whose parameters are not the expected ones."""
    case = next(case for case in CASES if case.n == 512)
    build, *_ = proof.builds(case, records.H200)
    compiled = compile_build(build, records.H200)
    kinds = [kind for _, _, kind in build.leaves() if kind != "constexpr"]

    def head(kinds: Any, pdl: bool = True, **changes: Any) -> object:
        facts = {"num_ctas": 1, "launch_cooperative_grid": False, "shared": 64} | changes
        kernel: Any = SimpleNamespace(asm=compiled.asm, metadata=SimpleNamespace(**facts), function=5)
        return direct(kernel, kinds, 4, pdl, 3)

    assert head(kinds) == (5, 128, 64, True, 3) and head(kinds, pdl=False) == (5, 128, 64, False, 3)
    for wrong in (kinds[:-1], [*kinds, "i32"], [*kinds[:-1], "i64"], ["fp32", *kinds[1:]], []):
        assert head(wrong) is None, wrong
    assert head(kinds, num_ctas=2) is None and head(kinds, launch_cooperative_grid=True) is None
