"""``vllm._custom_ops``: ``from onepass.engines import vllm as ops`` replaces its import.

The equations are those of vLLM 0.20 and later, where ``round`` rounds to the tensors' dtype::

    rms_norm             y = round((x * rs) * w)
    fused_add_rms_norm   h = round(x + residual);  y = round((h * rs) * w),  rs from the rounded h
    the two with fp8     h = x + residual, unrounded;  y = round(round(h * rs) * w)
                         scale = max(min(max |y|, scale_ub) / qmax, 1 / (qmax * 512));  code = fp8(y / scale)

    the two with int8    y as with fp8;  scale = max(max |y| / 127, 2**-23);  code = int8(y * (1 / scale))

    static fp8           h = round(x + residual);  y = round(round(h * rs) * w);  code = fp8(y * (1 / scale))

``qmax`` is 448 for float8_e4m3fn, 224 for float8_e4m3fnuz and 57344 for float8_e5m2, which vLLM's functions do not take.
Results are bit-identical to vLLM's, with two exceptions:

- vLLM adds squares in another order, and on a GPU its reciprocal square root may differ in the last bit. Where that
  changes ``rs``, a value at a rounding boundary can round the other way.
- A row that contains NaN or infinity, or whose sum of squares overflows, is NaN here (in int8 its scale is NaN and its
  codes are 0). vLLM's functions store finite codes for it.

vLLM 0.19 and earlier also round ``x * rs`` in the first two: see `onepass.engines.vllm_0_19`.

The docstrings of the norms around attention, of MLA's cache write and of its projection state their rounding. Weights may
have any float dtype, whatever the input's. Every function checks all of its arguments before it writes anything.

Some functions are not in ``vllm._custom_ops``: those with static scales are ``torch.ops._C`` functions,
`fused_q_kv_rmsnorm` is in ``vllm.models.common.ops``, and the two with packed scales are in
``vllm.model_executor.layers.quantization.utils.fp8_utils``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.contract import describe
from ..errors import ContractError, Unsupported
from ..ops.linear.op import linear
from ..ops.qk_cache.op import qk_norm_rope_cache
from ..ops.qk_norm.op import qk_rms_norm
from ..ops.rms_norm.op import quantize, rms_norm_fused_fp8, rms_norm_fused_quant
from ..ops.rms_norm.op import rms_norm as _rms_norm
from ..rope import Rope, RopeStyle
from .arguments import names_of_op, one_element, require_codes, require_counts, require_tensors

_MAXIMA = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0, torch.float8_e5m2: 57344.0}
"""The largest value of each fp8 format. vLLM takes the first on NVIDIA's GPUs and the second on AMD's."""
_GROUPS = (16, 32, 64, 128)
"""Columns that may share a scale; 64 and 128 in vLLM."""
_LEAST_INT8 = 2.0**-23
"""The smallest scale of int8 in vLLM."""
_LEAST_PACKED = 1e-10
"""The smallest packed scale in vLLM, before it becomes a power of two."""
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
    "per_token_group_quant_fp8_packed_for_deepgemm",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "rms_norm_static_fp8_quant",
    "silu_mul_quant_fp8_packed_triton",
]


@as_called
def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """``out = round((input * rs) * weight)``; ``weight=None`` is a weight of ones."""
    if out is None:
        require_tensors("rms_norm", out=out)
    _rms_norm(input, weight, epsilon, out=out)


@as_called
def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """``residual += input``, then ``input = round((residual * rs) * weight)``, in one launch."""
    if residual is None:
        require_tensors("fused_add_rms_norm", residual=residual)
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
    require_codes(name, _MAXIMA, result=result)
    require_tensors(name, weight=weight)
    rms_norm_fused_fp8(
        input,
        weight,
        epsilon,
        out_dtype=result.dtype,
        fp8_max=_MAXIMA[result.dtype],
        static_scale=one_element(name, scale=scale),
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
    """Norm and quantize to fp8 or int8 with one scale per ``group_size[1]`` columns: 16, 32, 64 or 128.

    Scales are [tokens, N / group_size[1]]. ``is_scale_transposed`` stores the scales column by
    column; ``tma_alignment=4`` aligns each column to a multiple of four elements.
    """
    name = "rms_norm_per_block_quant"
    if not isinstance(group_size, Sequence) or len(group_size) != 2 or group_size[1] not in _GROUPS:
        raise ContractError(f"{name}: `group_size` must be [1, n] with n 16, 32, 64 or 128, got {describe(group_size)}")
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


# --- codes without a norm ------------------------------------------------------------------------------------------


@names_of_op(out="out_q")
def per_token_group_quant_fp8_packed_for_deepgemm(
    x: Tensor, group_size: int, eps: float = 1e-10, use_ue8m0: bool | None = None, out_q: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize groups of columns to fp8, with the scales that DeepGEMM reads: powers of two, four in a word.

    Args:
        x: [..., N], bfloat16, float16 or float32.
        group_size: Columns that share a scale: 16, 32, 64 or 128, a divisor of N.
        eps: Lower bound of a group's ``max |x|``.
        use_ue8m0: True or None, because packed scales are powers of two.
        out_q: Receives the codes, float8_e4m3fn in x's shape.

    Returns:
        ``(codes, scales)``: scales [rows, N / group_size / 4] of int32, rounded up, stored column by column, each aligned to four rows.

    Rounding:
        ``scale`` is the smallest power of two not below ``max(max(|x|, eps) / 448, 1e-10)``; ``code = fp8(x / scale)``.

    One call of `onepass.quantize`, which raises `Unsupported` on a GPU until its kernels have run there.

    >>> import torch
    >>> from onepass.engines import vllm as ops
    >>> codes, scales = ops.per_token_group_quant_fp8_packed_for_deepgemm(torch.full((1, 32), 448.0), 16)
    >>> codes.float().amax().item(), [hex(word) for word in scales.flatten().tolist()]  # 2^0 twice
    (448.0, ['0x7f7f'])
    """
    name = "per_token_group_quant_fp8_packed_for_deepgemm"
    if use_ue8m0 not in (None, True):
        raise Unsupported(f"{name}: `use_ue8m0` must be True or None, got {describe(use_ue8m0)}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise ContractError(f"{name}: `eps` must be a finite number of at least 0, got {describe(eps)}")
    return _packed(name, x, group_size, out_q, max(eps / _MAXIMA[torch.float8_e4m3fn], _LEAST_PACKED))


@names_of_op(x="input", gate="input", out="output_q")
def silu_mul_quant_fp8_packed_triton(
    input: Tensor,
    group_size: int = 128,
    output_q: Tensor | None = None,
    clamp_limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    expert_ends: Tensor | None = None,
    expert_alignment: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantize ``silu(gate) * up`` of a gated MLP like `per_token_group_quant_fp8_packed_for_deepgemm`.

    Args:
        input: [tokens, 2 * N], bfloat16: gate, then up. vLLM's function takes float16 and rounds its product to bfloat16.
        group_size: Columns that share a scale: 16, 32, 64 or 128, a divisor of N.
        output_q: Receives the codes, float8_e4m3fn [tokens, N].
        clamp_limit: None.
        alpha: 1.
        beta: 0.
        expert_ends: None.
        expert_alignment: Ignored without expert_ends.

    Returns:
        ``(codes, scales)``, as of that function.

    Rounding:
        The product to bfloat16, then as that function.

    >>> import torch
    >>> from onepass.engines import vllm as ops
    >>> codes, scales = ops.silu_mul_quant_fp8_packed_triton(torch.full((2, 256), 2.0, dtype=torch.bfloat16))
    >>> codes.shape, codes[0, 0].item(), hex(scales[0, 0].item())  # 3.53125 of 2^-6
    (torch.Size([2, 128]), 224.0, '0x79')
    """
    name = "silu_mul_quant_fp8_packed_triton"
    options = {
        "clamp_limit": (clamp_limit, None),
        "alpha": (alpha, 1),
        "beta": (beta, 0),
        "expert_ends": (expert_ends, None),
    }
    for option, (value, only) in options.items():
        if value is not only and (only is None or value != only):
            raise Unsupported(f"{name}: `{option}` must be {only}, got {describe(value)}")
    if not isinstance(input, Tensor) or input.dim() != 2 or input.shape[1] % 2 or input.dtype != torch.bfloat16:
        raise ContractError(f"{name}: `input` must be bfloat16 [tokens, 2 * columns], got {describe(input)}")
    gate, up = input.chunk(2, -1)
    return _packed(name, up, group_size, output_q, _LEAST_PACKED, gate)


def _packed(
    name: str, x: Tensor, group_size: int, codes: Tensor | None, least: float, gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes with a power of two per group, four in a word: the words of all rows in two dimensions."""
    if group_size not in _GROUPS:
        raise ContractError(f"{name}: `group_size` must be 16, 32, 64 or 128, got {describe(group_size)}")
    codes, scales = quantize(
        x,
        gate=gate,
        group_size=group_size,
        scale_format="ue8m0",
        scale_layout="column_packed",
        rounding="stored",
        quantize="divide",
        min_scale=least,
        out=codes,
    )
    return codes, scales.flatten(0, -2) if scales.dim() != 2 else scales


# --- around attention ----------------------------------------------------------------------------------------------


@names_of_op(q="qkv", k="qkv", gamma_q="q_weight", gamma_k="k_weight", cos="cos_sin_cache", sin="cos_sin_cache")
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
    """Norm and rotate the heads of q and k in ``qkv``, in place: ``x = round(rope((x * rs) * w))``; v is not touched.

    Args:
        qkv: [tokens, (Hq + Hk + Hv) * head_dim].
        num_heads_q: Hq.
        num_heads_k: Hk.
        num_heads_v: Hv.
        head_dim: Columns of a head.
        eps: Added to the mean of squares.
        q_weight: [head_dim] of any float dtype.
        k_weight: Likewise.
        cos_sin_cache: [positions, rotated columns], all cosines, then all sines, in any float dtype.
        is_neox: Whether columns i and i + half form a pair; else 2i and 2i + 1.
        position_ids: [tokens], int32 or int64.
        forced_token_heads_per_warp: Ignored.

    Rounding:
        Once, at the store. vLLM computes ``x * (rs * w)``: a value at a rounding boundary can differ in its last bit.

    torch gathers the rows of ``cos_sin_cache`` before the launch.

    >>> import torch
    >>> from onepass.engines import vllm as ops
    >>> qkv, ones = torch.tensor([[3.0, 4.0, 0.0, 2.0, 5.0, 6.0]]), torch.ones(2)
    >>> quarter = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # no rotation at position 0, a quarter turn at 1
    >>> ops.fused_qk_norm_rope(qkv, 1, 1, 1, 2, 0.0, ones, ones, quarter, True, torch.tensor([1]))
    >>> qkv
    tensor([[-1.1314,  0.8485, -1.4142,  0.0000,  5.0000,  6.0000]])
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
    if position_ids.shape != qkv.shape[:1] or position_ids.dtype not in _INTEGERS:
        raise ContractError(
            f"{name}: `position_ids` must be [{qkv.shape[0]}] of int32 or int64, got {describe(position_ids)}"
        )
    for label, tensor in (("cos_sin_cache", cos_sin_cache), ("position_ids", position_ids)):
        if tensor.device != qkv.device:
            raise ContractError(f"{name}: `{label}` must be on {qkv.device} like qkv, got {tensor.device}")
    q, k, _ = qkv.view(qkv.shape[0], heads, head_dim).split((num_heads_q, num_heads_k, num_heads_v), 1)
    rope = _angles(cos_sin_cache, position_ids, "half" if is_neox else "interleaved")
    qk_norm_rope_cache(q, k, gamma_q=q_weight, gamma_k=k_weight, eps=eps, rope=rope, out=(q, k))


def _angles(cos_sin_cache: Tensor, positions: Tensor, style: RopeStyle) -> Rope:
    """The rotation of each token, by one gather.

    The op reads the first half of each row of cos and of sin. So rows of sin begin in the middle of those that are gathered.
    """
    tokens, columns = positions.shape[0], cos_sin_cache.shape[1]
    angles = cos_sin_cache.new_empty(tokens * columns + columns // 2)
    shape, strides = (tokens, columns), (columns, 1)
    cos, sin = angles.as_strided(shape, strides), angles.as_strided(shape, strides, columns // 2)
    torch.index_select(cos_sin_cache, 0, positions, out=cos)
    return Rope(cos=cos, sin=sin, style=style)


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


@names_of_op(
    q="k_pe", k="k_pe", v="kv_c", k_cache="kv_cache", v_cache="kv_cache", slots="slot_mapping", k_scale="scale",
    v_scale="scale",
)  # fmt: skip
def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
    skip_scale: bool = False,
) -> None:
    """Write ``concat(kv_c, k_pe)`` of each token to its slot of ``kv_cache``, in one launch.

    Args:
        kv_c: [tokens, L], at most 1024 columns. Rows may be slices of a projection.
        k_pe: [tokens, R] or [tokens, 1, R] in kv_c's dtype.
        kv_cache: [pages, page size, L + R], with any strides but contiguous columns.
        slot_mapping: Each token's slot, page times page size plus entry, int32 or int64. A token whose slot is negative or
            beyond the cache is not stored. It may be shorter than kv_c, whose remaining rows are padding.
        kv_cache_dtype: "auto" stores values in the cache's dtype, "fp8" and "fp8_e4m3" in a cache of uint8 or float8_e4m3fn.
        scale: One float32 that fp8 entries are divided by.
        skip_scale: Whether to divide fp8 entries by 1 instead.

    Rounding:
        Once: ``round(value)``, or ``fp8(value / scale)``, which saturates.

    If the latent still has to be normed or rotated, `onepass.fused_rope_rmsnorm_quantization` does all of it in one launch.
    It also writes the packed entries of "fp8_ds_mla".

    >>> import torch
    >>> from onepass.engines import vllm as ops
    >>> cache, slots = torch.zeros(2, 2, 3), torch.tensor([3, -1])
    >>> latent, rope = torch.tensor([[1.0, 2.0], [4.0, 5.0]]), torch.tensor([[3.0], [6.0]])
    >>> ops.concat_and_cache_mla(latent, rope, cache, slots, "auto", torch.ones(1))
    >>> cache.flatten(0, 1)
    tensor([[0., 0., 0.],
            [0., 0., 0.],
            [0., 0., 0.],
            [1., 2., 3.]])
    """
    name = "concat_and_cache_mla"
    if kv_cache_dtype not in ("auto", *_FP8):
        raise Unsupported(f"{name}: `kv_cache_dtype` must be auto, fp8 or fp8_e4m3, got {describe(kv_cache_dtype)}")
    require_tensors(name, kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)
    _check_entries(name, kv_c, k_pe, kv_cache, slot_mapping)
    divisor = None
    if kv_cache_dtype in _FP8:
        if kv_cache.dtype not in (torch.uint8, torch.float8_e4m3fn):
            raise ContractError(f"{name}: `kv_cache` must be uint8 or float8_e4m3fn, got {kv_cache.dtype}")
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
        divisor = None if skip_scale else one_element(name, scale=scale)
    (tokens,), latent = slot_mapping.shape, kv_c.shape[1]
    # the op stores a key and a value of each token; here both are parts of one entry, and nothing reads the query
    key, value = k_pe[:tokens].view(tokens, 1, k_pe.shape[-1]), kv_c[:tokens].unsqueeze(1)
    caches = (kv_cache[..., latent:].unsqueeze(2), kv_cache[..., :latent].unsqueeze(2))
    qk_norm_rope_cache(key, key, value, *caches, slots=slot_mapping, k_scale=divisor, v_scale=divisor)


def _check_entries(name: str, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """The shapes of what is stored; the op checks the rest."""
    if kv_c.dim() != 2:
        raise ContractError(f"{name}: `kv_c` must be [tokens, columns], got {list(kv_c.shape)}")
    if k_pe.dim() not in (2, 3) or k_pe.shape[0] != kv_c.shape[0] or k_pe.numel() != k_pe.shape[0] * k_pe.shape[-1]:
        raise ContractError(
            f"{name}: `k_pe` must be [{kv_c.shape[0]}, columns] or [{kv_c.shape[0]}, 1, columns], got {list(k_pe.shape)}"
        )
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] > kv_c.shape[0]:
        raise ContractError(
            f"{name}: `slot_mapping` must have at most {kv_c.shape[0]} elements in one dimension, "
            f"got {describe(slot_mapping)}"
        )
    width = kv_c.shape[-1] + k_pe.shape[-1]
    if kv_cache.dim() != 3 or kv_cache.shape[-1] != width:
        raise ContractError(f"{name}: `kv_cache` must be [pages, page size, {width}], got {list(kv_cache.shape)}")


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
