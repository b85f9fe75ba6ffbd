"""``flashinfer``: ``from onepass.compat import flashinfer`` replaces ``import flashinfer``.

- `onepass.compat.flashinfer.norm`: ``flashinfer.norm``.
- `onepass.compat.flashinfer.rope`: ``mla_rope_quantize_fp8`` of ``flashinfer.rope``.

Their functions are also here, where FlashInfer has them too.
"""

from . import norm, rope
from .norm import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_quant,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    qk_rmsnorm,
    rmsnorm,
    rmsnorm_quant,
)
from .rope import mla_rope_quantize_fp8

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "mla_rope_quantize_fp8",
    "norm",
    "qk_rmsnorm",
    "rmsnorm",
    "rmsnorm_quant",
    "rope",
]
