"""The contracts of `rms_norm`, `layer_norm`, `rms_norm_add_rms_norm`, `quantize` and the norms that quantize."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from ...core.contract import ROUNDING, WEIGHT_OFFSET, Alias, Arg, Contract, Option, Out, Rule, columns, eps, short
from ...core.layout import PACKINGS, empty_scale, scale_shape
from ...formats import (
    CODE_FORMATS,
    FLOATS,
    GROUP_SIZES,
    OPERAND_GROUPS,
    QUANT_FORMATS,
    QUANTIZE,
    QUANTIZED,
    ROUNDINGS,
    SCALE_DTYPES,
    SCALE_FORMATS,
    SCALE_LAYOUTS,
)
from ...prologues import MAX_OPERANDS, find
from .launch import GATE_ACTIVATIONS, GATE_ORDERS, STATISTICS

_F32 = (torch.float32,)
_GAMMA = Arg("N", "weight; any float dtype; None: 1", FLOATS, optional=True, sample="gamma")
_HEAD_GAMMA = Arg("H N", "gamma [H, N]: a weight for each head of x [..., H, N]", FLOATS, optional=True, sample="gamma")
_GAMMA_RULES = (
    Rule("gamma is None or head_gamma is None", "head_gamma", "be the only gamma"),
    Rule("head_gamma is None or x.shape[-2:] == (H, N)", "head_gamma", "have shape [N], or [H, N] with x [..., H, N]"),
    Rule("gamma is not None or head_gamma is not None or weight_offset == 0", "weight_offset", "be 0 without gamma"),
)
_EITHER_GAMMA: Final[dict[str, tuple[str, ...]]] = {"gamma": ("gamma", "head_gamma")}
_RESIDUAL = Arg("... N", "added to x in float32; x's dtype or float32", "(x.dtype, torch.float32)", optional=True)
_RESIDUAL_OF_ANY_X = Arg(
    "... N",
    "added to x in float32; x's dtype or float32, or any float dtype if x is 8-bit",
    "((x.dtype, torch.float32) if x.dtype in FLOATS else FLOATS)",
    optional=True,
)
_NEW_RESIDUAL = Out("... N", "residual.dtype", "x + residual", "residual_out", when="residual is not None")
_ROUND_SUM = Option(
    "bool", None, "whether x + residual is rounded before the norm; None: decided by rounding", optional=True
)
_FINITE = "0 <= min_scale <= 3.4e38"
_NORM_DTYPE = "x.dtype if x.dtype in FLOATS else (head_gamma if gamma is None else gamma).dtype"
_OPERAND_SHAPES = " | ".join(("... N", "N", "... 1", *(f"... N/{group}" for group in OPERAND_GROUPS)))
_OPERANDS = "the prologue's other tensors: a value per element, per column, per row, or per group of columns"

_GATE = Arg("... N", "the norm (or x) is multiplied by its activation; any float dtype", FLOATS, optional=True)
_BIAS = Arg("N", "added to the norm; any float dtype", FLOATS, optional=True)
_GATE_ACTIVATION: Final = Option("str", "silu", "what is applied to the gate", choices=GATE_ACTIVATIONS)
_GATING: Final = {
    "gate_order": Option("str", "after", "gate the norm, or x before the norm", choices=GATE_ORDERS),
    "gate_activation": _GATE_ACTIVATION,
}
_OUT_DTYPE = Option("ScalarType", None, "dtype of y; None: x's", choices=FLOATS, optional=True)
_Y = Out("... N", "out_dtype or x.dtype", "the norm", "out")
_RSTD = Out(
    "...",
    "torch.float32",
    "rs of each row",
    "rstd_out",
    when="return_rstd",
    make="empty(lead, dtype=torch.float32, device=device)",
)
_RETURN_RSTD = Option("bool", False, "also return rs")
_SUMS = "round_sum=True: h = round(x+residual) with either; round_sum=False: h = x+residual"

RMS_NORM = Contract(
    "rms_norm",
    args={
        "x": Arg("... N", "activations", FLOATS),
        "gamma": _GAMMA,
        "residual": _RESIDUAL,
        "gate": _GATE,
        "bias": _BIAS,
        "head_gamma": _HEAD_GAMMA,
    },
    options={
        "eps": eps(),
        "weight_offset": WEIGHT_OFFSET,
        "rounding": ROUNDING,
        "round_sum": _ROUND_SUM,
        **_GATING,
        "out_dtype": _OUT_DTYPE,
        "return_rstd": _RETURN_RSTD,
    },
    outs={"y": _Y, "new_residual": _NEW_RESIDUAL, "rstd": _RSTD},
    rules=(columns("N", "x"), *_GAMMA_RULES),
    carried=_EITHER_GAMMA,
    known_as={"head_gamma": "gamma"},
    rounding="once: y = round((h*rs)*(gamma+offset)); hf: h = round(x+residual), y = round(round(h*rs)*(gamma+offset)); "
    f"{_SUMS}; bias and gate: y = round(((h*rs)*(gamma+offset)+bias)*act(gate)), and hf rounds each step",
)

LAYER_NORM = Contract(
    "layer_norm",
    args={
        "x": Arg("... N", "activations", FLOATS),
        "gamma": _GAMMA,
        "bias": _BIAS,
        "residual": _RESIDUAL,
        "head_gamma": _HEAD_GAMMA,
    },
    options={
        "eps": eps(),
        "weight_offset": WEIGHT_OFFSET,
        "round_sum": _ROUND_SUM,
        "out_dtype": _OUT_DTYPE,
        "return_rstd": _RETURN_RSTD,
    },
    outs={"y": _Y, "new_residual": _NEW_RESIDUAL, "rstd": _RSTD},
    rules=(columns("N", "x"), *_GAMMA_RULES),
    carried=_EITHER_GAMMA,
    known_as={"head_gamma": "gamma"},
    rounding="once: d = h-mean(h), y = round((d*rs)*(gamma+offset)+bias); round_sum=True: h = round(x+residual)",
)


def _arity(prologue: str) -> int:
    return len(find(prologue).parameters) - 1 if prologue else 0


_SCALE_INPUTS: Final = {
    "static_scale": Arg("", "scale of the whole tensor", _F32, True, layout="any", sample="positive"),
    "scale_ub_tensor": Arg("", "upper bound of amax, in memory", _F32, True, layout="any", sample="positive"),
}
_INPUTS: Final = {
    "x": Arg("... N", "activations; 8 bits if a prologue dequantizes them", (*FLOATS, *QUANTIZED)),
    "gamma": _GAMMA,
    "residual": _RESIDUAL_OF_ANY_X,
    **_SCALE_INPUTS,
}
_GLOBAL_SCALE: Final = Arg(
    "", "what nvfp4's scales are multiplied by before rounding", _F32, True, layout="any", sample="positive"
)
_PROLOGUE_ARGS: Final = Arg(_OPERAND_SHAPES, _OPERANDS, FLOATS, many=True)
_GROUP_SIZE: Final = Option("int", None, "columns per scale; None: the whole row", choices=GROUP_SIZES, optional=True)
_SCALE_UB: Final = Option("float", None, "upper bound of amax", where="scale_ub > 0", optional=True)
_QUANTIZE: Final = Option("str", "reciprocal", "multiply by 1 / scale, or divide by scale", choices=QUANTIZE)
_MIN_SCALE: Final = Option("float", 0.0, "smallest scale, before rounding to scales_dtype", where=_FINITE)
_RETURN_NORM: Final = Option("bool", False, "also return the unquantized norm")
_STEPS: Final = {
    "prologue": Option("str", "", "elementwise function fused into the load; its globals are frozen at decoration"),
    "return_norm": _RETURN_NORM,
    "round_sum": _ROUND_SUM,
    "quantize": _QUANTIZE,
    "min_scale": _MIN_SCALE,
    "return_rstd": _RETURN_RSTD,
}
_NORM: Final = Out("... N", _NORM_DTYPE, "the norm, as rms_norm returns it", "norm_out", when="return_norm")
_DIVIDES: Final = Rule("group_size is None or N % group_size == 0", "group_size", "divide the number of columns, N={N}")
_SCALE_RULES: Final = (
    Rule("static_scale is None or scale_ub is None", "scale_ub", "be None with static_scale"),
    Rule("static_scale is None or scale_ub_tensor is None", "scale_ub_tensor", "be None with static_scale"),
    Rule("scale_ub is None or scale_ub_tensor is None", "scale_ub_tensor", "be either a number or a tensor"),
    Rule("static_scale is None or min_scale == 0", "min_scale", "be 0 with static_scale"),
    Rule("static_scale is None or group_size is None", "group_size", "be None with static_scale"),
    Rule("static_scale is None or scale_format == 'float'", "scale_format", "be 'float' with static_scale"),
)
_PROLOGUE_RULES: Final = (
    Rule("x.dtype in FLOATS or prologue", "x", "be bfloat16, float16 or float32 without a prologue"),
    Rule(
        "x.dtype in FLOATS or gamma is not None or head_gamma is not None or not return_norm",
        "gamma",
        "be given for the norm of an 8-bit x",
    ),
    Rule("x.dtype in FLOATS or rounding == 'once'", "rounding", "be 'once' for an 8-bit x ('hf' rounds to x's dtype)"),
    Rule("arity(prologue) == len(prologue_args)", "prologue_args", "hold one tensor per parameter after x"),
)


def _is_dense(output: object) -> bool:
    """Whether an output is contiguous; one that is no strided tensor is rejected elsewhere."""
    strided = isinstance(output, Tensor) and output.layout is torch.strided and not output.is_nested
    return not strided or output.is_contiguous()  # type: ignore[attr-defined]


def _listed(values: Iterable[object]) -> str:
    return " or ".join(map(str, values))


_QUANT_LIMITS = tuple(dict.fromkeys(m for f in QUANT_FORMATS.values() for m in f.codes.maxima))
_GROUPS = ", ".join(f"{f.name}: {_listed(f.groups)}" for f in QUANT_FORMATS.values())
_QUANT_SCALES = ", ".join(f"{f.name}: {_listed(f.scales)}" for f in QUANT_FORMATS.values())
_LIMITS = ", ".join(f"{c.name}: {_listed(f'{m:g}' for m in c.maxima)}" for c in CODE_FORMATS.values())
_SCALE_DTYPES = ", ".join(f"{s.name}: {_listed(map(short, s.dtypes))}" for s in SCALE_FORMATS.values())
_NORM_OPTIONS: Final = {"eps": eps(groups=GROUP_SIZES), "weight_offset": WEIGHT_OFFSET}
_CODES_OPTIONS: Final = {
    "rounding": Option("str", "once", "where values are rounded", choices=(*ROUNDINGS, "stored")),
    "scale_ub": _SCALE_UB,
    "format": Option("str", "e4m3fn", "format of codes and scales", choices=tuple(QUANT_FORMATS)),
    "code_max": Option("float", None, "saturation limit; None: the format's first", _QUANT_LIMITS, optional=True),
    "scales_dtype": Option("ScalarType", torch.float32, "dtype of stored scales", choices=SCALE_DTYPES),
    "group_size": _GROUP_SIZE,
    "scale_format": Option("str", "float", "any value, powers of two, or fp8", choices=tuple(SCALE_FORMATS)),
    "scale_layout": Option("str", "row", "where scales are in memory", choices=SCALE_LAYOUTS),
}
_CODES_SIZES: Final = {
    "C": "N // 2 if codes(format).bits == 4 else N",
    "G": "N // group_size if group_size else 1",
    "S": "scale_shape(lead, G, scale_layout)",
}
_CODES_OUTS: Final = {
    "out": Out("... C", "codes(format).dtype", "codes; of 4 bits two in a byte", "out"),
    "scale": Out(
        "*S",
        "scales_dtype",
        "one scale per row or group",
        "scale_out",
        when="static_scale is None",
        make="empty_scale(lead, G, scale_layout, scales_dtype, device)",
    ),
}
_FORMAT_RULES: Final = (
    columns("N", "x"),
    Rule("group_size in groups(format)", "group_size", f"suit format ({_GROUPS})"),
    _DIVIDES,
    Rule("scale_format in scales(format)", "scale_format", f"suit format ({_QUANT_SCALES})"),
    Rule(
        "code_max is None or code_max in codes(format).maxima",
        "code_max",
        f"be a limit of format's codes ({_LIMITS})",
    ),
    Rule("scales_dtype in scale_dtypes(scale_format)", "scales_dtype", f"suit scale_format ({_SCALE_DTYPES})"),
    Rule(
        "(scales_dtype == torch.int32) == (scale_layout == 'column_packed')",
        "scales_dtype",
        "be int32 for scale_layout 'column_packed', and only for it",
    ),
    Rule(
        "scale_layout != '128x4' or scales_dtype.itemsize == 1",
        "scales_dtype",
        "be float8_e8m0fnu or float8_e4m3fn for scale_layout '128x4'",
    ),
    Rule(
        "group_size or scale_layout not in PACKINGS",
        "group_size",
        "not be None for scale_layout 'column_packed' and '128x4'",
    ),
    Rule(
        "scale_layout != '128x4' or is_dense(scale_out)",
        "scale_out",
        "be contiguous for scale_layout '128x4'",
    ),
    Rule("global_scale is None or format == 'nvfp4'", "global_scale", "be None unless format is 'nvfp4'"),
)
_FORMAT_SCOPE: Final[dict[str, Any]] = {
    "PACKINGS": PACKINGS,
    "scale_dtypes": lambda name: SCALE_FORMATS[name].dtypes,
    "codes": lambda name: QUANT_FORMATS[name].codes,
    "groups": lambda name: QUANT_FORMATS[name].groups,
    "scales": lambda name: QUANT_FORMATS[name].scales,
    "scale_shape": scale_shape,
    "is_dense": _is_dense,
    "empty_scale": empty_scale,
}
_EITHER_BOUND: Final[dict[str, tuple[str, ...]]] = {"scale_ub": ("scale_ub", "scale_ub_tensor")}

RMS_NORM_FUSED_QUANT = Contract(
    "rms_norm_fused_quant",
    args={
        **_INPUTS,
        "global_scale": _GLOBAL_SCALE,
        "gate": _GATE,
        "bias": _BIAS,
        "head_gamma": _HEAD_GAMMA,
        "prologue_args": _PROLOGUE_ARGS,
    },
    options={
        **_NORM_OPTIONS,
        **_CODES_OPTIONS,
        **_STEPS,
        **_GATING,
        "statistic": Option("str", "rms", "RMSNorm, or LayerNorm", choices=STATISTICS),
    },
    sizes=_CODES_SIZES,
    outs={
        **_CODES_OUTS,
        "new_residual": _NEW_RESIDUAL,
        "norm": _NORM,
        "rstd": _RSTD,
    },
    rules=(
        *_FORMAT_RULES,
        Rule("gate is None or gate_order == 'after' or not prologue", "gate_order", "be 'after' with a prologue"),
        Rule("statistic == 'rms' or rounding != 'hf'", "rounding", "be 'once' or 'stored' for LayerNorm"),
        Rule(
            f"len(prologue_args) + (gate is not None) + (bias is not None) <= {MAX_OPERANDS}",
            "prologue_args",
            f"hold at most {MAX_OPERANDS} tensors, gate and bias included",
        ),
        *_GAMMA_RULES,
        *_SCALE_RULES,
        *_PROLOGUE_RULES,
    ),
    scope={**_FORMAT_SCOPE, "FLOATS": FLOATS, "arity": _arity},
    rounding="once: code = round((h*(gamma+offset))*(rs/scale)); hf: y as in rms_norm, code = round(y*(1/scale)); "
    "divide: y as in rms_norm (once: before its rounding), code = round(y/scale); stored: y = round((h*rs)*(gamma+offset)), "
    "code = round(y*(1/scale))",
    carried=_EITHER_GAMMA | _EITHER_BOUND,
    known_as={"scale_ub_tensor": "scale_ub", "head_gamma": "gamma"},
)

_SANDWICHED: Final = {
    "x": Arg("... N", "the output of an attention or MLP", FLOATS),
    "gamma_post": Arg("N", "weight of the post-norm; any float dtype", FLOATS, sample="gamma"),
    "gamma_pre": Arg("N", "weight of the next pre-norm; any float dtype", FLOATS, sample="gamma"),
    "residual": Arg("... N", "added to the post-norm in float32; x's dtype or float32", "(x.dtype, torch.float32)"),
}
_ROUND_H: Final = Option(
    "bool", None, "whether h is rounded before the pre-norm; None: decided by rounding", optional=True
)
_H: Final = Out("... N", "residual.dtype", "post-norm + residual", "residual_out")
_BRANCH_SCALE: Final = Option("float", 1.0, "multiplies the post-norm", where="-3.4e38 <= branch_scale <= 3.4e38")
_POST = "b = y of rms_norm(x, gamma_post), as stored in x's dtype, and round(b*branch_scale) unless that is 1; then as {} of b"

RMS_NORM_ADD_RMS_NORM = Contract(
    "rms_norm_add_rms_norm",
    args=_SANDWICHED,
    options={
        "eps": eps(),
        "weight_offset": WEIGHT_OFFSET,
        "rounding": ROUNDING,
        "round_sum": _ROUND_H,
        "out_dtype": _OUT_DTYPE,
        "branch_scale": _BRANCH_SCALE,
    },
    outs={"y": _Y, "h": _H},
    rules=(columns("N", "x"),),
    rounding=_POST.format("rms_norm"),
)

RMS_NORM_ADD_RMS_NORM_QUANT = Contract(
    "rms_norm_add_rms_norm_quant",
    args={**_SANDWICHED, **_SCALE_INPUTS, "global_scale": _GLOBAL_SCALE},
    options={
        **_NORM_OPTIONS,
        **_CODES_OPTIONS,
        "return_norm": _RETURN_NORM,
        "round_sum": _ROUND_H,
        "quantize": _QUANTIZE,
        "min_scale": _MIN_SCALE,
        "branch_scale": _BRANCH_SCALE,
    },
    sizes=_CODES_SIZES,
    outs={
        **_CODES_OUTS,
        "h": _H,
        "norm": Out("... N", "x.dtype", "y, as rms_norm returns it", "norm_out", when="return_norm"),
    },
    rules=(*_FORMAT_RULES, *_SCALE_RULES),
    scope=_FORMAT_SCOPE,
    carried=_EITHER_BOUND,
    known_as={"scale_ub_tensor": "scale_ub"},
    rounding=_POST.format("rms_norm_fused_quant"),
)

QUANTIZATION = Contract(
    "quantize",
    args={
        "x": Arg("... N", "activations", FLOATS),
        "gate": Arg("... N", "x is multiplied by its activation; any float dtype", FLOATS, optional=True),
        **_SCALE_INPUTS,
        "global_scale": _GLOBAL_SCALE,
    },
    options={
        **_CODES_OPTIONS,
        "quantize": _QUANTIZE,
        "min_scale": _MIN_SCALE,
        "gate_activation": _GATE_ACTIVATION,
    },
    sizes=_CODES_SIZES,
    outs=_CODES_OUTS,
    rules=(*_FORMAT_RULES, *_SCALE_RULES),
    scope=_FORMAT_SCOPE,
    carried=_EITHER_BOUND,
    known_as={"scale_ub_tensor": "scale_ub"},
    rounding="code = round(y*(1/scale)); divide: code = round(y/scale); without a gate y = x; once: y = x*act(gate); "
    "stored: y = round(x*act(gate)); hf: y = round(x*round(act(gate)))",
)

RMS_NORM_FUSED_FP8 = Alias(
    "rms_norm_fused_fp8",
    RMS_NORM_FUSED_QUANT,
    {"format": "out_dtype", "code_max": "fp8_max", "scale_out": "scale_output"},
)
