"""``flashinfer``: ``from onepass.engines import flashinfer`` replaces ``import flashinfer``.

- `onepass.engines.flashinfer.norm`: ``flashinfer.norm``.
- `onepass.engines.flashinfer.fp4`: its norms with FP4 quantization.
- `onepass.engines.flashinfer.rope`: ``mla_rope_quantize_fp8`` of ``flashinfer.rope``.

Their functions are also here, where FlashInfer has them too.
"""

from . import fp4, norm, rope
from .fp4 import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from .norm import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_fp8_block_quant,
    fused_add_rmsnorm_quant,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    layernorm_quant,
    qk_rmsnorm,
    rmsnorm,
    rmsnorm_quant,
    rmsnorm_sigmoid_gate,
)
from .rope import mla_rope_quantize_fp8

__all__ = [
    "add_rmsnorm_fp4quant",
    "fp4",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_quant",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "layernorm_quant",
    "mla_rope_quantize_fp8",
    "norm",
    "qk_rmsnorm",
    "rmsnorm",
    "rmsnorm_fp4quant",
    "rmsnorm_quant",
    "rmsnorm_sigmoid_gate",
    "rope",
]
