"""Valid calls of `linear`."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from onepass import linear
from onepass.formats import E4M3FN
from onepass.ops.linear.op import LINEAR
from tests.inputs import F32, FP8, Arguments, Build, Form, Rows, Tensors, both, sampled_arguments, writing


def linear_arguments(device: str = "cpu", **changes: Any) -> Arguments:
    """All arguments, with a scale per row."""
    optional = ("gamma", "residual", "bias", "weight_scale", "add")
    options = {"eps": 0.5, "weight_offset": 1.0, "activation": "silu_mul"} | changes
    return sampled_arguments(LINEAR, {"N": 24, "K": 32, "S": 24, "D": 12}, (3, 2), device, optional, **options)


def blocks_arguments(device: str = "cpu") -> Arguments:
    """Weights in fp8 with a scale per block, and a float32 result."""
    sizes = {"N": 130, "K": 140, "P": 2, "Q": 2, "D": 130}
    options = {"weight": FP8, "add": F32, "eps": 0.0, "out_dtype": F32}
    return sampled_arguments(LINEAR, sizes, (3,), device, ("block_scale", "add"), **options)


BY_CONTRACT: dict[str, Build] = {"linear": linear_arguments}


def public_scale(values: Arguments) -> Arguments:
    """The public function's arguments: one ``weight_scale`` of either kind."""
    scale = values["block_scale"] if values["weight_scale"] is None else values["weight_scale"]
    return {name: value for name, value in values.items() if name != "block_scale"} | {"weight_scale": scale}


def split_scale(values: Arguments) -> Arguments:
    """The contract's two arguments for the public function's ``weight_scale``: blocks have two dimensions."""
    scale, weight = public_scale(values)["weight_scale"], values["weight"]
    if not isinstance(scale, Tensor) or scale.is_nested or scale.layout is not torch.strided or scale.dim() != 2:
        return values | {"weight_scale": scale, "block_scale": None}
    rows = len(weight) if isinstance(weight, Tensor) and not weight.is_nested and weight.dim() else 0
    if tuple(scale.shape) == (rows, 1) and scale.dtype is not torch.float8_e8m0fnu:
        return values | {"weight_scale": scale.squeeze(1), "block_scale": None}
    return values | {"weight_scale": None, "block_scale": scale}


def call_linear(values: Arguments) -> Any:
    return linear(**public_scale(values))


FORMS: list[Form] = [
    *both("linear", LINEAR, linear_arguments, call_linear, derived=split_scale),
    writing("linear, blocks", LINEAR, blocks_arguments, call_linear, derived=split_scale),
]

# --- any number of rows ---------------------------------------------------------------------------------------------


def _linear(t: Tensors, **options: Any) -> list[Tensor]:
    return list(linear(t["x"], t["weight"], residual=t["r"], add=t["add"], **options))


def _linear_blocks(t: Tensors) -> list[Tensor]:
    """Norm and activation. The scales of blocks depend on the number of columns."""
    blocks = -(-t["x"].shape[1] // 128)
    scale = torch.arange(1, 2 * blocks + 1, device=t["x"].device).float().view(2, blocks) / 64
    named: dict[str, Any] = {"gamma": t["gamma"], "bias": t["bias"], "weight_scale": scale}
    return [linear(t["x"], t["weight"], activation="silu_mul", rounding="hf", **named)]


_FP8_WEIGHT = {"weight": E4M3FN.dtype}
ROWS: Final = (
    Rows(
        "linear",
        {"x": 0, "r": 0, "add": 70},
        {"weight": (70, 0)},
        _linear,
        own={"r": torch.float32},
        shared_out=2000,
    ),
    Rows(
        "linear, norm, activation, fp8 weights in blocks",
        {"x": 0},
        {"weight": (140, 0), "gamma": (0,), "bias": (140,)},
        _linear_blocks,
        own=_FP8_WEIGHT,
        shared_out=2000,
    ),
)
