"""``flashinfer.norm``.

FlashInfer's kernels round once, when they store, as onepass does by default::

    rmsnorm, qk_rmsnorm        out      = round((x * rs) * w)
    fused_add_rmsnorm          h        = x + residual                in float32
                               input    = round((h * rs) * w),  residual = round(h)
    rmsnorm_quant              out      = fp8(((x * rs) * w) / scale)
    fused_add_rmsnorm_quant    h, residual as above;  out = fp8(((h * rs) * w) / scale)
    gemma_...                  1 + w instead of w, added in float32
    rmsnorm_sigmoid_gate       input    = round((x * rs) * sigmoid(gate))
    layernorm                  out      = round((d * rs) * gemma + beta),  d = x - mean(x)

Two quantize what the norm would store, so they round twice::

    layernorm_quant                     out = fp8(round((d * rs) * gemma + beta) * (1 / scale))
    fused_add_rmsnorm_fp8_block_quant   h, residual as above;  normed_out = round((h * rs) * w)
                                        block_scale = max(amax(|normed_out|), 1e-4) / 448  of 128 columns
                                        out = fp8(normed_out * (1 / block_scale))

In `rmsnorm_quant` and `fused_add_rmsnorm_quant`, FlashInfer multiplies by the reciprocal of the scale, which one of its
two backends approximates. For a scale that is a power of two that is the same. Otherwise a value within one float32
rounding of the midpoint between two codes can get the other code.

``enable_pdl`` is accepted and ignored: onepass decides itself whether to use programmatic dependent launch (PDL). Weights
may have any float dtype, whatever the input's.
"""

from __future__ import annotations

from typing import Final, TypedDict

import torch
from torch import Tensor

from ...core.contract import describe
from ...errors import ContractError, Unsupported
from ...formats import FP8_CODES, QuantFormatName, Quantize
from ...ops.rms_norm.op import layer_norm, rms_norm, rms_norm_fused_fp8, rms_norm_fused_quant
from ..arguments import names_of_op, one_element, require_codes, require_tensors

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_quant",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "layernorm_quant",
    "qk_rmsnorm",
    "rmsnorm",
    "rmsnorm_quant",
    "rmsnorm_sigmoid_gate",
]
_as_called = names_of_op(x="input", gamma="weight", static_scale="scale")
_layer_as_called = names_of_op(x="input", gamma="gemma", bias="beta", static_scale="scale")
_block_as_called = names_of_op(
    x="input", gamma="weight", scale_out="block_scale", norm_out="normed_out", residual_out="residual"
)
_BLOCK: Final = 128
_FORMATS: Final[dict[torch.dtype, QuantFormatName]] = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}


@_as_called
def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """``round((input * rs) * weight)`` with ``rs = 1 / sqrt(mean(input^2) + eps)``.

    Args:
        input: [tokens, N] or [tokens, heads, N], bfloat16, float16 or float32.
        weight: [N] of any float dtype.
        eps: Added to the mean of squares.
        out: Receives the result; may be input itself.
        enable_pdl: Ignored.

    Returns:
        The norm in input's dtype: ``out`` if given.

    Rounding:
        Once.

    >>> import torch
    >>> from onepass.engines import flashinfer
    >>> flashinfer.rmsnorm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
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
    """``out = fp8(((input * rs) * weight) / scale)``.

    Args:
        out: [tokens, N] of an fp8 dtype; receives the codes.
        input: [tokens, N].
        weight: [N] of any float dtype.
        scale: A number or one float32.
        eps: Added to the mean of squares.
        enable_pdl: Ignored.

    Rounding:
        Once, to fp8. FlashInfer multiplies by the reciprocal of the scale.
    """
    require_tensors("rmsnorm_quant", weight=weight)
    options = _static("rmsnorm_quant", out, input, scale)
    rms_norm_fused_fp8(input, weight, eps, out=out, **options)


@_as_called
def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """``h = input + residual``, then ``input = round((h * rs) * weight)`` and ``residual = round(h)``.

    Args:
        input: [tokens, N]; overwritten by the norm.
        residual: Like input, or float32; overwritten by the sum.
        weight: [N] of any float dtype.
        eps: Added to the mean of squares.
        enable_pdl: Ignored.

    Rounding:
        Each result once. The norm reads the unrounded sum.
    """
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
    """``h = input + residual``, then ``out = fp8(((h * rs) * weight) / scale)`` and ``residual = round(h)``.

    Args:
        out: [tokens, N] of an fp8 dtype; receives the codes.
        input: [tokens, N]; not changed.
        residual: Like input, or float32; overwritten by the sum.
        weight: [N] of any float dtype.
        scale: A number or one float32.
        eps: Added to the mean of squares.
        enable_pdl: Ignored.

    Rounding:
        Each result once. The norm reads the unrounded sum. FlashInfer multiplies by the reciprocal of the scale.
    """
    require_tensors("fused_add_rmsnorm_quant", residual=residual, weight=weight)
    options = _static("fused_add_rmsnorm_quant", out, input, scale)
    rms_norm_fused_fp8(input, weight, eps, residual=residual, out=out, residual_out=residual, **options)


def _static(name: str, out: Tensor, input: Tensor, scale: float | Tensor) -> _Options:
    """The options of a norm that is divided by a given scale."""
    require_codes(name, FP8_CODES, out=out)
    return {"static_scale": _scale(name, scale, input), "quantize": "divide", "out_dtype": out.dtype}


def _scale(name: str, scale: float | Tensor, input: Tensor) -> Tensor:
    """The scale as a tensor of no dimensions on input's device."""
    require_tensors(name, input=input)
    if isinstance(scale, Tensor):
        return one_element(name, scale=scale)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise ContractError(f"{name}: `scale` must be a number or a tensor of one element, got {describe(scale)}")
    return torch.full((), scale, dtype=torch.float32, device=input.device)


class _Options(TypedDict):
    static_scale: Tensor
    quantize: Quantize
    out_dtype: torch.dtype


@_as_called
def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """``round((input * rs) * (1 + weight))``: `rmsnorm` with Gemma's weights, and the same arguments.

    Returns:
        The norm in input's dtype: ``out`` if given.

    Rounding:
        Once. 1 is added to the weight in float32.
    """
    if weight is None:
        require_tensors("gemma_rmsnorm", weight=weight)
    return rms_norm(input, weight, eps, weight_offset=1.0, out=out)


@_as_called
def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """``h = input + residual``, then ``input = round((h * rs) * (1 + weight))`` and ``residual = round(h)``.

    This is `fused_add_rmsnorm` with Gemma's weights, and the same arguments.

    Rounding:
        Each result once. The norm reads the unrounded sum. 1 is added to the weight in float32.
    """
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
    """``output = round((input * rs) * (weight + weight_bias))`` of every head.

    In FlashInfer this is ``norm.kernels.rmsnorm.qk_rmsnorm_cute``, which `rmsnorm` and, with ``weight_bias=1``,
    `gemma_rmsnorm` call for three dimensions. `onepass.qk_rms_norm` norms queries and keys in one launch.

    Args:
        input: [tokens, heads, head_dim] with any strides but contiguous columns.
        weight: [head_dim] of any float dtype.
        output: Receives the result; may be input itself.
        eps: Added to the mean of squares.
        weight_bias: Added to the weight in float32.
        enable_pdl: Ignored.

    Rounding:
        Once.
    """
    if output is None or weight is None:
        require_tensors("qk_rmsnorm", output=output, weight=weight)
    rms_norm(input, weight, eps, weight_offset=weight_bias, out=output)


@names_of_op(x="input", out="input")
def rmsnorm_sigmoid_gate(input: Tensor, gate: Tensor, eps: float = 1e-5, *, enable_pdl: bool = True) -> None:
    """``input = round((input * rs) * sigmoid(gate))`` in place: a norm of every head without a weight.

    Args:
        input: [rows, N] or [rows, heads, N] with any strides but contiguous columns. FlashInfer takes N = 64.
        gate: Like input, of any float dtype.
        eps: Added to the mean of squares.
        enable_pdl: Ignored.

    Rounding:
        Once. FlashInfer's sigmoid is approximate.
    """
    require_tensors("rmsnorm_sigmoid_gate", input=input, gate=gate)
    rms_norm(input, None, eps, gate=gate, gate_activation="sigmoid", out=input)


@_layer_as_called
def layernorm(input: Tensor, gemma: Tensor, beta: Tensor, eps: float = 1e-6) -> Tensor:
    """``round((d * rs) * gemma + beta)`` with ``d = input - mean(input)`` and ``rs = 1 / sqrt(mean(d^2) + eps)``.

    Args:
        input: [tokens, N], bfloat16, float16 or float32. FlashInfer takes bfloat16.
        gemma: The weight [N] of any float dtype, by FlashInfer's name.
        beta: [N] of any float dtype.
        eps: Added to the variance.

    Returns:
        [tokens, N] in input's dtype.

    Rounding:
        Once.
    """
    require_tensors("layernorm", gemma=gemma, beta=beta)
    return layer_norm(input, gemma, beta, eps)


@_layer_as_called
def layernorm_quant(
    out: Tensor, input: Tensor, gemma: Tensor, beta: Tensor, scale: float | Tensor, eps: float = 1e-6
) -> None:
    """``out = fp8(layernorm(input, gemma, beta) * (1 / scale))``.

    Args:
        out: [tokens, N] of float8_e4m3fn or float8_e5m2; receives the codes.
        input: [tokens, N], as `layernorm` takes it.
        gemma: The weight [N].
        beta: [N].
        scale: A number or one float32.
        eps: Added to the variance.

    Rounding:
        Twice: the norm to input's dtype, its product with the reciprocal of the scale to fp8.
    """
    name = "layernorm_quant"
    require_tensors(name, gemma=gemma, beta=beta)
    require_codes(name, _FORMATS, out=out)
    rms_norm_fused_quant(
        input,
        gemma,
        eps,
        format=_FORMATS[out.dtype],
        bias=beta,
        statistic="layer",
        rounding="stored",
        static_scale=_scale(name, scale, input),
        out=out,
    )


@_block_as_called
def fused_add_rmsnorm_fp8_block_quant(
    out: Tensor,
    block_scale: Tensor,
    normed_out: Tensor,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """``residual += input``, then the norm of the unrounded sum, and its codes with a scale per 128 columns.

    Args:
        out: [tokens, N] of float8_e4m3fn; receives the codes.
        block_scale: float32 [N / 128, tokens rounded up to a multiple of 4]; receives a column of scales per group, as
            DeepGEMM reads them. What is beyond the tokens is not written.
        normed_out: [tokens, N] in input's dtype; receives the norm.
        input: [tokens, N]; N is any multiple of 128.
        residual: Like input; updated in place.
        weight: [N] of any float dtype.
        eps: Added to the mean of squares.
        enable_pdl: Ignored.

    Rounding:
        The norm is rounded once to input's dtype, and that is what scales and codes are computed from. Codes are products
        with ``1 / block_scale``, where FlashInfer divides 448 by the maximum: at a midpoint a code may be the other one.
        A group with NaN has a NaN scale, where FlashInfer's maximum ignores it.
    """
    name = "fused_add_rmsnorm_fp8_block_quant"
    require_tensors(name, out=out, block_scale=block_scale, normed_out=normed_out)
    require_tensors(name, input=input, residual=residual, weight=weight)
    if input.dim() != 2 or input.shape[1] % _BLOCK:
        raise ContractError(f"{name}: `input` must be [tokens, a multiple of {_BLOCK}], got {list(input.shape)}")
    if out.dtype != torch.float8_e4m3fn:
        raise Unsupported(f"{name}: `out` must be torch.float8_e4m3fn, got {out.dtype}")
    tokens, columns = input.shape
    shape = (columns // _BLOCK, -(-tokens // 4) * 4)
    if block_scale.shape != shape or block_scale.stride(-1) != 1:
        raise ContractError(
            f"{name}: `block_scale` must be {list(shape)} with contiguous rows, got {describe(block_scale)}"
        )
    rms_norm_fused_quant(
        input,
        weight,
        eps,
        format="e4m3fn",
        group_size=_BLOCK,
        scale_layout="column_tma",
        residual=residual,
        rounding="stored",
        min_scale=1e-4 / 448,
        return_norm=True,
        out=out,
        scale_out=block_scale.t()[:tokens],
        residual_out=residual,
        norm_out=normed_out,
    )
