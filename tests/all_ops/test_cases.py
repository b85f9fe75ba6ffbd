"""Every case of every op on the CPU against the oracle, and properties that need no oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import onepass
from onepass.core import backend
from onepass.core.backend import launching_with
from onepass.formats import E4M3FN, FLOATS, Quantize, Rounding
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing.tensors import same_bytes
from tests import matrix
from tests.oracle import runner
from tests.oracle.case import Case, Check
from tools.ulps import floats


def runs_here(case: Check) -> bool:
    """Not large batches of every format: on a CPU they are the same rows as in small ones. GPUs run them all."""
    large = case.op == "rms_norm_fused_quant" and case.group == "large"
    return not large or any(name in case.name for name in ("e4m3fn", "nvfp4"))


LARGE = (
    "rms_norm_fused_quant",
    "rms_norm_fused_fp8",
    "layer_norm",
    "rms_norm_add_rms_norm",
    "rms_norm_add_rms_norm_quant",
    "quantize",
)


@pytest.mark.sampled(40)  # each group of each op stays
@pytest.mark.parametrize(
    "case",
    [
        # one op's large cases are enough
        pytest.param(c, marks=[pytest.mark.full] if c.group == "large" and c.op in LARGE else [])
        for c in matrix.CASES
        if runs_here(c)
    ],
    ids=lambda c: f"{c.op}-{c.name}",
)
def test_case(case: Case) -> None:
    result = runner.run_case(case, "cpu")
    assert result.passed, result.message


@pytest.mark.sampled(40)  # stays for the cases of test_case that stay
@pytest.mark.parametrize(
    "case", [c for c in matrix.CASES if c.group != "empty" and c.interpretable], ids=lambda c: f"{c.op}-{c.name}"
)
def test_zeros_fail_every_case(case: Case) -> None:
    """No case accepts zeros in place of one of its outputs. `test_case` shows that it accepts the correct ones.

    Where zeros are correct, because amax has a bound of -inf, ones are not accepted. Long rows and large
    batches are left out: they would be slow and show nothing more.
    """
    module = runner.MODULES[case.op]
    arguments = module.inputs(case, "cpu")
    results = module.call(case, arguments)
    outputs = module.zeroable(case)
    assert outputs
    options = getattr(case, "options", {})
    fill = int(options.get("bounded") == -math.inf and not options.get("min_scale"))
    for index, name in outputs:
        t = results[index]
        wrong = torch.full((t.numel() * t.element_size(),), fill, dtype=torch.uint8).view(t.dtype).view(t.shape)
        assert module.verify(case, arguments, (*results[:index], wrong, *results[index + 1 :])) is not None, name


def test_case_names_are_unique() -> None:
    names = [(c.op, c.name) for c in matrix.CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("shape", [(6, 120), (2, 3, 120), (2, 1, 3, 120)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_pattern_full_of_ties(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    """Values that repeat every 20 columns, against an independent float32 computation: only ties may differ."""
    count = torch.arange(math.prod(shape))
    x = (0.05 + 2.95 * (count % 20) / 19).reshape(shape).to(dtype)
    gamma = (0.5 + 0.1 * (torch.arange(120) % 11)).to(dtype)
    q, scale = onepass.rms_norm_fused_fp8(x, gamma, 1e-5, weight_offset=offset, scale_ub=448.0)

    h, g = x.float(), gamma.float() + offset
    rs = 1 / torch.sqrt(h.square().mean(-1, keepdim=True) + 1e-5)
    amax = (h * g).abs().amax(-1, keepdim=True) * rs
    expected_scale = amax.clamp(max=448.0) / 448
    torch.testing.assert_close(scale, expected_scale, rtol=3e-7, atol=0)
    value = (h * g) * (rs / scale)
    expected = value.clamp(-448, 448).to(torch.float8_e4m3fn)
    different = q.view(torch.uint8) != expected.view(torch.uint8)
    exact = rms_norm_reference.rms_norm(x, gamma, 1e-5, weight_offset=offset).y / scale.double()
    table = rms_norm_reference.decode_table(E4M3FN.bias)[:127]
    boundaries = (table[1:] + table[:-1]) / 2
    distance = (exact[different].unsqueeze(-1) / boundaries[1:] - 1).abs().amin(-1)
    assert (distance < 1e-6).all(), (
        f"{int(different.sum())} codes differ, {int((distance >= 1e-6).sum())} of them not at a tie"
    )
    assert different.double().mean() < 0.02


class TestMeaning:
    def test_dequantized_is_the_norm(self) -> None:
        x, gamma = torch.randn(16, 512).bfloat16(), torch.randn(512).bfloat16()
        q, scale = onepass.rms_norm_fused_fp8(x, gamma)
        y = rms_norm_reference.rms_norm(x, gamma, 1e-6).y
        error = (q.double() * scale.double() - y).abs()
        assert (error <= y.abs() * 2.0**-4 + scale.double() * 2.0**-10 * 1.001).all()
        assert q.float().abs().amax(-1).eq(448).all()

    def test_norm_is_what_rms_norm_returns(self) -> None:
        x, gamma = torch.randn(5, 777).bfloat16(), torch.randn(777)
        _, _, norm = onepass.rms_norm_fused_fp8(x, gamma, return_norm=True)
        assert same_bytes(norm, onepass.rms_norm(x, gamma))

    def test_order_of_results(self) -> None:
        x, gamma = torch.randn(3, 128).bfloat16(), torch.ones(128).bfloat16()
        results = onepass.rms_norm_fused_fp8(x, gamma, residual=torch.ones_like(x), return_norm=True)
        assert [t.dtype for t in results] == [torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.bfloat16]
        assert same_bytes(results[2], (x.float() + 1).bfloat16())

    def test_static_scale_is_returned(self) -> None:
        scale = torch.tensor(0.03)
        results = onepass.rms_norm_fused_fp8(torch.randn(3, 128), torch.ones(128), static_scale=scale)
        assert results[1] is scale

    def test_column_layout_has_rows_contiguous(self) -> None:
        x = torch.randn(2, 5, 256)
        _, scale = onepass.rms_norm_fused_fp8(x, torch.ones(256), group_size=128, scale_layout="column")
        assert scale.shape == (2, 5, 2)
        assert scale.stride() == (5, 1, 10)

    def test_once_uses_the_unrounded_sum(self) -> None:
        """x + residual differs from its bfloat16 rounding: "once" norms the sum, "hf" the rounded sum."""
        x = torch.full((1, 64), 1.0).bfloat16()
        residual = torch.full((1, 64), 2.0**-9).bfloat16()
        residual[0, 0] = 3.0
        exact = rms_norm_reference.rms_norm(x, torch.ones(64), 0.0, residual=residual).y
        y, _ = onepass.rms_norm(x, torch.ones(64), 0.0, residual=residual)
        assert same_bytes(y, exact.bfloat16())
        assert not torch.equal(
            exact, rms_norm_reference.rms_norm(x, torch.ones(64), 0.0, residual=residual, rounding="hf").y
        )

    @pytest.mark.parametrize("rounding", ["once", "hf"])
    def test_round_sum_is_independent_of_rounding(self, rounding: Rounding) -> None:
        """With a rounded sum the result is the norm of the stored sum, otherwise that of the float32 sum."""
        x, r, gamma = torch.randn(16, 512).bfloat16(), torch.randn(16, 512).bfloat16(), torch.randn(512).bfloat16()
        rounded, stored = onepass.rms_norm(x, gamma, residual=r, rounding=rounding, round_sum=True)
        assert same_bytes(stored, x + r)
        assert same_bytes(rounded, onepass.rms_norm(stored, gamma, rounding=rounding))
        plain, stored = onepass.rms_norm(x, gamma, residual=r, rounding=rounding, round_sum=False)
        assert same_bytes(stored, x + r) and (plain != rounded).float().mean() > 0.05
        exact = rms_norm_reference.rms_norm(x, gamma, 1e-6, residual=r, rounding=rounding, round_sum=False).y
        assert (plain == exact.bfloat16()).float().mean() > 0.999
        for given, expected in ((True, rounded), (False, plain), (None, rounded if rounding == "hf" else plain)):
            codes = onepass.rms_norm_fused_fp8(
                x, gamma, residual=r, rounding=rounding, round_sum=given, return_norm=True
            )
            assert same_bytes(codes[-1], expected)

    def test_round_sum_without_anything_to_round(self) -> None:
        x, gamma = torch.randn(3, 64).bfloat16(), torch.randn(64)
        for residual in (None, torch.randn(3, 64)):
            call: Callable[..., Any] = partial(onepass.rms_norm, x, gamma, residual=residual)
            results = [call(round_sum=given) for given in (None, True, False)]
            first, *others = [r if residual is None else r[0] for r in results]
            assert all(same_bytes(first, other) for other in others)

    @pytest.mark.parametrize("group", [None, 64])
    @pytest.mark.parametrize("rounding", ["once", "hf"])
    def test_divide_uses_the_norm_itself(self, rounding: Rounding, group: int | None) -> None:
        x, gamma = torch.randn(64, 256), torch.randn(256)
        q, scale, norm = onepass.rms_norm_fused_fp8(
            x, gamma, rounding=rounding, quantize="divide", group_size=group, return_norm=True
        )
        values = norm.unflatten(-1, (-1, group or 256))
        assert same_bytes(scale, values.abs().amax(-1) / 448)
        expected = (values / scale.unsqueeze(-1)).flatten(-2).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert same_bytes(q, expected)

    @pytest.mark.parametrize(
        "options", [{}, {"group_size": 64}, {"quantize": "divide"}, {"scale_format": "ue8m0"}], ids=str
    )
    def test_bound_as_tensor_equals_bound_as_number(self, options: dict[str, Any]) -> None:
        x, gamma = torch.randn(16, 256).bfloat16(), torch.randn(256).bfloat16()
        for bound in (0.7, 5.0):
            number = onepass.rms_norm_fused_fp8(x, gamma, scale_ub=bound, **options)
            tensor = onepass.rms_norm_fused_fp8(x, gamma, scale_ub=torch.tensor([bound]), **options)
            assert all(same_bytes(a, b) for a, b in zip(number, tensor, strict=True))
        nothing = onepass.rms_norm_fused_fp8(x, gamma, scale_ub=torch.tensor(torch.nan), **options)
        assert all(
            same_bytes(a, b) for a, b in zip(nothing, onepass.rms_norm_fused_fp8(x, gamma, **options), strict=True)
        )

    def test_weight_offset_is_added_in_float32(self) -> None:
        gamma = torch.full((64,), 0.0039).bfloat16()
        y = onepass.rms_norm(torch.ones(1, 64), gamma.float(), 0.0, weight_offset=1.0)
        torch.testing.assert_close(y, torch.full((1, 64), 1 + gamma[0].item()), rtol=1e-6, atol=0)

    def test_stored_scale_is_the_one_used(self) -> None:
        x, gamma = torch.randn(64, 256).bfloat16(), torch.randn(256).bfloat16()
        q, scale = onepass.rms_norm_fused_fp8(x, gamma, scales_dtype=torch.bfloat16)
        y = rms_norm_reference.rms_norm(x, gamma, 1e-6).y
        exact = rms_norm_reference.encode(y / scale.double(), 7, 448.0, 0x7F, True)
        assert (q.view(torch.uint8) != exact).double().mean() < 1e-3


class TestEdges:
    gamma = torch.ones(128)

    @pytest.mark.sampled(5)  # one way to divide stays
    @pytest.mark.parametrize("quantize", ["reciprocal", "divide"])
    def test_smallest_scale(self, quantize: Quantize) -> None:
        """For a row of zeros, a row with a smaller scale, and bounds at or below zero; a NaN row stays NaN."""
        x = torch.zeros(4, 128)
        x[1], x[2], x[3, 5] = 1e-6, 1.0, torch.nan
        q, scale = onepass.rms_norm_fused_fp8(x, self.gamma, 0.5, min_scale=1e-5, quantize=quantize)
        assert scale[:3].flatten().tolist() == pytest.approx([1e-5, 1e-5, 1.5**-0.5 / 448], rel=1e-6)
        assert (
            q[0].view(torch.uint8).eq(0).all()
            and q[1].float().tolist() == [pytest.approx(0.1 * 2**0.5, rel=0.05)] * 128
        )
        assert scale[3].isnan() and q[3].view(torch.uint8).eq(0x7F).all()
        for bound in (0.0, -1.0, float("-inf")):
            upper = torch.tensor(bound)
            _, scale = onepass.rms_norm_fused_fp8(x, self.gamma, scale_ub=upper, min_scale=1e-5, quantize=quantize)
            assert same_bytes(scale[:3], torch.full((3, 1), 1e-5)) and scale[3].isnan()
            q, scale = onepass.rms_norm_fused_fp8(x, self.gamma, scale_ub=upper, quantize=quantize)
            assert scale[:3].eq(0).all() and q[:3].view(torch.uint8).eq(0).all() and scale[3].isnan()
        powers = {"scale_format": "ue8m0", "quantize": quantize}
        _, scale = onepass.rms_norm_fused_fp8(x[:3], self.gamma, 0.5, min_scale=1e-5, **powers)  # type: ignore[arg-type]
        assert scale.flatten().tolist() == [2.0**-16, 2.0**-16, 2.0**-9]
        _, scale = onepass.rms_norm_fused_fp8(x[:3], self.gamma, scale_ub=torch.tensor(-3.0), **powers)  # type: ignore[arg-type]
        assert scale.flatten().tolist() == [2.0**-127] * 3

    @pytest.mark.parametrize("static", [0.0, -0.0, 1e-40, float("inf"), float("nan")])
    def test_division_by_any_scale(self, static: float) -> None:
        x = torch.tensor([[3.0, -4.0], [torch.nan, 1.0], [0.0, -0.0]])
        given = torch.tensor(static)
        q, _ = onepass.rms_norm_fused_fp8(x, torch.ones(2), 0.0, static_scale=given, quantize="divide")
        codes = q.view(torch.uint8).tolist()
        expected = {0.0: [0, 0x80], 1e-40: [0x7E, 0xFE], float("inf"): [0, 0x80]}.get(static, [0x7F, 0x7F])
        assert codes[:2] == [expected, [0x7F, 0x7F]]
        assert codes[2] == ([0x7F, 0x7F] if static != static else [0, 0x80])

    def test_zero_row(self) -> None:
        q, scale = onepass.rms_norm_fused_fp8(torch.zeros(2, 128), self.gamma, 0.0)
        assert q.view(torch.uint8).eq(0).all() and scale.eq(0).all()
        assert onepass.rms_norm(torch.zeros(2, 128), self.gamma, 0.0).eq(0).all()

    @pytest.mark.parametrize("size", [1e-15, 1e-20, 1e-30])
    def test_tiny_rows_without_eps_stay_finite(self, size: float) -> None:
        """eps is at least 2**-126, so the argument of the reciprocal root is never subnormal."""
        x = torch.full((2, 128), size)
        expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 2.0**-126).sqrt()
        assert floats(onepass.rms_norm(x, self.gamma, 0.0), expected) is None
        passed: list[float] = []
        with launching_with(lambda family: lambda call: passed.append(call.eps)):
            onepass.rms_norm(x, self.gamma, 0.0)
            onepass.rms_norm(x, self.gamma, 1e-6)
        assert passed == [2.0**-126, 1e-6]

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_bad_row_is_nan_and_others_are_unaffected(self, bad: float) -> None:
        x = torch.randn(3, 128).bfloat16()
        spoiled = x.clone()
        spoiled[1, 77] = bad
        gamma = self.gamma.bfloat16()
        (q, s), (q0, s0) = (onepass.rms_norm_fused_fp8(v, gamma) for v in (spoiled, x))
        assert q[1].view(torch.uint8).eq(0x7F).all() and s[1].isnan().all()
        assert onepass.rms_norm(spoiled, gamma)[1].isnan().all()
        for row in (0, 2):
            assert same_bytes(q[row], q0[row]) and same_bytes(s[row], s0[row])

    def test_negative_zero(self) -> None:
        x = torch.tensor([[1.0, -0.0, -1e-30] + [0.0] * 125])
        fn, _ = onepass.rms_norm_fused_fp8(x, self.gamma)
        fnuz, _ = onepass.rms_norm_fused_fp8(x, self.gamma, out_dtype=torch.float8_e4m3fnuz)
        assert fn.view(torch.uint8)[0, :3].tolist() == [0x7E, 0x80, 0x80]
        assert fnuz.view(torch.uint8)[0, :3].tolist() == [0x7F, 0x00, 0x00]

    def test_saturation_is_finite(self) -> None:
        q, _ = onepass.rms_norm_fused_fp8(torch.randn(4, 128), self.gamma, scale_ub=1e-3)
        assert set(q.view(torch.uint8).flatten().tolist()) <= {0x7E, 0xFE, *range(0x7E), *range(0x80, 0xFE)}
        assert (q.float().abs() == 448).double().mean() > 0.5

    def test_finite_amax_never_stores_an_infinite_scale(self) -> None:
        x = torch.randn(2, 128)
        q, scale = onepass.rms_norm_fused_fp8(x, self.gamma * 1e9, scales_dtype=torch.float16)
        assert scale.eq(65504).all() and q.float().isfinite().all()

    def test_empty(self) -> None:
        q, scale = onepass.rms_norm_fused_fp8(torch.empty(0, 3, 128), self.gamma, group_size=64)
        assert q.shape == (0, 3, 128) and scale.shape == (0, 3, 2)
        assert onepass.rms_norm(torch.empty(2, 0, 128), self.gamma).shape == (2, 0, 128)

    def test_more_than_two_billion_elements_are_addressed(self) -> None:
        """Rows 2**31 elements apart; the memory in between is never touched."""
        step = 2**31 + 64
        x = torch.empty(step + 128, dtype=torch.bfloat16).as_strided((2, 128), (step, 1))
        x.copy_(torch.randn(2, 128))
        y = onepass.rms_norm(x, self.gamma.bfloat16())
        assert same_bytes(y, onepass.rms_norm(x.contiguous(), self.gamma.bfloat16()))


class TestCallersTensors:
    def test_in_place(self) -> None:
        x, r, gamma = torch.randn(6, 300).bfloat16(), torch.randn(6, 300).bfloat16(), torch.randn(300).bfloat16()
        y, h = onepass.rms_norm(x, gamma, residual=r)
        x2, r2 = x.clone(), r.clone()
        got = onepass.rms_norm(x2, gamma, residual=r2, out=x2, residual_out=r2)
        assert got[0] is x2 and got[1] is r2
        assert same_bytes(x2, y) and same_bytes(r2, h)

    def test_strided_out_does_not_touch_its_neighbours(self) -> None:
        x, gamma = torch.randn(4, 96), torch.randn(96)
        parent = torch.full((4, 200), 7.0)
        onepass.rms_norm(x, gamma, out=parent[:, 50:146])
        assert parent[:, :50].eq(7).all() and parent[:, 146:].eq(7).all()
        assert same_bytes(parent[:, 50:146].contiguous(), onepass.rms_norm(x, gamma))

    def test_two_slices_of_one_parent(self) -> None:
        x, r, gamma = torch.randn(4, 96), torch.randn(4, 96), torch.randn(96)
        parent = torch.empty(4, 192)
        y, h = onepass.rms_norm(x, gamma, residual=r, out=parent[:, :96], residual_out=parent[:, 96:])
        y0, h0 = onepass.rms_norm(x, gamma, residual=r)
        assert same_bytes(y.contiguous(), y0) and same_bytes(h.contiguous(), h0)

    @pytest.mark.parametrize("shift", [1, 48, 95])
    def test_overlap_is_rejected(self, shift: int) -> None:
        memory = torch.randn(1000)
        before = memory.clone()
        x = memory[: 4 * 96].view(4, 96)
        out = memory[shift : shift + 4 * 96].view(4, 96)
        with pytest.raises(onepass.ContractError, match=r"rms_norm: `out` must not overlap `x`"):
            onepass.rms_norm(x, torch.ones(96), out=out)
        assert torch.equal(memory, before)

    def test_out_that_overlaps_itself_is_rejected(self) -> None:
        with pytest.raises(onepass.ContractError, match="`out` must not overlap itself"):
            onepass.rms_norm(torch.randn(4, 96), torch.ones(96), out=torch.empty(1, 96).expand(4, 96))

    @pytest.mark.parametrize("stride", [0, 1, 96, 5000])
    def test_stride_of_a_single_row_does_not_matter(self, stride: int) -> None:
        """It is not a sign of overlap: expand leaves a stride of 0."""
        x = torch.randn(4, 1, 96)
        out = torch.empty(4, 200).as_strided((4, 1, 96), (200, stride, 1))
        assert not out.is_contiguous()
        assert same_bytes(
            onepass.rms_norm(x, torch.ones(96), out=out).contiguous(), onepass.rms_norm(x, torch.ones(96))
        )

    def test_overlapping_outs_are_rejected(self) -> None:
        x = torch.randn(4, 96)
        out = torch.empty_like(x)
        with pytest.raises(onepass.ContractError, match="`residual_out` must not overlap `out`"):
            onepass.rms_norm(x, torch.ones(96), residual=x, out=out, residual_out=out)


def test_each_device_has_its_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_launches", {("rms_norm", "cpu"): "llvm", ("rms_norm", "cuda"): "triton"})
    on_another = torch.empty(1, device="meta")  # like a GPU's, not on the CPU
    assert [str(backend.launch_for("rms_norm", t)) for t in (torch.empty(1), on_another)] == ["llvm", "triton"]
