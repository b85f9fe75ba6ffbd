"""``rmsnorm_fp4quant`` and ``add_rmsnorm_fp4quant`` of FlashInfer: a norm and its quantization to NVFP4 or MXFP4.

FlashInfer rounds the product of input and weight to the input's dtype before it is scaled, and approximates
reciprocals. Here everything is float32 until the codes, so a value next to the midpoint between two codes, or a scale
next to the midpoint between two scales, can be the other one. The layouts are FlashInfer's.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ...core.contract import describe
from ...core.layout import scale_shape
from ...errors import ContractError, Unsupported
from ...formats import QuantFormatName
from ...ops.rms_norm.op import rms_norm_fused_quant
from ..arguments import names_of_op, one_element, require_tensors

__all__ = ["add_rmsnorm_fp4quant", "rmsnorm_fp4quant"]

_FORMATS: dict[int, tuple[QuantFormatName, str, torch.dtype]] = {
    16: ("nvfp4", "e4m3", torch.float8_e4m3fn),
    32: ("mxfp4", "ue8m0", torch.float8_e8m0fnu),
}
"""Format and scales of each block size."""
_as_called = names_of_op(x="input", gamma="weight", out="y_fp4", scale_out="block_scale", norm_out="y_out")


@_as_called
def rmsnorm_fp4quant(
    input: Tensor,
    weight: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: Literal["e4m3", "ue8m0"] | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``(input * rs) * weight``: pairs of e2m1, with a scale per block of columns.

    Args:
        input: [..., N].
        weight: [N] of any float dtype.
        y_fp4: Receives the codes.
        block_scale: Receives the scales.
        global_scale: One float32 that multiplies the scales of blocks of 16. None: 1.
        eps: Added to the mean of squares.
        block_size: 16 for NVFP4, whose scales are float8_e4m3fn; 32 for MXFP4, whose scales are UE8M0 in uint8.
        scale_format: "e4m3" or "ue8m0"; None: that of the block size.
        is_sf_swizzled_layout: Whether scales are flat, in tiles of 128 rows and 4 blocks.
        enable_pdl: Ignored.

    Returns:
        ``(codes, scales)``: ``y_fp4`` and ``block_scale`` if given.

    Rounding:
        Everything is float32 until the scales and codes.
    """
    options = (global_scale, eps, block_size, scale_format, is_sf_swizzled_layout)
    return _quantized("rmsnorm_fp4quant", (input, None, weight), (y_fp4, block_scale, None), *options)


@_as_called
def add_rmsnorm_fp4quant(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: Literal["e4m3", "ue8m0"] | None = None,
    is_sf_swizzled_layout: bool = False,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: Tensor | None = None,
    enable_pdl: bool | None = None,
    y_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual = round(input + residual)``, then `rmsnorm_fp4quant` of it.

    Arguments that are not listed are those of `rmsnorm_fp4quant`.

    Args:
        input: [..., N]; not changed.
        residual: Like input, or float32; overwritten by the sum.
        output_both_sf_layouts: Must be False: scales have one layout at a time.
        block_scale_unswizzled: Must be None.
        y_out: Receives the norm.

    Returns:
        ``(codes, scales)``.

    Rounding:
        The sum is rounded to the residual's dtype before the norm reads it. Then everything is float32 until the scales
        and codes.
    """
    name = "add_rmsnorm_fp4quant"
    if output_both_sf_layouts or block_scale_unswizzled is not None:
        raise Unsupported(f"{name}: `output_both_sf_layouts` must be False; scales are stored in one layout")
    require_tensors(name, residual=residual)
    options = (global_scale, eps, block_size, scale_format, is_sf_swizzled_layout)
    return _quantized(name, (input, residual, weight), (y_fp4, block_scale, y_out), *options)


def _quantized(
    name: str,
    inputs: tuple[Tensor, Tensor | None, Tensor],
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    global_scale: Tensor | None,
    eps: float,
    block_size: int,
    scale_format: str | None,
    swizzled: bool,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the norm of input + residual, in the given outputs: codes, scales and the norm."""
    (input, residual, weight), (codes, scale, norm) = inputs, outputs
    if not isinstance(input, Tensor) or not input.dim():
        raise ContractError(f"{name}: `input` must be a tensor [..., N], got {describe(input)}")
    require_tensors(name, weight=weight)
    format, dtype = _format(name, input.shape[-1], block_size, scale_format)
    if codes is not None:
        require_tensors(name, y_fp4=codes)
    if global_scale is not None:
        if format == "mxfp4":
            raise ContractError(f"{name}: `global_scale` must be None with blocks of 32, got {describe(global_scale)}")
        global_scale = one_element(name, global_scale=global_scale)
    shape = scale_shape(input.shape[:-1], input.shape[-1] // block_size, "128x4" if swizzled else "row")
    scale_out = None
    if scale is not None:
        if not isinstance(scale, Tensor) or scale.numel() != math.prod(shape) or scale.element_size() != 1:
            raise ContractError(
                f"{name}: `block_scale` must have {math.prod(shape)} elements of a byte, got {describe(scale)}"
            )
        scale_out = scale.view(torch.uint8).view(shape).view(dtype)
    out, block_scales, *_ = rms_norm_fused_quant(
        input,
        weight,
        eps,
        format=format,
        residual=residual,
        round_sum=True,
        global_scale=global_scale,
        scale_layout="128x4" if swizzled else "row",
        out=None if codes is None else codes.view(torch.uint8),
        scale_out=scale_out,
        residual_out=residual,
        return_norm=norm is not None,
        norm_out=norm,
    )
    stored = block_scales if format == "nvfp4" else block_scales.view(torch.uint8)
    result = out.view(torch.float4_e2m1fn_x2) if codes is None else codes
    return result, scale if scale is not None else stored.flatten() if swizzled else stored


def _format(name: str, columns: int, block_size: int, scale_format: str | None) -> tuple[QuantFormatName, torch.dtype]:
    """The format of the codes and the dtype of their scales."""
    if not isinstance(block_size, int) or block_size not in _FORMATS:
        raise ContractError(f"{name}: `block_size` must be 16 or 32, got {describe(block_size)}")
    format, scales, dtype = _FORMATS[block_size]
    if scale_format not in (None, scales):
        raise Unsupported(
            f"{name}: `scale_format` must be {scales!r} with blocks of {block_size}, got {scale_format!r}"
        )
    if columns % block_size:
        raise ContractError(f"{name}: `block_size` must divide the {columns} columns of `input`, got {block_size}")
    return format, dtype
