"""``vllm._custom_ops`` of vLLM 0.19 and earlier, which round twice, as Hugging Face does::

    rms_norm             y = round(round(x * rs) * w)
    fused_add_rms_norm   h = round(x + residual);  y = round(round(h * rs) * w),  rs from the rounded h

The other functions are those of `onepass.engines.vllm`.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.rms_norm.op import rms_norm as _rms_norm
from .arguments import require_tensors
from .vllm import (
    as_called,
    concat_and_cache_mla,
    dsv3_fused_a_gemm,
    fused_add_rms_norm_static_fp8_quant,
    fused_q_kv_rmsnorm,
    fused_qk_norm_rope,
    rms_norm_dynamic_per_token_quant,
    rms_norm_per_block_quant,
    rms_norm_static_fp8_quant,
)

__all__ = [
    "concat_and_cache_mla",
    "dsv3_fused_a_gemm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_fp8_quant",
    "fused_q_kv_rmsnorm",
    "fused_qk_norm_rope",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "rms_norm_static_fp8_quant",
]


@as_called
def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """``out = round(round(input * rs) * weight)``."""
    if out is None:
        require_tensors("rms_norm", out=out)
    _rms_norm(input, weight, epsilon, rounding="hf", out=out)


@as_called
def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """``residual += input``, then ``input = round(round(residual * rs) * weight)``, in one launch."""
    if residual is None:
        require_tensors("fused_add_rms_norm", residual=residual)
    _rms_norm(input, weight, epsilon, residual=residual, rounding="hf", out=input, residual_out=residual)
