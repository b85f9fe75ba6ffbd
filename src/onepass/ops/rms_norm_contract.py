"""The contracts of `rms_norm` and `rms_norm_fused_fp8`."""

from __future__ import annotations

import torch

from ..contract.declaration import Arg, Contract, Option, Out, Rule, short
from ..formats import (
    FLOATS,
    FP8_FORMATS,
    GROUP_SIZES,
    OPERAND_GROUPS,
    QUANTIZE,
    QUANTIZED,
    SCALE_DTYPES,
    SCALE_FORMATS,
    SCALE_LAYOUTS,
)
from ..prologues import find
from .options import ROUNDING, WEIGHT_OFFSET, columns, eps

_F32 = (torch.float32,)
_GAMMA = Arg("N", "weight; any float dtype", FLOATS, sample="gamma")
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
_MAXIMA = tuple(limit for f in FP8_FORMATS.values() for limit in f.maxima)
_LIMITS = ", ".join(f"{f.name}: {' or '.join(f'{m:g}' for m in f.maxima)}" for f in FP8_FORMATS.values())
_SCALES = ", ".join(f"{s.name}: {' or '.join(map(short, s.dtypes))}" for s in SCALE_FORMATS.values())
_FINITE = "0 <= min_scale <= 3.4e38"
_DYNAMIC, _BY_COLUMN = "static_scale is None", "scale_layout == 'column'"
_NORM_DTYPE = "x.dtype if x.dtype in FLOATS else gamma.dtype"
_OPERAND_SHAPES = " | ".join(("... N", "N", "... 1", *(f"... N/{group}" for group in OPERAND_GROUPS)))
_OPERANDS = "the prologue's other tensors: a value per element, per column, per row, or per group of columns"

RMS_NORM = Contract(
    "rms_norm",
    args={"x": Arg("... N", "activations", FLOATS), "gamma": _GAMMA, "residual": _RESIDUAL},
    options={"eps": eps(), "weight_offset": WEIGHT_OFFSET, "rounding": ROUNDING, "round_sum": _ROUND_SUM},
    outs={"y": Out("... N", "x.dtype", "the norm", "out"), "new_residual": _NEW_RESIDUAL},
    rules=(columns("N", "x"),),
    rounding="once: y = round((h*rs)*(gamma+offset)); hf: h = round(x+residual), y = round(round(h*rs)*(gamma+offset)); "
    "round_sum=True: h = round(x+residual) with either; round_sum=False: h = x+residual",
)


def _arity(prologue: str) -> int:
    return len(find(prologue).parameters) - 1 if prologue else 0


RMS_NORM_FUSED_FP8 = Contract(
    "rms_norm_fused_fp8",
    args={
        "x": Arg("... N", "activations; 8 bits if a prologue dequantizes them", (*FLOATS, *QUANTIZED)),
        "gamma": _GAMMA,
        "residual": _RESIDUAL_OF_ANY_X,
        "static_scale": Arg("", "scale of the whole tensor", _F32, True, layout="any", sample="positive"),
        "scale_ub_tensor": Arg("", "upper bound of amax, in memory", _F32, True, layout="any", sample="positive"),
        "prologue_args": Arg(_OPERAND_SHAPES, _OPERANDS, FLOATS, many=True),
    },
    options={
        "eps": eps(),
        "weight_offset": WEIGHT_OFFSET,
        "rounding": ROUNDING,
        "scale_ub": Option("float", None, "upper bound of amax", where="scale_ub > 0", optional=True),
        "out_dtype": Option("ScalarType", torch.float8_e4m3fn, "fp8 format", choices=tuple(FP8_FORMATS)),
        "fp8_max": Option("float", None, f"saturation limit ({_LIMITS}); None: the first", _MAXIMA, optional=True),
        "scales_dtype": Option("ScalarType", torch.float32, "dtype of stored scales", choices=SCALE_DTYPES),
        "group_size": Option("int", None, "columns per scale; None: the whole row", choices=GROUP_SIZES, optional=True),
        "scale_format": Option("str", "float", "any value, or powers of two", choices=tuple(SCALE_FORMATS)),
        "scale_layout": Option("str", "row", "which dimension of scale is contiguous", choices=SCALE_LAYOUTS),
        "prologue": Option("str", "", "elementwise function fused into the load; its globals are frozen at decoration"),
        "return_norm": Option("bool", False, "also return the unquantized norm"),
        "round_sum": _ROUND_SUM,
        "quantize": Option("str", "reciprocal", "multiply by 1 / scale, or divide by scale", choices=QUANTIZE),
        "min_scale": Option("float", 0.0, "smallest scale, before rounding to scales_dtype", where=_FINITE),
    },
    sizes={"G": "N // group_size if group_size else 1"},
    outs={
        "out": Out("... N", "out_dtype", "fp8 codes", "out"),
        "scale": Out("... G", "scales_dtype", "one scale per row or group", "scale_output", _DYNAMIC, _BY_COLUMN),
        "new_residual": _NEW_RESIDUAL,
        "norm": Out("... N", _NORM_DTYPE, "the norm, as rms_norm returns it", "norm_out", when="return_norm"),
    },
    rules=(
        columns("N", "x"),
        Rule("group_size is None or N % group_size == 0", "group_size", "divide the number of columns, N={N}"),
        Rule("fp8_max is None or fp8_max in maxima(out_dtype)", "fp8_max", f"be a limit of out_dtype ({_LIMITS})"),
        Rule("scales_dtype in scale_dtypes(scale_format)", "scales_dtype", f"suit scale_format ({_SCALES})"),
        Rule("static_scale is None or scale_ub is None", "scale_ub", "be None with static_scale"),
        Rule("static_scale is None or scale_ub_tensor is None", "scale_ub_tensor", "be None with static_scale"),
        Rule("scale_ub is None or scale_ub_tensor is None", "scale_ub_tensor", "be either a number or a tensor"),
        Rule("static_scale is None or min_scale == 0", "min_scale", "be 0 with static_scale"),
        Rule("static_scale is None or group_size is None", "group_size", "be None with static_scale"),
        Rule("static_scale is None or scale_format == 'float'", "scale_format", "be 'float' with static_scale"),
        Rule("x.dtype in FLOATS or prologue", "x", "be bfloat16, float16 or float32 without a prologue"),
        Rule(
            "x.dtype in FLOATS or rounding == 'once'", "rounding", "be 'once' for an 8-bit x ('hf' rounds to x's dtype)"
        ),
        Rule("arity(prologue) == len(prologue_args)", "prologue_args", "hold one tensor per parameter after x"),
    ),
    scope={
        "FLOATS": FLOATS,
        "scale_dtypes": lambda name: SCALE_FORMATS[name].dtypes,
        "maxima": lambda dtype: FP8_FORMATS[dtype].maxima,
        "arity": _arity,
    },
    rounding="once: code = round((h*(gamma+offset))*(rs/scale)); hf: y as in rms_norm, code = round(y*(1/scale)); "
    "divide: y as in rms_norm (once: before its rounding), code = round(y/scale)",
    carried={"scale_ub": ("scale_ub", "scale_ub_tensor")},
    known_as={"scale_ub_tensor": "scale_ub"},
)
