"""``vllm._custom_ops``: ``from onepass.engines import vllm as ops`` replaces its import.

The equations are those of vLLM 0.20 and later, where ``round`` rounds to the tensors' dtype::

    rms_norm             y = round((x * rs) * w)
    fused_add_rms_norm   h = round(x + residual);  y = round((h * rs) * w),  rs from the rounded h
    the two with fp8     h = x + residual, unrounded;  y = round(round(h * rs) * w)
                         scale = max(min(max |y|, scale_ub) / qmax, 1 / (qmax * 512));  code = fp8(y / scale)

    the two with int8    y as with fp8;  scale = max(max |y| / 127, 2**-23);  code = int8(y * (1 / scale))

    static fp8           h = round(x + residual);  y = round(round(h * rs) * w);  code = fp8(y * (1 / scale))

``qmax`` is 448 for float8_e4m3fn and 224 for float8_e4m3fnuz. Results are bit-identical to vLLM's, with two exceptions:

- vLLM adds squares in another order, and on a GPU its reciprocal square root may differ in the last bit. Where that
  changes ``rs``, a value at a rounding boundary can round the other way.
- A row that contains NaN or infinity, or whose sum of squares overflows, is NaN here (in int8 its scale is NaN and its
  codes are 0). vLLM's functions store finite codes for it.

vLLM 0.19 and earlier also round ``x * rs`` in the first two: see `onepass.engines.vllm_0_19`.

The docstrings of the norms around attention, of MLA's cache write and of its projection state their rounding. Weights may
have any float dtype, whatever the input's. Every function checks all of its arguments before it writes anything.

Some functions are not in ``vllm._custom_ops``: those with static scales are ``torch.ops._C`` functions, and
`fused_q_kv_rmsnorm` is in ``vllm.models.common.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.contract import describe
from ..errors import ContractError, Unsupported
from ..kvcache import DS_MLA, DS_MLA_BYTES, DS_MLA_COLUMNS, pack_ds_mla
from ..ops.linear.op import linear
from ..ops.qk_norm.op import qk_rms_norm
from ..ops.rms_norm.op import rms_norm as _rms_norm
from ..ops.rms_norm.op import rms_norm_fused_fp8, rms_norm_fused_quant
from ..rope import Rope
from .arguments import names_of_op, require_counts, require_tensors

_MAXIMA = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
"""The largest value of each fp8 format in vLLM."""
_LEAST_INT8 = 2.0**-23
"""The smallest scale of int8 in vLLM."""
as_called = names_of_op(x="input", gamma="weight", eps="epsilon", out_dtype="quant_dtype")
"""The ops' arguments by vLLM's names."""
_static_as_called = names_of_op(x="input", gamma="weight", eps="epsilon", static_scale="scale", out="result")

_FP8 = ("fp8", "fp8_e4m3")
_INTEGERS = (torch.int32, torch.int64)
product = names_of_op(x="mat_a", weight="mat_b", out="output")
"""The arguments of `linear` by the names of DeepSeek's projection."""

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
        "residual_out": residual,
    }
    scale_out = None if scales is None else scales.view(*lead, groups)
    if quant_dtype == torch.int8:
        options |= {"format": "int8", "min_scale": _LEAST_INT8, "scale_out": scale_out}
        results = rms_norm_fused_quant(input, weight, epsilon, **options)
    else:
        limit = _MAXIMA[quant_dtype]
        options |= {"out_dtype": quant_dtype, "fp8_max": limit, "quantize": "divide", "min_scale": 1 / (limit * 512)}
        results = rms_norm_fused_fp8(input, weight, epsilon, scale_ub=scale_ub, scale_output=scale_out, **options)
    codes, scale = results[:2]
    return codes, scale.view(tokens, groups) if scales is None else scales


# --- around attention ----------------------------------------------------------------------------------------------


@names_of_op(q="qkv", k="qkv", q_out="qkv", k_out="qkv", gamma_q="q_weight", gamma_k="k_weight", freqs="cos_sin_cache")
def fused_qk_norm_rope(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    position_ids: Tensor,
    forced_token_heads_per_warp: int = -1,
) -> None:
    """Norm and rotate the heads of q and k in ``qkv`` [tokens, (Hq + Hk + Hv) * head_dim], in place; v is not touched.

    ``x = round(rope((x * rs) * w))``, where vLLM computes ``x * (rs * w)``: both are float32, and a value at a rounding
    boundary can differ in its last bit. ``cos_sin_cache`` [positions, rotated columns] has all cosines, then all sines,
    in any float dtype; its rows are gathered by torch before the launch. The last argument is ignored.
    """
    name = "fused_qk_norm_rope"
    require_tensors(name, qkv=qkv, q_weight=q_weight, k_weight=k_weight)
    require_tensors(name, cos_sin_cache=cos_sin_cache, position_ids=position_ids)
    require_counts(name, num_heads_q=num_heads_q, num_heads_k=num_heads_k, num_heads_v=num_heads_v, head_dim=head_dim)
    heads = num_heads_q + num_heads_k + num_heads_v
    if qkv.dim() != 2 or qkv.shape[1] != heads * head_dim:
        raise ContractError(f"{name}: `qkv` must be [tokens, {heads} heads of {head_dim}], got {list(qkv.shape)}")
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] % 2 or cos_sin_cache.shape[1] > head_dim:
        raise ContractError(
            f"{name}: `cos_sin_cache` must be [positions, at most {head_dim}] with an even number of columns, "
            f"got {list(cos_sin_cache.shape)}"
        )
    if not cos_sin_cache.dtype.is_floating_point:
        raise ContractError(f"{name}: `cos_sin_cache` must have a float dtype, got {cos_sin_cache.dtype}")
    if position_ids.shape != qkv.shape[:1] or position_ids.dtype not in _INTEGERS:
        raise ContractError(
            f"{name}: `position_ids` must be [{qkv.shape[0]}] of int32 or int64, got {describe(position_ids)}"
        )
    for label, tensor in (("cos_sin_cache", cos_sin_cache), ("position_ids", position_ids)):
        if tensor.device != qkv.device:
            raise ContractError(f"{name}: `{label}` must be on {qkv.device} like qkv, got {tensor.device}")
    # onepass wants the two of a pair next to each other
    cos, sin = cos_sin_cache[position_ids].float().chunk(2, -1)
    freqs = torch.stack((cos, sin), -1).flatten(-2)
    rope = Rope(freqs, style="half" if is_neox else "interleaved", head_dim=head_dim)
    middle, end = num_heads_q * head_dim, (num_heads_q + num_heads_k) * head_dim
    q, k = qkv[:, :middle], qkv[:, middle:end]
    qk_rms_norm(q, k, q_weight, k_weight, eps, rope=rope, per_head=True, out=(q, k))


@names_of_op(q="qr", k="kv", gamma_q="q_weight", gamma_k="kv_weight")
def fused_q_kv_rmsnorm(
    qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norms of MLA's two latents, ``round((x * rs) * w)``, in one launch. Rows may be slices of one projection."""
    require_tensors("fused_q_kv_rmsnorm", qr=qr, kv=kv, q_weight=q_weight, kv_weight=kv_weight)
    out = (_like(qr), _like(kv))
    qk_rms_norm(qr, kv, q_weight, kv_weight, eps, out=out)
    return out


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
    skip_scale: bool = False,
) -> None:
    """Write ``concat(kv_c, k_pe)`` of each token to its slot of ``kv_cache`` [pages, page size, columns].

    "auto" stores the values in the cache's dtype. "fp8" and "fp8_e4m3" store ``fp8(value / scale)`` in a cache of
    uint8 or float8_e4m3fn; with ``skip_scale`` they store ``fp8(value)``. "fp8_ds_mla" packs an entry into 656 bytes:
    codes of 512 columns with a scale for each 128, at least 2**-126, and 64 columns in bfloat16; ``scale`` is ignored.
    There a tile with NaN or infinity has a NaN scale.
    A negative slot means that a token is not stored. slot_mapping may be shorter than kv_c, whose remaining rows are
    padding.

    There is no norm here, so torch does the work, without waiting for the device. If the latent still has to be
    normed, `onepass.fused_rope_rmsnorm_quantization` does all of it in one launch.
    """
    name = "concat_and_cache_mla"
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in ("auto", *_FP8, DS_MLA):
        raise Unsupported(
            f"{name}: `kv_cache_dtype` must be auto, fp8, fp8_e4m3 or fp8_ds_mla, got {describe(kv_cache_dtype)}"
        )
    require_tensors(name, kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)
    packed = kv_cache_dtype == DS_MLA
    _check_entries(name, kv_c, k_pe, kv_cache, slot_mapping, packed)
    tokens = slot_mapping.shape[0]
    rope = k_pe.reshape(k_pe.shape[0], -1)[:tokens]
    entries = pack_ds_mla(kv_c[:tokens], rope) if packed else torch.cat((kv_c[:tokens], rope), -1)
    if packed:
        if kv_cache.dtype != torch.uint8:
            raise ContractError(f"{name}: `kv_cache` must be uint8 with fp8_ds_mla, got {kv_cache.dtype}")
    elif kv_cache_dtype in _FP8:
        if kv_cache.dtype not in (torch.uint8, torch.float8_e4m3fn):
            raise ContractError(f"{name}: `kv_cache` must be uint8 or float8_e4m3fn, got {kv_cache.dtype}")
        values = entries.float()
        if not skip_scale:
            if not isinstance(scale, Tensor) or scale.numel() != 1 or not scale.dtype.is_floating_point:
                raise ContractError(f"{name}: `scale` must be a float tensor of one element, got {describe(scale)}")
            values = values / scale.reshape(())
        entries = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)
    if tokens:
        _scatter(entries.to(kv_cache.dtype), kv_cache, slot_mapping.long())


def _check_entries(name: str, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, packed: bool) -> None:
    """The shapes, devices and dtypes of what is stored."""
    if kv_c.dim() != 2:
        raise ContractError(f"{name}: `kv_c` must be [tokens, columns], got {list(kv_c.shape)}")
    if k_pe.dim() not in (2, 3) or k_pe.shape[0] != kv_c.shape[0] or k_pe.numel() != k_pe.shape[0] * k_pe.shape[-1]:
        raise ContractError(
            f"{name}: `k_pe` must be [{kv_c.shape[0]}, columns] or [{kv_c.shape[0]}, 1, columns], got {list(k_pe.shape)}"
        )
    if slot_mapping.dim() != 1 or slot_mapping.dtype not in _INTEGERS:
        raise ContractError(f"{name}: `slot_mapping` must be [tokens] of int32 or int64, got {describe(slot_mapping)}")
    for label, tensor in (("kv_c", kv_c), ("k_pe", k_pe)):
        if not tensor.dtype.is_floating_point:
            raise ContractError(f"{name}: `{label}` must have a float dtype, got {tensor.dtype}")
    for label, tensor in (("k_pe", k_pe), ("kv_cache", kv_cache), ("slot_mapping", slot_mapping)):
        if tensor.device != kv_c.device:
            raise ContractError(f"{name}: `{label}` must be on {kv_c.device} like kv_c, got {tensor.device}")
    tokens, width = slot_mapping.shape[0], kv_c.shape[-1] + k_pe.shape[-1]
    if packed and (kv_c.shape[-1], k_pe.shape[-1]) != DS_MLA_COLUMNS:
        got = f"{kv_c.shape[-1]} and {k_pe.shape[-1]}"
        raise ContractError(f"{name}: `kv_c` must have 512 columns and k_pe 64 with fp8_ds_mla, got {got}")
    width = DS_MLA_BYTES if packed else width
    if kv_cache.dim() != 3 or kv_cache.shape[-1] != width:
        raise ContractError(f"{name}: `kv_cache` must be [pages, page size, {width}], got {list(kv_cache.shape)}")
    if tokens > kv_c.shape[0]:
        raise ContractError(f"{name}: `slot_mapping` must have at most {kv_c.shape[0]} elements, got {tokens}")


def _scatter(entries: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Write each entry to its slot, without waiting for the device."""
    # A token without a slot repeats the write of one that has a slot, and if there is none, rewrites the first entry.
    stored = slots.argmax(0, keepdim=True)  # one element and not a scalar, which torch would read on the host
    last = slots[stored]
    replacement = torch.where((last < 0).unsqueeze(-1), kv_cache[0, 0], entries[stored])
    skipped = slots < 0
    slots = torch.where(skipped, last.clamp(min=0), slots)
    entries = torch.where(skipped.unsqueeze(-1), replacement, entries)
    size = kv_cache.shape[1]
    kv_cache[slots // size, slots % size] = entries


@product
def dsv3_fused_a_gemm(output: Tensor, mat_a: Tensor, mat_b: Tensor, enable_pdl: bool = False) -> None:
    """``output = mat_a @ mat_b``, rounded once. ``mat_b`` [K, N] is the transposed weight, as vLLM passes it.

    Any number of tokens and any sizes, bfloat16, float16 or float32. Each row is bit-identical to running it alone.
    """
    require_tensors("dsv3_fused_a_gemm", output=output)
    linear(mat_a, weight_of("dsv3_fused_a_gemm", mat_b), out=output)


def weight_of(name: str, mat_b: Tensor) -> Tensor:
    """The weight [N, K] whose transpose ``mat_b`` is."""
    require_tensors(name, mat_b=mat_b)
    if mat_b.dim() != 2 or (mat_b.stride(0) != 1 and mat_b.shape[0] != 1):
        raise ContractError(
            f"{name}: `mat_b` must be the transpose of a contiguous weight, with strides (1, K), got {mat_b.stride()}"
        )
    return mat_b.t()
