"""``flashinfer.norm``: ``from onepass.compat import flashinfer`` replaces ``import flashinfer``.

FlashInfer's kernels round once, when they store, as onepass does by default::

    rmsnorm, qk_rmsnorm        out      = round((x * rs) * w)
    fused_add_rmsnorm          h        = x + residual                in float32
                               input    = round((h * rs) * w),  residual = round(h)
    gemma_...                  1 + w instead of w, added in float32

``enable_pdl`` is accepted and ignored: onepass decides itself whether to use dependent launches.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.rms_norm import rms_norm

__all__ = ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "qk_rmsnorm", "rmsnorm"]


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """``round((input * rs) * weight)`` of [tokens, N] or [tokens, heads, N], optionally in ``out``."""
    return rms_norm(input, weight, eps, out=out)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """``residual += input``, then ``input = norm(residual) * weight``, of the unrounded sum."""
    rms_norm(input, weight, eps, residual=residual, out=input, residual_out=residual)


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """``round((input * rs) * (1 + weight))``, written to ``out`` if given."""
    return rms_norm(input, weight, eps, weight_offset=1.0, out=out)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """``residual += input``, then ``input = norm(residual) * (1 + weight)``, of the unrounded sum."""
    rms_norm(input, weight, eps, weight_offset=1.0, residual=residual, out=input, residual_out=residual)


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
    dimensions. `onepass.qk_rms_norm` norms queries and keys in one launch.
    """
    rms_norm(input, weight, eps, weight_offset=weight_bias, out=output)
