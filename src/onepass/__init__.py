"""onepass: fused RMSNorm-family kernels for LLM inference. One launch, one pass, specified rounding."""

from typing import TYPE_CHECKING

from . import prologues
from .core import process as process
from .errors import ContractError, Unsupported
from .kvcache import PagedKVCache, gather_mla
from .ops.gemv_norm.op import (
    gemv_and_partial_norm,
    gemv_and_partial_norm_unfused_with_scratch,
    gemv_and_partial_norm_with_scratch,
    gemv_trace_blocks,
)
from .ops.linear.op import linear
from .ops.mla_cache.op import fused_rope_rmsnorm_quantization
from .ops.qk_cache.op import qk_norm_rope_cache
from .ops.qk_norm.op import apply_qk_rms_norm, qk_rms_norm, row_mean_of_squares_qk, row_sum_of_squares_qk
from .ops.rms_norm.op import (
    layer_norm,
    quantize,
    rms_norm,
    rms_norm_add_rms_norm,
    rms_norm_add_rms_norm_quant,
    rms_norm_fused_fp8,
    rms_norm_fused_quant,
)
from .prologues import Prologue, prologue
from .rope import Rope
from .trace import GEMV_TRACE_EVENTS_PER_BLOCK, GemvEvent, GmemTrace, NullTrace, TraceBuf
from .weights import dequantize_weight, quantize_weight

if TYPE_CHECKING:
    from . import dist as dist
    from . import engines as engines
    from . import models as models
    from . import nn as nn
    from .models import patch as patch

__version__ = "0.1.0"

__all__ = ["ContractError", "Prologue", "Rope", "Unsupported", "__version__", "patch", "prologue", "prologues"]
__all__ += ["GEMV_TRACE_EVENTS_PER_BLOCK", "GemvEvent", "GmemTrace", "NullTrace", "TraceBuf", "gemv_trace_blocks"]
__all__ += ["gemv_and_partial_norm", "gemv_and_partial_norm_unfused_with_scratch", "gemv_and_partial_norm_with_scratch"]
__all__ += ["PagedKVCache", "fused_rope_rmsnorm_quantization", "gather_mla", "linear", "rms_norm", "rms_norm_fused_fp8"]
__all__ += ["layer_norm", "quantize", "rms_norm_add_rms_norm", "rms_norm_add_rms_norm_quant", "rms_norm_fused_quant"]
__all__ += ["apply_qk_rms_norm", "qk_rms_norm", "row_mean_of_squares_qk", "row_sum_of_squares_qk"]
__all__ += ["dequantize_weight", "qk_norm_rope_cache", "quantize_weight"]

_AT_FIRST_USE = ("dist", "engines", "models", "nn", "patch")
"""Names that are imported at first use. ``import *`` includes only `patch`."""


def __getattr__(name: str) -> object:
    """Import modules at first use."""
    if name in _AT_FIRST_USE:
        from importlib import import_module

        module = import_module(".models" if name == "patch" else f".{name}", __name__)
        return module.patch if name == "patch" else module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, including those that are imported at first use."""
    return sorted({*__all__, *_AT_FIRST_USE})
