"""RMSNorm and LayerNorm, plain and quantized, and quantization without a norm, in one launch that reads each row once.

The public functions state their equations and rounding. docs/numerics.md compares the roundings of all ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...core.contract import Contract, describe, short
from ...core.op import Op
from ...errors import ContractError, Unsupported
from ...formats import (
    FP8_CODES,
    QUANT_FORMATS,
    SCALE_FORMATS,
    QuantFormatName,
    Quantize,
    Rounding,
    ScaleFormat,
    ScaleLayout,
)
from ...prologues import Prologue
from .contract import (
    LAYER_NORM,
    QUANTIZATION,
    RMS_NORM,
    RMS_NORM_ADD_RMS_NORM,
    RMS_NORM_ADD_RMS_NORM_QUANT,
    RMS_NORM_FUSED_FP8,
    RMS_NORM_FUSED_QUANT,
)
from .launch import (
    FinishedArguments,
    GateActivation,
    GateOrder,
    PlainArguments,
    RowCall,
    SpecCache,
    Statistic,
    finished_norm,
    quantized_norm,
    quantized_rows,
    quantized_sandwich,
    row_spec,
    run_rows,
    sandwich_norm,
)

__all__ = [
    "LAYER_NORM",
    "QUANTIZATION",
    "RMS_NORM",
    "RMS_NORM_ADD_RMS_NORM",
    "RMS_NORM_ADD_RMS_NORM_QUANT",
    "RMS_NORM_FUSED_FP8",
    "RMS_NORM_FUSED_QUANT",
    "layer_norm",
    "quantize",
    "rms_norm",
    "rms_norm_add_rms_norm",
    "rms_norm_add_rms_norm_quant",
    "rms_norm_fused_fp8",
    "rms_norm_fused_quant",
]


def either_gamma(gamma: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The contract's two arguments for the public functions' ``gamma``; the one for heads has two dimensions."""
    return (None, gamma) if isinstance(gamma, Tensor) and gamma.dim() == 2 else (gamma, None)


def prologue_key(contract: Contract, prologue: object) -> str:
    """The name under which the kernels find a prologue."""
    if prologue is None:
        return ""
    if not isinstance(prologue, Prologue):
        contract.fail("prologue", "be a function decorated with onepass.prologue", describe(prologue))
    return prologue.key


def quantized_results(op: Op, arguments: tuple[Any, ...], static_scale: Tensor | None) -> tuple[Tensor, ...]:
    """The results of a quantizing call: codes, scale, then new residual, norm and rstd, if requested."""
    results = None if is_compiling() else op.repeat(*arguments)
    codes, scale, new_residual, norm, rstd = results or cast(tuple[Any, ...], op(*arguments))
    if static_scale is not None:
        scale = static_scale
    if new_residual is None and norm is None and rstd is None:
        return codes, scale
    return tuple([t for t in (codes, scale, new_residual, norm, rstd) if t is not None])


def _centered_norm(spec_cache: SpecCache, a: FinishedArguments) -> None:
    finished_norm(spec_cache, a, "once", centered=True, head_gamma=a.head_gamma, rstd=a.rstd_out)


def _norm(spec_cache: SpecCache, a: PlainArguments) -> None:
    if a.gate is not None or a.bias is not None or a.gamma is None or a.return_rstd:
        gating = (a.gate_order, a.gate_activation)
        finished_norm(spec_cache, a, a.rounding, a.gate, gating, head_gamma=a.head_gamma, rstd=a.rstd_out)
        return
    key = (a.x.dtype, a.gamma.dtype, None if a.residual is None else a.residual.dtype)
    spec = spec_cache.get(key)
    if spec is None:
        spec = spec_cache[key] = row_spec(*key, a.out.dtype, a.rounding, round_sum=a.round_sum)
    run_rows(RowCall(spec, a.x, a.gamma, a.eps, a.weight_offset, a.residual, norm=a.out, new_residual=a.residual_out))


RMS_NORM_OP = Op(RMS_NORM, _norm)
_E4M3FN: Final = torch.float8_e4m3fn
_rms_norm_fused_quant = Op(RMS_NORM_FUSED_QUANT, quantized_norm)
_layer_norm = Op(LAYER_NORM, _centered_norm)
_sandwich = Op(RMS_NORM_ADD_RMS_NORM, sandwich_norm)
_sandwich_quant = Op(RMS_NORM_ADD_RMS_NORM_QUANT, quantized_sandwich)
_quantize = Op(QUANTIZATION, quantized_rows)


@overload
def rms_norm(
    x: Tensor,
    gamma: Tensor | None,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: None = ...,
    rounding: Rounding = ...,
    round_sum: bool | None = ...,
    gate: Tensor | None = ...,
    gate_order: GateOrder = ...,
    gate_activation: GateActivation = ...,
    bias: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_rstd: Literal[False] = ...,
    out: Tensor | None = ...,
    residual_out: None = ...,
    rstd_out: None = ...,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    gamma: Tensor | None,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: Tensor,
    rounding: Rounding = ...,
    round_sum: bool | None = ...,
    gate: Tensor | None = ...,
    gate_order: GateOrder = ...,
    gate_activation: GateActivation = ...,
    bias: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_rstd: Literal[False] = ...,
    out: Tensor | None = ...,
    residual_out: Tensor | None = ...,
    rstd_out: None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def rms_norm(
    x: Tensor,
    gamma: Tensor | None,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: Tensor | None = ...,
    rounding: Rounding = ...,
    round_sum: bool | None = ...,
    gate: Tensor | None = ...,
    gate_order: GateOrder = ...,
    gate_activation: GateActivation = ...,
    bias: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_rstd: Literal[True],
    out: Tensor | None = ...,
    residual_out: Tensor | None = ...,
    rstd_out: Tensor | None = ...,
) -> tuple[Tensor, ...]: ...


def rms_norm(
    x: Tensor,
    gamma: Tensor | None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    rounding: Rounding = "once",
    round_sum: bool | None = None,
    gate: Tensor | None = None,
    gate_order: GateOrder = "after",
    gate_activation: GateActivation = "silu",
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_rstd: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    rstd_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """RMSNorm of the last dimension: ``y = (h * rs) * (gamma + weight_offset)``, ``h = x + residual``.

    With ``rs = 1 / sqrt(mean(h^2) + eps)`` and an optional bias and gate::

        y = ((h * rs) * (gamma + weight_offset) + bias) * act(gate)

    Args:
        x: [..., N], bfloat16, float16 or float32. The last dimension is contiguous, all others may have any stride.
        gamma: Weight [N] of any float dtype, or [H, N] with a weight for each head of x [..., H, N]. None is
            bit-identical to ones.
        eps: Added to the mean of squares.
        weight_offset: Added to gamma in float32: 1.0 for Gemma.
        residual: [..., N] in x's dtype or float32, added to x in float32.
        rounding: "once" or "hf", see below.
        round_sum: Whether the norm reads h rounded to the residual's dtype. None leaves it to ``rounding``.
        gate: [..., N] of any float dtype.
        gate_order: "after" multiplies the result by ``act(gate)`` (Qwen3-Next), "before" multiplies x (Mamba-2).
        gate_activation: "silu", or "sigmoid" (Kimi Linear).
        bias: [N] of any float dtype, added to the product with gamma.
        out_dtype: Dtype of y; None: x's.
        return_rstd: Whether to return rs too.
        out: Receives y; may be x itself.
        residual_out: Receives h; may be the residual itself.
        rstd_out: Receives rs.

    Returns:
        y. With a residual ``(y, new_residual)``, where new_residual is h in the residual's dtype.
            ``return_rstd`` appends rs, float32 [...].

    Rounding:
        "once" computes in float32 and rounds y (and separately h, for new_residual) at the store and nowhere else.
        "hf" rounds where Hugging Face's modules do: h to the residual's dtype, then to x's dtype ``h * rs``, its product
        with gamma, and the results of bias and gate. The product of x and a gate before the norm is not rounded.
        ``round_sum`` changes the rounding of h alone. The order of the sum of squares depends only on N and the dtypes,
        so each row is bit-identical to running it alone.

    To norm the first k columns of each row, pass views: the other columns are neither read nor written.

    >>> import torch, onepass
    >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> onepass.rms_norm(x, torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314],
            [0.0000, 0.0000]])
    >>> onepass.rms_norm(x, None, eps=0.25, return_rstd=True)[1]
    tensor([0.2801, 2.0000])
    >>> onepass.rms_norm(x, torch.ones(2), eps=0.0, gate=torch.zeros(2, 2), gate_activation="sigmoid")
    tensor([[0.4243, 0.5657],
            [0.0000, 0.0000]])
    >>> rows = torch.tensor([[3.0, 4.0, 7.0]])
    >>> onepass.rms_norm(rows[:, :2], torch.ones(2), out=rows[:, :2]), rows
    (tensor([[0.8485, 1.1314]]), tensor([[0.8485, 1.1314, 7.0000]]))
    """
    gamma, heads = either_gamma(gamma)
    options = (eps, weight_offset, rounding, round_sum, gate_order, gate_activation, out_dtype, return_rstd)
    arguments = (x, gamma, residual, gate, bias, heads, *options, out, residual_out, rstd_out)
    repeated = None if is_compiling() else RMS_NORM_OP.repeat(*arguments)
    y, h, rstd = repeated or RMS_NORM_OP(*arguments)
    if rstd is not None:
        return tuple([t for t in (y, h, rstd) if t is not None])
    return cast(Tensor, y) if residual is None else (cast(Tensor, y), cast(Tensor, h))


def rms_norm_fused_fp8(
    x: Tensor,
    gamma: Tensor | None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale_ub: float | Tensor | None = None,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    scales_dtype: torch.dtype = torch.float32,
    residual: Tensor | None = None,
    prologue: Prologue | None = None,
    prologue_args: Sequence[Tensor] = (),
    group_size: int | None = None,
    scale_format: ScaleFormat = "float",
    scale_layout: ScaleLayout = "row",
    static_scale: Tensor | None = None,
    return_norm: bool = False,
    return_rstd: bool = False,
    rounding: Rounding = "once",
    round_sum: bool | None = None,
    quantize: Quantize = "reciprocal",
    min_scale: float = 0.0,
    fp8_max: float | None = None,
    out: Tensor | None = None,
    scale_output: Tensor | None = None,
    residual_out: Tensor | None = None,
    norm_out: Tensor | None = None,
    rstd_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """RMSNorm and fp8 quantization in one read: ``out * scale`` is the norm.

    With ``h = prologue(x, *prologue_args) + residual`` and ``g = gamma + weight_offset``::

        rs    = 1 / sqrt(mean(h^2) + eps)
        amax  = max |h * g| * rs                                    over a row, or over a group of columns
        scale = max(min(amax, scale_ub) / fp8_max, min_scale)       rounded to scales_dtype
        out   = saturate((h * g) * (rs / scale))

    An alias of `rms_norm_fused_quant` for fp8, with the argument names of its reference page.

    Args:
        x: [..., N], bfloat16, float16 or float32. With a prologue also float8_e4m3fn, float8_e4m3fnuz or int8, which the
            prologue sees as numbers (`onepass.prologues.dequantize`).
        gamma: Weight as in `rms_norm`: [N], [H, N], or None.
        eps: Added to the mean of squares.
        weight_offset: Added to gamma in float32.
        scale_ub: Upper bound of amax: a positive number, or one float32 on x's device, which needs no synchronization. A
            tensor may hold any value: zero or less makes the scale ``min_scale``, and NaN sets no bound.
        out_dtype: float8_e4m3fn, float8_e4m3fnuz or float8_e5m2.
        scales_dtype: Dtype of stored scales.
        residual: [..., N] in x's dtype or float32, added in float32. With an 8-bit x, any float dtype.
        prologue: Function decorated with `onepass.prologue`, compiled into the load.
        prologue_args: Its other tensors, each [..., N], [N], [..., 1], or [..., N / group] with a value per group of 32,
            64, 128 or 256 columns.
        group_size: Columns that share a scale: 16, 32, 64 or 128. None: a whole row.
        scale_format: "float"; "ue8m0", rounded up to a power of two; or "ue8m0_floor" (see `rms_norm_fused_quant`).
            Powers of two are stored as float32 or float8_e8m0fnu.
        scale_layout: "row", or "column" for scales that are contiguous along rows (strides (1, M)), as block-scaled GEMMs
            read them. `rms_norm_fused_quant` lists the others.
        static_scale: One float32 on x's device that replaces the computed scale and is returned unchanged.
        return_norm: Whether to return the unquantized norm too, in x's dtype, or in gamma's for an 8-bit x.
        return_rstd: Whether to return rs too.
        rounding: "once", "hf" or "stored", see below. An 8-bit x takes only "once", because the others round to x's dtype.
        round_sum: Whether the norm reads h rounded to the residual's dtype. None leaves it to ``rounding``.
        quantize: "reciprocal", or "divide" to compute ``saturate(y / scale)`` and ``amax = max |y|``, as unfused code
            does, with a correctly rounded division. A quotient halfway between two codes then rounds to even.
        min_scale: Smallest scale; smaller ones, and that of a row of zeros, are raised to it.
        fp8_max: Saturation limit. None: the format's. float8_e4m3fnuz also allows 224.
        out: Receives the codes.
        scale_output: Receives the scales.
        residual_out: Receives h; may be the residual itself.
        norm_out: Receives the norm.
        rstd_out: Receives rs.

    Returns:
        ``(out, scale[, new_residual][, norm][, rstd])``. The scale is [..., 1], or [..., N / group_size] with groups.

    Rounding:
        Everything is float32 until the store. Codes are computed from the scale as stored, rounded to nearest even, and
        saturate. "hf" rounds h, ``h * rs`` and y as in `rms_norm` before amax and quantization. "stored" quantizes y as
        `rms_norm` stores it. A row of zeros has codes 0 and scale ``min_scale`` (ue8m0: at least 2**-127). A row with NaN
        or infinity has NaN codes and a NaN scale.

    >>> import torch, onepass
    >>> q, scale = onepass.rms_norm_fused_fp8(torch.tensor([[3.0, -4.0]]), torch.ones(2), eps=0.0)
    >>> q.float() * scale
    tensor([[ 0.8081, -1.1314]])
    >>> heads = torch.tensor([[3.0, -4.0], [3.0, -4.0]])
    >>> gamma = torch.tensor([[1.0, 1.0], [2.0, 0.5]])
    >>> q, scale, rstd = onepass.rms_norm_fused_fp8(heads, gamma, eps=0.0, return_rstd=True)
    >>> q.float() * scale, rstd
    (tensor([[ 0.8081, -1.1314],
            [ 1.6971, -0.5455]]), tensor([0.2828, 0.2828]))
    """
    format = "e4m3fn" if out_dtype is _E4M3FN else _format_of(out_dtype)
    gamma, heads = either_gamma(gamma)
    bound, number = (scale_ub, None) if isinstance(scale_ub, Tensor) else (None, scale_ub)
    try:
        # fmt: off
        arguments = (  # noqa: RUF005 (as in rms_norm_fused_quant)
            x, gamma, residual, static_scale, bound, None, None, None, heads, prologue_args, eps, weight_offset,
        ) + (
            rounding, number, format, fp8_max, scales_dtype, group_size, scale_format, scale_layout,
            "" if prologue is None else prologue_key(RMS_NORM_FUSED_QUANT, prologue),
            return_norm, round_sum, quantize, min_scale, return_rstd, "after", "silu", "rms",
            out, scale_output, residual_out, norm_out, rstd_out,
        )
        # fmt: on
        return quantized_results(_rms_norm_fused_quant, arguments, static_scale)
    except (ContractError, Unsupported) as error:
        raise RMS_NORM_FUSED_FP8.error(error) from None


def _format_of(out_dtype: object) -> str:
    """The format whose codes are fp8 of this dtype."""
    for dtype, codes in FP8_CODES.items():
        if out_dtype is dtype:
            return codes.name
    allowed = " or ".join(map(short, FP8_CODES))
    raise ContractError(f"rms_norm_fused_fp8: `out_dtype` must be {allowed}, got {describe(out_dtype)}")


def _implied(
    format: str, group_size: int | None, scale_format: ScaleFormat | None, scales_dtype: torch.dtype | None, layout: str
) -> tuple[int | None, ScaleFormat | None, torch.dtype | None]:
    """Groups, scale format and dtype of scales, with what the format implies in place of None."""
    known = QUANT_FORMATS.get(format) if isinstance(format, str) else None
    if known is not None:
        group_size = known.groups[0] if group_size is None else group_size
        scale_format = known.scales[0] if scale_format is None else scale_format
        encoding = SCALE_FORMATS.get(scale_format) if isinstance(scale_format, str) else None
        if scales_dtype is None and encoding is not None:
            scales_dtype = torch.int32 if layout == "column_packed" else encoding.dtypes[0]
    return group_size, scale_format, scales_dtype


def rms_norm_fused_quant(
    x: Tensor,
    gamma: Tensor | None,
    eps: float = 1e-6,
    *,
    format: QuantFormatName = "e4m3fn",
    weight_offset: float = 0.0,
    scale_ub: float | Tensor | None = None,
    code_max: float | None = None,
    scales_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    prologue: Prologue | None = None,
    prologue_args: Sequence[Tensor] = (),
    group_size: int | None = None,
    scale_format: ScaleFormat | None = None,
    scale_layout: ScaleLayout = "row",
    static_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    return_norm: bool = False,
    return_rstd: bool = False,
    rounding: Rounding = "once",
    round_sum: bool | None = None,
    quantize: Quantize = "reciprocal",
    min_scale: float = 0.0,
    gate: Tensor | None = None,
    gate_order: GateOrder = "after",
    gate_activation: GateActivation = "silu",
    bias: Tensor | None = None,
    statistic: Statistic = "rms",
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_out: Tensor | None = None,
    norm_out: Tensor | None = None,
    rstd_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """RMSNorm and quantization to any format in one read: ``out * scale`` is the norm.

    With ``y = (h * rs) * (gamma + weight_offset)`` as in `rms_norm`, and ``h = prologue(x, *prologue_args) + residual``::

        scale = max(min(max |y|, scale_ub) / code_max, min_scale)       rounded to scales_dtype
        out   = saturate(y / scale)                                     `rms_norm_fused_fp8` has the exact grouping

    - "e4m3fn", "e4m3fnuz", "e5m2", "int8": one byte per column, and a scale per row, per ``group_size``
      of 16, 32, 64 or 128 columns, or ``static_scale``. int8 codes are -127 to 127.
    - "mxfp8": e4m3fn codes, "mxfp4": e2m1 codes; a power of two per 32 columns.
    - "nvfp4": e2m1 codes, and a float8_e4m3fn scale per 16 columns. ``out * scale / global_scale`` is the norm.

    Arguments that are not listed are those of `rms_norm_fused_fp8`, an alias of this function.

    Args:
        x: [..., N]. All leading dimensions together are M rows.
        gamma: Weight as in `rms_norm`: [N], [H, N], or None.
        format: Format of the codes; it may imply groups and scales.
        code_max: Saturation limit; None: the format's first.
        scales_dtype: Dtype of stored scales; None: the first that the scale format has.
        scale_format: "float", "e4m3" (nvfp4), "ue8m0", the smallest power of two with which nothing saturates, or
            "ue8m0_floor", OCP's rule ``2**(floor(log2(amax)) - emax)``, with which the largest values may saturate.
        scale_layout: "row" or "column"; "column_tma" pads columns to 16 bytes; "column_packed" stores the exponents of four
            groups per int32 in such columns; "128x4" is the [M padded to 128, G padded to 4] swizzle of block-scaled GEMMs.
        global_scale: One float32 in memory that multiplies nvfp4's scales before they are rounded.
        gate: As in `rms_norm`. With a gate or a bias, scale and codes are computed from the result.
        gate_order: As in `rms_norm`.
        gate_activation: As in `rms_norm`.
        bias: As in `rms_norm`.
        statistic: "rms", or "layer" for `layer_norm`.
        out: Receives the codes: [..., N], or uint8 [..., N / 2] for e2m1, with the even column in the low half of a byte.
        scale_out: Receives the scales.

    Returns:
        ``(out, scale[, new_residual][, norm][, rstd])``.

    Rounding:
        As in `rms_norm_fused_fp8`. "stored" quantizes the norm as `rms_norm` stores it, rounded once to x's dtype.
        A row with NaN or infinity has a NaN scale. Its codes are NaN, or 0 in int8 and e2m1, which have no NaN; times the
        NaN scale they are NaN again. int8 with ``static_scale`` stores such a row as zeros.

    >>> import torch, onepass
    >>> q, scale = onepass.rms_norm_fused_quant(torch.tensor([[3.0, -4.0]]), torch.ones(2), eps=0.0, format="int8")
    >>> q, q * scale
    (tensor([[  95, -127]], dtype=torch.int8), tensor([[ 0.8463, -1.1314]]))
    """
    group_size, scale_format, scales_dtype = _implied(format, group_size, scale_format, scales_dtype, scale_layout)
    gamma, heads = either_gamma(gamma)
    bound, number = (scale_ub, None) if isinstance(scale_ub, Tensor) else (None, scale_ub)
    # fmt: off
    arguments = (  # noqa: RUF005 (CPython builds a tuple of more than 30 values by way of a list)
        x, gamma, residual, static_scale, bound, global_scale, gate, bias, heads, prologue_args, eps, weight_offset,
    ) + (
        rounding, number, format, code_max, scales_dtype, group_size, scale_format, scale_layout,
        "" if prologue is None else prologue_key(RMS_NORM_FUSED_QUANT, prologue),
        return_norm, round_sum, quantize, min_scale, return_rstd, gate_order, gate_activation, statistic,
        out, scale_out, residual_out, norm_out, rstd_out,
    )
    # fmt: on
    return quantized_results(_rms_norm_fused_quant, arguments, static_scale)


@overload
def layer_norm(
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: None = ...,
    round_sum: bool | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_rstd: Literal[False] = ...,
    out: Tensor | None = ...,
    residual_out: None = ...,
    rstd_out: None = ...,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: Tensor,
    round_sum: bool | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_rstd: Literal[False] = ...,
    out: Tensor | None = ...,
    residual_out: Tensor | None = ...,
    rstd_out: None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def layer_norm(
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: Tensor | None = ...,
    round_sum: bool | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_rstd: Literal[True],
    out: Tensor | None = ...,
    residual_out: Tensor | None = ...,
    rstd_out: Tensor | None = ...,
) -> tuple[Tensor, ...]: ...


def layer_norm(
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    round_sum: bool | None = None,
    out_dtype: torch.dtype | None = None,
    return_rstd: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    rstd_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """LayerNorm of the last dimension: ``y = (d * rs) * (gamma + weight_offset) + bias``, ``d = h - mean(h)``, ``h = x + residual``.

    Here ``rs = 1 / sqrt(mean(d^2) + eps)``. To quantize the result, use `rms_norm_fused_quant` with ``statistic="layer"``.

    Args:
        x: [..., N], bfloat16, float16 or float32. The last dimension is contiguous, all others may have any stride.
        gamma: Weight [N] of any float dtype, or [H, N] with a weight for each head of x [..., H, N]. None: 1.
        bias: [N] of any float dtype, added to the product.
        eps: Added to the mean of squares.
        weight_offset: Added to gamma in float32.
        residual: [..., N] in x's dtype or float32, added to x in float32.
        round_sum: Whether the norm reads h rounded to the residual's dtype.
        out_dtype: Dtype of y; None: x's.
        return_rstd: Whether to return rs too.
        out: Receives y; may be x itself.
        residual_out: Receives h; may be the residual itself.
        rstd_out: Receives rs.

    Returns:
        y. With a residual ``(y, new_residual)``, where new_residual is h in the residual's dtype.
            ``return_rstd`` appends rs, float32 [...].

    Rounding:
        Everything is float32 until the store. The mean is rounded to float32 before it is subtracted.

    >>> import torch, onepass
    >>> onepass.layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.tensor([0.0, 0.5]), eps=0.0)
    tensor([[-1.0000,  1.5000]])
    >>> heads, gamma = torch.tensor([[1.0, 3.0], [1.0, 5.0]]), torch.tensor([[1.0, 1.0], [2.0, 3.0]])
    >>> onepass.layer_norm(heads, gamma, eps=0.0, return_rstd=True)
    (tensor([[-1.,  1.],
            [-2.,  3.]]), tensor([1.0000, 0.5000]))
    """
    gamma, heads = either_gamma(gamma)
    options = (eps, weight_offset, round_sum, out_dtype, return_rstd)
    arguments = (x, gamma, bias, residual, heads, *options, out, residual_out, rstd_out)
    repeated = None if is_compiling() else _layer_norm.repeat(*arguments)
    y, h, rstd = repeated or _layer_norm(*arguments)
    if rstd is not None:
        return tuple([t for t in (y, h, rstd) if t is not None])
    return cast(Tensor, y) if residual is None else (cast(Tensor, y), cast(Tensor, h))


def rms_norm_add_rms_norm(
    x: Tensor,
    gamma_post: Tensor,
    gamma_pre: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor,
    branch_scale: float = 1.0,
    weight_offset: float = 0.0,
    rounding: Rounding = "once",
    round_sum: bool | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A post-norm, the residual add and the next pre-norm: ``h = residual + norm(x, gamma_post)``, ``y = norm(h, gamma_pre)``.

    The norms around an attention or MLP in Gemma 2 and 3 and GLM-4. The results are bit-identical to the separate calls::

        b    = rms_norm(x, gamma_post, eps, weight_offset=..., rounding=...) * branch_scale
        y, h = rms_norm(b, gamma_pre, eps, residual=residual, weight_offset=..., rounding=..., round_sum=...)

    Args:
        x: [..., N], bfloat16, float16 or float32. The last dimension is contiguous, all others may have any stride.
        gamma_post: Weight [N] of the norm of x, of any float dtype.
        gamma_pre: Weight [N] of the norm of h, of any float dtype.
        eps: Added to the mean of squares of both norms.
        residual: [..., N] in x's dtype or float32, added to the post-norm in float32.
        branch_scale: Multiplies the post-norm: the residual multiplier of HyperCLOVA X.
        weight_offset: Added to both weights in float32: 1.0 for Gemma.
        rounding: "once" or "hf" for both norms, see below.
        round_sum: Whether the pre-norm reads h rounded to the residual's dtype. None leaves it to ``rounding``.
        out_dtype: Dtype of y; None: x's.
        out: Receives y; may be x itself.
        residual_out: Receives h; may be the residual itself.

    Returns:
        ``(y, h)``, with h in the residual's dtype.

    Rounding:
        The post-norm is rounded to x's dtype before it is added, as `rms_norm` stores it: with "once" in that place alone,
        with "hf" also after its first product. Its product with ``branch_scale`` is rounded to x's dtype too. The rest is
        `rms_norm` with a residual. Gemma's modules, which round a norm once and h before the pre-norm, are "once" with
        ``round_sum=True``.

    The GPU kernels have not run yet: on a GPU this raises `Unsupported`, unless ONEPASS_UNPROVEN=1 is set.

    >>> import torch, onepass
    >>> x, residual, ones = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]]), torch.ones(2)
    >>> onepass.rms_norm_add_rms_norm(x, ones, ones, eps=0.0, residual=residual)
    (tensor([[0.5231, 1.3139]]), tensor([[0.8485, 2.1314]]))
    """
    options = (eps, weight_offset, rounding, round_sum, out_dtype, branch_scale)
    arguments = (x, gamma_post, gamma_pre, residual, *options, out, residual_out)
    repeated = None if is_compiling() else _sandwich.repeat(*arguments)
    y, h = repeated or _sandwich(*arguments)
    return cast(Tensor, y), cast(Tensor, h)


def rms_norm_add_rms_norm_quant(
    x: Tensor,
    gamma_post: Tensor,
    gamma_pre: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor,
    branch_scale: float = 1.0,
    format: QuantFormatName = "e4m3fn",
    weight_offset: float = 0.0,
    scale_ub: float | Tensor | None = None,
    code_max: float | None = None,
    scales_dtype: torch.dtype | None = None,
    group_size: int | None = None,
    scale_format: ScaleFormat | None = None,
    scale_layout: ScaleLayout = "row",
    static_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    return_norm: bool = False,
    rounding: Rounding = "once",
    round_sum: bool | None = None,
    quantize: Quantize = "reciprocal",
    min_scale: float = 0.0,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_out: Tensor | None = None,
    norm_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """`rms_norm_add_rms_norm` with a quantized y, in any format of `rms_norm_fused_quant`.

    The results are bit-identical to those of `rms_norm` and `rms_norm_fused_quant`, called separately::

        b             = rms_norm(x, gamma_post, eps, weight_offset=..., rounding=...) * branch_scale
        out, scale, h = rms_norm_fused_quant(b, gamma_pre, eps, residual=residual, format=..., rounding=..., ...)

    Args:
        x: As in `rms_norm_add_rms_norm`, like all arguments up to ``branch_scale``.
        format: As in `rms_norm_fused_quant`, like all arguments that are not listed.
        rounding: "once", "hf" or "stored". "stored" rounds the post-norm as "once" does.
        out: Receives the codes.
        scale_out: Receives the scales.
        residual_out: Receives h; may be the residual itself.
        norm_out: Receives y.

    Returns:
        ``(out, scale, h[, y])``, with y in x's dtype.

    Rounding:
        The post-norm is rounded to x's dtype before it is added. The rest is `rms_norm_fused_quant` with a residual.

    The GPU kernels have not run yet: on a GPU this raises `Unsupported`, unless ONEPASS_UNPROVEN=1 is set.

    >>> import torch, onepass
    >>> x, residual, ones = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]]), torch.ones(2)
    >>> q, scale, h = onepass.rms_norm_add_rms_norm_quant(x, ones, ones, eps=0.0, residual=residual, format="int8")
    >>> q, q * scale
    (tensor([[ 51, 127]], dtype=torch.int8), tensor([[0.5276, 1.3139]]))
    """
    group_size, scale_format, scales_dtype = _implied(format, group_size, scale_format, scales_dtype, scale_layout)
    bound, number = (scale_ub, None) if isinstance(scale_ub, Tensor) else (None, scale_ub)
    # fmt: off
    arguments = (
        x, gamma_post, gamma_pre, residual, static_scale, bound, global_scale, eps, weight_offset, rounding, number,
        format, code_max, scales_dtype, group_size, scale_format, scale_layout, return_norm, round_sum, quantize,
        min_scale, branch_scale, out, scale_out, residual_out, norm_out,
    )
    # fmt: on
    results = None if is_compiling() else _sandwich_quant.repeat(*arguments)
    codes, scale, h, norm = results or cast(tuple[Any, ...], _sandwich_quant(*arguments))
    if static_scale is not None:
        scale = static_scale
    return (codes, scale, h) if norm is None else (codes, scale, h, norm)


def quantize(
    x: Tensor,
    *,
    format: QuantFormatName = "e4m3fn",
    gate: Tensor | None = None,
    gate_activation: GateActivation = "silu",
    scale_ub: float | Tensor | None = None,
    code_max: float | None = None,
    scales_dtype: torch.dtype | None = None,
    group_size: int | None = None,
    scale_format: ScaleFormat | None = None,
    scale_layout: ScaleLayout = "row",
    static_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    rounding: Rounding = "once",
    quantize: Quantize = "reciprocal",
    min_scale: float = 0.0,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantization to any format in one read, without a norm: ``out * scale`` is ``y = x``, or with a gate ``y = x * act(gate)``.

    It stands before the linear layers that follow no norm: after an attention, and after the activation of a gated MLP::

        scale = max(min(max |y|, scale_ub) / code_max, min_scale)       rounded to scales_dtype
        out   = saturate(y * (1 / scale))

    Formats, scales and their layouts are those of `rms_norm_fused_quant`, like all arguments that are not listed.

    Args:
        x: [..., N], bfloat16, float16 or float32. The last dimension is contiguous, all others may have any stride: x and
            gate may be halves of one tensor.
        format: Format of the codes; it may imply groups and scales.
        gate: [..., N] of any float dtype.
        gate_activation: "silu", for an MLP of Llama and others, or "sigmoid".
        scale_ub: Upper bound of ``max |y|``, a number or one float32 on x's device.
        rounding: How the product with the gate is rounded, see below. Without a gate nothing is rounded before its code is.
        out: Receives the codes: [..., N], or uint8 [..., N / 2] for e2m1, with the even column in the low half of a byte.
        scale_out: Receives the scales.

    Returns:
        ``(out, scale)``.

    Rounding:
        "once" quantizes the float32 product. "stored" rounds it to x's dtype first. "hf" does too, and rounds ``act(gate)``
        before the product, as Hugging Face's modules do. Everything else is float32 until the codes. NaN and infinity in y
        affect the row or group whose scale they are in: its scale is NaN, and its codes are NaN, or 0 in int8 and e2m1.
        With ``static_scale`` they affect themselves alone: an infinity saturates.

    The GPU kernels have not run yet: on a GPU this raises `Unsupported`, unless ONEPASS_UNPROVEN=1 is set.

    >>> import torch, onepass
    >>> q, scale = onepass.quantize(torch.tensor([[3.0, -4.0], [0.0, 0.0]]), format="int8")
    >>> q, q * scale
    (tensor([[  95, -127],
            [   0,    0]], dtype=torch.int8), tensor([[ 2.9921, -4.0000],
            [ 0.0000,  0.0000]]))
    >>> gate_up = torch.tensor([[2.0, -1.0, 3.0, -4.0]])
    >>> q, scale = onepass.quantize(gate_up[:, 2:], gate=gate_up[:, :2])
    >>> q.float() * scale
    tensor([[5.2848, 1.0381]])
    """
    group_size, scale_format, scales_dtype = _implied(format, group_size, scale_format, scales_dtype, scale_layout)
    bound, number = (scale_ub, None) if isinstance(scale_ub, Tensor) else (None, scale_ub)
    # fmt: off
    arguments = (
        x, gate, static_scale, bound, global_scale, rounding, number, format, code_max, scales_dtype, group_size,
        scale_format, scale_layout, quantize, min_scale, gate_activation, out, scale_out,
    )
    # fmt: on
    results = None if is_compiling() else _quantize.repeat(*arguments)
    codes, scale = results or cast(tuple[Any, ...], _quantize(*arguments))
    return codes, scale if static_scale is None else static_scale
