"""qk_rms_norm with fp8 results, and with an epsilon for k."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onepass
from onepass.errors import ContractError
from onepass.testing.tensors import same_bytes
from tests.qk_norm.test_op import angles, qk

FP8, F32 = torch.float8_e4m3fn, torch.float32


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("rounding", ["once", "hf"])
def test_codes_are_the_result_divided_by_its_scale(style: str, rounding: str) -> None:
    """With "hf" the rotated value is rounded to q's dtype first, so the codes are those of the 16-bit result."""
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 64).bfloat16(), torch.randn(5, 2, 64).bfloat16()
    gamma = torch.randn(64)
    options: dict[str, Any] = {"rope": onepass.Rope(angles(9, 32), torch.arange(5), style), "per_head": True}  # type: ignore[arg-type]
    options["rounding"] = rounding
    wide = onepass.qk_rms_norm(q, k, gamma, gamma, **options, out_dtype=F32 if rounding == "once" else None)
    codes = onepass.qk_rms_norm(q, k, gamma, gamma, **options, out_dtype=FP8)
    assert [t.shape for t in codes] == [q.shape, k.shape, (5, 4, 1), (5, 2, 1)]
    for y, code, scale in zip(wide, codes[:2], codes[2:], strict=True):
        assert same_bytes(scale, y.float().abs().amax(-1, keepdim=True) / 448)
        assert same_bytes(code, (y.float() / scale).to(FP8)) and code.float().abs().amax() == 448


def test_scales_follow_the_shape_of_rows() -> None:
    q, k, gq, gk = qk(6, 128, 64)
    whole = onepass.qk_rms_norm(q, k, gq, gk, out_dtype=FP8)
    assert [t.shape for t in whole[2:]] == [(6, 1), (6, 1)]
    flat = onepass.qk_rms_norm(q, k, gk[:32], gk[:32], per_head=True, out_dtype=FP8)
    apart = onepass.qk_rms_norm(
        q.unflatten(-1, (4, 32)), k.unflatten(-1, (2, 32)), gk[:32], gk[:32], per_head=True, out_dtype=FP8
    )
    assert [t.shape for t in flat[2:]] == [(6, 4), (6, 2)] and [t.shape for t in apart[2:]] == [(6, 4, 1), (6, 2, 1)]
    assert all(same_bytes(a, b.reshape(a.shape)) for a, b in zip(flat, apart, strict=True))


def test_given_scales_and_outputs() -> None:
    q, k, gq, gk = qk(6, 128, 64)
    scales: dict[str, Any] = {"q_scale": torch.tensor([0.02]), "k_scale": torch.tensor(0.05)}
    allocated = onepass.qk_rms_norm(q, k, gq, gk, out_dtype=FP8, **scales)
    assert len(allocated) == 2
    y = onepass.qk_rms_norm(q, k, gq, gk, out_dtype=F32)
    for code, value, scale in zip(allocated, y, scales.values(), strict=True):
        assert same_bytes(code, (value / scale).clamp(-448, 448).to(FP8)) and code.float().any()
    outs = torch.zeros(6, 128).to(FP8), torch.zeros(6, 64).to(FP8)
    assert onepass.qk_rms_norm(q, k, gq, gk, out=outs, **scales)[0] is outs[0]
    assert all(same_bytes(a, b) for a, b in zip(outs, allocated, strict=True))
    rooms = torch.zeros(6, 3)[:, 1:2], torch.zeros(6, 1)
    own = onepass.qk_rms_norm(q, k, gq, gk, out=outs, scale_out=rooms)
    assert own[2] is rooms[0] and all(
        same_bytes(a, b) for a, b in zip(own, onepass.qk_rms_norm(q, k, gq, gk, out_dtype=FP8), strict=True)
    )


def test_k_has_its_own_epsilon() -> None:
    q, k, gq, gk = qk(6, 128, 64)
    both = onepass.qk_rms_norm(q, k, gq, gk, 1e-5, eps_k=0.5)
    first, second = onepass.qk_rms_norm(q, k, gq, gk, 1e-5), onepass.qk_rms_norm(q, k, gq, gk, 0.5)
    assert same_bytes(both[0], first[0]) and same_bytes(both[1], second[1]) and not same_bytes(both[1], first[1])
    same = onepass.qk_rms_norm(q, k, gq, gk, 0.5, eps_k=0.5)
    assert all(same_bytes(a, b) for a, b in zip(same, second, strict=True))


def test_a_row_with_nan_has_nan_codes_and_scale_and_a_zero_row_zeros() -> None:
    q, k, gq, gk = qk(4, 128, 64)
    q[1, 3], k[2] = torch.inf, 0.0
    q_out, k_out, q_scale, k_scale = onepass.qk_rms_norm(q, k, gq, gk, out_dtype=FP8)
    assert (q_out[1].view(torch.uint8) == 0x7F).all() and q_scale[1].isnan() and q_scale.isnan().sum() == 1
    assert not k_out[2].view(torch.uint8).any() and k_scale[2] == 0 and not k_scale.isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_scale": torch.ones(())}, "`k_scale` must be given with q_scale"),
        ({"q_scale": torch.ones(()), "k_scale": torch.ones(())}, "`q_scale` must be None unless the results are fp8"),
        ({"scale_out": (torch.zeros(3, 1), torch.zeros(3, 1))}, "`q_scale_out` must be None unless"),
        ({"scale_out": torch.zeros(3, 2), "out_dtype": FP8}, "`scale_out` must be a pair of tensors"),
        ({"eps_k": -1.0}, "`eps_k` must be a number and satisfy 0 <= eps_k"),
        ({"out_dtype": torch.int8}, "`out_dtype` must be bfloat16 or float16 or float32 or float8_e4m3fn"),
        (
            {"scale_out": (torch.zeros(3, 1), torch.zeros(3, 1)), "group": object()},
            "`scale_out` must be None with group",
        ),
    ],
)
def test_wrong_calls_are_refused(change: dict[str, Any], message: str) -> None:
    q, k, gq, gk = qk(3, 128, 64)
    with pytest.raises(ContractError, match=f"qk_rms_norm: {message}"):
        onepass.qk_rms_norm(q, k, gq, gk, **change)


def applied(given: dict[str, Any], dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """The results of `apply_qk_rms_norm` with the statistics of whole rows."""
    q_out, k_out = (torch.full(given[side].shape, 7.0).to(dtype) for side in "qk")
    means = onepass.row_mean_of_squares_qk(given["q"], given["k"])
    onepass.apply_qk_rms_norm(q_out, k_out, qk_var=means, **given, **options)
    return [q_out, k_out]


@pytest.mark.parametrize("rounding", ["once", "hf"])
@pytest.mark.parametrize("dtype", [FP8, torch.float8_e4m3fnuz])
def test_halves_have_the_codes_of_the_whole(dtype: torch.dtype, rounding: str) -> None:
    given: dict[str, Any] = dict(zip(("q", "k", "gamma_q", "gamma_k"), qk(6, 128, 64), strict=True))
    rope = onepass.Rope(angles(9, 32), torch.arange(6), head_dim=64)
    options: dict[str, Any] = {"q_scale": torch.tensor(0.02), "k_scale": torch.tensor(0.05), "rounding": rounding}
    found = applied(given, dtype, epsilon=1e-5, epsilon_k=0.5, rope=rope, **options)
    whole = onepass.qk_rms_norm(**given, eps=1e-5, eps_k=0.5, out_dtype=dtype, rope=rope, **options)
    assert all(same_bytes(a, b) for a, b in zip(found, whole, strict=True)) and found[1].float().abs().amax() > 10
    plain = applied(given, F32, epsilon=1e-5, epsilon_k=0.5)
    same = applied(given, F32, epsilon=1e-5)
    assert torch.equal(plain[0], same[0]) and not torch.equal(plain[1], same[1])


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        (FP8, {}, "`q_out` must have dtype float32, got float8_e4m3fn"),
        (F32, {"q_scale": torch.ones(()), "k_scale": torch.ones(())}, "`q_scale` must be None unless q_out is fp8"),
        (FP8, {"q_scale": torch.ones(())}, "`k_scale` must be given with q_scale, or both be None"),
        (F32, {"epsilon_k": -1.0}, "`epsilon_k` must be a number and satisfy 0 <= epsilon_k"),
    ],
)
def test_wrong_applications_are_refused(dtype: torch.dtype, change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = dict(zip(("q", "k", "gamma_q", "gamma_k"), qk(3, 128, 64), strict=True))
    given |= {side: given[side].float() for side in "qk"}
    with pytest.raises(ContractError, match=f"apply_qk_rms_norm: {message}"):
        applied(given, dtype, epsilon=1e-6, **change)


def test_codes_compile_in_one_graph() -> None:
    q, k, gq, gk = qk(3, 128, 64)

    def codes() -> tuple[torch.Tensor, ...]:
        return onepass.qk_rms_norm(q, k, gq, gk, out_dtype=FP8, eps_k=0.1)

    compiled: Any = torch.compile(codes, fullgraph=True, backend="aot_eager")
    assert all(same_bytes(a, b) for a, b in zip(compiled(), codes(), strict=True))
    given = {"q": q, "k": k, "gamma_q": gq, "gamma_k": gk}
    scales = {"q_scale": torch.tensor(0.02), "k_scale": torch.tensor(0.05)}

    def halves() -> list[torch.Tensor]:
        return applied(given, FP8, epsilon=1e-6, **scales)

    found = torch.compile(halves, fullgraph=True, backend="aot_eager")()
    expected = halves()
    assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))
