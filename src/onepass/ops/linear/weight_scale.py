"""The scale of a weight [N, K] as an argument: one element, one per row, or one per block of 128 x 128.

The public argument ``weight_scale`` is two arguments of a contract, because their shapes differ:
``weight_scale`` [1] or [N], and ``block_scale`` [ceil(N / 128), ceil(K / 128)].
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ...core.contract import Arg, Rule
from ...formats import SCALE_BLOCK, WeightScale

BLOCK_DTYPES: Final = (torch.float32, torch.float8_e8m0fnu)

ARGS: Final = {
    "weight_scale": Arg(
        "S", "factor of all weights, or of each row", (torch.float32,), optional=True, sample="positive"
    ),
    "block_scale": Arg(
        "P Q",
        f"factor of each block of {SCALE_BLOCK} rows and columns of float8_e4m3fn weights",
        BLOCK_DTYPES,
        optional=True,
        sample="positive",
    ),
}
_BLOCKS = f"P == -(-N // {SCALE_BLOCK}) and Q == -(-K // {SCALE_BLOCK})"
_SHAPE = f"[-(-N // {SCALE_BLOCK}), -(-K // {SCALE_BLOCK})]"
RULES: Final = (
    Rule("weight_scale is None or S == 1 or S == N", "weight_scale", "have one element, or one per row of weight"),
    Rule(
        "block_scale is None or weight.dtype == torch.float8_e4m3fn",
        "block_scale",
        "have shape [1], [N] or [N, 1] unless weight is float8_e4m3fn",
    ),
    Rule(
        f"block_scale is None or {_BLOCKS}",
        "block_scale",
        f"have shape [1], [N], [N, 1] or, with one scale per {SCALE_BLOCK} rows and columns, "
        f"[ceil(N / {SCALE_BLOCK}), ceil(K / {SCALE_BLOCK})]={{{_SHAPE}}}",
    ),
    Rule("weight_scale is None or block_scale is None", "block_scale", "be None with weight_scale"),
)
CARRIED: Final = {"weight_scale": tuple(ARGS)}
KNOWN_AS: Final = {"block_scale": "weight_scale"}


def split(weight: Tensor, scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The public argument as the contract's two. A column [N, 1] is a scale per row."""
    if not isinstance(scale, Tensor) or scale.dim() != 2 or scale.is_nested or scale.layout is not torch.strided:
        return scale, None
    rows = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else None
    if scale.shape[1] == 1 and scale.shape[0] == rows and scale.dtype is not torch.float8_e8m0fnu:
        return scale[:, 0], None
    return None, scale


def kind_of(weight: Tensor, scale: Tensor | None, blocks: Tensor | None) -> WeightScale:
    """How validated weights are scaled. If there is one row, one element is a scale per row."""
    if blocks is not None:
        return "block" if blocks.dtype is torch.float32 else "ue8m0_block"
    if scale is None:
        return "none"
    return "tensor" if scale.shape[0] == 1 != weight.shape[0] else "row"
