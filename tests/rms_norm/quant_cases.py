"""Cases of rms_norm_fused_quant: every format with every kind and layout of scales that it has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from onepass.formats import FLOATS
from onepass.prologues import dequantize, silu_and_mul
from tests.grid import grid
from tests.oracle.case import Case

BF16, F16, F32 = FLOATS
E8M0 = torch.float8_e8m0fnu

_LAYOUTS = ["sliced", "misaligned", "transposed"]
_STORED = {"rounding": "stored"}
_VLLM_INT8 = {"rounding": "hf", "round_sum": False, "min_scale": 2.0**-23}


def format_of(name: str, **options: Any) -> dict[str, Any]:
    """Options of a format."""
    return {"format": name, **options}


FORMATS: list[dict[str, Any]] = [
    format_of("e4m3fn"),
    format_of("e5m2"),
    format_of("int8"),
    format_of("mxfp8"),
    format_of("mxfp4"),
    format_of("nvfp4"),
]
BLOCKS = [format_of("mxfp8"), format_of("mxfp4"), format_of("nvfp4")]
GROUPS = [format_of(name, group_size=size) for name in ("e4m3fn", "int8") for size in (16, 32, 64, 128)]
GROUPS.append(format_of("e5m2", group_size=32, scale_format="ue8m0"))
PACKED = [
    format_of("mxfp8", scale_layout="column_packed"),
    format_of("mxfp4", scale_layout="128x4"),
    format_of("nvfp4", scale_layout="128x4"),
    format_of("e4m3fn", group_size=128, scale_format="ue8m0", scale_layout="column_packed"),
]
_ROUNDINGS: list[dict[str, Any]] = [
    _STORED,
    {"rounding": "hf"},
    {"quantize": "divide"},
    _STORED | {"quantize": "divide"},
]


def each(formats: list[dict[str, Any]], *ways: dict[str, Any]) -> list[dict[str, Any]]:
    """Each format with each further options."""
    return [chosen | way for chosen in formats for way in ways]


def quant_cases(op: str) -> Iterator[Case]:
    """All cases."""
    c = partial(grid, Case, op)
    yield from c("formats", (5,), [128, 896, 4096, 7168, 20480], options=FORMATS)
    yield from c("groups", (5,), [384, 7168], options=GROUPS)
    yield from c("groups", (3,), 20480, options=[GROUPS[0], GROUPS[4], GROUPS[7]])
    for x in FLOATS:
        yield from c("dtypes", (3,), 640, x, F32, options=FORMATS)
        yield from c("dtypes", (3,), 640, x, options=each(FORMATS, _STORED))
        scales: list[dict[str, Any]] = [{"scales_dtype": x}, {"scales_dtype": x, "group_size": 32}]
        yield from c("dtypes", (3,), 640, options=each([format_of("int8")], *scales))
    yield from c("rounding", (4,), 640, residual=BF16, options=each(FORMATS, *_ROUNDINGS))
    yield from c("rounding", (4,), 4096, residual=BF16, options=each(FORMATS, _STORED))
    yield from c("rounding", (4,), 20480, options=each([FORMATS[2], FORMATS[5]], _STORED))
    yield from c("rounding", (4,), 7168, residual=BF16, options=each(FORMATS, _STORED | {"round_sum": True}))
    yield from c("values", (9,), 384, values="special", options=each(FORMATS, {}, _STORED, {"quantize": "divide"}))
    yield from c("values", (9,), [4096, 20480], values="special", options=FORMATS)
    yield from c("values", (9,), 384, values="special", options=each(GROUPS[:5], {}))
    yield from c("values", (9,), 384, values="special", options=each(PACKED, {}))
    yield from c("layouts", (3, 4), 1536, layout=_LAYOUTS, options=FORMATS)
    yield from c("layouts", (3, 4), 128, layout="misaligned", options=FORMATS)
    yield from c("layouts", (3, 4), 1536, residual=BF16, layout="transposed", options=each(BLOCKS, _STORED))
    yield from c("levels", (2, 3, 2, 3), 128, layout="reversed", options=FORMATS)
    yield from c("levels", (2, 2, 3, 2, 2), 1536, layout="reversed", options=FORMATS[2:])
    yield from c("ranks", [(), (2, 1, 3, 2)], 352, options=FORMATS)
    yield from c("empty", (0,), 64, options=[*FORMATS, *PACKED[:3]])
    yield from _scale_cases(op)
    yield from _int8_cases(op)
    operands: dict[str, Any] = {"operands": ("full",)}
    fused = {"prologue": silu_and_mul}
    yield from c("prologues", (4,), 1536, **operands, options=each(FORMATS, fused))
    read = {"prologue": dequantize}
    yield from c("prologues", (4,), 1536, torch.int8, BF16, operands=("group128",), options=each(FORMATS[2:], read))
    shown = {"return_norm": True}
    yield from c("outputs", (4,), 7168, residual=F32, options=each(FORMATS, shown))
    yield from c("large", (2048,), 7168, options=[*FORMATS, *PACKED])


def _scale_cases(op: str) -> Iterator[Case]:
    """Layouts of scales, powers of two rounded down, bounds, and a scale for the whole tensor."""
    c = partial(grid, Case, op, "scales")
    floor = {"scale_format": "ue8m0_floor"}
    yield from c((5,), [384, 4096], options=each(BLOCKS[:2], floor, floor | {"scales_dtype": F32}))
    yield from c((5,), 640, options=each([FORMATS[0], FORMATS[1]], floor, floor | {"group_size": 32}))
    limited: list[dict[str, Any]] = [{"scale_ub": 1.5}, {"bounded": 1.5}, {"bounded": -math.inf}, {"min_scale": 0.25}]
    yield from c((5,), 640, options=each(FORMATS[1:], *limited))
    yield from c((9,), 384, values="special", options=each(BLOCKS, {"min_scale": 0.25}))
    for overall in (1.0, 37.5, 2.0**-4, 1e5, math.inf):
        wide = {"global_scale": overall}
        yield from c((5,), 640, options=each([FORMATS[5]], wide, wide | {"quantize": "divide"}))
    wide_ones = [{"global_scale": overall} for overall in (300.0, math.inf)]
    yield from c((9,), [384, 4096, 20480], values="special", options=each([FORMATS[5]], *wide_ones))
    raised = {"global_scale": 0.0, "min_scale": 0.25}
    yield from c((5,), 640, options=each([FORMATS[5]], raised, raised | {"quantize": "divide"}))
    c = partial(grid, Case, op, "places")
    padded = [format_of(f["format"], scale_layout=order) for f in BLOCKS for order in ("column", "column_tma")]
    padded += [
        format_of("int8", group_size=32, scale_layout="column_tma"),
        format_of("int8", scale_layout="column_tma"),
    ]
    yield from c((5,), [480, 4096], options=padded)
    yield from c((5,), 480, options=PACKED[:3])
    yield from c((130,), [384, 4096, 7168], options=PACKED)
    yield from c((2, 67), [32, 96, 1056], options=PACKED[:3])
    yield from c((2, 3, 5), 640, options=[*padded, *PACKED])
    yield from c((3,), 20480, options=PACKED)
    yield from c((3, 44), 1536, layout="transposed", options=PACKED)
    yield from c((3, 44), 1536, layout="misaligned", options=PACKED)


def _int8_cases(op: str) -> Iterator[Case]:
    """int8 as vLLM's kernels make it, and with a given scale."""
    c, int8 = partial(grid, Case, op, "int8"), format_of("int8")
    yield from c((3,), [128, 640, 4096, 7168, 20480], residual=[None, BF16], options=each([int8], _VLLM_INT8))
    yield from c((9,), 384, residual=BF16, values="special", options=each([int8], _VLLM_INT8))
    static: list[dict[str, Any]] = [{}, {"rounding": "hf"}, {"quantize": "divide"}, _STORED]
    given = each([int8, format_of("e5m2")], *({"static_scale": True} | way for way in static))
    yield from c((3,), [640, 4096, 20480], options=given)
    yield from c((9,), 384, values="special", options=given)
