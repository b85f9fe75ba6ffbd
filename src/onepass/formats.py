"""Number formats as data: codes of 8 and 4 bits, formats and layouts of scales, and how scales are computed.

Contracts, both backends, the oracle and the tests read these objects, so a format is described once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch

Rounding = Literal["once", "hf", "stored", "hf_rope", "reference"]
"""Where values are rounded. docs/numerics.md has what each word means, and an op's contract which of them it takes."""
Quantize = Literal["reciprocal", "divide"]
ScaleFormat = Literal["float", "ue8m0", "ue8m0_floor", "e4m3"]
ScaleLayout = Literal["row", "column", "column_tma", "column_packed", "128x4"]
ScaleKind = Literal["row", "group", "static"]
Packing = Literal["", "words", "128x4"]
QuantFormatName = Literal["e4m3fn", "e4m3fnuz", "e5m2", "int8", "mxfp8", "mxfp4", "nvfp4"]

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
ROUNDINGS: Final[tuple[Rounding, ...]] = ("once", "hf")
"""The roundings of every norm."""
QUANTIZE: Final[tuple[Quantize, ...]] = ("reciprocal", "divide")
SCALE_LAYOUTS: Final[tuple[ScaleLayout, ...]] = ("row", "column", "column_tma", "column_packed", "128x4")
GROUP_SIZES: Final = (16, 32, 64, 128)
"""Numbers of columns that may share a scale."""
OPERAND_GROUPS: Final = (32, 64, 128, 256)
"""Numbers of columns that may share one element of a prologue's tensor."""

FLOAT32_MAX: Final = torch.finfo(torch.float32).max
SMALLEST_SCALE: Final = 2.0**-126
"""A float scale below this (a float32 subnormal) is stored as 0, and its codes are 0."""
SMALLEST_EPS: Final = 2.0**-126
"""Smaller epsilons are raised to this: GPUs flush subnormals, so the reciprocal root would be infinite."""


@dataclass(frozen=True)
class CodeFormat:
    """How a number becomes a code, which is a small float or an integer.

    A float's smallest normal is ``2**(1 - bias)`` and the step below it ``2**(1 - bias - mantissa)``.

    Args:
        name: Name of the format.
        dtype: Dtype of the codes. 4-bit codes are stored in pairs, the even column in the low half of a byte.
        bias: Exponent bias.
        nan_code: The code of NaN, which has either sign if the format has a negative zero. 0 in formats without a NaN: their
            scale is NaN instead.
        has_negative_zero: Whether there is a code for -0.
        maxima: Saturation limits that a caller may choose, the default first.
        mantissa: Mantissa bits.
        bits: Bits of a code.
        integer: Whether codes are integers.
    """

    name: str
    dtype: torch.dtype
    bias: int
    nan_code: int
    has_negative_zero: bool
    maxima: tuple[float, ...]
    mantissa: int = 3
    bits: int = 8
    integer: bool = False

    @property
    def max(self) -> float:
        """The default saturation limit."""
        return self.maxima[0]

    @property
    def has_nan(self) -> bool:
        """Whether a code stands for NaN."""
        return self.nan_code != 0

    @property
    def largest_power(self) -> float:
        """The largest power of two that is a code: OCP's MX formats divide amax by it."""
        return float(2 ** math.floor(math.log2(self.max)))


Fp8Format = CodeFormat
"""A `CodeFormat` with 8-bit floats."""

E4M3FN: Final = CodeFormat("e4m3fn", torch.float8_e4m3fn, 7, 0x7F, True, (448.0,))
E4M3FNUZ: Final = CodeFormat("e4m3fnuz", torch.float8_e4m3fnuz, 8, 0x80, False, (240.0, 224.0))
E5M2: Final = CodeFormat("e5m2", torch.float8_e5m2, 15, 0x7F, True, (57344.0,), mantissa=2)
INT8: Final = CodeFormat("int8", torch.int8, 0, 0, False, (127.0,), mantissa=0, integer=True)
E2M1: Final = CodeFormat("e2m1", torch.uint8, 1, 0, True, (6.0,), mantissa=1, bits=4)
FP8_FORMATS: Final = {f.dtype: f for f in (E4M3FN, E4M3FNUZ)}
FP8_CODES: Final = {f.dtype: f for f in (E4M3FN, E4M3FNUZ, E5M2)}
"""The formats of the codes of `rms_norm_fused_fp8`. Weights, caches and other ops have those of ``FP8_FORMATS``."""
CODE_FORMATS: Final = {f.dtype: f for f in (E4M3FN, E4M3FNUZ, E5M2, INT8, E2M1)}
QUANTIZED: Final = (*FP8_FORMATS, torch.int8)
"""Dtypes of an x that needs a prologue to interpret it."""


@dataclass(frozen=True)
class ScaleEncoding:
    """How a computed scale is stored.

    Args:
        name: Name of the format.
        dtypes: Dtypes it may have, the default first.
        power_of_two: Whether it is rounded to a power of two: up, unless ``floor``.
        floor: Round down, as OCP's MX specification has it.
    """

    name: ScaleFormat
    dtypes: tuple[torch.dtype, ...]
    power_of_two: bool
    floor: bool = False


_POWERS: Final = (torch.float8_e8m0fnu, torch.float32, torch.int32)
SCALE_FORMATS: Final[dict[str, ScaleEncoding]] = {
    s.name: s
    for s in (
        ScaleEncoding("float", (torch.float32, torch.float16, torch.bfloat16), power_of_two=False),
        ScaleEncoding("ue8m0", _POWERS, power_of_two=True),
        ScaleEncoding("ue8m0_floor", _POWERS, power_of_two=True, floor=True),
        ScaleEncoding("e4m3", (torch.float8_e4m3fn,), power_of_two=False),
    )
}
"""Formats of the scales of `rms_norm_fused_quant`, each with its default dtype first; int32 holds four exponents."""
SCALE_DTYPES: Final = tuple(dict.fromkeys(dtype for s in SCALE_FORMATS.values() for dtype in s.dtypes))


@dataclass(frozen=True)
class QuantFormat:
    """A format of `rms_norm_fused_quant`.

    Args:
        name: Name of the format.
        codes: Its codes.
        groups: Group sizes, the default first. None is a row.
        scales: Scale formats, the default first.
    """

    name: QuantFormatName
    codes: CodeFormat
    groups: tuple[int | None, ...]
    scales: tuple[ScaleFormat, ...]


_ANY_GROUP: Final = (None, *GROUP_SIZES)
_MX_SCALES: Final[tuple[ScaleFormat, ...]] = ("ue8m0", "ue8m0_floor")
QUANT_FORMATS: Final[dict[str, QuantFormat]] = {
    f.name: f
    for f in (
        QuantFormat("e4m3fn", E4M3FN, _ANY_GROUP, ("float", *_MX_SCALES)),
        QuantFormat("e4m3fnuz", E4M3FNUZ, _ANY_GROUP, ("float", *_MX_SCALES)),
        QuantFormat("e5m2", E5M2, _ANY_GROUP, ("float", *_MX_SCALES)),
        QuantFormat("int8", INT8, _ANY_GROUP, ("float",)),
        QuantFormat("mxfp8", E4M3FN, (32,), _MX_SCALES),
        QuantFormat("mxfp4", E2M1, (32,), _MX_SCALES),
        QuantFormat("nvfp4", E2M1, (16,), ("e4m3",)),
    )
}


@dataclass(frozen=True)
class ScaleRule:
    """How the scale of a row, a group of columns or a whole tensor is computed, stored and applied.

    Args:
        kind: "row", "group" or "static".
        dtype: Dtype of one scale.
        group: Columns of a group.
        ue8m0: Whether scales are powers of two.
        divides: Whether the norm is divided by the scale. Otherwise it is multiplied by the reciprocal.
        has_least: Whether the call sets a smallest scale.
        bound_in_memory: Whether the upper bound of amax is a tensor.
        floor: Whether powers of two are rounded down.
        has_global: Whether scales are multiples of the reciprocal of one number in memory.
        packing: Scales of four neighbouring groups are four neighbouring bytes, in "words" or in tiles of "128x4".
    """

    kind: ScaleKind
    dtype: torch.dtype
    group: int = 0
    ue8m0: bool = False
    divides: bool = False
    has_least: bool = False
    bound_in_memory: bool = False
    floor: bool = False
    has_global: bool = False
    packing: Packing = ""


WeightScale = Literal["none", "row", "tensor", "block", "ue8m0_block"]
"""How weights are scaled: per row, as a whole, or per block of `SCALE_BLOCK` rows and columns, with
float32 scales or powers of two (float8_e8m0fnu). The last blocks may be smaller."""
SCALE_BLOCK: Final = 128
"""Rows and columns of weight that share a scale."""
