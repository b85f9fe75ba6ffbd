"""``flashinfer.norm``.

FlashInfer's kernels round once, when they store, as onepass does by default::

    rmsnorm, qk_rmsnorm        out      = round((x * rs) * w)
    fused_add_rmsnorm          h        = x + residual                in float32
                               input    = round((h * rs) * w),  residual = round(h)
    rmsnorm_quant              out      = fp8(((x * rs) * w) / scale)
    fused_add_rmsnorm_quant    h, residual as above;  out = fp8(((h * rs) * w) / scale)
    gemma_...                  1 + w instead of w, added in float32

FlashInfer multiplies by the reciprocal of the scale, which one of its two backends approximates. For a scale that is a
power of two that is the same. Otherwise a value within one float32 rounding of the midpoint between two codes can get
the other code.

``enable_pdl`` is accepted and ignored: onepass decides itself whether to use programmatic dependent launch (PDL). Weights
may have any float dtype, whatever the input's.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from ...core.contract import describe
from ...errors import ContractError, Unsupported
from ...formats import FP8_CODES, Quantize
from ...ops.rms_norm.op import rms_norm, rms_norm_fused_fp8
from ..arguments import names_of_op, require_tensors

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "qk_rmsnorm",
    "rmsnorm",
    "rmsnorm_quant",
]
_as_called = names_of_op(x="input", gamma="weight", static_scale="scale")


@_as_called
def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """``round((input * rs) * weight)`` of [tokens, N] or [tokens, heads, N], optionally in ``out``."""
    if weight is None:
        require_tensors("rmsnorm", weight=weight)
    return rms_norm(input, weight, eps, out=out)


@_as_called
def rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: float | Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """``out = fp8(norm(input) * weight / scale)``, of [tokens, N]; ``scale`` is a number or one float32."""
    require_tensors("rmsnorm_quant", weight=weight)
    options = _static("rmsnorm_quant", out, input, scale)
    rms_norm_fused_fp8(input, weight, eps, out=out, **options)


@_as_called
def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """``residual += input``, then ``input = norm(residual) * weight``, of the unrounded sum."""
    if residual is None or weight is None:
        require_tensors("fused_add_rmsnorm", residual=residual, weight=weight)
    rms_norm(input, weight, eps, residual=residual, out=input, residual_out=residual)


@_as_called
def fused_add_rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: float | Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """``residual += input``, then ``out = fp8(norm(residual) * weight / scale)``, of the unrounded sum."""
    require_tensors("fused_add_rmsnorm_quant", residual=residual, weight=weight)
    options = _static("fused_add_rmsnorm_quant", out, input, scale)
    rms_norm_fused_fp8(input, weight, eps, residual=residual, out=out, residual_out=residual, **options)


def _static(name: str, out: Tensor, input: Tensor, scale: float | Tensor) -> _Options:
    """The options of a norm that is divided by a given scale."""
    if not isinstance(out, Tensor) or out.dtype not in FP8_CODES:
        kind = out.dtype if isinstance(out, Tensor) else type(out).__name__
        raise Unsupported(f"{name}: `out` must be an fp8 tensor ({', '.join(map(str, FP8_CODES))}), got {kind}")
    require_tensors(name, input=input)
    if isinstance(scale, Tensor):
        if scale.numel() != 1:
            raise ContractError(f"{name}: `scale` must have one element, got shape {list(scale.shape)}")
        scale = scale.reshape(())
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise ContractError(f"{name}: `scale` must be a number or a tensor of one element, got {describe(scale)}")
    else:
        scale = torch.full((), scale, dtype=torch.float32, device=input.device)
    return {"static_scale": scale, "quantize": "divide", "out_dtype": out.dtype}


class _Options(TypedDict):
    static_scale: Tensor
    quantize: Quantize
    out_dtype: torch.dtype


@_as_called
def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """``round((input * rs) * (1 + weight))``, written to ``out`` if given."""
    if weight is None:
        require_tensors("gemma_rmsnorm", weight=weight)
    return rms_norm(input, weight, eps, weight_offset=1.0, out=out)


@_as_called
def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """``residual += input``, then ``input = norm(residual) * (1 + weight)``, of the unrounded sum."""
    if residual is None or weight is None:
        require_tensors("gemma_fused_add_rmsnorm", residual=residual, weight=weight)
    rms_norm(input, weight, eps, weight_offset=1.0, residual=residual, out=input, residual_out=residual)


@names_of_op(x="input", gamma="weight", out="output", weight_offset="weight_bias")
def qk_rmsnorm(
    input: Tensor,
    weight: Tensor,
    output: Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool = False,
) -> None:
    """Norm every head of ``input`` [tokens, heads, head_dim], with any strides, into ``output``.

    FlashInfer's `rmsnorm` and, with ``weight_bias=1``, `gemma_rmsnorm` use this kernel for three
    dimensions; there its name is ``norm.kernels.rmsnorm.qk_rmsnorm_cute``. `onepass.qk_rms_norm` norms queries and keys in one launch.
    """
    if output is None or weight is None:
        require_tensors("qk_rmsnorm", output=output, weight=weight)
    rms_norm(input, weight, eps, weight_offset=weight_bias, out=output)
