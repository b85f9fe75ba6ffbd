"""Cases of a post-norm, a residual add and a pre-norm in one launch, plain and quantized."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch

from onepass.formats import FLOATS
from tests.grid import grid
from tests.oracle.case import Case

BF16, F16, F32 = FLOATS

_HF: Final = {"rounding": "hf"}
_GEMMA: Final = {"weight_offset": 1.0, "round_sum": True}
_SCALED: Final[dict[str, Any]] = {"branch_scale": 0.22}
_FORMATS: Final[list[dict[str, Any]]] = [
    {"format": name} for name in ("e4m3fn", "e5m2", "int8", "mxfp8", "mxfp4", "nvfp4")
]
_GROUPS: Final[list[dict[str, Any]]] = [
    {"group_size": 128},
    {"group_size": 64, "format": "int8"},
    {"group_size": 32, "format": "e5m2", "scale_format": "ue8m0"},
]
_TILED: Final = {"format": "nvfp4", "scale_layout": "128x4"}


def _sums(x: torch.dtype) -> list[torch.dtype]:
    """The dtypes that a residual may have."""
    return list(dict.fromkeys((x, F32)))


def sandwich_cases(op: str) -> Iterator[Case]:
    """Of `rms_norm_add_rms_norm`; Gemma 2 and 3 have rows of 640 to 5376 columns, GLM-4 of 4096."""
    c = partial(grid, Case, op)
    yield from c("short", (5,), [1, 2, 33, 64, 128, 200, 512, 1024], residual=BF16)
    yield from c("models", (4,), [640, 1152, 2304, 2560, 3584, 3840, 4608, 5376], residual=BF16, options=_GEMMA)
    yield from c("models", (4,), [4096], residual=BF16, options=_HF)
    yield from c("wide", (3,), [4099, 7168, 8192, 16384], residual=BF16)
    yield from c("long", (3,), [16385, 20000], residual=BF16, options=[{}, _HF])
    yield from c("long", (3,), 20000, F32, residual=F32, options={"round_sum": True})
    for x in FLOATS:
        others = [dtype for dtype in FLOATS if dtype != x]
        yield from c("dtypes", (5,), [200, 640], x, residual=_sums(x), options=[{}, _HF])
        yield from c("dtypes", (5,), 640, x, others, residual=x, options=_HF)
        yield from c("dtypes", (5,), 640, x, residual=x, options=[{"post": post} for post in others])
        yield from c("out dtype", (5,), 640, x, residual=x, options=[{"out_dtype": y} for y in others])
    yield from c("dtypes", (5,), 640, F16, residual=F16, options=_HF | {"post": BF16})
    sums = [
        {"rounding": rounding, "round_sum": round_sum} for rounding in ("once", "hf") for round_sum in (True, False)
    ]
    yield from c("sums", (3,), [640, 5376, 20000], residual=BF16, options=sums)
    yield from c("sums", (3,), 640, F16, residual=F32, options=sums)
    yield from c(
        "offset", (5,), [384, 5376], residual=BF16, options=[{"weight_offset": 1.0, "eps": 1e-5}, _HF | _GEMMA]
    )
    yield from c("scaled", (5,), [640, 5376, 20000], residual=BF16, options=[_SCALED, _SCALED | _HF])
    yield from c("scaled", (5,), 640, [F16, F32], residual=F32, options=_SCALED | _GEMMA)
    yield from c(
        "layouts", (3, 4), [640, 5376], residual=BF16, layout=["sliced", "misaligned", "expanded", "transposed"]
    )
    yield from c("layouts", (3, 4), 20000, residual=BF16, layout="misaligned", options=_GEMMA)
    yield from c("levels", [(2, 3, 2, 3), (2, 2, 3, 2, 2)], 128, residual=BF16, layout="reversed")
    yield from c("ranks", [(), (1,), (2, 1, 3, 2)], 352, residual=BF16)
    yield from c("empty", [(0,), (2, 0)], 64, residual=BF16)
    yield from c("values", (9,), [384, 5000, 20000], residual=BF16, values="special", options=[{}, _HF])
    yield from c("values", (9,), 384, [F16, F32], residual=F32, values="special", options={"eps": 0.0})
    yield from c("pattern", (6,), 120, residual=BF16, values="pattern", options=_GEMMA)
    yield from c("large", (2048,), 5376, residual=BF16, options=_GEMMA)


def quant_sandwich_cases(op: str) -> Iterator[Case]:
    """Of `rms_norm_add_rms_norm_quant`."""
    c = partial(grid, Case, op)
    shown: dict[str, Any] = {"return_norm": True}
    yield from c("formats", (5,), [128, 896, 4096, 5376, 20480], residual=BF16, options=_FORMATS)
    yield from c("groups", (5,), [384, 5376], residual=BF16, options=_GROUPS)
    ways: list[dict[str, Any]] = [_HF, {"rounding": "stored"}, {"quantize": "divide"}, {"round_sum": True}]
    for way in ways:
        yield from c("rounding", (4,), 640, residual=BF16, options=[chosen | way for chosen in _FORMATS])
    yield from c("rounding", (4,), 20480, residual=BF16, options=[{"group_size": 128} | way for way in ways])
    for x in FLOATS:
        yield from c("dtypes", (3,), 640, x, F32, residual=_sums(x), options=[shown, shown | {"post": BF16}])
        yield from c("dtypes", (3,), 640, x, residual=x, options={"format": "mxfp8", "rounding": "stored"})
    limits: list[dict[str, Any]] = [
        {"scale_ub": 1.5},
        {"bounded": 1.5},
        {"min_scale": 0.25},
        {"static_scale": True},
        {"static_scale": True, "format": "int8", **_HF},
        {"format": "nvfp4", "global_scale": 37.5},
        {"code_max": 224.0, "format": "e4m3fnuz"},
    ]
    yield from c("scaled", (5,), 640, residual=BF16, options=[_SCALED | way for way in (_FORMATS[0], _FORMATS[3], _HF)])
    yield from c("limits", (5,), 640, residual=BF16, options=limits)
    yield from c("values", (9,), [384, 20480], residual=BF16, values="special", options=[*_FORMATS, *_GROUPS])
    yield from c("outputs", (4,), [640, 7168], residual=[BF16, F32], options=[shown | way for way in (_HF, _GEMMA)])
    places = ["column", "column_tma", "column_packed"]
    yield from c("places", (5,), 480, residual=BF16, options=[{"format": "mxfp8", "scale_layout": p} for p in places])
    yield from c("places", (3, 44), 1536, residual=BF16, layout="transposed", options=_TILED)
    yield from c("layouts", (3, 4), 1536, residual=BF16, layout=["sliced", "misaligned", "transposed"])
    yield from c("levels", (2, 2, 3, 2, 2), 128, residual=BF16, layout="reversed", options=_FORMATS[2:4])
    yield from c("ranks", [(), (2, 1, 3, 2)], 352, residual=BF16, options={"format": "int8"})
    yield from c("empty", (0,), 64, residual=BF16, options=[_FORMATS[0], _TILED])
    yield from c("large", (2048,), 5376, residual=BF16, options=[{}, {"group_size": 128}])
