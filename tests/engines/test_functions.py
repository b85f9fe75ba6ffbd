"""Compatibility functions compared with plain-torch versions of vLLM's and FlashInfer's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.backend import launching_with
from onepass.engines import flashinfer, plugin, vllm, vllm_0_19
from onepass.testing.quantized import Quantized, described
from tests.oracle.quantized import values
from tools import vllm_bytes

EPS = 1e-5
BF16, F16, F8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, residual = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
    return x, residual, (1 + 0.2 * torch.randn(shape[-1], generator=generator)).to(dtype)


def root(h: Tensor) -> Tensor:
    return torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + EPS)


def rounded_once(h: Tensor, weight: Tensor, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    return (h.float() * root(h) * (offset + weight.float())).to(dtype)


def rounded_twice(h: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (h.float() * root(h)).to(dtype) * weight


def assert_close(got: Tensor, expected: Tensor, equal: float = 0.999) -> None:
    """Equal up to the order of a float32 sum: at most one value in a thousand differs, by one unit in the last place."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype is torch.float32:
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-7)
        return
    assert (got == expected).float().mean() >= equal
    spacing = expected.float().abs().clamp(min=2.0**-14) * torch.finfo(got.dtype).eps
    assert ((got.float() - expected.float()).abs() <= spacing).all()
    assert expected.abs().max() > 0.5  # zeros would fail


@pytest.mark.parametrize("dtype", DTYPES)
def test_vllm_norms(dtype: torch.dtype) -> None:
    x, residual, weight = inputs(dtype, 40, 512)
    out = torch.empty_like(x)
    assert vllm.rms_norm(out, x, weight, EPS) is None
    assert_close(out, rounded_once(x, weight, dtype))
    vllm.rms_norm(out, x, None, EPS)
    assert_close(out, rounded_once(x, torch.ones_like(weight), dtype))

    a, b, total = x.clone(), residual.clone(), x + residual
    assert vllm.fused_add_rms_norm(a, b, weight, EPS) is None
    assert torch.equal(b, total)
    assert_close(a, rounded_once(total, weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_vllm_0_19_norms(dtype: torch.dtype) -> None:
    x, residual, weight = inputs(dtype, 40, 512)
    out = torch.empty_like(x)
    vllm_0_19.rms_norm(out, x, weight, EPS)
    assert_close(out, rounded_twice(x, weight, dtype))
    a, b, total = x.clone(), residual.clone(), x + residual
    vllm_0_19.fused_add_rms_norm(a, b, weight, EPS)
    assert torch.equal(b, total)
    assert_close(a, rounded_twice(total, weight, dtype))


def test_the_two_roundings_differ() -> None:
    """So the comparisons above can tell them apart."""
    x, _, weight = inputs(torch.bfloat16, 40, 512)
    once, twice = rounded_once(x, weight, torch.bfloat16), rounded_twice(x, weight, torch.bfloat16)
    assert (once != twice).float().mean() > 0.1
    with pytest.raises(AssertionError):
        assert_close(once, twice)


def promises_about(*words: str) -> list[Any]:
    """The comparisons with vLLM's formulas whose names contain all of these words. GPU runs make all comparisons."""
    return [pytest.param(p, id=name) for name, p in vllm_bytes.vllm_promises("cpu") if all(w in name for w in words)]


@pytest.mark.sampled(8)  # each compiles kernels
@pytest.mark.parametrize("promise", [*promises_about("640 columns"), *promises_about("e4m3fnuz")])
def test_vllm_bytes(promise: vllm_bytes.Promise) -> None:
    """Codes, scales and residuals have vLLM's bytes: rows, groups, residuals, bounds, zeros, the smallest scale."""
    assert promise() is None


@pytest.mark.parametrize("promise", promises_about("every quotient"))
def test_vllm_ties(promise: vllm_bytes.Promise) -> None:
    """Every bfloat16 value divided by every maximum, including all quotients halfway between two codes."""
    assert promise() is None


@pytest.mark.full  # test_vllm_bytes stays
@pytest.mark.slow
@pytest.mark.parametrize("n", [100, 4096, 7168, 20480])
def test_vllm_bytes_of_other_lengths(n: int) -> None:
    found = [p() for name, p in vllm_bytes.vllm_promises("cpu") if f"{n} columns" in name]
    assert len(found) >= 9 and found == [None] * len(found)


@pytest.mark.parametrize(
    "change",
    [{"quantize": "reciprocal"}, {"round_sum": True}, {"rounding": "once"}, {"min_scale": 0.0}, {"min_scale": 4.3e-6}],
    ids=str,
)
def test_the_comparison_with_vllm_can_fail(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It detects one option that differs from vLLM's."""
    before = onepass.rms_norm_fused_fp8
    monkeypatch.setattr(vllm, "rms_norm_fused_fp8", lambda *a, **k: before(*a, **{**k, **change}))
    assert vllm_bytes.code_bytes("cpu", BF16, 4096, None, True, None, F8) is not None


def test_the_comparison_of_norms_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """It detects a norm of the unrounded sum."""
    before: Callable[..., Any] = onepass.rms_norm
    monkeypatch.setattr(vllm, "_rms_norm", lambda *a, **k: before(*a, **{**k, "round_sum": None}))
    assert vllm_bytes.norm_bytes("cpu", BF16, 640) is not None


def test_the_comparison_of_native_norms_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """It detects a norm of the rounded sum, and a norm that is rounded once."""
    before: Callable[..., Any] = onepass.rms_norm
    for change in ({"round_sum": True}, {"rounding": "once"}):
        monkeypatch.setattr(plugin, "_rms_norm", lambda *a, change=change, **k: before(*a, **{**k, **change}))
        assert vllm_bytes.native_bytes("cpu", BF16, 640) is not None


@pytest.mark.parametrize("change", [{"rounding": "once"}, {"quantize": "divide"}, {"round_sum": False}], ids=str)
def test_the_comparison_of_static_codes_can_fail(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = onepass.rms_norm_fused_fp8
    monkeypatch.setattr(vllm, "rms_norm_fused_fp8", lambda *a, **k: before(*a, **{**k, **change}))
    assert vllm_bytes.static_bytes("cpu", BF16, 4096, True) is not None


@pytest.mark.sampled(4)  # each compiles a kernel
@pytest.mark.parametrize("out", [F8, torch.float8_e4m3fnuz, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("group", [None, 16, 32])
def test_codes_that_vllm_does_not_have(group: int | None, out: torch.dtype) -> None:
    """Smaller groups and e5m2, by vLLM's formula."""
    assert vllm_bytes.code_bytes("cpu", BF16, 640, group, True, 1.5, out) is None
    assert vllm_bytes.code_bytes("cpu", F16, 640, group, False, None, out) is None


@pytest.mark.parametrize("group", [16, 32])
def test_int8_groups_that_vllm_does_not_have(group: int) -> None:
    """Those of int8, as the op computes them."""
    x, _, weight = inputs(BF16, 9, 256)
    codes, scales = vllm.rms_norm_per_block_quant(x, weight, EPS, torch.int8, [1, group])
    options: Any = {"format": "int8", "group_size": group, "rounding": "hf", "min_scale": 2.0**-23}
    expected = onepass.rms_norm_fused_quant(x, weight, EPS, **options)
    assert torch.equal(codes, expected[0]) and torch.equal(scales, expected[1])
    assert codes.abs().amax() == 127 and scales.shape == (9, 256 // group)


def test_vllm_codes_are_divided_by_the_scale() -> None:
    """-100 is halfway between -96 and -104; multiplying by the rounded reciprocal of the scale would give -104."""
    weight = torch.full((64,), 0.68359375, dtype=BF16)
    weight[0] = 3.0625
    x = -torch.ones(1, 64, dtype=BF16)
    codes, scales = vllm.rms_norm_dynamic_per_token_quant(x, weight, 0.0, F8)
    assert float(scales) == pytest.approx(0.0068359375, abs=0) and float(codes[0, 1].float()) == -96
    reciprocal, _ = onepass.rms_norm_fused_fp8(x, weight, 0.0, rounding="hf")
    assert float(reciprocal[0, 1].float()) == -104


@pytest.mark.parametrize("bound", [0.0, -1.0, float("-inf")])
@pytest.mark.parametrize("out", [F8, torch.float8_e4m3fnuz])
def test_vllm_smallest_scale(bound: float, out: torch.dtype) -> None:
    x, _, weight = inputs(BF16, 5, 256)
    x[0] = 0
    least = {F8: 1 / (448 * 512), torch.float8_e4m3fnuz: 1 / (224 * 512)}[out]
    for upper, rows in ((None, slice(0, 1)), (torch.tensor(bound), slice(0, 5))):
        codes, scales = vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, out, upper)
        assert scales[rows].unique().tolist() == [torch.tensor(least).item()]
        assert (codes[0].float() == 0).all()
    assert (codes[1:].float().abs() == vllm_bytes.QMAX[out]).float().mean() > 0.9  # y far exceeds 448 such scales


def test_vllm_nonfinite_rows_are_nan() -> None:
    """The documented difference: vLLM stores codes of 448 and the smallest scale for them."""
    x, _, weight = inputs(BF16, 4, 256)
    x[1, 7], x[2, 9] = torch.nan, torch.inf
    codes, scales = vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, F8, torch.tensor(2.0))
    assert scales.isnan().flatten().tolist() == [False, True, True, False]
    assert codes.float().isnan().all(-1).tolist() == [False, True, True, False]


def test_vllm_residual_of_another_shape() -> None:
    """vLLM only counts rows, so a residual [tokens, N] fits an input [batch, tokens, N]."""
    x, residual, weight = inputs(BF16, 2, 5, 256)
    flat = residual.view(10, 256).clone()
    for given in (flat, residual):
        codes, scales = vllm.rms_norm_per_block_quant(x, weight, EPS, F8, [1, 64], None, given, True, 4)
        assert codes.shape == x.shape and scales.shape == (10, 4) and scales.stride() == (1, 12)
    assert torch.equal(flat, residual.view(10, 256)) and torch.equal(residual, x + inputs(BF16, 2, 5, 256)[1])


@pytest.mark.parametrize("group", [None, 128])
def test_vllm_in_a_compiled_graph(group: int | None) -> None:
    """A bound in a tensor causes no graph break, and the residual is updated."""

    def layer(x: Tensor, weight: Tensor, residual: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        if group is None:
            return vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, F8, bound, residual)
        return vllm.rms_norm_per_block_quant(x, weight, EPS, F8, [1, group], bound, residual)

    x, residual, weight = inputs(BF16, 6, 256)
    for value in (1.5, -1.0):
        bound = torch.tensor([value])
        expected_residual = residual.clone()
        expected = layer(x, weight, expected_residual, bound)
        given = residual.clone()
        got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, weight, given, bound)
        assert torch.equal(given, expected_residual) and torch.equal(got[1], expected[1])
        assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))


def test_fused_add_is_one_launch() -> None:
    launched: list[str] = []
    x, residual, weight = inputs(BF16, 4, 64)
    version = residual._version
    with launching_with(lambda family: lambda *_: launched.append(family)):
        vllm.fused_add_rms_norm(x, residual, weight, EPS)
    assert launched == ["rms_norm"] and residual._version == version + 1  # and no torch operation wrote to it


@pytest.mark.parametrize("module", [vllm, vllm_0_19])
def test_vllm_without_a_weight(module: Any) -> None:
    """A weight of ones, which is not made."""
    x, residual, _ = inputs(BF16, 5, 64)
    ones, outs, sums = (
        torch.ones(64, dtype=BF16),
        [torch.empty_like(x) for _ in range(2)],
        [x.clone() for _ in range(2)],
    )
    totals = [residual.clone() for _ in range(2)]
    for out, h, total, weight in zip(outs, sums, totals, (None, ones), strict=True):
        module.rms_norm(out, x, weight, EPS)
        module.fused_add_rms_norm(h, total, weight, EPS)
    assert torch.equal(*outs) and torch.equal(*sums) and torch.equal(*totals)
    assert outs[0].abs().max() > 0.5 and not torch.equal(sums[0], x) and not torch.equal(totals[0], residual)
    with torch.profiler.profile() as profiler:
        module.rms_norm(outs[0], x, None, EPS)
    assert not any(event.key.startswith("aten::") for event in profiler.key_averages())


def wrong_arguments(x: Tensor, residual: Tensor, weight: Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bad values for every argument of a call that updates a residual in place."""
    n = x.shape[-1]
    for name, good in (("weight", weight), ("residual", residual), ("x", x)):
        yield f"{name} is not a tensor", {name: 3.0}
        yield f"{name} is None", {name: None} if name == "x" else {name: "none"}
        yield f"{name} of integers", {name: good.to(torch.int32)}
        yield f"{name} of float64", {name: good.double()}
        yield f"{name} on another device", {name: good.to("meta")}
        yield f"{name} too long", {name: torch.cat([good, good], -1)}
        yield f"{name} strided", {name: torch.stack([good, good], -1)[..., 0]}
        yield f"{name} with a gradient", {name: good.clone().requires_grad_()}
        yield f"{name} without columns", {name: good[..., :0]}
        yield f"{name} without dimensions", {name: good.flatten()[0].clone()}
    yield "weight too short", {"weight": weight[:-1]}
    yield "weight of two dimensions", {"weight": weight.expand(2, n).contiguous()}
    yield "residual has one row less", {"residual": residual[:-1]}
    yield "residual of another dtype", {"residual": residual.to(torch.float16)}
    yield "residual with overlapping rows", {"residual": residual[:1].expand(x.shape)}
    yield "residual is the input", {"residual": x}
    for eps in (-1.0, float("nan"), "1e-5", None):
        yield f"epsilon is {eps!r}", {"eps": eps}


FUSED: dict[str, Callable[..., object]] = {
    "vllm": vllm.fused_add_rms_norm,
    "vllm_0_19": vllm_0_19.fused_add_rms_norm,
    "flashinfer": flashinfer.fused_add_rmsnorm,
    "flashinfer, gemma": flashinfer.gemma_fused_add_rmsnorm,
    "vllm, fp8": lambda x, r, w, eps: vllm.rms_norm_dynamic_per_token_quant(x, w, eps, F8, residual=r),
    "vllm, fp8 groups": lambda x, r, w, eps: vllm.rms_norm_per_block_quant(x, w, eps, F8, [1, 64], residual=r),
}


@pytest.mark.parametrize("name", FUSED)
def test_nothing_is_written_before_all_arguments_are_checked(name: str) -> None:
    refused = 0
    for label, _ in wrong_arguments(*inputs(BF16, 4, 64)):
        x, residual, weight = inputs(BF16, 4, 64)
        given: dict[str, Any] = {"x": x, "residual": residual, "weight": weight, "eps": EPS}
        given |= dict(wrong_arguments(x, residual, weight))[label]
        kept = {k: v.detach().clone() for k, v in given.items() if isinstance(v, Tensor) and not v.is_meta}
        with torch.enable_grad():
            try:
                FUSED[name](*(given[key] for key in ("x", "residual", "weight", "eps")))
            except (onepass.ContractError, onepass.Unsupported):
                refused += 1
            else:  # vLLM accepts it, too
                assert name.startswith("vllm, fp8") and label == "residual is the input", label
        if label != "residual is the input" or not name.startswith("vllm, fp8"):
            for key, before in kept.items():
                assert torch.equal(given[key].detach(), before), (label, key)
    assert refused >= 39


@pytest.mark.parametrize(
    "bound",
    [torch.ones(2), torch.ones(1).double(), torch.ones(1, device="meta"), torch.ones(1).int()],
    ids=lambda b: f"{list(b.shape)} {b.dtype} {b.device}",
)
def test_a_bad_bound_changes_nothing(bound: Tensor) -> None:
    x, residual, weight = inputs(BF16, 4, 64)
    kept = residual.clone()
    with pytest.raises(onepass.ContractError, match="rms_norm_dynamic_per_token_quant: `scale_ub` must"):
        vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, F8, bound, residual)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize(("alignment", "stride"), [(0, 41), (4, 44)])
def test_vllm_transposed_scales(alignment: int, stride: int) -> None:
    x, _, weight = inputs(torch.bfloat16, 41, 512)
    plain = vllm.rms_norm_per_block_quant(x, weight, EPS, torch.float8_e4m3fn, [1, 128])
    transposed = vllm.rms_norm_per_block_quant(x, weight, EPS, F8, [1, 128], None, None, True, alignment)
    assert transposed[1].stride() == (1, stride) and transposed[1].shape == (41, 4)
    assert torch.equal(plain[1], transposed[1])
    assert torch.equal(plain[0].view(torch.uint8), transposed[0].view(torch.uint8))


def test_vllm_shapes_and_dtypes() -> None:
    x, residual, weight = inputs(torch.bfloat16, 2, 5, 256)
    codes, scales = vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.float8_e4m3fnuz, residual=residual)
    assert codes.shape == x.shape and scales.shape == (10, 1) and codes.dtype is torch.float8_e4m3fnuz
    assert codes.float().abs().max() == 224  # the largest value of this format in vLLM
    message = "rms_norm_dynamic_per_token_quant: `quant_dtype` must be one of"
    with pytest.raises(onepass.Unsupported, match=message):
        vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.int16)
    with pytest.raises(onepass.ContractError, match=r"`scale_ub` must be None with torch\.int8"):
        vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.int8, torch.ones(1))
    with pytest.raises(onepass.ContractError, match="`group_size` must be"):
        vllm.rms_norm_per_block_quant(x, weight, EPS, torch.float8_e4m3fn, [1, 8])
    with pytest.raises(onepass.ContractError, match="`tma_alignment` must be 0 or 4"):
        vllm.rms_norm_per_block_quant(x, weight, EPS, torch.float8_e4m3fn, [1, 128], tma_alignment=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flashinfer(dtype: torch.dtype) -> None:
    x, residual, weight = inputs(dtype, 40, 512)
    total = x.float() + residual.float()
    for offset, norm, fused in (
        (0.0, flashinfer.rmsnorm, flashinfer.fused_add_rmsnorm),
        (1.0, flashinfer.gemma_rmsnorm, flashinfer.gemma_fused_add_rmsnorm),
    ):
        expected = rounded_once(x, weight, dtype, offset)
        assert_close(norm(x, weight, EPS), expected)
        out = torch.empty_like(x)
        assert norm(x, weight, EPS, out, enable_pdl=True) is out
        assert_close(out, expected)
        a, b = x.clone(), residual.clone()
        fused(a, b, weight, EPS)
        assert torch.equal(b, total.to(dtype))
        assert_close(a, rounded_once(total, weight, dtype, offset))


def test_flashinfer_heads() -> None:
    qkv = torch.randn(9, 12, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = (1 + 0.2 * torch.randn(64)).bfloat16()
    q = qkv[:, :8]  # strided, as a packed projection is
    out = torch.empty(9, 8, 64, dtype=torch.bfloat16)
    flashinfer.qk_rmsnorm(q, weight, out, EPS)
    assert_close(out, rounded_once(q, weight, torch.bfloat16))
    assert torch.equal(out, flashinfer.rmsnorm(q, weight, EPS))
    flashinfer.qk_rmsnorm(q, weight, out, EPS, 1.0)
    assert_close(out, rounded_once(q, weight, torch.bfloat16, 1.0))


@pytest.mark.sampled(3)  # each compiles a kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 64])
def test_vllm_int8(dtype: torch.dtype, group: int | None) -> None:
    """The bytes of vLLM's kernel in plain torch: rounded twice, multiplied by the reciprocal, no smaller scale than 2^-23."""
    x, residual, weight = inputs(dtype, 40, 512)
    x[1], residual[1] = 0.0, 0.0
    kept = residual.clone()
    total = x.float() + residual.float()
    if group is None:
        codes, scale = vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.int8, residual=residual)
    else:
        codes, scale = vllm.rms_norm_per_block_quant(x, weight, EPS, torch.int8, [1, group], residual=residual)
    assert torch.equal(residual, total.to(dtype)) and not torch.equal(residual, kept)
    y = rounded_twice(total, weight, dtype).float().unflatten(-1, (-1, group or 512))
    expected = (y.abs().amax(-1) / 127).clamp(min=2.0**-23)
    torch.testing.assert_close(scale, expected, rtol=2.0**-7 if dtype == BF16 else 2e-3, atol=0.0)
    wanted = (y * (1 / scale).unsqueeze(-1)).flatten(-2).round().clamp(-128, 127).to(torch.int8)
    assert codes.dtype == torch.int8 and (codes == wanted).float().mean() > 0.995
    assert (codes.int() - wanted.int()).abs().max() <= 1 and codes.abs().max() == 127
    assert scale[1].eq(2.0**-23).all() and codes[1].eq(0).all()


@pytest.mark.sampled(3)  # each compiles kernels
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("swizzled", [False, True])
def test_flashinfer_fp4(block: int, swizzled: bool) -> None:
    x, residual, weight = inputs(BF16, 3, 5, 448)
    overall = torch.tensor([8.0]) if block == 16 else None
    kept = residual.clone()
    normed = torch.empty_like(x)
    codes, scale = flashinfer.add_rmsnorm_fp4quant(
        x, residual, weight, None, None, overall, EPS, block, None, swizzled, enable_pdl=True, y_out=normed
    )
    assert_close(normed, rounded_once(residual, weight, BF16))
    assert torch.equal(residual, x + kept) and codes.dtype == torch.float4_e2m1fn_x2
    assert scale.dtype == (torch.float8_e4m3fn if block == 16 else torch.uint8)
    assert scale.shape == ((128 * 28,) if block == 16 else (128 * 16,)) if swizzled else (3, 5, 448 // block)
    y_fp4, given = torch.zeros_like(codes.view(torch.uint8)).view(codes.dtype), torch.zeros_like(scale)
    again = flashinfer.rmsnorm_fp4quant(
        residual, weight, y_fp4, given, overall, EPS, block, is_sf_swizzled_layout=swizzled
    )
    assert again[0] is y_fp4 and again[1] is given
    assert torch.equal(y_fp4.view(torch.uint8), codes.view(torch.uint8))
    arguments: dict[str, Any] = {"format": "nvfp4" if block == 16 else "mxfp4"}
    if swizzled:
        arguments["scale_layout"] = "128x4"
        given = given.view(128, -1)
    if overall is not None:
        arguments["global_scale"] = overall
    plain = described(arguments, y_fp4.view(torch.uint8), given if block == 16 else given.view(torch.float8_e8m0fnu))
    assert isinstance(plain, Quantized)
    y = rounded_once(residual, weight, torch.float32)
    error = (values(plain).float() - y).abs() / y.unflatten(-1, (-1, block)).abs().amax(-1).repeat_interleave(block, -1)
    assert error.max() < 0.26 and y.abs().max() > 0.5  # half of the largest step of e2m1, relative to the largest code
    with pytest.raises(onepass.ContractError, match="`block_size` must be 16 or 32"):
        flashinfer.rmsnorm_fp4quant(x, weight, block_size=64)
    with pytest.raises(onepass.Unsupported, match="`scale_format` must be"):
        flashinfer.rmsnorm_fp4quant(x, weight, block_size=block, scale_format="ue8m0" if block == 16 else "e4m3")
