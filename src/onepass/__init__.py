"""onepass: fused RMSNorm-family kernels for LLM inference; one launch, one pass, a stated rounding contract."""

from . import prologues
from .errors import ContractError, Unsupported
from .ops.gemv_partial_norm import (
    gemv_and_partial_norm,
    gemv_and_partial_norm_unfused_with_scratch,
    gemv_and_partial_norm_with_scratch,
    gemv_trace_blocks,
)
from .ops.rms_norm import rms_norm, rms_norm_fused_fp8
from .prologues import Prologue, prologue
from .trace import GEMV_TRACE_EVENTS_PER_BLOCK, GemvEvent, GmemTrace, NullTrace, TraceBuf

__version__ = "0.1.0"

__all__ = [
    "GEMV_TRACE_EVENTS_PER_BLOCK",
    "ContractError",
    "GemvEvent",
    "GmemTrace",
    "NullTrace",
    "Prologue",
    "TraceBuf",
    "Unsupported",
    "__version__",
    "gemv_and_partial_norm",
    "gemv_and_partial_norm_unfused_with_scratch",
    "gemv_and_partial_norm_with_scratch",
    "gemv_trace_blocks",
    "prologue",
    "prologues",
    "rms_norm",
    "rms_norm_fused_fp8",
]
