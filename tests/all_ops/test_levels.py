"""Leading dimensions whose strides fold to more than three levels: several launches give the bytes of one.

That the Triton kernels do the same is checked by the cases of the group "levels", in the interpreter (test_interpreter.py) and on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.backend import launching_with
from onepass.core.layout import geometry, smallest_dimension
from onepass.testing.tensors import lay_out, same_bytes

LEAD = (2, 3, 4, 2)


def reversed_(t: Tensor) -> Tensor:
    """The same values with the leading dimensions reversed in memory."""
    return lay_out(t, "reversed")


def room(like: Tensor) -> Tensor:
    """An output with another order than `reversed_`: leading dimensions 1, 3, 0, 2."""
    a, b, c, d, n = like.shape
    return torch.full((b, d, a, c, n), 7.0).to(like.dtype).permute(2, 0, 3, 1, 4)


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(*LEAD, 96).to(dtype), torch.randn(96).to(dtype), torch.randn(*LEAD, 96).to(dtype)


def test_samples_have_more_than_three_levels() -> None:
    x, _, _ = inputs()
    assert geometry([x]) is not None and geometry([reversed_(x)]) is None and geometry([room(x)]) is None
    assert geometry([x, room(x)]) is None


def test_smallest_dimension_is_split() -> None:
    assert [smallest_dimension(sizes) for sizes in ([3, 2, 5], [1, 4, 1, 3], [2, 2])] == [1, 3, 0]


def launches(call: Any) -> int:
    """The number of launches of a call, which computes nothing."""
    count: list[str] = []
    with launching_with(lambda family: lambda *_: count.append(family)):
        call()
    return len(count)


def test_one_launch_per_index_of_the_smallest_dimensions() -> None:
    x, gamma, residual = inputs()
    assert launches(lambda: onepass.rms_norm(x, gamma)) == 1
    assert launches(lambda: onepass.rms_norm(reversed_(x), gamma)) == 2
    six = reversed_(x.view(2, 3, 2, 2, 2, 96))
    assert launches(lambda: onepass.rms_norm(six, gamma)) == 4
    # the last leading dimension is never split, because it may be the position
    assert launches(lambda: onepass.qk_rms_norm(reversed_(x), reversed_(residual), gamma, gamma)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, gamma, residual = inputs(dtype)
    expected = onepass.rms_norm(x, gamma, residual=residual)
    assert expected[0].float().abs().amax() > 1
    found = onepass.rms_norm(reversed_(x), gamma, residual=residual)
    given = onepass.rms_norm(
        reversed_(x), gamma, residual=reversed_(residual), out=room(x), residual_out=room(residual)
    )
    own = reversed_(x), reversed_(residual)
    onepass.rms_norm(own[0], gamma, residual=own[1], out=own[0], residual_out=own[1])
    for results in (found, given, own):
        assert all(same_bytes(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"return_norm": True}, {"rounding": "hf"}, {"scale_format": "ue8m0"}])
def test_rms_norm_fused_fp8(options: dict[str, Any]) -> None:
    x, gamma, residual = inputs()
    expected = onepass.rms_norm_fused_fp8(x, gamma, residual=residual, **options)
    found = onepass.rms_norm_fused_fp8(reversed_(x), gamma, residual=residual, **options)
    given = onepass.rms_norm_fused_fp8(
        x,
        gamma,
        residual=reversed_(residual),
        out=room(expected[0].float()).to(torch.float8_e4m3fn),
        scale_output=room(expected[1]),
        **options,
    )
    for results in (found, given):
        assert all(same_bytes(a, b) for a, b in zip(results, expected, strict=True))


def test_groups_column_scales_and_a_static_scale() -> None:
    x, gamma = torch.randn(*LEAD, 128).bfloat16(), torch.randn(128)
    for options in ({"group_size": 64, "scale_layout": "column"}, {"static_scale": torch.tensor(0.01)}):
        expected = onepass.rms_norm_fused_fp8(x, gamma, **options)
        found = onepass.rms_norm_fused_fp8(reversed_(x), gamma, **options)
        assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


@onepass.prologue
def shifted(x, full, column, row):  # type: ignore[no-untyped-def]
    """An operand of each kind."""
    return x * row + full - column


def test_prologue_operands_follow_their_rows() -> None:
    x, gamma, full = inputs()
    column, row = torch.randn(96), torch.randn(*LEAD, 1)
    options = {"prologue": shifted}
    expected = onepass.rms_norm_fused_fp8(x, gamma, prologue_args=[full, column, row], **options)  # type: ignore[arg-type]
    found = onepass.rms_norm_fused_fp8(
        reversed_(x),
        gamma,
        prologue_args=[room(full).copy_(full), column, reversed_(row)],
        **options,  # type: ignore[arg-type]
    )
    assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("placed", [False, True])
def test_statistics_application_and_rotation_of_q_and_k(placed: bool) -> None:
    """Without positions a token's position is its index in the last leading dimension, however the call is split."""
    q, _, _ = inputs()
    k, gamma_q, gamma_k = torch.randn(*LEAD, 32).bfloat16(), torch.randn(96), torch.randn(32)
    angle = torch.rand(9, 16) * 6
    freqs = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)
    positions = torch.randint(0, 9, LEAD) if placed else None
    rope = onepass.Rope(freqs, positions, head_dim=32)
    moved = onepass.Rope(
        freqs, None if positions is None else reversed_(positions.unsqueeze(-1)).squeeze(-1), head_dim=32
    )
    means = onepass.row_mean_of_squares_qk(q, k)
    assert same_bytes(onepass.row_mean_of_squares_qk(reversed_(q), k), means)
    assert same_bytes(
        onepass.row_sum_of_squares_qk(q, reversed_(k), out=room(means)), onepass.row_sum_of_squares_qk(q, k)
    )
    expected = onepass.qk_rms_norm(q, k, gamma_q, gamma_k, rope=rope)
    found = onepass.qk_rms_norm(reversed_(q), reversed_(k), gamma_q, gamma_k, rope=moved, out=(room(q), room(k)))
    own = reversed_(q), reversed_(k)
    onepass.apply_qk_rms_norm(*own, gamma_q, gamma_k, reversed_(means), *own, 1e-6, rope=moved)
    for results in (found, own):
        assert all(same_bytes(a, b) for a, b in zip(results, expected, strict=True))


def test_strided_heads() -> None:
    q, k = torch.randn(*LEAD, 3, 32), torch.randn(*LEAD, 2, 32)
    gamma_q, gamma_k = torch.randn(32), torch.randn(32)
    expected = onepass.qk_rms_norm(q, k, gamma_q, gamma_k, per_head=True)
    found = onepass.qk_rms_norm(reversed_(q), reversed_(k), gamma_q, gamma_k, per_head=True)
    assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


def test_no_rows() -> None:
    x = torch.empty(3, 2, 0, 4, 2, 8).permute(4, 3, 2, 1, 0, 5)
    assert onepass.rms_norm(x, torch.ones(8)).shape == x.shape
    assert [t.shape for t in onepass.qk_rms_norm(x, x, torch.ones(8), torch.ones(8))] == [x.shape] * 2


def test_compiled() -> None:
    x, gamma, residual = inputs()

    def call(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return onepass.rms_norm(x.permute(3, 2, 1, 0, 4), gamma, residual=residual.permute(3, 2, 1, 0, 4))

    expected = call(x, residual)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(x, residual)
    assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


def test_every_option_reaches_each_launch() -> None:
    """A bound in memory and a smallest scale, both of which change every scale here."""
    x, gamma, residual = inputs()
    bound = torch.tensor(0.5)
    options: dict[str, Any] = {
        "scale_ub": bound,
        "min_scale": 0.001,
        "residual": residual,
        "round_sum": True,
        "quantize": "divide",
    }
    plain = onepass.rms_norm_fused_fp8(x, gamma, **options)
    apart = onepass.rms_norm_fused_fp8(reversed_(x), gamma, **{**options, "residual": reversed_(residual)})
    assert all(same_bytes(a.contiguous(), b.contiguous()) for a, b in zip(plain, apart, strict=True))
    for name, value in (("scale_ub", None), ("min_scale", 0.0)):
        changed = {**options, "scale_ub": torch.tensor(-1.0), name: value}
        assert not torch.equal(onepass.rms_norm_fused_fp8(x, gamma, **changed)[1], plain[1])
