"""RMSNorm, plain and with FP8 quantization, in one launch and one read of each row.

With ``h = prologue(x, *prologue_args) + residual`` in float32 (either may be absent)::

    rs   = 1 / sqrt(mean(h^2, -1) + eps)
    y    = (h * rs) * (gamma + weight_offset)

`rms_norm` stores y. `rms_norm_fused_fp8` stores fp8 codes and scales (`onepass.formats` has the formats)::

    amax  = max |h * (gamma + weight_offset)| * rs                over a row, or over a group of columns
    scale = min(amax, scale_ub) / fp8_max                         rounded to scales_dtype
    code  = saturate((h * (gamma + weight_offset)) * (rs / scale))

Everything is float32 until the one rounding at the store. ``rounding="hf"`` rounds where Hugging Face's modules do:
h to the residual's dtype, ``h * rs`` to x's dtype, and y to x's dtype before amax and quantization.

Three options change one step each, for callers who must match other code:

- ``round_sum`` says whether h is rounded to the residual's dtype before it is normed, whatever ``rounding`` implies.
- ``quantize="divide"`` makes scale and codes from y itself: ``amax = max |y|``, ``code = saturate(y / scale)``, with a
  correctly rounded division. "hf" then differs from its default only in the division.
- ``min_scale`` is the least scale: ``scale = max(min(amax, scale_ub) / fp8_max, min_scale)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast, overload

import torch
from torch import Tensor

from ..contract.declaration import Arg, Contract, Option, Out, Rule, describe
from ..formats import (
    FLOATS,
    FP8_FORMATS,
    GROUP_SIZES,
    OPERAND_GROUPS,
    QUANTIZE,
    QUANTIZED,
    ROUNDINGS,
    SCALE_FORMATS,
    SCALE_LAYOUTS,
    Quantize,
    Rounding,
    ScaleFormat,
    ScaleKind,
    ScaleLayout,
    ScaleRule,
)
from ..prologues import Prologue, find
from ..specs.rms_norm import Operand, RowCall, RowSpec, row_spec
from .registration import Op
from .rms_norm_call import run_rows

_X = Arg("... N", "activations", FLOATS)
_GAMMA = Arg("N", "weight; any float dtype", FLOATS, sample="gamma")
_RESIDUAL = Arg("... N", "added to x in float32; x's dtype or float32", "(x.dtype, torch.float32)", optional=True)
_EPS = Option("float", 1e-6, "added to the mean of squares", where="0 <= eps <= 3.4e38")
_OFFSET = Option("float", 0.0, "added to gamma in float32", where="-3.4e38 <= weight_offset <= 3.4e38")
_ROUNDING = Option("str", "once", "where values are rounded", choices=ROUNDINGS)
_ROUND_SUM = Option(
    "bool", None, "whether x + residual is rounded before it is normed; None: as rounding says", optional=True
)
_COLUMNS = Rule("0 < N <= 16777216", "x", "have 1 to 2**24 columns")

RMS_NORM = Contract(
    "rms_norm",
    args={"x": _X, "gamma": _GAMMA, "residual": _RESIDUAL},
    options={"eps": _EPS, "weight_offset": _OFFSET, "rounding": _ROUNDING, "round_sum": _ROUND_SUM},
    outs={
        "y": Out("... N", "x.dtype", "the norm", "out"),
        "new_residual": Out("... N", "residual.dtype", "x + residual", "residual_out", when="residual is not None"),
    },
    rules=(_COLUMNS,),
    rounding="once: y = round((h*rs)*(gamma+offset)); hf: h = round(x+residual), y = round(round(h*rs)*(gamma+offset)); "
    "round_sum=True: h = round(x+residual) with either; round_sum=False: h = x+residual",
)


def _arity(prologue: str) -> int:
    return len(find(prologue).parameters) - 1 if prologue else 0


RMS_NORM_FUSED_FP8 = Contract(
    "rms_norm_fused_fp8",
    args={
        "x": Arg("... N", "activations; 8 bits where a prologue dequantizes them", (*FLOATS, *QUANTIZED)),
        "gamma": _GAMMA,
        "residual": Arg(
            "... N", "added to x in float32; x's dtype or float32, any float dtype beside an 8-bit x",
            "((x.dtype, torch.float32) if x.dtype in FLOATS else FLOATS)", optional=True,
        ),
        "static_scale": Arg("", "one float32: the scale of the whole tensor", (torch.float32,), True, layout="any", sample="positive"),
        "scale_ub_tensor": Arg(
            "", "one float32: upper bound of amax, read by the kernel", (torch.float32,), True, layout="any", sample="positive"
        ),
        "prologue_args": Arg(
            " | ".join(("... N", "N", "... 1", *(f"... N/{group}" for group in OPERAND_GROUPS))),
            "the prologue's further tensors: a value per element, per column, per row, or per group of columns", FLOATS, many=True,
        ),
    },
    options={
        "eps": _EPS,
        "weight_offset": _OFFSET,
        "rounding": _ROUNDING,
        "scale_ub": Option("float", None, "upper bound of amax", where="scale_ub > 0", optional=True),
        "out_dtype": Option("ScalarType", torch.float8_e4m3fn, "fp8 format", choices=tuple(FP8_FORMATS)),
        "fp8_max": Option("float", None, "saturation limit; e4m3fnuz also takes 224", choices=(448.0, 240.0, 224.0), optional=True),
        "scales_dtype": Option(
            "ScalarType", torch.float32, "dtype of stored scales", choices=(*FLOATS, torch.float8_e8m0fnu)
        ),
        "group_size": Option("int", None, "columns that share a scale; None: the row", choices=GROUP_SIZES, optional=True),
        "scale_format": Option("str", "float", "any value, or powers of two", choices=SCALE_FORMATS),
        "scale_layout": Option("str", "row", "which dimension of scale is contiguous", choices=SCALE_LAYOUTS),
        "prologue": Option("str", "", "elementwise function fused into the load; its globals are frozen at decoration"),
        "return_norm": Option("bool", False, "also return the unquantized norm"),
        "round_sum": _ROUND_SUM,
        "quantize": Option("str", "reciprocal", "multiply by 1 / scale, or divide by scale", choices=QUANTIZE),
        "min_scale": Option("float", 0.0, "least scale, before its rounding to scales_dtype", where="0 <= min_scale <= 3.4e38"),
    },
    sizes={"G": "N // group_size if group_size else 1"},
    outs={
        "out": Out("... N", "out_dtype", "fp8 codes", "out"),
        "scale": Out(
            "... G", "scales_dtype", "one scale a row or group", "scale_output",
            when="static_scale is None", column="scale_layout == 'column'",
        ),
        "new_residual": Out("... N", "residual.dtype", "x + residual", "residual_out", when="residual is not None"),
        "norm": Out(
            "... N", "x.dtype if x.dtype in FLOATS else gamma.dtype", "the norm, as rms_norm gives it", "norm_out", when="return_norm"
        ),
    },
    rules=(
        _COLUMNS,
        Rule("group_size is None or N % group_size == 0", "group_size", "divide the number of columns, N={N}"),
        Rule("fp8_max is None or fp8_max in maxima(out_dtype)", "fp8_max", "be a limit of out_dtype (448; 240 or 224 for e4m3fnuz)"),
        Rule("(scales_dtype in FLOATS) if scale_format == 'float' else (scales_dtype in E8M0)", "scales_dtype",
             "be float32, float16 or bfloat16 (scale_format='ue8m0': float32 or float8_e8m0fnu)"),
        Rule("static_scale is None or scale_ub is None", "scale_ub", "be None with static_scale"),
        Rule("static_scale is None or scale_ub_tensor is None", "scale_ub_tensor", "be None with static_scale"),
        Rule("scale_ub is None or scale_ub_tensor is None", "scale_ub_tensor", "be either a number or a tensor"),
        Rule("static_scale is None or min_scale == 0", "min_scale", "be 0 with static_scale"),
        Rule("static_scale is None or group_size is None", "group_size", "be None with static_scale"),
        Rule("static_scale is None or scale_format == 'float'", "scale_format", "be 'float' with static_scale"),
        Rule("x.dtype in FLOATS or prologue", "x", "be bfloat16, float16 or float32 without a prologue"),
        Rule("x.dtype in FLOATS or rounding == 'once'", "rounding", "be 'once' where x has 8 bits ('hf' rounds to x's dtype)"),
        Rule("arity(prologue) == len(prologue_args)", "prologue_args", "hold one tensor for each parameter of the prologue after x"),
    ),
    scope={
        "FLOATS": FLOATS,
        "E8M0": (torch.float32, torch.float8_e8m0fnu),
        "maxima": lambda dtype: FP8_FORMATS[dtype].maxima,
        "arity": _arity,
    },
    rounding="once: code = round((h*(gamma+offset))*(rs/scale)); hf: y as in rms_norm, code = round(y*(1/scale)); "
    "divide: y as in rms_norm (once: before its rounding), code = round(y/scale)",
    carried={"scale_ub": ("scale_ub", "scale_ub_tensor")},
    known_as={"scale_ub_tensor": "scale_ub"},
)  # fmt: skip


Notes = dict[tuple[object, ...], RowSpec]
"""Row kernels of one combination of options, by the tensors' dtypes and kinds."""


def _rms_norm_kernel(
    notes: Notes,
    x: Tensor,
    gamma: Tensor,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: Rounding,
    round_sum: bool | None,
    y: Tensor,
    new_residual: Tensor | None,
) -> None:
    key = (x.dtype, gamma.dtype, None if residual is None else residual.dtype)
    spec = notes.get(key)
    if spec is None:
        spec = notes[key] = row_spec(*key, x.dtype, rounding, round_sum=round_sum)
    run_rows(RowCall(spec, x, gamma, eps, weight_offset, residual, norm=y, new_residual=new_residual))


def _fp8_kernel(
    notes: Notes,
    x: Tensor,
    gamma: Tensor,
    residual: Tensor | None,
    static_scale: Tensor | None,
    scale_ub_tensor: Tensor | None,
    prologue_args: Sequence[Tensor],
    eps: float,
    weight_offset: float,
    rounding: Rounding,
    scale_ub: float | None,
    out_dtype: torch.dtype,
    fp8_max: float | None,
    scales_dtype: torch.dtype,
    group_size: int | None,
    scale_format: ScaleFormat,
    scale_layout: ScaleLayout,
    prologue: str,
    return_norm: bool,
    round_sum: bool | None,
    quantize: Quantize,
    min_scale: float,
    out: Tensor,
    scale: Tensor | None,
    new_residual: Tensor | None,
    norm: Tensor | None,
) -> None:
    operands = tuple([_operand(t, x) for t in prologue_args]) if prologue_args else ()
    residual_dtype = None if residual is None else residual.dtype
    key = (x.dtype, gamma.dtype, residual_dtype, static_scale is None, scale_ub_tensor is None, operands)
    spec = notes.get(key)
    if spec is None:
        kind: ScaleKind = "static" if static_scale is not None else "group" if group_size else "row"
        rule = ScaleRule(
            kind, scales_dtype if static_scale is None else torch.float32, group_size or 0, scale_format == "ue8m0",
            quantize == "divide", min_scale > 0, scale_ub_tensor is not None,
        )  # fmt: skip
        spec = notes[key] = row_spec(
            x.dtype, gamma.dtype, residual_dtype, None if norm is None else norm.dtype, rounding, prologue, operands, out_dtype,
            fp8_max or FP8_FORMATS[out_dtype].max, rule, round_sum,
        )  # fmt: skip
    limit = math.inf if scale_ub is None else scale_ub
    run_rows(
        RowCall(
            spec, x, gamma, eps, weight_offset, residual, prologue_args, static_scale, norm, out, scale, new_residual, limit,
            scale_ub_tensor, min_scale,
        )
    )  # fmt: skip


def _operand(tensor: Tensor, x: Tensor) -> Operand:
    if tensor.shape == x.shape:
        return Operand("full", tensor.dtype)
    n, last = x.shape[-1], tensor.shape[-1]
    if tensor.dim() == 1 and last == n:
        return Operand("column", tensor.dtype)
    return Operand("row", tensor.dtype) if last == 1 else Operand("group", tensor.dtype, n // last)


_rms_norm = Op(RMS_NORM, _rms_norm_kernel)
_rms_norm_fused_fp8 = Op(RMS_NORM_FUSED_FP8, _fp8_kernel)


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

    ``x`` [..., N] is bfloat16, float16 or float32, its rows strided in any way that leaves the last dimension
    contiguous; ``gamma`` [N] has any of these dtypes. Returns ``y`` in x's dtype, or ``(y, new_residual)`` when a
    ``residual`` is given, with ``new_residual = h`` in the residual's dtype. ``out`` and ``residual_out`` receive the
    results; they may be ``x`` and ``residual`` themselves.

    Rounding: "once" rounds y (and, apart from it, h for new_residual) at the store and nowhere else; "hf" rounds h to
    the residual's dtype, ``h * rs`` to x's dtype, then the product with gamma. ``round_sum`` decides about h alone: with
    True "once" norms the sum as it is stored in new_residual, with False "hf" norms the unrounded sum. It has no effect
    without a residual. The sum of squares is float32 in an order that depends on N and the dtypes only, so a row gives
    the same bytes alone and in any batch.

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

    ``scale`` is [..., 1], one a row; with ``group_size`` 64 or 128 it is [..., N / group_size], contiguous along the
    row or, with ``scale_layout="column"``, along the rows (strides (1, M), as block-scaled GEMMs read it).
    ``scale_format="ue8m0"`` rounds scales up to powers of two, stored as float32 or float8_e8m0fnu. ``static_scale``,
    one float32 on the same device, replaces the computed scale and is returned as it is. ``scale_ub`` bounds amax: a
    positive number, or one float32 on the same device, which the kernel reads. So a tensor needs no synchronization with
    the host, and it may hold any value: at or below zero the scale is ``min_scale``, and NaN bounds nothing.

    ``quantize="divide"`` computes codes as ``y / scale``, as unfused code does, where the default multiplies by the
    reciprocal. A quotient that lies halfway between two codes is then rounded to even, whatever the scale. ``min_scale`` is
    the least scale: smaller ones, and that of a row of zeros, are raised to it.

    ``h = prologue(x, *prologue_args) + residual``: a function decorated with `onepass.prologue` is compiled into the
    load; each of its tensors is [..., N], [N], [..., 1] or, with a value per group of 32, 64, 128 or 256 columns,
    [..., N / group]. With a prologue ``x`` may be float8_e4m3fn, float8_e4m3fnuz or int8, which the prologue sees as
    numbers (`onepass.prologues.dequantize`). ``return_norm`` also stores what `rms_norm` would return, in x's dtype, or
    in gamma's where x has 8 bits; ``rounding="hf"`` is refused there, as it rounds to x's dtype.

    Rounding: see the module, also for ``round_sum``; codes are round-to-nearest-even and saturate, and are computed from
    the scale as stored. A row of zeros has codes 0 and scale ``min_scale`` (ue8m0: at least 2**-127). A row with NaN or
    inf has NaN codes and a NaN scale.

    >>> import torch, onepass
    >>> q, scale = onepass.rms_norm_fused_fp8(torch.tensor([[3.0, -4.0]]), torch.ones(2), eps=0.0)
    >>> q.float() * scale
    tensor([[ 0.8081, -1.1314]])
    """
    if prologue is not None and not isinstance(prologue, Prologue):
        RMS_NORM_FUSED_FP8.fail("prologue", "be a function decorated with onepass.prologue", describe(prologue))
    bound, number = (scale_ub, None) if isinstance(scale_ub, Tensor) else (None, scale_ub)
    codes, scale, new_residual, norm = _rms_norm_fused_fp8.call(
        x, gamma, residual, static_scale, bound, prologue_args, eps, weight_offset, rounding, number, out_dtype, fp8_max, scales_dtype,
        group_size, scale_format, scale_layout, prologue.key if prologue is not None else "", return_norm, round_sum, quantize,
        min_scale, out, scale_output, residual_out, norm_out,
    )  # fmt: skip
    stored = scale if static_scale is None else static_scale
    return tuple([t for t in (codes, stored, new_residual, norm) if t is not None])
