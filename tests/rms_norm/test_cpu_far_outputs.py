"""Outputs that are larger than the caches bypass them: the same bytes, at any alignment, and only if nothing reads them first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

import onepass
from onepass.core import op as registration
from onepass.cpu import launch as launcher
from onepass.ops.rms_norm import cpu as rms_norm
from onepass.ops.rms_norm.launch import RowCall, RowSpec, row_spec
from onepass.testing.tensors import same_bytes

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def placed(like: Tensor, bytes_off: int) -> Tensor:
    """Memory for a tensor that begins this many bytes after a cache line, filled with ones and with a line on each side."""
    size = like.nbytes
    whole = torch.ones(size + 256, dtype=torch.uint8)
    start = -whole.data_ptr() % 64 + 64 + bytes_off
    return whole[start : start + size].view(like.dtype).view(like.shape)


def forget() -> None:
    """Let no call repeat what another test recorded."""
    for op in registration.ops:
        if op.table is not None:
            op.table.clear()


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Everything is larger than the caches; what each call chose."""
    forget()
    found: list[int] = []
    before = rms_norm._far

    def choose(call: RowCall) -> int:
        found.append(before(call))
        return found[-1]

    monkeypatch.setattr(rms_norm, "cache_size", lambda: 0)
    monkeypatch.setattr(rms_norm, "_far", choose)
    yield found
    forget()


@pytest.mark.parametrize("off", [0, 16, 2])
@pytest.mark.parametrize("n", [64, 96, 130])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("rounding", ["once", "hf"])
def test_bytes(flags: list[int], monkeypatch: pytest.MonkeyPatch, dtype: Any, n: int, off: int, rounding: Any) -> None:
    """The path in C repeats a call at other addresses than the recorded one: at a line, and 16 bytes after one."""
    x, h, gamma = (torch.randn(shape, dtype=F32).to(dtype) for shape in ((5, n), (5, n), (n,)))
    off = max(off, off and dtype.itemsize)
    with monkeypatch.context() as context:
        context.setattr(rms_norm, "_far", lambda call: 0)
        expected = onepass.rms_norm(x.clone(), gamma, residual=h.clone(), rounding=rounding)
        alone = onepass.rms_norm(x.clone(), gamma, rounding=rounding)
    for shift in (0, off, off, off, 0):
        y, new = placed(x, shift), placed(h, shift)
        onepass.rms_norm(x, gamma, residual=h, rounding=rounding, out=y, residual_out=new)
        assert same_bytes(y, expected[0]) and same_bytes(new, expected[1])
        onepass.rms_norm(x, gamma, rounding=rounding, out=y)
        assert same_bytes(y, alone)
        for t in (y, new):
            edges = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
            start = t.data_ptr() - edges.data_ptr()
            assert edges[:start].eq(1).all() and edges[start + t.nbytes :].eq(1).all()
    assert {1, 3} <= {*flags}


def test_only_what_is_not_read(flags: list[int]) -> None:
    x, h, gamma = torch.randn(4, 64), torch.randn(4, 64), torch.ones(64)
    y, new = torch.empty_like(x), torch.empty_like(h)
    for out, residual_out, chosen in ((y, new, 3), (x.clone(), h, 1), (y, h, 1), (None, None, 3)):
        onepass.rms_norm(x, gamma, residual=h, out=out, residual_out=residual_out)
        assert flags.pop() == chosen
    onepass.rms_norm(x, gamma, out=x)
    onepass.rms_norm(x, gamma, residual=h, out=x, residual_out=h)
    assert flags == [0, 0]
    onepass.rms_norm_fused_fp8(x, gamma)
    assert len(flags) == 2


def test_small_outputs_stay_in_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "_far", lambda call: pytest.fail("a small call"))
    onepass.rms_norm(torch.randn(3, 48), torch.ones(48))
    assert 1 << 18 <= rms_norm.cache_size() < 1 << 34


SPECS: dict[str, tuple[RowSpec, int]] = {
    "norm": (row_spec(BF16, BF16, None, BF16, "once"), 1),
    "residual": (row_spec(BF16, BF16, BF16, BF16, "once"), 2),
    "residual rounded first": (row_spec(BF16, BF16, BF16, BF16, "hf"), 1),
}


@pytest.mark.parametrize("name", SPECS)
def test_machine_code(name: str) -> None:
    """Stores that bypass are in the loops of the last row and of the others; a fence follows. Other CPUs have neither."""
    spec, outputs = SPECS[name]
    text = launcher.ir_of(spec, "+sse2,+avx2")
    assert text.count("!nontemporal") == 2 * outputs and text.count('call void @"llvm.x86.sse.sfence"') == 1
    assert "nontemporal" not in launcher.ir_of(spec, "+neon") and "sfence" not in launcher.ir_of(spec, "+neon")
