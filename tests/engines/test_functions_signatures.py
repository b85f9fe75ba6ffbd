"""Names, order and defaults of parameters of the functions of `onepass.engines`, against those of the libraries.

``SIGNATURES`` is data: each text is copied from the function that the release has at that place, without annotations. The
schemas of vLLM's ops are those that its extension registers.
"""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from onepass.engines import flashinfer, sglang, vllm, vllm_0_19

SIGNATURES: dict[str, dict[str, str]] = {
    "vllm 0.33.0: vllm._custom_ops": {
        "rms_norm": "out, input, weight, epsilon",
        "fused_add_rms_norm": "input, residual, weight, epsilon",
        "rms_norm_dynamic_per_token_quant": "input, weight, epsilon, quant_dtype, scale_ub=None, residual=None",
        "rms_norm_per_block_quant": "input, weight, epsilon, quant_dtype, group_size, scale_ub=None, residual=None, "
        "is_scale_transposed=False, tma_alignment=0",
        "fused_qk_norm_rope": "qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, "
        "cos_sin_cache, is_neox, position_ids, forced_token_heads_per_warp=-1",
        "concat_and_cache_mla": "kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, skip_scale=False",
        "dsv3_fused_a_gemm": "output, mat_a, mat_b, enable_pdl=False",
    },
    "vllm 0.33.0: torch.ops._C": {
        "rms_norm_static_fp8_quant": "result, input, weight, scale, epsilon",
        "fused_add_rms_norm_static_fp8_quant": "result, input, residual, weight, scale, epsilon",
    },
    "vllm 0.33.0: vllm.model_executor.layers.quantization.utils.fp8_utils": {
        "per_token_group_quant_fp8_packed_for_deepgemm": "x, group_size, eps=1e-10, use_ue8m0=None, out_q=None",
        "silu_mul_quant_fp8_packed_triton": "input, group_size=128, output_q=None, clamp_limit=None, alpha=1.0, beta=0.0, "
        "*, expert_ends=None, expert_alignment=0",
    },
    "vllm 0.33.0: vllm.models.common.ops.fused_qk_rmsnorm": {
        "fused_q_kv_rmsnorm": "qr, kv, q_weight, kv_weight, eps",
    },
    "vllm 0.19.1: vllm._custom_ops": {
        "rms_norm": "out, input, weight, epsilon",
        "fused_add_rms_norm": "input, residual, weight, epsilon",
        "rms_norm_dynamic_per_token_quant": "input, weight, epsilon, quant_dtype, scale_ub=None, residual=None",
        "rms_norm_per_block_quant": "input, weight, epsilon, quant_dtype, group_size, scale_ub=None, residual=None, "
        "is_scale_transposed=False, tma_alignment=0",
        "fused_qk_norm_rope": "qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, "
        "cos_sin_cache, is_neox, position_ids",
        "concat_and_cache_mla": "kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale",
        "dsv3_fused_a_gemm": "output, mat_a, mat_b",
    },
    "vllm 0.19.1: torch.ops._C": {
        "rms_norm_static_fp8_quant": "result, input, weight, scale, epsilon",
        "fused_add_rms_norm_static_fp8_quant": "result, input, residual, weight, scale, epsilon",
    },
    "flashinfer-python 0.7.2.post1: flashinfer.norm": {
        "rmsnorm": "input, weight, eps=1e-06, out=None, enable_pdl=None",
        "rmsnorm_quant": "out, input, weight, scale, eps=1e-06, enable_pdl=None",
        "fused_add_rmsnorm": "input, residual, weight, eps=1e-06, enable_pdl=None",
        "fused_add_rmsnorm_quant": "out, input, residual, weight, scale, eps=1e-06, enable_pdl=None",
        "gemma_rmsnorm": "input, weight, eps=1e-06, out=None, enable_pdl=None",
        "gemma_fused_add_rmsnorm": "input, residual, weight, eps=1e-06, enable_pdl=None",
        "rmsnorm_sigmoid_gate": "input, gate, eps=1e-05, *, enable_pdl=True",
        "layernorm": "input, gemma, beta, eps=1e-06",
        "layernorm_quant": "out, input, gemma, beta, scale, eps=1e-06",
        "fused_add_rmsnorm_fp8_block_quant": "out, block_scale, normed_out, input, residual, weight, eps=1e-06, "
        "enable_pdl=None",
        "rmsnorm_fp4quant": "input, weight, y_fp4=None, block_scale=None, global_scale=None, eps=1e-06, block_size=16, "
        "scale_format=None, is_sf_swizzled_layout=False, enable_pdl=None",
        "add_rmsnorm_fp4quant": "input, residual, weight, y_fp4=None, block_scale=None, global_scale=None, eps=1e-06, "
        "block_size=16, scale_format=None, is_sf_swizzled_layout=False, output_both_sf_layouts=False, "
        "block_scale_unswizzled=None, enable_pdl=None, y_out=None",
    },
    "flashinfer-python 0.7.2.post1: flashinfer.norm.kernels.rmsnorm": {
        "qk_rmsnorm_cute": "input, weight, output, eps=1e-06, weight_bias=0.0, enable_pdl=False",
    },
    "sglang-kernel 0.4.10: sgl_kernel": {
        "rmsnorm": "input, weight, eps=1e-06, out=None, enable_pdl=None",
        "fused_add_rmsnorm": "input, residual, weight, eps=1e-06, enable_pdl=None",
        "gemma_rmsnorm": "input, weight, eps=1e-06, out=None, enable_pdl=None",
        "gemma_fused_add_rmsnorm": "input, residual, weight, eps=1e-06, enable_pdl=None",
    },
    "sglang 0.5.23: sglang.kernels.ops": {
        "layernorm.norm.fused_inplace_qknorm": "q, k, q_weight, k_weight, eps=1e-06, *, head_dim=0",
        "gemm.dsv3_fused_a_gemm.dsv3_fused_a_gemm": "mat_a, mat_b, output=None",
    },
}
OURS = {"qk_rmsnorm_cute": "qk_rmsnorm"}
"""A name of a library that is another one here."""
MODULES: dict[str, tuple[str, ModuleType]] = {
    "vllm 0.33.0": ("equal", vllm),
    "vllm 0.19.1": ("beginning", vllm_0_19),
    "flashinfer-python": ("equal", flashinfer),
    "sglang": ("equal", sglang),
}
"""By the beginning of a place: the module with its functions, and whether parameters may follow the library's."""


def shown(module: ModuleType, name: str) -> list[str]:
    """The parameters of a function, as `ast.unparse` writes those of the library's."""
    parts = []
    for p in inspect.signature(getattr(module, name)).parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(p.name if p.default is p.empty else f"{p.name}={p.default}")
    return parts


@pytest.mark.parametrize("place", SIGNATURES)
def test_parameters_are_those_of_the_library(place: str) -> None:
    (relation, module) = next(MODULES[start] for start in MODULES if place.startswith(start))
    for original, text in SIGNATURES[place].items():
        name = original.split(".")[-1]
        ours, theirs = shown(module, OURS.get(name, name)), text.split(", ")
        if relation == "beginning":  # a later release added parameters: they must have defaults
            assert all("=" in part for part in ours[len(theirs) :])
            ours = ours[: len(theirs)]
        assert ours == theirs, original


def test_every_function_has_an_original() -> None:
    for start, (_, module) in MODULES.items():
        originals = [name for place in SIGNATURES if place.startswith(start) for name in SIGNATURES[place]]
        functions = {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)}
        later = {"fused_q_kv_rmsnorm"} if module is vllm_0_19 else set()
        assert functions - later == {OURS.get(name, name.split(".")[-1]) for name in originals}
