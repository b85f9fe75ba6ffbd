"""``vllm._custom_ops``: ``from onepass.engines import vllm as ops`` replaces its import.

What vLLM 0.20 and later compute, where ``round`` rounds to the tensors' dtype::

    rms_norm             y = round((x * rs) * w)
    fused_add_rms_norm   h = round(x + residual);  y = round((h * rs) * w),  rs from the rounded h
    the two with fp8     h = x + residual, unrounded;  y = round(round(h * rs) * w)
                         scale = max(min(max |y|, scale_ub) / qmax, 1 / (qmax * 512));  code = fp8(y / scale)

    the two with int8    y as with fp8;  scale = max(max |y| / 127, 2**-23);  code = int8(y * (1 / scale))

    static fp8           h = round(x + residual);  y = round(round(h * rs) * w);  code = fp8(y * (1 / scale))

``qmax`` is 448 for float8_e4m3fn and 224 for float8_e4m3fnuz. Results have the same bytes as
vLLM's, with two exceptions. vLLM adds squares in another order, and on a GPU its reciprocal square
root may differ in the last bit; where that changes ``rs``, a value at a rounding boundary can round
the other way. And a row that contains NaN or infinity, or whose sum of squares overflows, is NaN
here (in int8 its scale is NaN and its codes are 0); vLLM's functions store finite codes for it.

vLLM 0.19 and earlier also round ``x * rs`` in the first two: see `onepass.engines.vllm_0_19`.

The norms around attention, MLA's cache write and its projection are in `onepass.engines.vllm_attention`; their
docstrings state their rounding. Weights may have any float dtype, whatever the input's.

Not all are in ``vllm._custom_ops``: those with static scales are ``torch.ops._C`` functions, and `fused_q_kv_rmsnorm` is in
``vllm.models.common.ops``.

Every function checks all of its arguments before it writes anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.contract import describe
from ..errors import ContractError, Unsupported
from ..ops.rms_norm.op import rms_norm as _rms_norm
from ..ops.rms_norm.op import rms_norm_fused_fp8, rms_norm_fused_quant
from .arguments import names_of_op, require_tensors
from .vllm_attention import concat_and_cache_mla, dsv3_fused_a_gemm, fused_q_kv_rmsnorm, fused_qk_norm_rope

_MAXIMA = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
"""The largest value of each fp8 format in vLLM."""
_LEAST_INT8 = 2.0**-23
"""The smallest scale of int8 in vLLM."""
as_called = names_of_op(x="input", gamma="weight", eps="epsilon", out_dtype="quant_dtype")
"""The ops' arguments by vLLM's names."""
_static_as_called = names_of_op(x="input", gamma="weight", eps="epsilon", static_scale="scale", out="result")

__all__ = [
    "concat_and_cache_mla",
    "dsv3_fused_a_gemm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_fp8_quant",
    "fused_q_kv_rmsnorm",
    "fused_qk_norm_rope",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "rms_norm_static_fp8_quant",
]


def weight_or_ones(weight: Tensor | None, like: Tensor) -> Tensor:
    """The weight; None means ones, as in vLLM."""
    if weight is not None:
        return weight
    require_tensors("rms_norm", input=like)
    return like.new_ones(like.shape[-1:])


@as_called
def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """``out = round((input * rs) * weight)``; ``weight=None`` is a weight of ones."""
    if out is None:
        require_tensors("rms_norm", out=out)
    _rms_norm(input, weight_or_ones(weight, input), epsilon, out=out)


@as_called
def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """``residual += input``, then ``input = round((residual * rs) * weight)``, in one launch."""
    if residual is None:
        require_tensors("fused_add_rms_norm", residual=residual)
    weight = weight_or_ones(weight, input)
    _rms_norm(input, weight, epsilon, residual=residual, round_sum=True, out=input, residual_out=residual)


@_static_as_called
def rms_norm_static_fp8_quant(result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> None:
    """``result = fp8(norm(input) * weight * (1 / scale))``, with one float32 scale in memory."""
    _static("rms_norm_static_fp8_quant", result, input, None, weight, scale, epsilon)


@_static_as_called
def fused_add_rms_norm_static_fp8_quant(
    result: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    """``residual += input``, then ``result = fp8(norm(residual) * weight * (1 / scale))``; input is not changed."""
    require_tensors("fused_add_rms_norm_static_fp8_quant", residual=residual)
    _static("fused_add_rms_norm_static_fp8_quant", result, input, residual, weight, scale, epsilon)


def _static(
    name: str, result: Tensor, input: Tensor, residual: Tensor | None, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    if not isinstance(result, Tensor) or result.dtype not in _MAXIMA:
        kind = result.dtype if isinstance(result, Tensor) else type(result).__name__
        raise Unsupported(f"{name}: `result` must be an fp8 tensor ({', '.join(map(str, _MAXIMA))}), got {kind}")
    require_tensors(name, weight=weight)
    if not isinstance(scale, Tensor) or scale.numel() != 1:
        raise ContractError(f"{name}: `scale` must be a tensor of one element, got {describe(scale)}")
    rms_norm_fused_fp8(
        input,
        weight,
        epsilon,
        out_dtype=result.dtype,
        fp8_max=_MAXIMA[result.dtype],
        static_scale=scale.reshape(()),
        residual=residual,
        rounding="hf",
        out=result,
        residual_out=residual,
    )


@as_called
def rms_norm_dynamic_per_token_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm and quantize to fp8 or int8 with one scale per token: (codes, scales [tokens, 1]).

    ``residual`` is updated in place. ``scale_ub`` is one float32 on input's device. The kernel
    reads it, so the call works in CUDA graphs and in ``torch.compile(fullgraph=True)``.
    ``quant_dtype`` is an fp8 dtype or int8, which takes no ``scale_ub``.
    """
    return _quantized("rms_norm_dynamic_per_token_quant", input, weight, epsilon, quant_dtype, None, scale_ub, residual)


@as_called
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
    """Norm and quantize to fp8 or int8 with one scale per ``group_size[1]`` columns, 64 or 128.

    Scales are [tokens, N / group_size[1]]. ``is_scale_transposed`` stores the scales column by
    column; ``tma_alignment=4`` aligns each column to a multiple of four elements.
    """
    name = "rms_norm_per_block_quant"
    if not isinstance(group_size, Sequence) or len(group_size) != 2 or group_size[1] not in (64, 128):
        raise ContractError(f"{name}: `group_size` must be [1, 64] or [1, 128], got {describe(group_size)}")
    if tma_alignment not in (0, 4):
        raise ContractError(f"{name}: `tma_alignment` must be 0 or 4, got {describe(tma_alignment)}")
    alignment = (tma_alignment or 1) if is_scale_transposed else None
    return _quantized(name, input, weight, epsilon, quant_dtype, group_size[1], scale_ub, residual, alignment)


def _quantized(
    name: str,
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    group_size: int | None,
    scale_ub: Tensor | None,
    residual: Tensor | None,
    alignment: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``alignment``: store scales column by column, each aligned to this many elements."""
    if not isinstance(input, Tensor) or not input.dim():
        raise ContractError(f"{name}: `input` must be a tensor [..., N], got {describe(input)}")
    require_tensors(name, weight=weight)
    if quant_dtype not in (*_MAXIMA, torch.int8):
        allowed = ", ".join(map(str, (*_MAXIMA, torch.int8)))
        raise Unsupported(f"{name}: `quant_dtype` must be one of {allowed}, got {quant_dtype}")
    if quant_dtype == torch.int8 and scale_ub is not None:
        raise ContractError(f"{name}: `scale_ub` must be None with torch.int8, got {describe(scale_ub)}")
    lead, columns = input.shape[:-1], input.shape[-1]
    if columns % (group_size or 1):
        raise ContractError(f"{name}: `group_size` must divide the {columns} columns of `input`, got {group_size}")
    tokens, groups = math.prod(lead), columns // group_size if group_size else 1
    if isinstance(residual, Tensor) and residual.numel() == input.numel() and residual.is_contiguous():
        residual = residual.view(input.shape)  # vLLM only counts rows, whatever the leading dimensions
    scales = None
    if alignment is not None:
        stride = -(-tokens // alignment) * alignment
        scales = torch.empty_strided((tokens, groups), (1, stride), dtype=torch.float32, device=input.device)
    options: dict[str, Any] = {
        "group_size": group_size,
        "scale_layout": "row" if scales is None else "column",
        "residual": residual,
        "rounding": "hf",
        "round_sum": False,
        "scale_output": None if scales is None else scales.view(*lead, groups),
        "residual_out": residual,
    }
    if quant_dtype == torch.int8:
        results = rms_norm_fused_quant(input, weight, epsilon, format="int8", min_scale=_LEAST_INT8, **options)
    else:
        limit = _MAXIMA[quant_dtype]
        options |= {"out_dtype": quant_dtype, "fp8_max": limit, "quantize": "divide", "min_scale": 1 / (limit * 512)}
        results = rms_norm_fused_fp8(input, weight, epsilon, scale_ub=scale_ub, **options)
    codes, scale = results[:2]
    return codes, scale.view(tokens, groups) if scales is None else scales
