"""Valid calls of `rms_norm`, `layer_norm`, `rms_norm_add_rms_norm`, the norms that quantize, and `quantize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

import onepass
from onepass import (
    layer_norm,
    quantize,
    rms_norm,
    rms_norm_add_rms_norm,
    rms_norm_add_rms_norm_quant,
    rms_norm_fused_fp8,
    rms_norm_fused_quant,
)
from onepass.core.contract import Contract
from onepass.formats import E4M3FN, E4M3FNUZ, FP8_CODES, QUANT_FORMATS, SCALE_FORMATS
from onepass.ops.rms_norm.launch import GATE_ACTIVATIONS
from onepass.ops.rms_norm.op import (
    LAYER_NORM,
    QUANTIZATION,
    RMS_NORM,
    RMS_NORM_ADD_RMS_NORM,
    RMS_NORM_ADD_RMS_NORM_QUANT,
    RMS_NORM_FUSED_FP8,
    RMS_NORM_FUSED_QUANT,
)
from onepass.prologues import dequantize
from onepass.testing.rms_norm import soft_cap_gate
from tests.inputs import F32, FP8, I32, Arguments, Build, Form, Rows, Tensors, both, random, sampled_arguments, writing

_QUANT = RMS_NORM_FUSED_QUANT
_FP8_NAMES = RMS_NORM_FUSED_FP8.names
_FP8 = replace(
    _QUANT, name="rms_norm_fused_fp8", carried=_QUANT.carried | {own: (name,) for name, own in _FP8_NAMES.items()}
)
"""The contract as it is for the alias, whose errors have the alias' names."""
_ONLY_QUANT = ("global_scale", "gate", "bias", "gate_order", "gate_activation", "statistic")

# --- arguments by the contract's names ------------------------------------------------------------------------------


def norm_arguments(device: str = "cpu", contract: Contract = RMS_NORM) -> Arguments:
    optional = ("gamma", "residual")
    return sampled_arguments(contract, {"N": 64}, (3, 2), device, optional, eps=0.5, weight_offset=0.0)


def heads_arguments(device: str = "cpu") -> Arguments:
    """A gamma for each head, and the reciprocal RMS."""
    options = {"eps": 0.5, "weight_offset": 1.0, "return_rstd": True}
    return sampled_arguments(RMS_NORM, {"N": 64, "H": 2}, (3, 2), device, ("head_gamma", "residual"), **options)


def gated_arguments(device: str = "cpu") -> Arguments:
    options = {"eps": 0.5, "weight_offset": 0.0, "rounding": "hf"}
    values = sampled_arguments(RMS_NORM, {"N": 64}, (3,), device, ("gamma", "gate", "bias"), **options)
    return values | {"out_dtype": F32}


def layer_arguments(device: str = "cpu") -> Arguments:
    optional = ("gamma", "residual", "bias")
    return sampled_arguments(LAYER_NORM, {"N": 64}, (3, 2), device, optional, eps=0.5, weight_offset=0.0)


def layer_heads_arguments(device: str = "cpu") -> Arguments:
    options = {"eps": 0.5, "weight_offset": 1.0, "return_rstd": True}
    return sampled_arguments(LAYER_NORM, {"N": 64, "H": 2}, (3, 2), device, ("head_gamma",), **options)


def fp8_arguments(device: str = "cpu") -> Arguments:
    values = norm_arguments(device, _FP8)
    values |= {"group_size": 64, "return_norm": True, "scale_ub": 1.0, "code_max": 448.0, "weight_offset": 1.0}
    values["prologue_args"] = [random(device, 3, 2, 64)]
    return values | {"prologue": onepass.prologues.silu_and_mul.key}


def static_arguments(device: str = "cpu") -> Arguments:
    optional = ("gamma", "residual", "static_scale")
    return sampled_arguments(_FP8, {"N": 64}, (3,), device, optional, eps=0.0, weight_offset=1)


def vllm_arguments(device: str = "cpu") -> Arguments:
    optional = ("gamma", "residual", "scale_ub_tensor")
    values = sampled_arguments(_FP8, {"N": 64}, (3,), device, optional, eps=0.0, weight_offset=1)
    values |= {"rounding": "hf", "round_sum": False, "quantize": "divide", "min_scale": 0.25}
    return values | {"return_rstd": True}


def quant_arguments(device: str = "cpu") -> Arguments:
    """Pairs of 4-bit codes, swizzled scales and a scale in memory."""
    optional = ("gamma", "residual", "global_scale")
    values = sampled_arguments(RMS_NORM_FUSED_QUANT, {"N": 96}, (3, 2), device, optional, eps=0.5)
    values |= {"format": "nvfp4", "group_size": 16, "scale_format": "e4m3", "scales_dtype": FP8}
    return values | {"scale_layout": "128x4", "return_norm": True, "rounding": "stored"}


def packed_arguments(device: str = "cpu") -> Arguments:
    """A prologue, and four exponents per word."""
    optional = ("gamma", "scale_ub_tensor")
    values = sampled_arguments(RMS_NORM_FUSED_QUANT, {"N": 160}, (5,), device, optional, eps=0.0, weight_offset=1)
    values |= {"format": "mxfp8", "group_size": 32, "scale_format": "ue8m0", "scales_dtype": I32, "min_scale": 0.25}
    values["prologue_args"] = [random(device, 5, 160)]
    return values | {"scale_layout": "column_packed", "prologue": onepass.prologues.silu_and_mul.key}


def sandwich_arguments(device: str = "cpu") -> Arguments:
    return sampled_arguments(RMS_NORM_ADD_RMS_NORM, {"N": 64}, (3, 2), device, eps=0.5, weight_offset=1.0)


def sandwich_hf_arguments(device: str = "cpu") -> Arguments:
    options: dict[str, Any] = {"eps": 0.5, "rounding": "hf", "round_sum": False, "residual": F32, "branch_scale": 0.25}
    return sampled_arguments(RMS_NORM_ADD_RMS_NORM, {"N": 64}, (3,), device, **options) | {"out_dtype": F32}


def sandwich_quant_arguments(device: str = "cpu") -> Arguments:
    """Pairs of 4-bit codes, swizzled scales and a scale in memory."""
    values = sampled_arguments(
        RMS_NORM_ADD_RMS_NORM_QUANT, {"N": 96}, (3, 2), device, ("global_scale", "scale_ub_tensor"), eps=0.5
    )
    values |= {"format": "nvfp4", "group_size": 16, "scale_format": "e4m3", "scales_dtype": FP8}
    return values | {"scale_layout": "128x4", "return_norm": True, "rounding": "stored"}


def sandwich_static_arguments(device: str = "cpu") -> Arguments:
    options = {"eps": 0.0, "weight_offset": 1.0, "format": "int8", "branch_scale": 0.25}
    return sampled_arguments(RMS_NORM_ADD_RMS_NORM_QUANT, {"N": 64}, (3,), device, ("static_scale",), **options)


def rows_arguments(device: str = "cpu") -> Arguments:
    """Pairs of 4-bit codes, swizzled scales, a scale in memory and a gate."""
    optional = ("gate", "global_scale", "scale_ub_tensor")
    values = sampled_arguments(QUANTIZATION, {"N": 96}, (3, 2), device, optional, gate=F32)
    values |= {"format": "nvfp4", "group_size": 16, "scale_format": "e4m3", "scales_dtype": FP8}
    return values | {"scale_layout": "128x4", "rounding": "stored", "gate_activation": "sigmoid"}


def rows_static_arguments(device: str = "cpu") -> Arguments:
    options = {"format": "int8", "quantize": "divide"}
    return sampled_arguments(QUANTIZATION, {"N": 64}, (3,), device, ("static_scale",), **options)


BY_CONTRACT: dict[str, Build] = {
    "rms_norm": norm_arguments,
    "layer_norm": layer_arguments,
    "rms_norm_fused_quant": quant_arguments,
    "rms_norm_add_rms_norm": sandwich_arguments,
    "rms_norm_add_rms_norm_quant": sandwich_quant_arguments,
    "quantize": rows_arguments,
}

# --- calls of the public functions ----------------------------------------------------------------------------------


def public_gamma(values: Arguments) -> Arguments:
    """The public function's arguments: one ``gamma`` of either kind."""
    gamma = values["gamma"] if values["head_gamma"] is None else values["head_gamma"]
    return {name: value for name, value in values.items() if name != "head_gamma"} | {"gamma": gamma}


def split_gamma(values: Arguments) -> Arguments:
    """The contract's two arguments for the public function's ``gamma``: that of heads has two dimensions."""
    gamma = public_gamma(values)["gamma"]
    heads = isinstance(gamma, Tensor) and gamma.dim() == 2
    return values | {"gamma": None if heads else gamma, "head_gamma": gamma if heads else None}


def public_bound(values: Arguments) -> Any:
    """The public function's ``scale_ub``, a number or a tensor."""
    return values["scale_ub"] if values["scale_ub_tensor"] is None else values["scale_ub_tensor"]


def split_bound(values: Arguments) -> Arguments:
    """The contract's arguments for the public function's ``scale_ub``."""
    bound = public_bound(values)
    tensor = isinstance(bound, Tensor)
    return values | {"scale_ub": None if tensor else bound, "scale_ub_tensor": bound if tensor else None}


def split_both(values: Arguments) -> Arguments:
    """The contract's arguments for the public function's ``gamma`` and ``scale_ub``."""
    return split_gamma(split_bound(values))


def with_defaults(values: Arguments) -> Arguments:
    """The contract's arguments: None stands for what the format implies."""
    return implied(split_both(values))


def implied(values: Arguments) -> Arguments:
    """The arguments with what the format implies in place of None."""
    quant = QUANT_FORMATS.get(values["format"]) if isinstance(values["format"], str) else None
    if quant is None:
        return values
    if values["group_size"] is None:
        values = values | {"group_size": quant.groups[0]}
    if values["scale_format"] is None:
        values = values | {"scale_format": quant.scales[0]}
    if values["scales_dtype"] is None:
        packed = values["scale_layout"] == "column_packed"
        named = values["scale_format"] in quant.scales
        dtypes = SCALE_FORMATS[values["scale_format"]].dtypes if named else (None,)
        values = values | {"scales_dtype": torch.int32 if packed else dtypes[0]}
    return values


def call_norm(values: Arguments) -> Any:
    return rms_norm(**public_gamma(values))


def call_layer(values: Arguments) -> Any:
    return layer_norm(**public_gamma(values))


def call_fp8(values: Arguments) -> Any:
    named = {_FP8_NAMES.get(name, name): value for name, value in values.items() if name not in _ONLY_QUANT}
    if not fp8_rules(values):
        named["out_dtype"] = QUANT_FORMATS[named["out_dtype"]].codes.dtype
    elif isinstance(named["out_dtype"], torch.dtype):  # wrong as a format, but legal here
        named["out_dtype"] = str(named["out_dtype"])
    return _call_quantizing(rms_norm_fused_fp8, named)


def fp8_rules(values: Arguments) -> list[str]:
    """The alias has the formats of fp8 alone."""
    return [] if any(values["format"] == codes.name for codes in FP8_CODES.values()) else ["format"]


def _call_quantizing(op: Callable[..., Any], values: Arguments) -> Any:
    key = values["prologue"]
    if isinstance(key, str):
        key = onepass.prologues.find(key) if key else None
    named = {name: value for name, value in public_gamma(values).items() if name != "scale_ub_tensor"}
    return op(**{**named, "prologue": key, "scale_ub": public_bound(values)})


def call_quant(values: Arguments) -> Any:
    return _call_quantizing(rms_norm_fused_quant, values)


def call_sandwich(values: Arguments) -> Any:
    return rms_norm_add_rms_norm(**values)


def public_scale_ub(values: Arguments) -> Arguments:
    """The public function's arguments: one ``scale_ub`` of either kind."""
    named = {name: value for name, value in values.items() if name != "scale_ub_tensor"}
    return named | {"scale_ub": public_bound(values)}


def call_sandwich_quant(values: Arguments) -> Any:
    return rms_norm_add_rms_norm_quant(**public_scale_ub(values))


def call_rows(values: Arguments) -> Any:
    return quantize(**public_scale_ub(values))


def bound_defaults(values: Arguments) -> Arguments:
    return implied(split_bound(values))


_FP8_FORM: dict[str, Any] = {"derived": split_both, "fixed": _ONLY_QUANT, "own_rules": fp8_rules}
_SANDWICH_QUANT: Any = (RMS_NORM_ADD_RMS_NORM_QUANT, sandwich_quant_arguments, call_sandwich_quant)
FORMS: list[Form] = [
    *both("rms_norm", RMS_NORM, norm_arguments, call_norm, derived=split_gamma),
    writing("rms_norm, gated", RMS_NORM, gated_arguments, call_norm, derived=split_gamma),
    writing("rms_norm, heads", RMS_NORM, heads_arguments, call_norm, derived=split_gamma),
    *both("layer_norm", LAYER_NORM, layer_arguments, call_layer, derived=split_gamma),
    writing("layer_norm, heads", LAYER_NORM, layer_heads_arguments, call_layer, derived=split_gamma),
    *both("rms_norm_fused_fp8", _FP8, fp8_arguments, call_fp8, **_FP8_FORM),
    writing("rms_norm_fused_fp8, static", _FP8, static_arguments, call_fp8, **_FP8_FORM),
    writing("rms_norm_fused_fp8, as vLLM", _FP8, vllm_arguments, call_fp8, **_FP8_FORM),
    writing("rms_norm_fused_quant", _QUANT, quant_arguments, call_quant, derived=with_defaults),
    writing("rms_norm_fused_quant, packed", _QUANT, packed_arguments, call_quant, derived=with_defaults),
    *both("rms_norm_add_rms_norm", RMS_NORM_ADD_RMS_NORM, sandwich_arguments, call_sandwich),
    writing("rms_norm_add_rms_norm, hf", RMS_NORM_ADD_RMS_NORM, sandwich_hf_arguments, call_sandwich),
    writing("rms_norm_add_rms_norm_quant", *_SANDWICH_QUANT, derived=bound_defaults),
    writing(
        "rms_norm_add_rms_norm_quant, static",
        RMS_NORM_ADD_RMS_NORM_QUANT,
        sandwich_static_arguments,
        call_sandwich_quant,
        derived=bound_defaults,
    ),
    # not allocating: a kernel leaves the padding of swizzled scales as it is
    writing("quantize", QUANTIZATION, rows_arguments, call_rows, derived=bound_defaults),
    *both("quantize, static", QUANTIZATION, rows_static_arguments, call_rows, derived=bound_defaults),
]

# --- any number of rows ---------------------------------------------------------------------------------------------


def _heads(t: Tensors) -> list[Tensor]:
    """The norms of heads, with statistics and as codes."""
    x, gamma = t["x"].unflatten(-1, (4, 80)), t["gamma"]
    y, rstd = layer_norm(x, gamma, return_rstd=True)
    codes, scale, rms = rms_norm_fused_fp8(x, gamma, return_rstd=True)
    return [rms_norm(x, gamma).flatten(-2), y.flatten(-2), rstd, codes.flatten(-2), scale.squeeze(-1), rms]


def _gated(t: Tensors) -> list[Tensor]:
    given: dict[str, Any] = {"gate": t["z"], "bias": t["bias"]}
    return [
        *(rms_norm(t["x"], t["gamma"], gate_activation=activation, **given) for activation in GATE_ACTIVATIONS),
        *rms_norm_fused_quant(t["x"], t["gamma"], format="int8", gate_activation="sigmoid", **given),
    ]


def _fp8(t: Tensors, **options: Any) -> list[Tensor]:
    return list(rms_norm_fused_fp8(t["x"], t["gamma"], residual=t["r"], return_norm=True, **options))


def _as_vllm(t: Tensors, group: int | None) -> list[Tensor]:
    """The norm of the unrounded sum, divided by a scale with a minimum and a bound in memory."""
    bound = torch.full((1,), 1.5, device=t["x"].device)
    options: dict[str, Any] = {"rounding": "hf", "round_sum": False, "quantize": "divide", "min_scale": 1 / (448 * 512)}
    options |= {"residual": t["r"], "scale_ub": bound, "group_size": group}
    return list(rms_norm_fused_fp8(t["x"], t["gamma"], **options))


def _groups(t: Tensors) -> list[Tensor]:
    return list(rms_norm_fused_fp8(t["x"], t["gamma"], group_size=64, out_dtype=E4M3FNUZ.dtype))


def _static(t: Tensors) -> list[Tensor]:
    return list(rms_norm_fused_fp8(t["x"], t["gamma"], static_scale=torch.full((), 0.02, device=t["x"].device))[:1])


def _quant(t: Tensors, **options: Any) -> list[Tensor]:
    return list(rms_norm_fused_quant(t["x"], t["gamma"], residual=t["r"], return_norm=True, **options))


def _prologue(t: Tensors) -> list[Tensor]:
    return list(
        rms_norm_fused_fp8(t["x"], t["gamma"], prologue=soft_cap_gate, prologue_args=[t["r"], t["bias"], t["s"]])
    )


def _dequantized(t: Tensors) -> list[Tensor]:
    return list(rms_norm_fused_fp8(t["x"], t["gamma"], residual=t["r"], prologue=dequantize, prologue_args=[t["s"]]))


def _sandwich(t: Tensors, **options: Any) -> list[Tensor]:
    return list(rms_norm_add_rms_norm(t["x"], t["gamma"], t["gamma"], residual=t["r"], **options))


def _sandwich_codes(t: Tensors, **options: Any) -> list[Tensor]:
    results = rms_norm_add_rms_norm_quant(t["x"], t["gamma"], t["gamma"], residual=t["r"], return_norm=True, **options)
    return list(results)


def _codes(t: Tensors, **options: Any) -> list[Tensor]:
    return list(quantize(t["x"], **options))


def _gated_codes(t: Tensors, **options: Any) -> list[Tensor]:
    return list(quantize(t["x"], gate=t["z"], **options))


_ROW, _GAMMA = {"x": 0, "r": 0}, {"gamma": (0,)}
ROWS: Final = (
    Rows("rms_norm", _ROW, _GAMMA, lambda t: list(rms_norm(t["x"], t["gamma"], residual=t["r"]))),
    Rows("rms_norm, hf", _ROW, _GAMMA, lambda t: [rms_norm(t["x"], t["gamma"], rounding="hf")]),
    Rows(
        "rms_norm, gate and bias",
        {**_ROW, "z": 0},
        {**_GAMMA, "bias": (0,)},
        _gated,
    ),
    Rows(
        "rms_norm, no gamma, statistics",
        _ROW,
        {},
        lambda t: list(rms_norm(t["x"], None, residual=t["r"], return_rstd=True)),
    ),
    Rows("rms_norm, heads", {"x": 320}, {"gamma": (4, 80)}, _heads),
    Rows(
        "layer_norm",
        _ROW,
        {**_GAMMA, "bias": (0,)},
        lambda t: list(layer_norm(t["x"], t["gamma"], t["bias"], residual=t["r"])),
    ),
    Rows("rms_norm_fused_fp8", _ROW, _GAMMA, _fp8),
    Rows("rms_norm_fused_fp8, hf, UE8M0", _ROW, _GAMMA, partial(_fp8, rounding="hf", scale_format="ue8m0")),
    Rows(
        "rms_norm, rounded sum",
        _ROW,
        _GAMMA,
        lambda t: list(rms_norm(t["x"], t["gamma"], residual=t["r"], round_sum=True)),
    ),
    Rows("rms_norm_fused_fp8, as vLLM", _ROW, _GAMMA, partial(_as_vllm, group=None)),
    Rows("rms_norm_fused_fp8, as vLLM, groups", {"x": 320, "r": 320}, {"gamma": (320,)}, partial(_as_vllm, group=64)),
    Rows("rms_norm_fused_fp8, groups", {"x": 320}, {"gamma": (320,)}, _groups),
    Rows("rms_norm_fused_fp8, static scale", {"x": 0}, _GAMMA, _static),
    Rows("rms_norm_fused_quant", _ROW, _GAMMA, partial(_quant, format="int8", rounding="stored")),
    Rows("rms_norm_fused_quant, nvfp4", {"x": 336, "r": 336}, {"gamma": (336,)}, partial(_quant, format="nvfp4")),
    Rows(
        "rms_norm_fused_quant, mxfp4",
        {"x": 320, "r": 320},
        {"gamma": (320,)},
        partial(_quant, format="mxfp4", quantize="divide"),
    ),
    Rows("rms_norm_fused_fp8, prologue", {**_ROW, "s": 1}, {**_GAMMA, "bias": (0,)}, _prologue),
    Rows(
        "rms_norm_fused_fp8, dequantize",
        {"x": 320, "r": 320, "s": 5},
        {"gamma": (320,)},
        _dequantized,
        own={"x": E4M3FN.dtype, "s": torch.float32},
    ),
    Rows("rms_norm_add_rms_norm", _ROW, _GAMMA, _sandwich),
    Rows("rms_norm_add_rms_norm, hf", _ROW, _GAMMA, partial(_sandwich, rounding="hf")),
    Rows("rms_norm_add_rms_norm_quant", _ROW, _GAMMA, partial(_sandwich_codes, format="int8", rounding="stored")),
    Rows(
        "rms_norm_add_rms_norm_quant, mxfp8",
        {"x": 320, "r": 320},
        {"gamma": (320,)},
        partial(_sandwich_codes, format="mxfp8", round_sum=True),
    ),
    Rows("quantize", {"x": 0}, {}, _codes),
    Rows("quantize, groups", {"x": 320}, {}, partial(_codes, group_size=64, format="int8")),
    Rows("quantize, gate", {"x": 0, "z": 0}, {}, partial(_gated_codes, rounding="hf")),
    Rows("quantize, gate, nvfp4", {"x": 336, "z": 336}, {}, partial(_gated_codes, format="nvfp4")),
)
