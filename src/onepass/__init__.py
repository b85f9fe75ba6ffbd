"""onepass: fused RMSNorm-family kernels for LLM inference; one launch, one pass, a stated rounding contract."""

from . import prologues
from .errors import ContractError, Unsupported
from .ops.rms_norm import rms_norm, rms_norm_fused_fp8
from .prologues import Prologue, prologue

__version__ = "0.1.0"

__all__ = [
    "ContractError",
    "Prologue",
    "Unsupported",
    "__version__",
    "prologue",
    "prologues",
    "rms_norm",
    "rms_norm_fused_fp8",
]
