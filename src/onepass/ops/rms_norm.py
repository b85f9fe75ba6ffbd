"""RMSNorm, plain and with FP8 quantization, in one launch and one read of each row.

With ``h = prologue(x, *prologue_args) + residual`` in float32 (either may be absent)::

    rs   = 1 / sqrt(mean(h^2, -1) + eps)
    y    = (h * rs) * (gamma + weight_offset)

`rms_norm` stores y. `rms_norm_fused_fp8` stores fp8 codes and scales (formats: `onepass.formats`)::

    amax  = max |h * (gamma + weight_offset)| * rs                over a row, or over a group of columns
    scale = min(amax, scale_ub) / fp8_max                         rounded to scales_dtype
    code  = saturate((h * (gamma + weight_offset)) * (rs / scale))

Everything is float32 until the single rounding at the store. ``rounding="hf"`` rounds where Hugging
Face's modules do: h to the residual's dtype, ``h * rs`` to x's dtype, and y to x's dtype before amax
and quantization.

Three options change one step each, for callers who must match other code:

- ``round_sum`` decides whether h is rounded to the residual's dtype before the norm, overriding ``rounding``.
- ``quantize="divide"`` computes scale and codes from y itself: ``amax = max |y|``,
  ``code = saturate(y / scale)``, with a correctly rounded division. "hf" then differs from its
  default only in the division.
- ``min_scale`` is the smallest scale: ``scale = max(min(amax, scale_ub) / fp8_max, min_scale)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor

from ..contract.declaration import describe
from ..formats import FP8_FORMATS, SCALE_FORMATS, Quantize, Rounding, ScaleFormat, ScaleKind, ScaleLayout, ScaleRule
from ..prologues import Prologue
from ..specs.rms_norm import Operand, RowCall, RowSpec, row_spec
from .registration import Op
from .rms_norm_call import run_rows
from .rms_norm_contract import RMS_NORM, RMS_NORM_FUSED_FP8

__all__ = ["RMS_NORM", "RMS_NORM_FUSED_FP8", "rms_norm", "rms_norm_fused_fp8"]

SpecCache = dict[tuple[object, ...], RowSpec]
"""The specs of one combination of options, by the tensors' dtypes and kinds."""


def _norm(spec_cache: SpecCache, a: Any) -> None:
    key = (a.x.dtype, a.gamma.dtype, None if a.residual is None else a.residual.dtype)
    spec = spec_cache.get(key)
    if spec is None:
        spec = spec_cache[key] = row_spec(*key, a.x.dtype, a.rounding, round_sum=a.round_sum)
    run_rows(RowCall(spec, a.x, a.gamma, a.eps, a.weight_offset, a.residual, norm=a.out, new_residual=a.residual_out))


def _quantized_norm(spec_cache: SpecCache, a: Any) -> None:
    operands = tuple([_operand(t, a.x) for t in a.prologue_args]) if a.prologue_args else ()
    residual_dtype = None if a.residual is None else a.residual.dtype
    dtypes = (a.x.dtype, a.gamma.dtype, residual_dtype)
    key = (*dtypes, a.static_scale is None, a.scale_ub_tensor is None, operands)
    spec = spec_cache.get(key)
    if spec is None:
        kind: ScaleKind = "static" if a.static_scale is not None else "group" if a.group_size else "row"
        rule = ScaleRule(
            kind,
            torch.float32 if kind == "static" else a.scales_dtype,
            a.group_size or 0,
            ue8m0=SCALE_FORMATS[a.scale_format].power_of_two,
            divides=a.quantize == "divide",
            has_least=a.min_scale > 0,
            bound_in_memory=a.scale_ub_tensor is not None,
        )
        norm_dtype = None if a.norm_out is None else a.norm_out.dtype
        fp8_max = a.fp8_max or FP8_FORMATS[a.out_dtype].max
        options: tuple[Any, ...] = (a.rounding, a.prologue, operands, a.out_dtype, fp8_max, rule, a.round_sum)
        spec = spec_cache[key] = row_spec(*dtypes, norm_dtype, *options)
    inputs = (a.x, a.gamma, a.eps, a.weight_offset, a.residual, a.prologue_args, a.static_scale)
    outs = (a.norm_out, a.out, a.scale_output, a.residual_out)
    scale_ub = math.inf if a.scale_ub is None else a.scale_ub
    run_rows(RowCall(spec, *inputs, *outs, scale_ub, a.scale_ub_tensor, a.min_scale))


def _operand(tensor: Tensor, x: Tensor) -> Operand:
    if tensor.shape == x.shape:
        return Operand("full", tensor.dtype)
    n, last = x.shape[-1], tensor.shape[-1]
    if tensor.dim() == 1 and last == n:
        return Operand("column", tensor.dtype)
    return Operand("row", tensor.dtype) if last == 1 else Operand("group", tensor.dtype, n // last)


_rms_norm = Op(RMS_NORM, _norm)
_rms_norm_fused_fp8 = Op(RMS_NORM_FUSED_FP8, _quantized_norm)


@overload
def rms_norm(
    x: Tensor,
    gamma: Tensor,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: None = ...,
    rounding: Rounding = ...,
    round_sum: bool | None = ...,
    out: Tensor | None = ...,
    residual_out: None = ...,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    gamma: Tensor,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: Tensor,
    rounding: Rounding = ...,
    round_sum: bool | None = ...,
    out: Tensor | None = ...,
    residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    gamma: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    rounding: Rounding = "once",
    round_sum: bool | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of the last dimension: ``y = (h * rs) * (gamma + weight_offset)``, ``h = x + residual``.

    ``x`` [..., N] is bfloat16, float16 or float32 with any strides as long as the last dimension is
    contiguous. ``gamma`` [N] has any of these dtypes. Returns ``y`` in x's dtype or, with a
    ``residual``, ``(y, new_residual)``, where ``new_residual = h`` in the residual's dtype. ``out`` and
    ``residual_out`` receive the results and may be ``x`` and ``residual`` themselves.

    Rounding: "once" rounds y (and separately h, for new_residual) at the store and nowhere else. "hf"
    rounds h to the residual's dtype, ``h * rs`` to x's dtype, then the product with gamma.
    ``round_sum`` controls h alone: with True, "once" norms the sum as stored in new_residual; with
    False, "hf" norms the unrounded sum. It has no effect without a residual. The sum of squares is
    float32 in an order that depends only on N and the dtypes, so the bytes of a row do not depend on
    its batch.

    >>> import torch, onepass
    >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> onepass.rms_norm(x, torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314],
            [0.0000, 0.0000]])
    """
    y, h = _rms_norm.call(x, gamma, residual, eps, weight_offset, rounding, round_sum, out, residual_out)
    return cast(Tensor, y) if residual is None else (cast(Tensor, y), cast(Tensor, h))


def rms_norm_fused_fp8(
    x: Tensor,
    gamma: Tensor,
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
    rounding: Rounding = "once",
    round_sum: bool | None = None,
    quantize: Quantize = "reciprocal",
    min_scale: float = 0.0,
    fp8_max: float | None = None,
    out: Tensor | None = None,
    scale_output: Tensor | None = None,
    residual_out: Tensor | None = None,
    norm_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """RMSNorm and FP8 quantization in one read: ``out * scale`` is the norm. Returns (out, scale[, new_residual][, norm]).

    ``scale`` is [..., 1], one per row. With ``group_size`` 64 or 128 it is [..., N / group_size],
    contiguous along the row or, with ``scale_layout="column"``, along the rows (strides (1, M), as
    block-scaled GEMMs read it). ``scale_format="ue8m0"`` rounds scales up to powers of two, stored as
    float32 or float8_e8m0fnu. ``static_scale``, one float32 on the same device, replaces the computed
    scale and is returned unchanged. ``scale_ub`` bounds amax: a positive number, or one float32 on the
    same device, which the kernel reads. A tensor thus needs no synchronization with the host and may
    hold any value: if it is zero or negative the scale is ``min_scale``, and NaN sets no bound.

    ``quantize="divide"`` computes codes as ``y / scale``, as unfused code does; the default multiplies
    by the reciprocal. A quotient halfway between two codes is then rounded to even, whatever the
    scale. ``min_scale`` is the smallest scale: smaller ones, and that of a row of zeros, are raised to it.

    ``h = prologue(x, *prologue_args) + residual``: a function decorated with `onepass.prologue` is
    compiled into the load. Each of its tensors is [..., N], [N], [..., 1] or, with a value per group of
    32, 64, 128 or 256 columns, [..., N / group]. With a prologue ``x`` may be float8_e4m3fn,
    float8_e4m3fnuz or int8, which the prologue sees as numbers (`onepass.prologues.dequantize`).
    ``return_norm`` also stores what `rms_norm` would return, in x's dtype, or in gamma's for an 8-bit
    x; ``rounding="hf"`` is rejected there, as it rounds to x's dtype.

    Rounding, including ``round_sum``: see the module. Codes are computed from the scale as stored,
    rounded to nearest even, and saturate. A row of zeros has codes 0 and scale ``min_scale`` (ue8m0: at
    least 2**-127). A row with NaN or inf has NaN codes and a NaN scale.

    >>> import torch, onepass
    >>> q, scale = onepass.rms_norm_fused_fp8(torch.tensor([[3.0, -4.0]]), torch.ones(2), eps=0.0)
    >>> q.float() * scale
    tensor([[ 0.8081, -1.1314]])
    """
    if prologue is not None and not isinstance(prologue, Prologue):
        RMS_NORM_FUSED_FP8.fail("prologue", "be a function decorated with onepass.prologue", describe(prologue))
    bound, number = (scale_ub, None) if isinstance(scale_ub, Tensor) else (None, scale_ub)
    tensors = (x, gamma, residual, static_scale, bound, prologue_args)
    scaling = (number, out_dtype, fp8_max, scales_dtype, group_size, scale_format, scale_layout)
    rest = (prologue.key if prologue is not None else "", return_norm, round_sum, quantize, min_scale)
    given = (out, scale_output, residual_out, norm_out)
    results = _rms_norm_fused_fp8.call(*tensors, eps, weight_offset, rounding, *scaling, *rest, *given)
    codes, scale, new_residual, norm = results
    stored = scale if static_scale is None else static_scale
    return tuple([t for t in (codes, stored, new_residual, norm) if t is not None])
