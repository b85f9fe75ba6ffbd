"""Cases of `quantize`: every format with every kind and layout of scales, with and without a gate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from onepass.formats import FLOATS
from tests.grid import grid
from tests.oracle.case import Case
from tests.rms_norm.quant_cases import FORMATS, GROUPS, PACKED, each, format_of

BF16, F16, F32 = FLOATS

_GATE: Final[dict[str, Any]] = {"gate": BF16}
_SIGMOID: Final = _GATE | {"gate_activation": "sigmoid"}
_STORED: Final = _GATE | {"rounding": "stored"}
_HF: Final = _GATE | {"rounding": "hf"}
_DIVIDE: Final = {"quantize": "divide"}
_E8M0: Final = format_of("e4m3fn", group_size=128, scale_format="ue8m0")


def quantize_cases(op: str) -> Iterator[Case]:
    """All cases."""
    c = partial(grid, Case, op)
    yield from c("short", (5,), [2, 33, 64, 128, 200, 512], options=[{}, _GATE])
    yield from c("formats", (5,), [128, 896, 7168, 20480], options=FORMATS)
    yield from c("groups", (5,), [384, 7168], options=GROUPS)
    yield from c(
        "gates", (5,), [896, 7168, 20480], options=each([FORMATS[0], FORMATS[2], FORMATS[3], FORMATS[5]], _GATE)
    )
    yield from c("gates", (3,), 384, options=each(GROUPS, _GATE))
    yield from c("gates", (3,), [384, 14336], options=each([FORMATS[0], _E8M0], _SIGMOID))
    for x in FLOATS:
        yield from c("dtypes", (3,), 640, x, options=[FORMATS[0], FORMATS[3], FORMATS[5], {"scales_dtype": x}])
        gates = dict.fromkeys((x, F32))
        ways = [{"gate": gate, "rounding": rounding} for gate in gates for rounding in ("once", "hf")]
        yield from c("dtypes", (3,), 640, x, options=ways)
        yield from c("dtypes", (3,), 640, x, options={"gate": F16, "rounding": "stored", "format": "mxfp8"})
    yield from c("rounding", (4,), 640, options=each(FORMATS, _STORED, _HF, _DIVIDE, _GATE | _DIVIDE))
    yield from c("rounding", (4,), [4096, 20480], options=each([FORMATS[2], FORMATS[5], _E8M0], _STORED, _HF))
    yield from _value_cases(op)
    yield from _scale_cases(op)
    few = [FORMATS[0], FORMATS[5]]
    yield from c("layouts", (3, 4), 1536, layout=["sliced", "misaligned", "expanded"], options=each(few, {}, _GATE))
    yield from c("layouts", (3, 4), [128, 20480], layout="misaligned", options=each(few, _HF))
    yield from c("levels", (2, 2, 3, 2, 2), 1536, layout="reversed", options=each(few, {}, _GATE))
    yield from c("ranks", [(), (2, 1, 3, 2)], 352, options=each(few, {}, _GATE))
    yield from c("empty", [(0,), (2, 0)], 64, options=[FORMATS[0], PACKED[1], _GATE])
    yield from c("large", (2048,), 7168, options=[{}, _E8M0, _GATE])


def _value_cases(op: str) -> Iterator[Case]:
    """Rows with NaN, infinities, zeros, large and small numbers: they spoil the row or the group that they are in."""
    c = partial(grid, Case, op, "values", (9,), values="special")
    yield from c(384, options=each(FORMATS, {}, _GATE, _DIVIDE))
    yield from c([4096, 20480], options=each(FORMATS, {}))
    yield from c(384, options=each([GROUPS[0], GROUPS[6], *PACKED], {}, _HF))
    yield from c(384, [F16, F32], options=each([FORMATS[0], FORMATS[5]], {}, _GATE))
    given: list[dict[str, Any]] = [{"format": name, "static_scale": True} for name in ("e4m3fn", "e5m2", "int8")]
    yield from c([384, 20480], options=each(given, {}, _DIVIDE))
    yield from c(
        384, options=[given[0] | _HF, {"min_scale": 0.25, **FORMATS[3]}, {"scale_ub": 1.5}, {"bounded": math.nan}]
    )
    yield from c([384, 4096], options=each([FORMATS[5]], {"global_scale": 300.0}, {"global_scale": math.inf}))


def _scale_cases(op: str) -> Iterator[Case]:
    """Layouts of scales, powers of two rounded down, bounds, and a scale for the whole tensor."""
    c = partial(grid, Case, op, "scales")
    floor = {"scale_format": "ue8m0_floor"}
    yield from c((5,), 640, options=each([FORMATS[1], FORMATS[3], FORMATS[4]], floor, floor | {"scales_dtype": F32}))
    limited: list[dict[str, Any]] = [{"scale_ub": 1.5}, {"bounded": 1.5}, {"bounded": -math.inf}, {"min_scale": 0.25}]
    yield from c((5,), 640, options=each([FORMATS[0], FORMATS[3], FORMATS[5]], *limited))
    yield from c(
        (5,), 640, options=each([FORMATS[5]], {"global_scale": 37.5}, {"global_scale": 0.0, "min_scale": 0.25})
    )
    yield from c((5,), 640, options=[format_of("e4m3fnuz", code_max=224.0), format_of("e4m3fnuz", group_size=64)])
    given = [{"format": name, "static_scale": True} | way for name in ("e4m3fn", "int8") for way in ({}, _GATE)]
    yield from c((3,), [640, 4096, 20480], options=given)
    c = partial(grid, Case, op, "places")
    padded = [format_of("mxfp8", scale_layout="column"), format_of("nvfp4", scale_layout="column_tma")]
    yield from c((5,), 480, options=[*padded, format_of("int8", scale_layout="column_tma")])
    yield from c((130,), 7168, options=PACKED)
    yield from c((2, 67), 1056, options=PACKED[:3])
    yield from c((3,), 20480, options=PACKED[:2])
    yield from c((3, 44), 1536, layout=["transposed", "misaligned"], options=each(PACKED[1:3], {}, _GATE))
