"""Checks that the rows of docs/reference.md name: apply_qk_rms_norm and rms_norm_fused_fp8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.testing.tensors import same_bytes
from tests.all_ops.reference_checks import CHECKS as CHECKS
from tests.all_ops.reference_checks import check, launches, near, rms

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E4M3UZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
I32 = torch.int32

# --- apply_qk_rms_norm -----------------------------------------------------------------------------------------------


def qk(dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gamma_q, gamma_k, statistics other than those of q and k, q and k."""
    return (
        torch.randn(48),
        torch.randn(16),
        torch.rand(6, 2) + 0.1,
        torch.randn(6, 48).to(dtype),
        torch.randn(6, 16).to(dtype),
    )


def applied(x: Tensor, gamma: Tensor, mean: Tensor, eps: float) -> Tensor:
    return x.to(F64) / (mean.to(F64)[:, None] + eps).sqrt() * gamma.to(F64)


@check
def apply_formula() -> None:
    gamma_q, gamma_k, var, q, k = qk()
    out = torch.zeros(6, 48), torch.zeros(6, 16)
    onepass.apply_qk_rms_norm(*out, gamma_q, gamma_k, var, q, k, 1e-3)
    assert near(out[0], applied(q, gamma_q, var[:, 0], 1e-3)) and near(out[1], applied(k, gamma_k, var[:, 1], 1e-3))


@check
def apply_dtypes() -> None:
    for dtype in (BF16, F16, F32):
        for other in (BF16, F16, F32):
            gamma_q, gamma_k, var, q, k = qk(dtype)
            out = torch.zeros(6, 48).to(other), torch.zeros(6, 16).to(other)
            onepass.apply_qk_rms_norm(*out, gamma_q.to(other), gamma_k, var, q, k, 1e-6)
            assert near(out[0], applied(q, gamma_q.to(other), var[:, 0], 1e-6))
            assert near(out[1], applied(k, gamma_k, var[:, 1], 1e-6))


@check
def apply_in_place() -> None:
    gamma_q, gamma_k, var, q, k = qk(BF16)
    out = torch.zeros_like(q), torch.zeros_like(k)
    onepass.apply_qk_rms_norm(*out, gamma_q, gamma_k, var, q, k, 1e-6)
    onepass.apply_qk_rms_norm(q, k, gamma_q, gamma_k, var, q, k, 1e-6)
    assert out[0].any() and same_bytes(q, out[0]) and same_bytes(k, out[1])


@check
def apply_statistics() -> None:
    """The sums of two ranks' columns, added and divided, are the statistics of whole rows."""
    gamma_q, gamma_k, _, q, k = qk()
    means = onepass.row_mean_of_squares_qk(q, k)
    assert near(means, torch.stack([t.to(F64).square().mean(-1) for t in (q, k)], -1))
    sums = onepass.row_sum_of_squares_qk(q[:, :20], k[:, :3]) + onepass.row_sum_of_squares_qk(q[:, 20:], k[:, 3:])
    out = torch.zeros_like(q), torch.zeros_like(k)
    onepass.apply_qk_rms_norm(*out, gamma_q, gamma_k, sums / torch.tensor([48.0, 16.0]), q, k, 1e-6)
    assert near(out[0], rms(q, gamma_q, 1e-6)) and near(out[1], rms(k, gamma_k, 1e-6))


@check
def apply_sizes() -> None:
    gamma_q, gamma_k, var, q, k = qk()
    good: dict[str, Any] = {"gamma_q": gamma_q, "gamma_k": gamma_k, "qk_var": var, "q": q, "k": k}
    for name, bad in (("k", k[:5]), ("qk_var", var[:5]), ("gamma_q", gamma_q[:47]), ("gamma_k", gamma_k[:15])):
        with pytest.raises(onepass.ContractError, match=f"^apply_qk_rms_norm: `{name}` must have shape"):
            onepass.apply_qk_rms_norm(torch.zeros_like(q), torch.zeros_like(k), **{**good, name: bad}, epsilon=1e-6)


@check
def apply_grouping() -> None:
    """``(x * rs) * gamma``, for values where the other grouping gives other bits."""
    gamma_q, gamma_k, _, q, k = qk()
    var = torch.full((6, 2), 0.25)
    out = torch.zeros_like(q), torch.zeros_like(k)
    onepass.apply_qk_rms_norm(*out, gamma_q, gamma_k, var, q, k, 0.0)
    assert same_bytes(out[0], (q * 2.0) * gamma_q)
    var = torch.full((6, 2), 3.0)
    rs = 1 / var[:, :1].sqrt()
    onepass.apply_qk_rms_norm(*out, gamma_q, gamma_k, var, q, k, 0.0)
    assert same_bytes(out[0], (q * rs) * gamma_q) and not same_bytes(out[0], q * (rs * gamma_q))


@check
def apply_one_launch() -> None:
    gamma_q, gamma_k, var, q, k = qk()
    assert launches(lambda: onepass.apply_qk_rms_norm(q, k, gamma_q, gamma_k, var, q, k, 1e-6)) == 1


# --- rms_norm_fused_fp8 ----------------------------------------------------------------------------------------------


def coded(codes: Tensor, y: Tensor, scale: Tensor) -> bool:
    """Whether the codes are those of ``y / scale``, except at ties."""
    limit = torch.finfo(codes.dtype).max
    expected = (y / scale.to(F64)).clamp(-limit, limit).float().to(codes.dtype)
    return bool(codes.float().any()) and float((codes.float() != expected.float()).float().mean()) < 0.01


@check
def fp8_formula() -> None:
    x, gamma = torch.randn(4, 64), torch.randn(64)
    y = rms(x, gamma, 1e-5)
    codes, scale, norm = onepass.rms_norm_fused_fp8(x, gamma, 1e-5, return_norm=True)
    assert near(scale * 448, y.abs().amax(-1, keepdim=True)) and coded(codes, y, scale) and near(norm, y)


@check
def fp8_dtypes() -> None:
    for dtype in (BF16, F16, F32):
        for out_dtype in (E4M3, E4M3UZ):
            for scales in (BF16, F16, F32):
                x, gamma = torch.randn(4, 64).to(dtype), torch.randn(64).to(dtype)
                codes, scale = onepass.rms_norm_fused_fp8(x, gamma, out_dtype=out_dtype, scales_dtype=scales)
                assert (codes.dtype, scale.dtype) == (out_dtype, scales)
                y = rms(x, gamma, 1e-6)
                assert near(scale * torch.finfo(out_dtype).max, y.abs().amax(-1, keepdim=True)) and coded(
                    codes, y, scale
                )


@check
def fp8_ranks() -> None:
    x, gamma = torch.randn(24, 16), torch.randn(16)
    codes, scale = onepass.rms_norm_fused_fp8(x, gamma)
    for lead in ((24,), (4, 6), (2, 3, 4), (2, 3, 2, 2), (1, 2, 3, 2, 2)):
        found = onepass.rms_norm_fused_fp8(x.view(*lead, 16), gamma)
        assert found[1].shape == (*lead, 1)
        assert same_bytes(found[0].view(24, 16), codes) and same_bytes(found[1].view(24, 1), scale)
    one = onepass.rms_norm_fused_fp8(x[3], gamma)
    assert same_bytes(one[0], codes[3]) and one[1].shape == (1,)


@onepass.prologue
def halved(x, bias):  # type: ignore[no-untyped-def]
    """An input function."""
    return 0.5 * x + bias


@check
def fp8_input_fn() -> None:
    x, gamma, bias = torch.randn(4, 64), torch.randn(64), torch.randn(64)
    codes, scale = onepass.rms_norm_fused_fp8(x, gamma, prologue=halved, prologue_args=[bias])
    y = rms(0.5 * x.to(F64) + bias.to(F64), gamma, 1e-6)
    assert near(scale * 448, y.abs().amax(-1, keepdim=True)) and coded(codes, y, scale)


@check
def fp8_outputs() -> None:
    x, gamma = torch.randn(4, 64), torch.randn(64)
    expected = onepass.rms_norm_fused_fp8(x, gamma)
    out, scale = torch.zeros(4, 64).to(E4M3), torch.zeros(4, 1)
    found = onepass.rms_norm_fused_fp8(x, gamma, out=out, scale_output=scale)
    assert found[0] is out and found[1] is scale and same_bytes(out, expected[0]) and same_bytes(scale, expected[1])
    with pytest.raises(onepass.ContractError, match="`scale_output` must have shape"):
        onepass.rms_norm_fused_fp8(x, gamma, scale_output=torch.zeros(4))


@check
def fp8_offset() -> None:
    x, gamma = torch.randn(4, 64), 0.01 * torch.randn(64)
    _, scale = onepass.rms_norm_fused_fp8(x, gamma, weight_offset=1.0)
    assert near(scale * 448, rms(x, gamma.to(F64) + 1, 1e-6).abs().amax(-1, keepdim=True))


@check
def fp8_bound() -> None:
    x, gamma = torch.randn(4, 64), torch.ones(64)
    codes, scale = onepass.rms_norm_fused_fp8(x, gamma, scale_ub=1.5)
    assert torch.equal(scale, torch.full((4, 1), 1.5) / 448) and coded(codes, rms(x, gamma, 1e-6), scale)
    assert codes.float().abs().amax() == 448


@check
def fp8_one_launch() -> None:
    x, gamma = torch.randn(4, 64), torch.ones(64)
    assert launches(lambda: onepass.rms_norm_fused_fp8(x, gamma)) == 1
