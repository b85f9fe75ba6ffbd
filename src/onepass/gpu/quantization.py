"""What kernels need to know about an output format and its scales."""

from typing import NamedTuple

import torch

from ..formats import FLOAT32_MAX, CodeFormat, ScaleRule
from .chip import Chip


class Quant(NamedTuple):
    """The constants of a code format and its scales. ``max`` 0: values are not stored as codes.

    ``hardware``: the chip's own cast encodes values. ``e8m0``: scales are stored as exponents.
    ``normed``: codes are made from the norm itself; otherwise the row's factor is applied together
    with the scale. ``divide``: values are divided by the scale. ``unit``: what amax is divided by.
    ``floor``: powers of two are rounded down. ``e4m3``: scales are stored as float8_e4m3fn.
    ``overall``: scales are multiplied by one number in memory. ``packing``: `ScaleRule.packing`.
    """

    max: float
    bias: int
    nan: int
    negative_zero: bool
    hardware: bool
    kind: str
    group: int
    largest: float
    ue8m0: bool
    e8m0: bool
    normed: bool
    divide: bool
    unit: float
    mantissa: int = 3
    bits: int = 8
    integer: bool = False
    floor: bool = False
    e4m3: bool = False
    overall: bool = False
    packing: str = ""


def hardware_cast(fmt: CodeFormat | None, chip: Chip) -> bool:
    """Whether the chip converts to and from this format itself."""
    return fmt is not None and fmt.name in ("e4m3fn", "e5m2") and chip.casts_e4m3fn


def quant(
    fmt: CodeFormat | None,
    chip: Chip,
    rule: ScaleRule | None = None,
    maximum: float | None = None,
    normed: bool = False,
) -> Quant:
    """The constants of a format and a scale rule; by default float32 scales per row."""
    facts = (0.0, 0, 0, False) if fmt is None else (fmt.max, fmt.bias, fmt.nan_code, fmt.has_negative_zero)
    if maximum is not None:
        facts = (torch.tensor(maximum, dtype=torch.float32).item(), *facts[1:])  # as kernels use it
    hardware = hardware_cast(fmt, chip)
    none = Quant(*facts, hardware, "none", 0, FLOAT32_MAX, False, False, normed, False, facts[0])
    if fmt is not None:
        none = none._replace(mantissa=fmt.mantissa, bits=fmt.bits, integer=fmt.integer)
    if rule is None:
        return none
    return none._replace(
        kind=rule.kind,
        group=rule.group,
        largest=torch.finfo(rule.dtype).max,
        ue8m0=rule.ue8m0,
        e8m0=rule.dtype == torch.float8_e8m0fnu,
        divide=rule.divides,
        unit=fmt.largest_power if rule.floor and fmt is not None else facts[0],
        floor=rule.floor,
        e4m3=rule.dtype == torch.float8_e4m3fn,
        overall=rule.has_global,
        packing=rule.packing,
    )
