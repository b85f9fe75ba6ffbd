"""Bad arguments of the functions of `onepass.engines`: errors name the function and the argument as the caller knows them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.backend import launching_with
from onepass.engines import flashinfer, sglang, vllm, vllm_0_19

BF16, FP8, BYTES = torch.bfloat16, torch.float8_e4m3fn, torch.uint8


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def norm(**more: Any) -> dict[str, Any]:
    return {"input": zeros(3, 64), "weight": zeros(64), **more}


ONE, X, CODES = torch.ones(1), zeros(3, 64), zeros(3, 64, dtype=FP8)
COS_SIN, THREE = torch.zeros(10, 16), torch.arange(3)
PROJECTION = {"mat_a": zeros(3, 64), "mat_b": zeros(32, 64).T, "output": zeros(3, 32)}
FP4 = norm(y_fp4=zeros(3, 32, dtype=BYTES), block_scale=zeros(3, 4, dtype=BYTES), global_scale=ONE, block_size=16)
GOOD: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (vllm.rms_norm, norm(out=X, epsilon=0.5), "weight"),
    (vllm_0_19.rms_norm, norm(out=X, epsilon=0.5), "weight"),
    (vllm.fused_add_rms_norm, norm(residual=X, epsilon=0.5), "weight"),
    (vllm_0_19.fused_add_rms_norm, norm(residual=X, epsilon=0.5), "weight"),
    (vllm.rms_norm_static_fp8_quant, norm(result=CODES, scale=ONE, epsilon=0.5), ""),
    (vllm.fused_add_rms_norm_static_fp8_quant, norm(result=CODES, residual=X, scale=ONE, epsilon=0.5), ""),
    (vllm.rms_norm_dynamic_per_token_quant, norm(epsilon=0.5, quant_dtype=FP8, scale_ub=ONE, residual=X), "scale_ub residual"),
    (vllm.rms_norm_per_block_quant, norm(epsilon=0.5, quant_dtype=FP8, group_size=[1, 64], tma_alignment=0), ""),
    (
        vllm.fused_qk_norm_rope,
        {"qkv": zeros(3, 64), "num_heads_q": 2, "num_heads_k": 1, "num_heads_v": 1, "head_dim": 16, "eps": 0.5,
         "q_weight": zeros(16), "k_weight": zeros(16), "cos_sin_cache": COS_SIN, "is_neox": True, "position_ids": THREE},
        "is_neox",
    ),
    (
        vllm.fused_q_kv_rmsnorm,
        {"qr": zeros(3, 64), "kv": zeros(3, 32), "q_weight": zeros(64), "kv_weight": zeros(32), "eps": 0.5},
        "",
    ),
    (
        vllm.concat_and_cache_mla,
        {"kv_c": zeros(3, 32), "k_pe": zeros(3, 16), "kv_cache": zeros(2, 4, 48, dtype=FP8), "slot_mapping": THREE,
         "kv_cache_dtype": "fp8", "scale": ONE},
        "",
    ),
    (
        vllm.per_token_group_quant_fp8_packed_for_deepgemm,
        {"x": X, "group_size": 64, "eps": 1e-10, "use_ue8m0": True, "out_q": CODES},
        "use_ue8m0 out_q",
    ),
    (
        vllm.silu_mul_quant_fp8_packed_triton,
        {"input": zeros(3, 128), "group_size": 64, "output_q": CODES, "alpha": 1.0, "beta": 0.0},
        "output_q",
    ),
    (vllm.dsv3_fused_a_gemm, PROJECTION, ""),
    (sglang.dsv3_fused_a_gemm, PROJECTION, "output"),
    (
        sglang.fused_inplace_qknorm,
        {"q": zeros(3, 2, 16), "k": zeros(3, 1, 16), "q_weight": zeros(16), "k_weight": zeros(16), "head_dim": 16},
        "",
    ),
    (flashinfer.rmsnorm, norm(eps=0.5, out=X), "out"),
    (flashinfer.gemma_rmsnorm, norm(eps=0.5, out=X), "out"),
    (flashinfer.rmsnorm_quant, norm(out=CODES, scale=1.0, eps=0.5), ""),
    (flashinfer.fused_add_rmsnorm, norm(residual=X, eps=0.5), ""),
    (flashinfer.gemma_fused_add_rmsnorm, norm(residual=X, eps=0.5), ""),
    (flashinfer.fused_add_rmsnorm_quant, norm(out=CODES, residual=X, scale=ONE, eps=0.5), ""),
    (flashinfer.qk_rmsnorm, norm(output=X, eps=0.5, weight_bias=0.0), ""),
    (flashinfer.rmsnorm_sigmoid_gate, {"input": X, "gate": X.clone(), "eps": 0.5}, ""),
    (flashinfer.layernorm, {"input": X, "gemma": torch.zeros(64), "beta": torch.zeros(64), "eps": 0.5}, ""),
    (
        flashinfer.layernorm_quant,
        {"out": CODES, "input": X, "gemma": zeros(64), "beta": zeros(64), "scale": 1.0, "eps": 0.5},
        "",
    ),
    (
        flashinfer.fused_add_rmsnorm_fp8_block_quant,
        {"out": zeros(3, 128, dtype=FP8), "block_scale": torch.zeros(1, 4), "normed_out": zeros(3, 128),
         "input": zeros(3, 128), "residual": zeros(3, 128), "weight": zeros(128), "eps": 0.5},
        "",
    ),
    (flashinfer.rmsnorm_fp4quant, FP4, "y_fp4 block_scale global_scale"),
    (flashinfer.add_rmsnorm_fp4quant, {**FP4, "residual": X, "y_out": X.clone()}, "y_fp4 block_scale global_scale y_out"),
]  # fmt: skip
"""A function, a good call, and the arguments that may be None."""


def wrong_values(good: object) -> Iterator[object]:
    """Values that are wrong whatever the other arguments are."""
    if isinstance(good, bool):
        return
    yield "a string"
    yield None
    yield {}
    if isinstance(good, Tensor):
        yield [good]
        yield torch.zeros(good.shape, dtype=torch.complex64)
        yield torch.zeros((), dtype=good.dtype) if good.numel() > 1 else torch.zeros(2, dtype=good.dtype)


@pytest.mark.parametrize(
    ("function", "good", "optional"), GOOD, ids=[f"{f.__module__}.{f.__name__}" for f, _, _ in GOOD]
)
def test_errors_name_the_function_and_the_argument(
    function: Callable[..., Any], good: dict[str, Any], optional: str
) -> None:
    failed, tried = [], 0
    with launching_with(lambda family: lambda *_: None), torch.inference_mode():
        function(**good)
        for name, value in good.items():
            for wrong in wrong_values(value):
                if wrong is None and name in optional.split():
                    continue
                tried += 1
                try:
                    function(**{**good, name: wrong})
                    failed.append(f"{name}={wrong!r} was not refused")
                except (onepass.ContractError, onepass.Unsupported) as error:
                    if not re.match(rf"{function.__name__}: `{name}` (must|is) .*\bgot .", str(error), re.DOTALL):
                        failed.append(f"{name}={wrong!r}: {error}")
    assert not failed, "\n".join(failed)
    assert tried >= 10


def test_every_function_is_tested() -> None:
    tested = {function for function, _, _ in GOOD}
    for module in (vllm, vllm_0_19, flashinfer, sglang):
        for name in module.__all__:
            member = getattr(module, name)
            assert not callable(member) or member in tested, name


def test_errors_describe_what_was_expected() -> None:
    with pytest.raises(onepass.ContractError, match=r"^rmsnorm: `weight` must have shape \[N\] with N=64, got \[63\]$"):
        flashinfer.rmsnorm(zeros(3, 64), zeros(63))
    with pytest.raises(onepass.ContractError, match=r"^fused_add_rms_norm: `residual` must be a tensor, got None$"):
        vllm.fused_add_rms_norm(zeros(3, 64), None, zeros(64), 1e-6)  # type: ignore[arg-type]
