"""Number formats as data: FP8 encodings, formats of scales, and how scales are computed.

Contracts, both backends, the oracle and the tests read these objects, so a format is described once.
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
SCALE_LAYOUTS: Final[tuple[ScaleLayout, ...]] = ("row", "column")
GROUP_SIZES: Final = (64, 128)
"""Numbers of columns that may share a scale."""
OPERAND_GROUPS: Final = (32, 64, 128, 256)
"""Numbers of columns that may share one element of a prologue's tensor."""

FLOAT32_MAX: Final = torch.finfo(torch.float32).max
SMALLEST_SCALE: Final = 2.0**-126
"""A float scale below this (a float32 subnormal) is stored as 0, and its codes are 0."""
SMALLEST_EPS: Final = 2.0**-126
"""Smaller epsilons are raised to this: GPUs flush subnormals, so the reciprocal root would be infinite."""


@dataclass(frozen=True)
class Fp8Format:
    """An 8-bit float: a sign, 4 exponent bits and 3 mantissa bits.

    ``bias`` is the exponent bias: the smallest normal is ``2**(1 - bias)`` and the step below it
    ``2**(-2 - bias)``. ``nan_code`` is the code of NaN, which has either sign if the format has a
    negative zero. ``maxima`` lists the saturation limits that a caller may choose, the default first.
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
QUANTIZED: Final = (*FP8_FORMATS, torch.int8)
"""Dtypes of an x that needs a prologue to interpret it."""


@dataclass(frozen=True)
class ScaleEncoding:
    """How a computed scale is stored: the ``dtypes`` it may have, and whether it is rounded up to a power of two."""

    name: ScaleFormat
    dtypes: tuple[torch.dtype, ...]
    power_of_two: bool


SCALE_FORMATS: Final = {
    s.name: s
    for s in (
        ScaleEncoding("float", FLOATS, power_of_two=False),
        ScaleEncoding("ue8m0", (torch.float32, torch.float8_e8m0fnu), power_of_two=True),
    )
}
SCALE_DTYPES: Final = tuple(dict.fromkeys(dtype for s in SCALE_FORMATS.values() for dtype in s.dtypes))


@dataclass(frozen=True)
class ScaleRule:
    """How the scale of a row, a group of columns or a whole tensor is computed, stored and applied.

    ``divides``: the norm is divided by the scale; otherwise it is multiplied by the reciprocal.
    ``has_least``: the call sets a smallest scale. ``bound_in_memory``: the upper bound of amax is a tensor.
    """

    kind: ScaleKind
    dtype: torch.dtype
    group: int = 0
    ue8m0: bool = False
    divides: bool = False
    has_least: bool = False
    bound_in_memory: bool = False
