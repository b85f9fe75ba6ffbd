"""The bounds of LayerNorm's differences, of what follows the product with gamma, and of x times a gate without a norm."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from onepass.formats import FLOATS
from onepass.ops.rms_norm.reference import activate
from tests.oracle import bounds
from tests.oracle.bounds import Bounds

BF16, F16, F32 = FLOATS
GATE_ERROR: Final = 8 * bounds.FLOAT32_ERROR
"""Relative error of an activation and its product, as for a prologue."""
_LEAST: Final = 2.0**-125
"""A sigmoid this small may be 0, because it is subnormal."""
_NOT_ZERO: Final = 1e-300


def centered(h: Tensor, doubt: Tensor | None) -> tuple[Tensor, Tensor]:
    """``h - mean(h)``, and how far it may be off: the mean is a float32 sum, and the difference is rounded."""
    if h.shape[-1] == 1:  # the mean of one number is that number
        return h - h, torch.zeros_like(h)
    d = h - h.mean(-1, keepdim=True)
    sizes = h.abs() if doubt is None else h.abs() + doubt
    off = sizes.mean(-1, keepdim=True) * bounds.FLOAT32_ERROR + d.abs() * bounds.PRODUCT
    off = torch.where(off > 0, off + 2 * bounds.FLOOR, off)
    if doubt is not None:
        off = off + doubt + doubt.mean(-1, keepdim=True)
    d = torch.where((d == 0) & (off > 0), _NOT_ZERO, d)  # bounds take zeros for exact
    return d, torch.where(d.isfinite() & off.isfinite(), off, 0.0)


def finished(y: Bounds, host: dict[str, Any]) -> Bounds:
    """``(y + bias) * act(gate)``; "hf" rounds both."""
    gate = host.get("gate") if host.get("gate_order", "after") == "after" else None
    dtype = host["x"].dtype if host.get("rounding") == "hf" else None
    if host.get("bias") is not None:
        sums = (end + host["bias"].double() for end in y)
        y = Bounds(*(_wider(end, end.abs() * bounds.PRODUCT, side) for side, end in enumerate(sums)))
        y = y if dtype is None else y.rounded(dtype)
    if gate is not None:
        ends = _times(y, activated(gate.double(), host))
        least = (y.low.abs() + y.high.abs() + 1.0) * _LEAST
        y = Bounds(*(_wider(e, e.abs() * GATE_ERROR + least, side) for side, e in enumerate(ends)))
        y = y if dtype is None else y.rounded(dtype)
    return y


def product(host: dict[str, Any]) -> Bounds:
    """What `quantize` quantizes: x, exactly, or ``x * act(gate)``. "hf" rounds both steps, "stored" the product."""
    dtype, x, gate = host["x"].dtype, host["x"].double(), host.get("gate")
    if gate is None:
        return Bounds(x, x)
    rounding, factor = host.get("rounding", "once"), activated(gate.double(), host)
    factors = bounds.around(factor, factor.abs() * GATE_ERROR + _LEAST)
    factors = factors.rounded(dtype) if rounding == "hf" else factors
    ends = _times(factors, x)
    y = Bounds(*(bounds.overflowed(_wider(e, e.abs() * bounds.PRODUCT + bounds.FLOOR, i)) for i, e in enumerate(ends)))
    return y if rounding == "once" else y.rounded(dtype)


def _times(y: Bounds, factor: Tensor) -> Bounds:
    """The bounds of a product; one is NaN where it may be."""
    ends = [end * factor for end in y]
    rising = ends[0] <= ends[1]  # minimum and maximum would lose the sign of zeros
    low, high = torch.where(rising, ends[0], ends[1]), torch.where(rising, ends[1], ends[0])
    nan = ends[0].isnan() | ends[1].isnan()
    return Bounds(torch.where(nan, ends[0], low), torch.where(nan, ends[1], high))


def activated(gate: Tensor, host: dict[str, Any]) -> Tensor:
    """``act(gate)``."""
    return activate(gate, host.get("gate_activation", "silu"))


def _wider(end: Tensor, radius: Tensor, side: int) -> Tensor:
    return bounds.around(end, radius)[side]
