"""Cases of gates, biases, LayerNorm and output dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from onepass.formats import FLOATS
from onepass.ops.rms_norm.launch import GATE_ACTIVATIONS
from tests.grid import grid
from tests.oracle.case import Case

BF16, F16, F32 = FLOATS

_HF: Final = {"rounding": "hf"}
_BEFORE: Final = {"gate": BF16, "gate_order": "before"}
_BOTH: Final = {"gate": BF16, "bias": F32}
_OTHER_ACTIVATIONS: Final = GATE_ACTIVATIONS[1:]
"""Silu is in the group "gate"."""


def norm_cases(op: str) -> Iterator[Case]:
    """Of `rms_norm`: a gate and a bias, alone and together, and results of another dtype."""
    c = partial(grid, Case, op)
    ways: list[dict[str, Any]] = [{"gate": BF16}, _BEFORE, {"bias": BF16}]
    yield from c("gate", (5,), [128, 2048, 5000, 20000], options=[ways[0], ways[1]])
    yield from c("gate", (3,), 640, residual=BF16, options=[way | more for way in ways for more in ({}, _HF)])
    yield from c("gate", (3, 4), 1536, layout=["sliced", "misaligned", "transposed"], options=_BOTH)
    yield from c("gate", (2, 3, 2, 3), 128, layout="reversed", options=_BOTH)
    for x in (F16, F32):
        yield from c("gate", (3,), 640, x, BF16, options={"gate": F32, "bias": BF16, "rounding": "hf"})
        yield from c("gate", (9,), 384, x, values="special", options={"gate": x, "weight_offset": 1.0})
    for activation in _OTHER_ACTIVATIONS:
        yield from _activation_cases(op, activation)
    yield from c("bias", (5,), [128, 4096, 20000], options=[{"bias": BF16}, {"bias": F32, **_HF}])
    yield from c("bias", (9,), 384, values="special", options={"bias": F16, "eps": 0.0})
    for x in FLOATS:
        others = [{"out_dtype": out} for out in FLOATS if out != x]
        yield from c("out dtype", (3,), [640, 5000], x, options=others)
    yield from c("out dtype", (3, 4), 20000, layout="misaligned", residual=F32, options=_HF | {"out_dtype": F32})


def _activation_cases(op: str, activation: str) -> Iterator[Case]:
    """Of `rms_norm`: gates with another activation than silu. Kimi Linear's has sigmoid and 128 columns."""
    c = partial(grid, Case, op, activation)
    gated: dict[str, Any] = {"gate": BF16, "gate_activation": activation}
    before = gated | {"gate_order": "before"}
    yield from c((5,), [128, 2048, 20000], options=gated)
    yield from c((5,), [128, 5000], options=before)
    yield from c((3,), 640, residual=BF16, options=[gated | _HF, before | _HF, gated | {"bias": F32}])
    yield from c((3, 4), 128, gamma=F32, layout=["misaligned", "transposed"], options=gated)
    for x in (F16, F32):
        yield from c((3,), 640, x, BF16, options=gated | {"gate": F32, **_HF})
        yield from c((9,), 384, x, values="special", options=gated | {"gate": x, "weight_offset": 1.0})


def layer_cases(op: str) -> Iterator[Case]:
    """Of `layer_norm`."""
    c = partial(grid, Case, op)
    yield from c("short", (5,), [2, 33, 64, 200, 512])
    yield from c("model", (5,), [2048, 4096, 7168, 8192], options={"bias": BF16})
    yield from c("odd", (5,), [1025, 7919])
    yield from c("wide", (5,), [16384, 20000, 131072], options=[{}, {"bias": F32}])
    yield from c("layouts", (3, 4), [128, 1536, 20000], layout=["misaligned", "transposed"], residual=BF16)
    yield from c("levels", (2, 3, 2, 3), 128, layout="reversed", options={"bias": BF16})
    yield from c("ranks", [(), (2, 1, 3, 2)], 300)
    yield from c("empty", (0,), 64)
    for x in FLOATS:
        yield from c("dtypes", (3,), 640, x, BF16, sorted({None, x, F32}, key=str), options={"bias": F16})
        yield from c("values", (9,), 384, x, values="special", options={"bias": x})
    yield from c("values", (9,), 20000, values="special")
    yield from c(
        "options", (4,), 512, residual=BF16, options=[{"round_sum": True}, {"weight_offset": 1.0, "eps": 1e-3}]
    )
    yield from c("options", (4,), 512, options={"out_dtype": F32})
    yield from c("large", (1024,), 8192, options={"bias": BF16})


def code_cases(op: str) -> Iterator[Case]:
    """Of `rms_norm_fused_quant`: the same, quantized."""
    c = partial(grid, Case, op)
    layer, shown = {"statistic": "layer"}, {"return_norm": True}
    ways: list[dict[str, Any]] = [{"gate": BF16}, _BEFORE, layer | {"bias": BF16}, layer]
    scales: list[dict[str, Any]] = [{}, {"group_size": 128}]
    yield from c("gate", (4,), [640, 4096], options=[way | more for way in ways for more in scales])
    yield from c("gate", (4,), 20480, residual=BF16, options=[way | shown for way in ways])
    yield from c("gate", (4,), 640, F16, options=[ways[0] | _HF, ways[0] | {"rounding": "stored"}])
    yield from c("gate", (4,), 640, F32, options=layer | {"gate": BF16, "bias": F32, "quantize": "divide"})
    formats = [{"format": name} for name in ("int8", "mxfp8", "nvfp4")]
    yield from c("gate", (5,), 896, options=[way | chosen for way in (ways[0], ways[2]) for chosen in formats])
    yield from c("gate", (4,), 7168, options=[layer | chosen for chosen in ({}, *formats[:2])])
    yield from c("gate", (4,), 8192, options=layer)
    yield from c("gate", (3, 4), 1536, layout="misaligned", options=[ways[0], ways[2]])
    yield from c("gate", (9,), 384, values="special", options=ways)
    for activation in _OTHER_ACTIVATIONS:
        c = partial(grid, Case, op, activation)
        gated: dict[str, Any] = {"gate": BF16, "gate_activation": activation}
        yield from c((4,), [128, 4096], options=[gated | more for more in scales])
        yield from c((4,), 20480, residual=BF16, options=gated | shown)
        yield from c((4,), 640, F16, options=[gated | _HF, gated | {"gate_order": "before"}])
        yield from c((5,), 896, options=[gated | chosen for chosen in formats])
        yield from c((4,), 640, F32, options=gated | layer | {"bias": F32, "quantize": "divide"})
        yield from c((9,), 384, values="special", options=gated)
