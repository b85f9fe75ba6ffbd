"""gamma may have any float dtype. It is converted to float32 exactly, so results equal those of a float32 gamma."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import nn
from onepass.engines import flashinfer, vllm, vllm_0_19
from onepass.formats import FLOATS
from onepass.testing.tensors import same_bytes

PAIRS = [(x, gamma) for x in FLOATS for gamma in FLOATS if gamma != torch.float32]
CALL = pytest.mark.parametrize(("x", "gamma"), PAIRS, ids=lambda d: str(d).removeprefix("torch."))
Results = tuple[Tensor, ...]


def rows(dtype: torch.dtype, n: int = 96, seed: int = 0) -> Tensor:
    return torch.randn(4, n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(dtype: torch.dtype, n: int = 96) -> Tensor:
    """Beyond the range of float16 if the dtype is bfloat16, so that only an exact conversion preserves it."""
    values = 1 + torch.rand(n, generator=torch.Generator().manual_seed(2))
    values[0] = 2.0**-20 if dtype == torch.float16 else 2.0**-40
    return values.to(dtype)


def norm(x: torch.dtype, gamma: Tensor, **options: Any) -> Results:
    return onepass.rms_norm(rows(x), gamma, residual=rows(x, seed=1), **options)


def fp8(x: torch.dtype, gamma: Tensor, **options: Any) -> Results:
    return onepass.rms_norm_fused_fp8(rows(x), gamma, return_norm=True, weight_offset=0.5, **options)


def gemv(x: torch.dtype, gamma: Tensor, **options: Any) -> Results:
    return onepass.gemv_and_partial_norm(
        rows(x), rows(x, seed=3).repeat(40, 1), gamma, segments=[gamma[:32]], **options
    )


def gemv_unfused(x: torch.dtype, gamma: Tensor) -> Results:
    return onepass.gemv_and_partial_norm(rows(x), rows(x, seed=3).repeat(40, 1), gamma, fused=False)


def qk(x: torch.dtype, gamma: Tensor, **options: Any) -> Results:
    return onepass.qk_rms_norm(rows(x), rows(x, 32), gamma, gamma[:32], **options)


def heads(x: torch.dtype, gamma: Tensor) -> Results:
    return onepass.qk_rms_norm(rows(x), rows(x, 64), gamma[:32], gamma[32:64], per_head=True)


def one_of_each(x: torch.dtype, gamma: Tensor) -> Results:
    """The weights of q and k have different dtypes."""
    return onepass.qk_rms_norm(rows(x), rows(x, 32), gamma, gamma[:32].float())


def applied(x: torch.dtype, gamma: Tensor) -> Results:
    q, k = rows(x), rows(x, 32)
    onepass.apply_qk_rms_norm(q, k, gamma, gamma[:32], onepass.row_mean_of_squares_qk(q, k), q, k, 1e-6)
    return q, k


def mla(x: torch.dtype, gamma: Tensor, **options: Any) -> Results:
    blocks = torch.zeros(1, 4, 98)
    given = (None, rows(x, 2).unsqueeze(1), rows(x, 98), None, None, gamma, onepass.PagedKVCache(blocks))
    q = onepass.fused_rope_rmsnorm_quantization(*given, rope_dim=0, slot_mapping=torch.arange(4), **options)
    return q, blocks


OPS: dict[str, Callable[[torch.dtype, Tensor], Results]] = {
    "rms_norm": norm,
    "rms_norm, hf": lambda x, gamma: norm(x, gamma, rounding="hf"),
    "rms_norm_fused_fp8": fp8,
    "layer_norm": lambda x, gamma: onepass.layer_norm(rows(x), gamma, gamma, residual=rows(x, seed=1)),
    "rms_norm_fused_quant": lambda x, gamma: onepass.rms_norm_fused_quant(rows(x), gamma, format="int8"),
    "rms_norm_fused_quant, layer": lambda x, gamma: onepass.rms_norm_fused_quant(
        rows(x), gamma, format="mxfp8", statistic="layer", bias=gamma, return_norm=True, rounding="stored"
    ),
    "rms_norm_add_rms_norm": lambda x, gamma: onepass.rms_norm_add_rms_norm(
        rows(x), gamma, gamma, residual=rows(x, seed=1)
    ),
    "rms_norm_add_rms_norm_quant, hf": lambda x, gamma: onepass.rms_norm_add_rms_norm_quant(
        rows(x), gamma, gamma, residual=rows(x, seed=1), format="int8", rounding="hf", return_norm=True
    ),
    "rms_norm, heads": lambda x, gamma: (onepass.rms_norm(rows(x).view(4, 3, 32), gamma.view(3, 32)),),
    "rms_norm_fused_fp8, hf": lambda x, gamma: fp8(x, gamma, rounding="hf"),
    "gemv": gemv,
    "gemv, codes": lambda x, gamma: gemv(x, gamma, normed_dtype=torch.float8_e4m3fn),
    "gemv, unfused": gemv_unfused,
    "qk_rms_norm": qk,
    "qk_rms_norm, hf": lambda x, gamma: qk(x, gamma, rounding="hf"),
    "qk_rms_norm, heads": heads,
    "qk_rms_norm, two dtypes": one_of_each,
    "apply_qk_rms_norm": applied,
    "mla": mla,
    "mla, reference": lambda x, gamma: mla(x, gamma, rounding="reference"),
}


@pytest.mark.sampled(16)  # test_cases.py has cases of these dtypes
@pytest.mark.parametrize("op", OPS)
@CALL
def test_bytes_are_those_of_the_same_gamma_in_float32(op: str, x: torch.dtype, gamma: torch.dtype) -> None:
    g = weight(gamma)
    found, expected = OPS[op](x, g), OPS[op](x, g.float())
    assert expected[0].float().abs().amax() > 1
    assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("x", "gamma"),
    [(x, gamma) for x, gamma in PAIRS if x != torch.float32],
    ids=lambda d: str(d).removeprefix("torch."),
)
def test_hf_rounds_the_product_to_the_inputs_dtype(x: torch.dtype, gamma: torch.dtype) -> None:
    h, g = rows(x), weight(gamma)
    rs = (1 / (h.float().double().square().mean(-1, keepdim=True) + 1e-6).sqrt()).float()
    expected = ((h.float() * rs).to(x).float() * g.float()).to(x)
    found = onepass.rms_norm(h, g, rounding="hf")
    assert (found != expected).float().mean() < 0.01, "the last bit of rs decides some roundings"
    assert torch.allclose(found.double(), expected.double(), rtol=2 * torch.finfo(x).eps, atol=1e-12)


def outputs(function: Callable[..., Any], x: torch.dtype, gamma: Tensor) -> Results:
    """What a function with another library's interface leaves in its first arguments."""
    out, h = torch.zeros(4, 96).to(x), rows(x)
    function(out, h, gamma)
    return out, h


LIKE: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "vllm.rms_norm": lambda out, x, g: vllm.rms_norm(out, x, g, 1e-6),
    "flashinfer.rmsnorm": lambda out, x, g: flashinfer.rmsnorm(x, g, out=out),
    "vllm_0_19.rms_norm": lambda out, x, g: vllm_0_19.rms_norm(out, x, g, 1e-6),
}


@pytest.mark.sampled(5)  # each compiles a kernel
@pytest.mark.parametrize("name", LIKE)
@CALL
def test_compat_functions(name: str, x: torch.dtype, gamma: torch.dtype) -> None:
    g = weight(gamma)
    found, expected = outputs(LIKE[name], x, g), outputs(LIKE[name], x, g.float())
    assert found[0].any() and all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


@CALL
def test_modules_do_not_convert_float_weights(x: torch.dtype, gamma: torch.dtype) -> None:
    module = nn.RMSNorm(96, 1e-6, dtype=gamma)
    pair = nn.QKNorm(96, 32, dtype=gamma)
    with torch.no_grad():
        assert module.weight is not None
        module.weight.copy_(weight(gamma))
        assert module._gamma(rows(x)).data_ptr() == module.weight.data_ptr(), "no conversion is launched"
        assert same_bytes(module(rows(x)), onepass.rms_norm(rows(x), weight(gamma)))
        q, k = pair(rows(x), rows(x, 32))
        pair.k_norm.float()
        assert all(same_bytes(a, b) for a, b in zip(pair(rows(x), rows(x, 32)), (q, k), strict=True))


def test_other_weight_dtypes_are_converted_by_modules_and_rejected_by_ops() -> None:
    module = nn.RMSNorm(96, 1e-6, dtype=torch.float64)
    with torch.no_grad():
        assert same_bytes(module(rows(torch.bfloat16)), onepass.rms_norm(rows(torch.bfloat16), torch.ones(96)))
    with pytest.raises(
        onepass.ContractError, match="rms_norm: `gamma` must have dtype bfloat16 or float16 or float32, got float64"
    ):
        onepass.rms_norm(rows(torch.bfloat16), torch.ones(96).double())
