"""The references agree with independent sources and import nothing else of the library."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from onepass.formats import E4M3FN, E4M3FNUZ, FLOATS, Fp8Format, ScaleRule
from onepass.ops.attention import reference as attention_reference
from onepass.ops.latent_attention import reference as latent_attention_reference
from onepass.ops.linear import reference as linear_reference
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing import compare
from tests.mla_cache import checks as mla_cache
from tests.mla_cache.cases import CASES
from tests.oracle import bounds, runner
from tests.oracle.case import Case
from tools.ulps import floats

F32 = torch.float32
OPS = Path(onepass.__file__).parent / "ops"
ACTIVATIONS: dict[str, Any] = {
    "silu_mul": torch.nn.functional.silu,
    "gelu_tanh_mul": partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu_mul": torch.nn.functional.gelu,
}


@pytest.mark.parametrize("op", sorted(set(map(runner.family, runner.MODULES))))
def test_references_import_only_torch_and_each_other(op: str) -> None:
    tree = ast.parse((OPS / op / "reference.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules = {f"{'.' * node.level}{node.module}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names <= {"torch"}
    others = {name for name in modules if name.startswith("..") and name.endswith(".reference")}
    assert modules - others <= {"__future__", "collections.abc", "typing", "torch"}


def test_equals_torch_in_float64() -> None:
    x, gamma = torch.randn(7, 96, dtype=torch.float64), torch.randn(96, dtype=torch.float64)
    eps = float(torch.tensor(1e-5, dtype=torch.float32))
    expected = torch.nn.functional.rms_norm(x, (96,), gamma, eps)
    torch.testing.assert_close(rms_norm_reference.rms_norm(x, gamma, 1e-5).y, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_torch_in_float64(masked: bool) -> None:
    """Also with latents, whose rotated parts are further columns of q and k."""
    q, k, v = (torch.randn(2, heads, n, 24).double() for heads, n in ((6, 3), (2, 9), (2, 9)))
    mask = torch.randn(2, 1, 3, 9).double() if masked else None
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask, scale=0.3, enable_gqa=True)
    got = attention_reference.attend(q, k, v, mask, 0.3)
    torch.testing.assert_close(got, sdpa(q, k, v).transpose(1, 2), rtol=1e-12, atol=1e-12)
    parts = q[..., :16], q[..., 16:], k[:, :1, :, :16], k[:, :1, :, 16:]
    got = latent_attention_reference.attend_latents(*parts, mask, 0.3)
    torch.testing.assert_close(got, sdpa(q, k[:, :1], parts[2]).transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
def test_hf_mode_rounds_as_hugging_face_does(dtype: torch.dtype) -> None:
    """As LlamaRMSNorm writes it: statistics in float32, round, then multiply by the weight in its dtype."""
    x, gamma = torch.randn(9, 200).to(dtype), torch.randn(200).to(dtype)
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = gamma * h.to(dtype)
    exact = rms_norm_reference.rms_norm(x, gamma, 1e-6, rounding="hf").y
    assert floats(expected, exact, ulps=2) is None


@pytest.mark.parametrize(("activation", "function"), ACTIVATIONS.items())
@pytest.mark.parametrize("rounding", ["once", "hf"])
def test_linear_equals_torch(rounding: str, activation: str, function: Any) -> None:
    """As a decoder layer of transformers computes it in float64, with its roundings in "hf"."""
    functional = torch.nn.functional
    x, residual, add = (torch.randn(5, n).bfloat16() for n in (300, 300, 65))
    weight, bias, gamma = torch.randn(130, 300).to(E4M3FN.dtype), torch.randn(130), torch.randn(300)
    scale = torch.rand(2, 3)

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t.bfloat16().double() if rounding == "hf" else t

    h = x.double() + residual.double()
    if rounding == "hf":
        h = h.bfloat16().double()
    normed = functional.rms_norm(h, (300,), None, 1e-5)
    a = (rounded(normed) * gamma.double()).bfloat16().double()
    blocks = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :300]
    y = rounded(functional.linear(a, weight.double() * blocks, bias.double()))
    y = rounded(rounded(function(y[:, :65])) * y[:, 65:])
    y = rounded(y + add.double())
    named = {"gamma": gamma, "residual": residual, "bias": bias, "add": add, "weight_scale": scale}
    found = linear_reference.linear(x, weight, eps=1e-5, activation=activation, rounding=rounding, **named)  # type: ignore[arg-type]
    if rounding == "once":
        torch.testing.assert_close(found.y, y, rtol=1e-6, atol=1e-9)
    else:
        assert float((found.y == y).double().mean()) > 0.98


def test_products_with_scales() -> None:
    x, weight = torch.randn(3, 200), torch.randn(130, 200)
    y, slack = linear_reference.matmul(x, weight)
    torch.testing.assert_close(y, x.double() @ weight.double().T)
    assert (slack > 0).all() and (slack < 1e-3).all()
    rows = torch.rand(130)
    for scale in (rows, rows.unsqueeze(1), torch.tensor([0.5])):
        torch.testing.assert_close(linear_reference.matmul(x, weight, scale)[0], y * scale.double().reshape(1, -1))
    exponents = torch.tensor([[120, 128], [127, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    scaled = linear_reference.matmul(x, weight, exponents)[0]
    left, right = (
        part[0].double() @ part[1].double().T for part in ((x[:, :128], weight[:, :128]), (x[:, 128:], weight[:, 128:]))
    )
    torch.testing.assert_close(scaled[:, :128], (left / 128 + right * 2)[:, :128])
    assert scaled[:, 128:].isnan().all()


@pytest.mark.parametrize("fmt", [E4M3FN, E4M3FNUZ], ids=lambda f: f.name)
def test_encode_equals_torch_in_range(fmt: Fp8Format) -> None:
    """Every bfloat16 value within the format's range, where torch's cast, which does not saturate, is correct."""
    values = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.abs() <= fmt.max]
    expected = values.to(fmt.dtype).view(torch.uint8)
    got = rms_norm_reference.encode(values.double(), fmt.bias, fmt.max, fmt.nan_code, fmt.has_negative_zero)
    assert torch.equal(got, expected)


def test_encode_ties_saturation_and_nan() -> None:
    values = torch.tensor(
        [17.0, 19.0, 460.0, 1e30, -1e30, torch.nan, -0.0, 2.0**-10, 3 * 2.0**-10], dtype=torch.float64
    )
    got = rms_norm_reference.encode(values, 7, 448.0, 0x7F, True)
    assert got.tolist() == [0x58, 0x5A, 0x7E, 0x7E, 0xFE, 0x7F, 0x80, 0x00, 0x02]
    assert rms_norm_reference.encode(torch.tensor([-0.0, -1e-9]).double(), 8, 240.0, 0x80, False).tolist() == [0, 0]


def test_powers_of_two() -> None:
    t = torch.tensor([0.0, 1.0, 1.0000001, 0.75, 2.0**-130, 3e38, torch.nan], dtype=torch.float64)
    got = rms_norm_reference.power_of_two_above(t)
    assert got[:6].tolist() == [2.0**-127, 1.0, 2.0, 1.0, 2.0**-127, 2.0**127]
    assert got[6].isnan()


class TestNoToleranceAcceptsZero:
    """A comparison that accepts all-zero outputs would prove nothing."""

    y = torch.randn(8, 64, dtype=torch.float64)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_floats(self, dtype: torch.dtype) -> None:
        assert floats(self.y.to(dtype), self.y) is None
        assert floats(torch.zeros_like(self.y, dtype=dtype), self.y) is not None

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_floats_two_ulps_off(self, dtype: torch.dtype) -> None:
        off = (self.y.to(dtype).view(torch.int16) + 2).view(dtype)
        assert floats(off, self.y) is not None

    def test_one_ulp_everywhere_is_too_much(self) -> None:
        off = (self.y.to(torch.bfloat16).view(torch.int16) + 1).view(torch.bfloat16)
        assert floats(off, self.y) is not None

    def test_scales(self) -> None:
        amax = self.y.abs().amax(-1, keepdim=True)
        step = amax / 448
        ends = amax * (1 - 1e-6), amax * (1 + 1e-6)
        wrong = partial(bounds.scales, low=ends[0], high=ends[1], bound=None, fp8_max=448.0, rule=ScaleRule("row", F32))
        assert wrong(step.float()) is None
        assert wrong(torch.zeros_like(step).float()) is not None
        assert wrong(step.float() * (1 + 1e-5)) is not None

    def test_codes(self) -> None:
        scale = self.y.abs().amax(-1, keepdim=True) / 448
        codes = rms_norm_reference.encode(self.y / scale, 7, 448.0, 0x7F, True)
        ends = bounds.around(self.y / scale, 1e-6 * (self.y / scale).abs())
        for right, changed in ((codes, False), (torch.zeros_like(codes), True), (codes ^ 1, True)):
            actual = right.view(E4M3FN.dtype)
            assert (compare.between(actual, *ends, E4M3FN) is not None) == changed
            assert (compare.mostly_equal(actual, self.y / scale, E4M3FN) is not None) == changed


class TestRoundedOnTheWay:
    """Roundings between the sum and the store: a result passes only if the rounding rules explain it."""

    @staticmethod
    def results(case: Any) -> tuple[Any, dict[str, Any], list[torch.Tensor]]:
        module = runner.MODULES[case.op]
        with runner.running_on("cpu"):
            arguments = module.inputs(case, "cpu")
            found = list(module.call(case, arguments))
            assert module.verify(case, arguments, tuple(found)) is None
        return module, arguments, found

    @pytest.mark.parametrize("factor", [1.005, 0.995, 1 + 1e-5, 1 - 1e-5])
    @pytest.mark.parametrize("group", [None, 128])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_scale_half_a_percent_off_is_wrong(self, dtype: torch.dtype, group: int | None, factor: float) -> None:
        options: dict[str, Any] = {"rounding": "hf"} | ({"group_size": group} if group else {})
        case = Case("rms_norm_fused_fp8", "test", (4,), 640, dtype, options=options)
        module, arguments, results = self.results(case)
        scale = results[1]
        for at in range(scale.numel()):
            changed = scale.clone()
            changed.view(-1)[at] *= factor
            wrong = module.verify(case, arguments, (results[0], changed))
            assert wrong is not None and wrong.startswith("1 of")

    @pytest.mark.parametrize("op", ["rms_norm", "rms_norm_fused_fp8"])
    def test_one_value_of_a_rounded_norm_a_step_off_is_wrong(self, op: str) -> None:
        case = Case(op, "test", (2,), 64, options={"rounding": "hf"})
        self.every_step_is_noticed(case, 0, 128)

    @pytest.mark.sampled(4)  # some cases stay
    @pytest.mark.parametrize("case", [c for c in CASES if c.group == "reference"], ids=lambda c: c.name)
    @pytest.mark.parametrize("index", [0, 1])
    def test_one_value_of_a_small_cache_write_a_step_off_is_wrong(self, case: Any, index: int) -> None:
        self.every_step_is_noticed(case, index, 40)

    def every_step_is_noticed(self, case: Any, index: int, most: int) -> None:
        """Change one value that the op wrote, in several runs: by one unit in the last place, or a float32 by about 1/4096."""
        module, arguments, results = self.results(case)
        whole = results[index]
        before = arguments["blocks"] if case.op == mla_cache.OP and index == 1 else torch.zeros_like(whole)
        integer, step = {1: (torch.uint8, 1), 2: (torch.int16, 1), 4: (torch.int32, 2**12)}[whole.element_size()]
        written = (whole.view(integer) != before.view(integer)).nonzero()
        assert len(written) >= most
        for at in written[:: len(written) // most].tolist():
            changed = whole.clone()
            place = changed.view(integer)[tuple(at)]
            place.copy_(place + (-step if int(place) & 0x7F == 0x7E else step))
            several = [changed if i == index else t for i, t in enumerate(results)]
            assert module.verify(case, arguments, tuple(several)) is not None, at


def test_sign_of_a_code_is_free_where_that_of_h_is() -> None:
    """A gamma of zero keeps only the sign of h, which an inexact prologue may lose."""
    h, one = torch.tensor([[-1e-15, -1.0, -0.0]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    doubt = torch.full_like(h, 1e-14)
    low, high = bounds.codes_once(h, one, torch.zeros(3, dtype=torch.float64), one, doubt=doubt)
    assert low.signbit().tolist() == [[True, True, True]] and high.signbit().tolist() == [[False, True, True]]
    low, high = bounds.codes_once(h, one, torch.zeros(3, dtype=torch.float64), one)
    assert low.signbit().all() and high.signbit().all()


def test_zeros_of_either_sign_stay_so_in_a_rotation_by_steps() -> None:
    """Twice minus zero is minus zero, also where cosine and sine are negative."""
    either = bounds.Bounds(torch.full((1, 1, 2), -0.0).double(), torch.zeros(1, 1, 2).double())
    freqs = torch.tensor([[-0.5, -0.5]])
    low, high = bounds.rotated_stepwise(
        either, freqs, torch.bfloat16, positions=torch.zeros(1, dtype=torch.int64), style="half", dim=2
    )
    assert low.signbit().all() and not high.signbit().any()
