"""``vllm._custom_ops``: ``from onepass.compat import vllm as ops`` in place of ``from vllm import _custom_ops as ops``.

What vLLM 0.20 and later round, with ``round`` to the tensors' dtype::

    rms_norm             y = round((x * rs) * w)
    fused_add_rms_norm   h = round(x + residual);  y = round((h * rs) * w),  rs from the rounded h
    the two with fp8     y = round(round(h * rs) * w);  scale = min(max |y|, scale_ub) / 448;  code = fp8(y / scale)

vLLM 0.19 and earlier rounded ``x * rs`` in the first two as well: that is `onepass.compat.vllm_0_19`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ContractError, Unsupported
from ..formats import FP8_FORMATS
from ..ops.rms_norm import rms_norm as _rms_norm
from ..ops.rms_norm import rms_norm_fused_fp8

__all__ = ["fused_add_rms_norm", "rms_norm", "rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant"]


def weight_or_ones(weight: Tensor | None, like: Tensor) -> Tensor:
    """The weight, or ones, which vLLM means by None."""
    return like.new_ones(like.shape[-1]) if weight is None else weight


def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """``out = round((input * rs) * weight)``; ``weight=None`` is a weight of ones."""
    _rms_norm(input, weight_or_ones(weight, input), epsilon, out=out)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """``residual += input``, then ``input = round((residual * rs) * weight)``: both are overwritten.

    vLLM norms the sum as it was rounded and rounds nothing else. No onepass kernel does both, so this is a torch addition
    and a norm, two launches; `onepass.rms_norm` with ``residual=`` is one, and norms the unrounded sum.
    """
    residual.add_(input)
    _rms_norm(residual, weight_or_ones(weight, input), epsilon, out=input)


def rms_norm_dynamic_per_token_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm and fp8 codes with a scale a token: (codes like input, scales [tokens, 1]). ``residual`` is updated in place.

    Differences: with a residual vLLM norms the float32 sum, here it is the sum as stored in residual, so y may be an ulp
    of its dtype off. A scale below 1 / (448 * 512) is kept (0 for a row of zeros) where vLLM raises it to that. Codes are
    ``y * (1 / scale)`` where vLLM divides. ``scale_ub`` is read on the host, so it cannot be used in a CUDA graph.
    ``quant_dtype`` is an fp8 dtype; int8 is not supported.
    """
    return _quantized("rms_norm_dynamic_per_token_quant", input, weight, epsilon, quant_dtype, None, scale_ub, residual)


def rms_norm_per_block_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    group_size: Sequence[int],
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
    is_scale_transposed: bool = False,
    tma_alignment: int = 0,
) -> tuple[Tensor, Tensor]:
    """The same with a scale for every ``group_size[1]`` columns, 64 or 128: scales [tokens, N / group_size[1]].

    ``is_scale_transposed`` stores a column of scales after the other; ``tma_alignment=4`` starts each at a multiple of
    four. Differences: as in `rms_norm_dynamic_per_token_quant`.
    """
    name = "rms_norm_per_block_quant"
    if len(group_size) != 2 or group_size[1] not in (64, 128) or input.shape[-1] % group_size[1]:
        raise ContractError(
            f"{name}: `group_size` must be [1, 64] or [1, 128] and divide the columns, got {group_size}"
        )
    if tma_alignment not in (0, 4):
        raise ContractError(f"{name}: `tma_alignment` must be 0 or 4, got {tma_alignment}")
    if is_scale_transposed and tma_alignment and input.dim() != 2:
        raise Unsupported(f"{name}: `tma_alignment` needs a 2-dimensional input, got {list(input.shape)}; flatten it")
    groups, tokens = input.shape[-1] // group_size[1], input.numel() // input.shape[-1]
    scales = None
    if is_scale_transposed:
        stride = -(-tokens // tma_alignment) * tma_alignment if tma_alignment else tokens
        scales = torch.empty_strided((tokens, groups), (1, stride), dtype=torch.float32, device=input.device)
    return _quantized(name, input, weight, epsilon, quant_dtype, group_size[1], scale_ub, residual, scales)


def _quantized(
    name: str,
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    group_size: int | None,
    scale_ub: Tensor | None,
    residual: Tensor | None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if quant_dtype not in FP8_FORMATS:
        raise Unsupported(
            f"{name}: `quant_dtype` must be an fp8 dtype ({', '.join(map(str, FP8_FORMATS))}), got {quant_dtype}"
        )
    flat = input.view(-1, input.shape[-1]) if input.dim() != 2 else input
    rest = None if residual is None else residual.view(flat.shape)
    codes, scale, *_ = rms_norm_fused_fp8(
        flat,
        weight,
        epsilon,
        scale_ub=None if scale_ub is None else float(scale_ub),
        out_dtype=quant_dtype,
        fp8_max=224.0 if quant_dtype is torch.float8_e4m3fnuz else None,
        group_size=group_size,
        scale_layout="row" if scales is None else "column",
        residual=rest,
        rounding="hf",
        scale_output=scales,
        residual_out=rest,
    )
    return codes.view(input.shape), scale
