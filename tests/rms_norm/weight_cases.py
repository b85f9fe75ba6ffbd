"""Cases of norms without gamma, with a gamma for each head, and of the stored reciprocal RMS, plain and quantized."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch

from onepass.formats import FLOATS
from onepass.prologues import dequantize
from tests.grid import grid
from tests.oracle.case import Case

BF16, F16, F32 = FLOATS

_HF: Final = {"rounding": "hf"}
_NONE: Final[dict[str, Any]] = {"gamma": None}
_HEADS: Final = {"heads": True}
_RSTD: Final = {"return_rstd": True}


def weight_cases(op: str) -> Iterator[Case]:
    """Of `rms_norm`."""
    c = partial(grid, Case, op)
    yield from c("no gamma", (5,), [128, 4096, 7168, 20000], options=_NONE)
    yield from c("no gamma", (5,), 640, [F16, F32], options=_NONE | _HF)
    yield from c("no gamma", (3, 4), 1536, residual=BF16, layout=["misaligned", "transposed"], options=_NONE)
    yield from c("no gamma", (9,), 384, values="special", options=_NONE | {"gate": BF16, "bias": F32})
    yield from c("heads", (3, 4), [64, 128, 5000, 20000], options=_HEADS)
    yield from c("heads", (2, 3, 5), 128, F16, BF16, options=_HEADS | _HF)
    yield from c("heads", (3, 4), 640, F32, residual=F32, layout="transposed", options=_HEADS | {"weight_offset": 1.0})
    yield from c("heads", (3, 4), 128, layout="misaligned", options=_HEADS | {"gate": BF16})
    yield from c("heads", (2, 2, 3, 2, 2), 128, layout="reversed", options=_HEADS | _RSTD)
    yield from c("heads", (9,), 384, values="special", options=_HEADS)
    yield from c("rstd", (5,), [128, 4096, 20000], options=_RSTD)
    yield from c("rstd", (3, 4), 1536, F16, residual=F16, layout="transposed", options=_RSTD | _HF)
    yield from c("rstd", (9,), 384, F32, values="special", options=_RSTD | {"eps": 0.0})
    yield from c("rstd", (), 128, options=_RSTD)


def layer_weight_cases(op: str) -> Iterator[Case]:
    """Of `layer_norm`; Cohere's norms of q and k have a weight for each head of 128 columns."""
    c = partial(grid, Case, op)
    yield from c("no gamma", (5,), [640, 20000], options=_NONE)
    yield from c("no gamma", (9,), 640, values="special", options=_NONE | {"bias": BF16})
    yield from c("heads", (3, 4), [128, 5000, 20000], options=_HEADS)
    yield from c("heads", (2, 3, 5), 128, layout="transposed", options=_HEADS)
    yield from c("heads", (3, 4), 640, F32, BF16, F32, options=_HEADS | {"weight_offset": 1.0, "bias": F16, **_RSTD})
    yield from c("heads", (9,), 384, F16, values="special", options=_HEADS | _RSTD)
    yield from c("rstd", (5,), [128, 4096, 20000], options=_RSTD)
    yield from c("rstd", (3, 4), 1536, residual=BF16, layout="misaligned", options=_RSTD | {"bias": BF16})


def fp8_weight_cases(op: str) -> Iterator[Case]:
    """Of `rms_norm_fused_fp8`."""
    c, shown = partial(grid, Case, op), {"return_norm": True}
    groups: dict[str, Any] = {"group_size": 128}
    yield from c("no gamma", (5,), [640, 4096], options=[_NONE, _NONE | groups])
    yield from c("no gamma", (5,), 20480, residual=BF16, options=_NONE | _HF | shown)
    yield from c("no gamma", (9,), 384, F16, values="special", options=_NONE)
    yield from c("heads", (3, 4), [128, 4096, 20480], options=[_HEADS, _HEADS | groups])
    yield from c("heads", (3, 4), 640, F16, BF16, F16, options=_HEADS | _HF | shown | _RSTD)
    yield from c("heads", (2, 3, 5), 128, layout="transposed", options=_HEADS | {"quantize": "divide"})
    yield from c("heads", (3, 4), 128, F32, layout="misaligned", options=_HEADS | {"static_scale": True, **_RSTD})
    yield from c("heads", (2, 2, 3, 2, 2), 128, layout="reversed", options=_HEADS | _RSTD)
    yield from c("heads", (9,), 384, values="special", options=_HEADS | {"weight_offset": 1.0})
    eight = {"prologue": dequantize, **shown}
    yield from c("heads", (3, 4), 256, torch.int8, F16, operands=("row",), options=_HEADS | eight)
    yield from c("rstd", (5,), [128, 4096], options=[_RSTD, _RSTD | groups])
    yield from c("rstd", (5,), 20480, residual=BF16, options=_RSTD | shown)
    yield from c("rstd", (9,), 384, values="special", options=_RSTD | {"eps": 0.0})


def quant_weight_cases(op: str) -> Iterator[Case]:
    """Of `rms_norm_fused_quant`."""
    c = partial(grid, Case, op)
    ways: list[dict[str, Any]] = [{"format": "int8"}, {"format": "nvfp4"}, {"statistic": "layer"}]
    stored = {"format": "mxfp8", "rounding": "stored"}
    yield from c("no gamma", (5,), 896, options=[_NONE | way for way in ways])
    yield from c("no gamma", (5,), 4096, residual=BF16, options=_NONE | stored)
    yield from c("heads", (3, 4), 128, options=[_HEADS | way for way in ways])
    yield from c("heads", (3, 4), 4096, residual=BF16, options=_HEADS | _RSTD | stored)
    tiles = {"format": "mxfp4", "scale_layout": "128x4"}
    yield from c("heads", (3, 44), 128, options=_HEADS | tiles)
    yield from c("heads", (3, 4), 640, options=_HEADS | {"gate": BF16, "gate_activation": "sigmoid", **_RSTD})
    yield from c("heads", (3, 4), 20480, options=_HEADS | {"statistic": "layer", "bias": F32, **_RSTD})
    yield from c("rstd", (5,), 896, options=[_RSTD | way for way in ways])
    yield from c("rstd", (9,), 384, values="special", options=_RSTD | ways[2])
