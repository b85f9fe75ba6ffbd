"""A row gives the same bytes alone and in any batch, wherever it lies; on the CPU and in the layouts of GPU kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.checks.case import lay_out, same_bytes
from onepass.checks.rms_norm import soft_cap_gate

VARIANTS: dict[str, dict[str, Any]] = {
    "row": {},
    "hf": {"rounding": "hf"},
    "fnuz": {"out_dtype": torch.float8_e4m3fnuz},
    "group": {"group_size": 128},
    "ue8m0": {"scale_format": "ue8m0"},
    "norm": {"return_norm": True},
    "static": {"static_scale": torch.tensor(0.02)},
}


def run(x: Tensor, gamma: Tensor, options: dict[str, Any]) -> list[Tensor]:
    results = [t for t in onepass.rms_norm_fused_fp8(x, gamma, **options) if t.dim()]
    rounding = options.get("rounding", "once")
    return [
        *results,
        onepass.rms_norm(x, gamma, rounding=rounding),
        *onepass.rms_norm(x, gamma, residual=x, rounding=rounding),
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [128, 1408])
def test_rows_do_not_know_their_batch(n: int, dtype: torch.dtype, variant: str) -> None:
    options = VARIANTS[variant]
    x, gamma = torch.randn(4096 if n == 128 else 515, n).to(dtype), torch.randn(n).to(dtype)
    whole = run(x, gamma, options)
    for rows in (1, 2, 3, 17, 64, 255):
        for begin in (0, 1, 100, x.shape[0] - rows):
            part = run(x[begin : begin + rows], gamma, options)
            for all_rows, some in zip(whole, part, strict=True):
                assert same_bytes(some, all_rows[begin : begin + rows]), f"rows {begin}..{begin + rows}"


@pytest.mark.parametrize("n", [1, 7, 33, 129, 1000, 4099])
def test_odd_lengths(n: int) -> None:
    x, gamma = torch.randn(70, n).bfloat16(), torch.randn(n).bfloat16()
    whole = run(x, gamma, {})
    for row in (0, 1, 33, 69):
        for all_rows, one in zip(whole, run(x[row : row + 1], gamma, {}), strict=True):
            assert same_bytes(one, all_rows[row : row + 1])


@pytest.mark.parametrize("layout", ["sliced", "misaligned", "transposed"])
@pytest.mark.parametrize("n", [96, 640, 7168])
def test_layout_changes_no_bit(n: int, layout: Any) -> None:
    x, gamma = torch.randn(3, 5, n).bfloat16(), torch.randn(n).bfloat16()
    for plain, moved in zip(run(x, gamma, {}), run(lay_out(x, layout), gamma, {}), strict=True):
        assert same_bytes(plain, moved.contiguous())


def test_alignment_of_every_tensor() -> None:
    """Tensors that begin 0 to 15 elements into an allocation."""
    n = 256
    x, gamma = torch.randn(4, n).bfloat16(), torch.randn(n).bfloat16()
    expected = run(x, gamma, {})
    for shift in range(16):
        memory = torch.empty(4 * n + 64).bfloat16()
        moved = memory[shift : shift + 4 * n].view(4, n).copy_(x)
        weight = torch.empty(n + 64).bfloat16()[shift : shift + n].copy_(gamma)
        for a, b in zip(expected, run(moved, weight, {}), strict=True):
            assert same_bytes(a, b), f"shift {shift}"


def test_thread_count_changes_no_bit() -> None:
    x, gamma = torch.randn(700, 1024).bfloat16(), torch.randn(1024).bfloat16()
    gate, bias, scale = torch.randn(700, 1024).bfloat16(), torch.randn(1024).bfloat16(), torch.randn(700, 1).bfloat16()
    before = torch.get_num_threads()
    seen = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            fused = onepass.rms_norm_fused_fp8(x, gamma, prologue=soft_cap_gate, prologue_args=[gate, bias, scale])
            seen.append([*run(x, gamma, {}), *fused])
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(same_bytes(a, b) for a, b in zip(seen[0], other, strict=True))


def test_repeats_change_no_bit() -> None:
    x, gamma = torch.randn(64, 4096).bfloat16(), torch.randn(4096).bfloat16()
    first = run(x, gamma, {})
    for _ in range(50):
        assert all(same_bytes(a, b) for a, b in zip(first, run(x, gamma, {}), strict=True))
