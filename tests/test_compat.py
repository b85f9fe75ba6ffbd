"""Compatibility functions against plain-torch statements of what vLLM's and FlashInfer's kernels compute."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch
from torch import Tensor

import onepass
from onepass.compat import flashinfer, vllm, vllm_0_19

EPS = 1e-5
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
    """Equal but for what the order of a float32 sum can do: one unit in the last place of at most one value in a thousand."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype is torch.float32:
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-7)
        return
    assert (got == expected).float().mean() >= equal
    spacing = expected.float().abs().clamp(min=2.0**-14) * torch.finfo(got.dtype).eps
    assert ((got.float() - expected.float()).abs() <= spacing).all()
    assert expected.abs().max() > 0.5  # zeros would not pass


@pytest.mark.parametrize("dtype", DTYPES)
def test_vllm_norms(dtype: torch.dtype) -> None:
    x, residual, weight = inputs(dtype, 40, 512)
    out = torch.empty_like(x)
    assert vllm.rms_norm(out, x, weight, EPS) is None  # type: ignore[func-returns-value]
    assert_close(out, rounded_once(x, weight, dtype))
    vllm.rms_norm(out, x, None, EPS)
    assert_close(out, rounded_once(x, torch.ones_like(weight), dtype))

    a, b, total = x.clone(), residual.clone(), x + residual
    assert vllm.fused_add_rms_norm(a, b, weight, EPS) is None  # type: ignore[func-returns-value]
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
    """What the comparison above can tell apart."""
    x, _, weight = inputs(torch.bfloat16, 40, 512)
    once, twice = rounded_once(x, weight, torch.bfloat16), rounded_twice(x, weight, torch.bfloat16)
    assert (once != twice).float().mean() > 0.1
    with pytest.raises(AssertionError):
        assert_close(once, twice)


def codes_of(y: Tensor, group: int, limit: float | None) -> tuple[Tensor, Tensor]:
    """The fp8 kernels' last step: a scale for every ``group`` columns, then a division."""
    grouped = y.float().view(*y.shape[:-1], -1, group)
    amax = grouped.abs().amax(-1, keepdim=True)
    scale = (amax if limit is None else amax.clamp(max=limit)) / 448
    codes = (grouped / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(y.shape)
    return codes, scale.squeeze(-1)


def assert_same_codes(got: Tensor, expected: Tensor, equal: float) -> None:
    assert got.dtype is torch.float8_e4m3fn and got.shape == expected.shape
    assert (got.view(torch.uint8) == expected.view(torch.uint8)).float().mean() >= equal
    # a code beside the expected one, at most
    assert ((got.float() - expected.float()).abs() <= 0.15 * expected.float().abs() + 2**-8).all()
    assert expected.float().abs().max() > 100


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("group", [None, 64, 128])
def test_vllm_quantized(group: int | None, limit: float | None) -> None:
    x, _, weight = inputs(torch.bfloat16, 40, 512)
    bound = None if limit is None else torch.tensor([limit])
    if group is None:
        codes, scales = vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.float8_e4m3fn, bound)
    else:
        codes, scales = vllm.rms_norm_per_block_quant(x, weight, EPS, torch.float8_e4m3fn, [1, group], bound)
    expected, expected_scales = codes_of(rounded_twice(x, weight, torch.bfloat16), group or 512, limit)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    assert_same_codes(codes, expected, equal=0.995)


def test_vllm_quantized_with_residual() -> None:
    """The residual is vLLM's to the bit; y comes from the stored sum, so a few codes are a neighbour of vLLM's."""
    x, residual, weight = inputs(torch.bfloat16, 40, 512)
    expected_residual = x + residual
    total = x.float() + residual.float()
    y = (total * root(total)).bfloat16() * weight
    codes, scales = vllm.rms_norm_dynamic_per_token_quant(
        x, weight, EPS, torch.float8_e4m3fn, residual=residual
    )  # fmt: skip
    assert torch.equal(residual, expected_residual)
    expected, expected_scales = codes_of(y, 512, None)
    torch.testing.assert_close(scales, expected_scales, rtol=2**-7, atol=0)
    assert_same_codes(codes, expected, equal=0.9)


@pytest.mark.parametrize(("alignment", "stride"), [(0, 41), (4, 44)])
def test_vllm_transposed_scales(alignment: int, stride: int) -> None:
    x, _, weight = inputs(torch.bfloat16, 41, 512)
    plain = vllm.rms_norm_per_block_quant(x, weight, EPS, torch.float8_e4m3fn, [1, 128])
    turned = vllm.rms_norm_per_block_quant(
        x, weight, EPS, torch.float8_e4m3fn, [1, 128], None, None, True, alignment
    )  # fmt: skip
    assert turned[1].stride() == (1, stride) and turned[1].shape == (41, 4)
    assert torch.equal(plain[1], turned[1])
    assert torch.equal(plain[0].view(torch.uint8), turned[0].view(torch.uint8))


def test_vllm_shapes_and_dtypes() -> None:
    x, residual, weight = inputs(torch.bfloat16, 2, 5, 256)
    codes, scales = vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.float8_e4m3fnuz, residual=residual)
    assert codes.shape == x.shape and scales.shape == (10, 1) and codes.dtype is torch.float8_e4m3fnuz
    assert codes.float().abs().max() == 224  # what vLLM takes for the largest value of this format
    with pytest.raises(
        onepass.Unsupported, match="rms_norm_dynamic_per_token_quant: `quant_dtype` must be an fp8 dtype"
    ):
        vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.int8)
    with pytest.raises(onepass.ContractError, match="`group_size` must be"):
        vllm.rms_norm_per_block_quant(x, weight, EPS, torch.float8_e4m3fn, [1, 32])
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


SIGNATURES = {
    "rms_norm": "out, input, weight, epsilon",
    "fused_add_rms_norm": "input, residual, weight, epsilon",
    "rms_norm_dynamic_per_token_quant": "input, weight, epsilon, quant_dtype, scale_ub=None, residual=None",
    "rms_norm_per_block_quant": "input, weight, epsilon, quant_dtype, group_size, scale_ub=None, residual=None, "
    "is_scale_transposed=False, tma_alignment=0",
    "rmsnorm": "input, weight, eps=1e-06, out=None, enable_pdl=None",
    "fused_add_rmsnorm": "input, residual, weight, eps=1e-06, enable_pdl=None",
    "gemma_rmsnorm": "input, weight, eps=1e-06, out=None, enable_pdl=None",
    "gemma_fused_add_rmsnorm": "input, residual, weight, eps=1e-06, enable_pdl=None",
    "qk_rmsnorm": "input, weight, output, eps=1e-06, weight_bias=0.0, enable_pdl=False",
}


@pytest.mark.parametrize("module", [vllm, vllm_0_19, flashinfer], ids=lambda m: m.__name__.split(".")[-1])
def test_signatures(module: ModuleType) -> None:
    for name in module.__all__:
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        assert ", ".join(shown) == SIGNATURES[name]
