"""The matrix of cases of rms_norm, layer_norm, rms_norm_add_rms_norm, the norms that quantize, and quantize."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from onepass.formats import FLOATS, FP8_FORMATS, QUANTIZED
from onepass.prologues import add, dequantize, silu_and_mul
from onepass.testing.rms_norm import soft_cap_gate
from tests.grid import grid
from tests.oracle.case import Case
from tests.rms_norm.finish_cases import code_cases, layer_cases, norm_cases
from tests.rms_norm.option_cases import sum_cases, vllm_cases
from tests.rms_norm.quant_cases import quant_cases
from tests.rms_norm.quantize_cases import quantize_cases
from tests.rms_norm.sandwich_cases import quant_sandwich_cases, sandwich_cases
from tests.rms_norm.weight_cases import fp8_weight_cases, layer_weight_cases, quant_weight_cases, weight_cases

BF16, F16, F32 = FLOATS
E8M0, FP8, FNUZ = torch.float8_e8m0fnu, *FP8_FORMATS

LENGTHS = {
    "short": [1, 2, 31, 33, 64, 127, 128, 129, 200, 512],
    "model": [896, 2048, 2880, 4096, 5120, 7168, 8192],
    "odd": [1025, 4097, 7919],
    "wide": [12288, 16384, 16385, 20000, 131072],
}
"""short: several rows per program; model: hidden sizes, many in several chunks; odd: no vector divides them; wide: more
chunks, then rows that are walked."""
OTHER_GAMMAS = ((BF16, F16), (F16, BF16), (F32, BF16), (F32, F16))
"""Dtypes of x, and of a gamma with neither x's dtype nor float32."""
_LAYOUTS = ["sliced", "misaligned", "expanded", "transposed"]
_ROUNDINGS = [{"rounding": "once"}, {"rounding": "hf"}]
_HF = {"rounding": "hf"}
_THREE = ("full", "column", "row")


def _common_cases(op: str) -> Iterator[Case]:
    c = partial(grid, Case, op)
    for group, lengths in LENGTHS.items():
        yield from c(group, (5,), lengths)
    yield from c("layouts", (3, 4), [128, 1536, 20000], layout=_LAYOUTS)
    yield from c("levels", (2, 3, 2, 3), 128, layout="reversed")
    yield from c("ranks", [(), (2, 1, 3, 2)], 300)
    yield from c("empty", (0,), 64)
    yield from c("values", (9,), 20000, values="special")
    yield from c("large", (1024,), 8192)


def _rms_norm_cases(op: str) -> Iterator[Case]:
    c = partial(grid, Case, op)
    yield from _common_cases(op)
    for x in FLOATS:
        gammas, residuals = list(dict.fromkeys((x, F32))), list(dict.fromkeys((None, x, F32)))
        yield from c("dtypes", (3,), 640, x, gammas, residuals, options=_ROUNDINGS)
        yield from c("values", (9,), 384, x, values="special")
        yield from c("values", (9,), 384, x, residual=x, values="special", options=_HF)
        yield from c("chunks", (3,), 3072, x, residual=x, options=_HF)
        yield from c("chunks", (3,), 5000, x, F32, residual=F32)
    for x, gamma in OTHER_GAMMAS:
        yield from c("gammas", (3,), 640, x, gamma, options=_ROUNDINGS)
        yield from c("gammas", (5,), 4096, x, gamma, residual=x)
        yield from c("gammas", (3,), 20000, x, gamma, options={"weight_offset": 1.0})
    yield from c("gammas", (3, 4), 1536, F32, BF16, layout="misaligned")
    yield from c("gammas", (9,), 384, F16, BF16, values="special")
    yield from c("gammas", (5,), [200, 4096, 20000], F16, BF16, [None, F16], values="spread", options=_HF)
    yield from c("layouts", (3, 4), [128, 1536, 20000], residual=BF16, layout=_LAYOUTS)
    yield from c("layouts", (2, 3, 4), 96, layout="transposed")
    yield from c("levels", (2, 2, 3, 2, 2), 1536, residual=BF16, layout="reversed")
    yield from c("options", (4,), 512, options=[{"weight_offset": 1.0, "eps": 1e-5}, {"eps": 0.0}])
    yield from c("chunks", (3, 4), 5000, layout=["misaligned", "transposed"])
    yield from c("chunks", (9,), 3072, values="special")
    yield from sum_cases(op, "once", True, [64, 640, 4096, 5000, 20000])
    yield from sum_cases(op, "hf", False, [64, 640, 2048, 4096, 5000, 5120, 7168, 8192, 20000])
    yield from c("large", (2048,), 4096, residual=BF16)


def _lane_cases(op: str) -> Iterator[Case]:
    """Groups of rows in whole chunks, where a GPU keeps each chunk's scales in lanes of their own: one per tile layout."""
    c, groups = partial(grid, Case, op, "lanes"), {"group_size": 128}
    yield from c((3,), [3072, 4096, 5120, 6144, 8192, 16384], options=groups)
    for x in FLOATS:
        yield from c((3,), 4096, x, options={"group_size": 64})
        yield from c((3,), 7168, x, F32, options=groups)
        yield from c((3,), 4096, options=groups | {"scales_dtype": x})
    yield from c((3,), 7168, residual=BF16, options=groups | {"return_norm": True})
    yield from c((3,), 4096, options=groups | {"weight_offset": 1.0, "scale_ub": 1.5})
    yield from c((3, 4), 4096, layout="transposed", options=groups | {"scale_layout": "column"})
    for out in FP8_FORMATS:
        ways = [groups | {"out_dtype": out} | way for way in ({}, _HF, {"scale_format": "ue8m0"})]
        yield from c((9,), 4096, values="special", options=ways)


def _dequantize_cases(op: str) -> Iterator[Case]:
    """8-bit rows, and operands with a value per group of columns."""
    c = partial(grid, Case, op, "dequantize")
    options: dict[str, Any] = {"prologue": dequantize}
    for x in QUANTIZED:
        yield from c((4,), 1536, x, BF16, operands=("group128",), options=options)
        yield from c((3,), 20480, x, BF16, residual=BF16, operands=("group128",), options=options)
        yield from c((5,), 200, x, F32, operands=("row",), options=options | {"return_norm": True})
    yield from c((4,), 768, FP8, BF16, operands=[(f"group{g}",) for g in (32, 64, 256)], options=options)
    shown = options | {"group_size": 128, "return_norm": True}
    yield from c((3,), 7168, FP8, BF16, BF16, operands=("group128",), options=shown)
    yield from c((3,), 4096, torch.int8, F16, F32, operands=("row",), options=shown)
    layouts = ["sliced", "misaligned", "transposed"]
    yield from c((3, 4), 640, FP8, BF16, BF16, ("group64",), layouts, options=options)
    yield from c((), 512, torch.int8, BF16, operands=("group64",), options=options)
    yield from c((4,), 1536, BF16, operands=("group128",), options=options)
    three = ("full", "column", "group32")
    yield from c((4,), 1536, FP8, BF16, BF16, three, options={"prologue": soft_cap_gate})


def _fp8_cases(op: str) -> Iterator[Case]:
    c, gate, groups = partial(grid, Case, op), {"prologue": soft_cap_gate}, {"group_size": 128}
    ue8m0, static = {"scale_format": "ue8m0"}, {"static_scale": True}
    yield from _common_cases(op)
    for x in FLOATS:
        yield from c("dtypes", (4,), 640, x, list(dict.fromkeys((x, F32))), options=_ROUNDINGS)
        yield from c("dtypes", (4,), 640, x, options=[{"scales_dtype": s, "out_dtype": FNUZ} for s in FLOATS])
        yield from c("chunks", (3,), 3072, x, F32, options=_HF)
    for x, gamma in OTHER_GAMMAS:
        yield from c("gammas", (4,), 640, x, gamma, options=_ROUNDINGS)
        yield from c("gammas", (3,), 4096, x, gamma, options=groups)
        yield from c("gammas", (3,), 20000, x, gamma, residual=x, options={"return_norm": True})
    yield from c("gammas", (4,), [640, 4096], F16, BF16, values="spread", options=_HF | {"return_norm": True})
    orders = [{"group_size": size, "scale_layout": order} for size in (64, 128) for order in ("row", "column")]
    powers = [groups | ue8m0 | {"scales_dtype": E8M0}, groups | ue8m0 | _HF]
    yield from c("groups", (6,), [384, 7168, 20480], options=[*orders, *powers])
    yield from c("groups", (6,), [384, 7168, 20480], layout="misaligned", options=groups)
    yield from c("groups", (2, 3), 256, options={"group_size": 64, "scale_layout": "column"})
    yield from _lane_cases(op)
    ways: list[dict[str, Any]] = [ue8m0 | {"scales_dtype": E8M0}, ue8m0, {"scale_ub": 1.5}, static, static | _HF]
    yield from c("scales", (4,), [512, 20000], options=ways)
    yield from c(
        "scales", (4,), 512, options=[{"out_dtype": FNUZ, "fp8_max": 224.0}, {"out_dtype": FNUZ, "scale_ub": 1.0}]
    )
    lengths = [640, 7168, 20000]
    yield from c("outputs", (4,), lengths, residual=BF16)
    yield from c("outputs", (4,), lengths, residual=F32, options={"return_norm": True, **_HF})
    yield from c("outputs", (4,), lengths, options={"return_norm": True})
    lengths = [1536, 20000]
    yield from c("prologues", (4,), lengths, operands=("full",), options={"prologue": silu_and_mul})
    yield from c("prologues", (4,), lengths, operands=("full",), options={"prologue": add}, layout="sliced")
    yield from c("prologues", (4,), lengths, operands=("row",), options={"prologue": dequantize})
    yield from c("prologues", (4,), lengths, operands=_THREE, residual=BF16, options=gate)
    yield from _dequantize_cases(op)
    yield from c("levels", (2, 2, 3, 2, 2), 1536, operands=_THREE, layout="reversed", options=gate)
    for out in FP8_FORMATS:
        special = [{"out_dtype": out} | way for way in ({}, _HF, groups, ue8m0, static)]
        yield from c("values", (9,), 384, values="special", options=special)
    offsets = [{"eps": 1e-5, "weight_offset": offset, "scale_ub": 448.0} for offset in (0.0, 1.0)]
    yield from c("pattern", [(6,), (2, 3), (2, 1, 3)], 120, values="pattern", options=offsets)
    yield from c("chunks", (9,), 5000, values="special")
    yield from c("chunks", (3, 4), 5000, layout="misaligned")
    yield from c("chunks", (4,), 3072, options=static)
    yield from c("chunks", (4,), 9216, options=groups)
    yield from c("chunks", (4,), 5000, operands=_THREE, residual=BF16, options=gate)
    yield from vllm_cases(op)
    yield from c("large", (2048,), 7168)


CASES = (
    *_rms_norm_cases("rms_norm"),
    *_fp8_cases("rms_norm_fused_fp8"),
    *quant_cases("rms_norm_fused_quant"),
    *norm_cases("rms_norm"),
    *layer_cases("layer_norm"),
    *code_cases("rms_norm_fused_quant"),
    *weight_cases("rms_norm"),
    *layer_weight_cases("layer_norm"),
    *fp8_weight_cases("rms_norm_fused_fp8"),
    *quant_weight_cases("rms_norm_fused_quant"),
    *sandwich_cases("rms_norm_add_rms_norm"),
    *quant_sandwich_cases("rms_norm_add_rms_norm_quant"),
    *quantize_cases("quantize"),
)
THREADED = (
    Case("rms_norm", "threads", (7,), 640),
    Case("rms_norm", "threads", (150,), 1024, F32, residual=F32),
    Case("rms_norm_fused_fp8", "threads", (3,), 512, residual=BF16),
    Case("rms_norm_fused_fp8", "threads", (140,), 1024, options={"group_size": 128}),
)
"""Cases with little work, which the calling thread does, and with enough to split on a CPU, for `tools/concurrency.py`."""
