"""Number formats as data: FP8 encodings and how their scales are made.

Both backends, the oracle and the tests read these tables, so a format is described once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

Rounding = Literal["once", "hf"]
Quantize = Literal["reciprocal", "divide"]
ScaleFormat = Literal["float", "ue8m0"]
ScaleLayout = Literal["row", "column"]
ScaleKind = Literal["row", "group", "static"]

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
ROUNDINGS: Final[tuple[Rounding, ...]] = ("once", "hf")
QUANTIZE: Final[tuple[Quantize, ...]] = ("reciprocal", "divide")
SCALE_FORMATS: Final[tuple[ScaleFormat, ...]] = ("float", "ue8m0")
SCALE_LAYOUTS: Final[tuple[ScaleLayout, ...]] = ("row", "column")
GROUP_SIZES: Final = (64, 128)
OPERAND_GROUPS: Final = (32, 64, 128, 256)
"""Columns that may share one number of a prologue's tensor."""
QUANTIZED: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8)
"""Dtypes of an x that only a prologue can give its meaning."""

FLOAT32_MAX: Final = torch.finfo(torch.float32).max
SMALLEST_SCALE: Final = 2.0**-126
"""A float scale below this (a float32 subnormal) is stored as 0 and its codes are 0."""
SMALLEST_EPS: Final = 2.0**-126
"""A smaller eps counts as this: GPUs take the reciprocal root of a subnormal as that of zero, which is infinite."""


@dataclass(frozen=True)
class Fp8Format:
    """An 8-bit float with 4 exponent and 3 mantissa bits.

    ``bias`` is the exponent bias, so the smallest normal is ``2**(1 - bias)`` and the step below it
    ``2**(-2 - bias)``. ``maxima`` lists the saturation limits a caller may choose; the first is the default.
    """

    name: str
    dtype: torch.dtype
    bias: int
    nan_code: int
    has_negative_zero: bool
    maxima: tuple[float, ...]

    @property
    def max(self) -> float:
        """The default saturation limit."""
        return self.maxima[0]


E4M3FN: Final = Fp8Format("e4m3fn", torch.float8_e4m3fn, 7, 0x7F, True, (448.0,))
E4M3FNUZ: Final = Fp8Format("e4m3fnuz", torch.float8_e4m3fnuz, 8, 0x80, False, (240.0, 224.0))
FP8_FORMATS: Final = {f.dtype: f for f in (E4M3FN, E4M3FNUZ)}


@dataclass(frozen=True)
class ScaleRule:
    """How the scale of a row, a group of columns, or a whole tensor is made, stored and applied.

    ``divides``: the norm is divided by the scale; otherwise it is multiplied by the reciprocal. ``has_least``: the call
    gives a least scale. ``bound_in_memory``: the upper bound of amax is read from a tensor.
    """

    kind: ScaleKind
    dtype: torch.dtype
    group: int = 0
    ue8m0: bool = False
    divides: bool = False
    has_least: bool = False
    bound_in_memory: bool = False
