"""From inputs to the numbers that a result may lie between, step by step, as docs/numerics.md groups and rounds them.

Comparing with a rounded oracle allows some share of values to differ, which says nothing of a row of equal numbers. So
here every value has bounds of its own: the exact value and the float32 error that the contract allows it (1e-6), taken
through each stated rounding. Away from the middle between two numbers of the output's format both bounds are stored
as the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from onepass.formats import FLOAT32_MAX, SMALLEST_EPS, Fp8Format, ScaleRule
from onepass.testing import compare, oracle
from onepass.testing.compare import FLOAT32_ERROR

FLOOR: Final = 2.0**-149
"""The step of float32's subnormal numbers: the error of a product that falls among them."""
PRODUCT: Final = 2.0**-23
"""Relative error of a product or two."""


class Bounds(NamedTuple):
    """Float64 numbers that a value may lie between, before it is stored; both NaN where it must be, one where it may."""

    low: Tensor
    high: Tensor

    def rounded(self, dtype: torch.dtype) -> Bounds:
        """The same after a rounding."""
        return Bounds(self.low.to(dtype).double(), self.high.to(dtype).double())

    def part(self, columns: slice) -> Bounds:
        """Some columns."""
        return Bounds(self.low[..., columns], self.high[..., columns])

    def stored(self, actual: Tensor) -> str | None:
        """None, or what is wrong with a tensor of such values."""
        return compare.between(actual, self.low, self.high)


def around(value: Tensor, radius: Tensor | float) -> Bounds:
    """``value`` give or take; what is zero or not finite is exact."""
    exact = (value == 0) | ~value.isfinite()
    return Bounds(torch.where(exact, value, value - radius), torch.where(exact, value, value + radius))


def weight(gamma: Tensor, offset: float) -> Tensor:
    """``gamma + weight_offset`` as added in float32."""
    g = gamma.float()
    return (g + torch.tensor(offset, dtype=torch.float32)).double() if offset else g.double()


@cache
def added(eps: float) -> float:
    """What is added to a mean."""
    return max(float(torch.tensor(eps, dtype=torch.float32)), SMALLEST_EPS)


def root(v: Tensor) -> Tensor:
    """``1 / sqrt(v)``: 0 where v is not above 0, NaN where it is not finite."""
    return torch.where(v.isfinite(), torch.where(v > 0, v.rsqrt(), 0.0), torch.nan)


def squares(h: Tensor) -> Tensor:
    """Sums of squares [..., 1]; infinite where float32 has no number for it."""
    total = h.square().sum(-1, keepdim=True)
    return torch.where(total > FLOAT32_MAX, torch.inf, total)


def reciprocal_rms(h: Tensor, eps: float) -> Tensor:
    """[..., 1]."""
    return root(squares(h) / h.shape[-1] + added(eps))


def normed(
    h: Tensor, rs: Tensor, g: Tensor, rounded: torch.dtype | None, error: float = FLOAT32_ERROR, doubt: Tensor | None = None,
    given: bool = False,
) -> Bounds:  # fmt: skip
    """``(h * rs) * g``, unrounded or ("hf") with both products rounded; ``doubt`` is how far h itself may be off."""
    a = overflowed(h * rs) if given else h * rs  # a root of h's own leaves nothing beyond float32
    radius = a.abs() * error + FLOOR
    if doubt is not None:
        radius = radius + doubt * rs + a.abs() * spread(doubt, rs)
    if rounded is None:
        y = overflowed(a * g) if given else a * g
        low, high = around(y, torch.where(a == 0, 0.0, radius) * g.abs() + FLOOR)
        if not g.isfinite().all():  # infinity times what may be zero
            high = torch.where(g.isinf() & (a != 0) & (a.abs() <= radius), torch.nan, high)
        return Bounds(low, high)
    first = around(a, radius).rounded(rounded)
    ends = [(end * g).float().double() for end in first]  # one product of float32: a tie of it is a tie
    rising = ends[0] <= ends[1]  # and not minimum and maximum: of zeros they would lose a sign
    low, high = torch.where(rising, ends[0], ends[1]), torch.where(rising, ends[1], ends[0])
    low, high = around(low, FLOOR).low, around(high, FLOOR).high
    if not g.isfinite().all():  # infinity times what may be zero
        doubtful = g.isinf() & (first.low <= 0) & (first.high >= 0) & (first.low != first.high)
        low, high = torch.where(doubtful, -torch.inf, low), torch.where(doubtful, torch.nan, high)
    return Bounds(low, high).rounded(rounded)


def overflowed(t: Tensor) -> Tensor:
    """Infinite where float32 has no number for it."""
    return torch.where(t.abs() > FLOAT32_MAX, torch.inf * t.sign(), t)


def spread(doubt: Tensor, rs: Tensor) -> Tensor:
    """How far, relatively, the root may be off when the numbers under it are."""
    return doubt.square().mean(-1, keepdim=True).sqrt() * rs


def rotated(y: Bounds, turn: Callable[[Tensor], oracle.Rotated]) -> Bounds:
    """What ``turn`` makes of y: errors are relative to the length of a pair, and a sum that is zero has either sign."""
    middle = torch.where(y.low == y.high, y.low, (y.low + y.high) / 2)
    doubt = (y.high - y.low) / 2 + torch.where(y.low.signbit() == y.high.signbit(), 0.0, FLOOR)
    doubt = torch.where(middle.isfinite(), doubt, 0.0)
    value, size = turn(middle)
    radius = size * FLOAT32_ERROR + turn(doubt).size
    exact = (radius == 0) | ~value.isfinite()
    radius = radius + FLOOR
    low, high = torch.where(exact, value, value - radius), torch.where(exact, value, value + radius)
    low, high = torch.where(low == 0, -0.0, low), torch.where(high == 0, 0.0, high)
    either = y.low.isnan() != y.high.isnan()
    if either.any():
        pairs = turn(either.double()).size > 0
        low, high = torch.where(pairs, -torch.inf, low), torch.where(pairs, torch.nan, high)
    return Bounds(low, high)


# --- fp8 ------------------------------------------------------------------------------------------------------------


def largest(sizes: Tensor, group: int | None) -> Tensor:
    """The largest of each row or group; NaN where one is not finite."""
    groups: Tensor = sizes.unflatten(-1, (-1, group or sizes.shape[-1]))
    amax = groups.amax(-1)
    return torch.where(amax.isfinite(), amax, torch.nan)


def scales(
    actual: Tensor, low: Tensor, high: Tensor, bound: float | None, fp8_max: float, rule: ScaleRule, least: float = 0.0
) -> str | None:
    """Stored scales against bounds of amax; ``least`` is the least scale, and a bound that is NaN is none."""
    bound = None if bound is None or math.isnan(bound) else float(torch.tensor(bound, dtype=torch.float32))
    ends = [(amax if bound is None else amax.clamp(max=bound)).clamp(min=0.0) / fp8_max for amax in (low, high)]
    value = compare.scale_values(actual)
    if actual.shape != low.shape:
        return f"scale shape {list(actual.shape)}, expected {list(low.shape)}"
    if not torch.equal(value.isnan(), low.isnan()):
        return f"scale is NaN in {int(value.isnan().sum())} places, expected in {int(low.isnan().sum())}"
    floor = float(torch.tensor(least, dtype=torch.float32))
    lowest = compare.stored_scale((ends[0] * (1 - PRODUCT)).clamp(min=floor), rule)
    highest = compare.stored_scale((ends[1] * (1 + PRODUCT)).clamp(min=floor), rule)
    bad = (value < lowest) | (value > highest)
    if bad.any():
        at = int(bad.flatten().nonzero()[0])
        ends_at = f"{lowest.flatten()[at]:.9g} to {highest.flatten()[at]:.9g}"
        return f"{int(bad.sum())} of {bad.numel()} scales off, first {value.flatten()[at]:.9g}, expected {ends_at}"
    return None


def multiplier(numerator: Tensor | float, scale: Tensor) -> Tensor:
    """``numerator / scale``: never beyond float32, 0 where the scale is 0, NaN where either is."""
    top = torch.as_tensor(numerator, dtype=torch.float64)
    k = (top / scale).clamp(max=FLOAT32_MAX)
    return torch.where((scale == 0) & ~top.isnan(), 0.0, k)


def codes_once(
    actual: Tensor, h: Tensor, rs: Tensor, g: Tensor, stored: Tensor, fmt: Fp8Format, fp8_max: float,
    error: float = FLOAT32_ERROR, doubt: Tensor | None = None,
) -> str | None:  # fmt: skip
    """``(h * g) * (rs / scale)``; ``stored`` holds the scales, one a column or one for all."""
    product, k = h * g, multiplier(rs, stored)
    value = product * k
    radius = value.abs() * error + FLOOR * (k + product.abs())
    if doubt is not None:
        radius = radius + doubt * g.abs() * k + value.abs() * spread(doubt, rs)
    return compare.between(actual, *around(value, radius), fmt, fp8_max)


def codes_rounded(actual: Tensor, y: Bounds, stored: Tensor, fmt: Fp8Format, fp8_max: float) -> str | None:
    """``y * (1 / scale)`` of a y that was rounded."""
    k = multiplier(1.0, stored)
    ends = [value * k for value in y]
    low = around(ends[0], ends[0].abs() * PRODUCT + FLOOR).low
    high = around(ends[1], ends[1].abs() * PRODUCT + FLOOR).high
    return compare.between(actual, low, high, fmt, fp8_max)


def codes_divided(actual: Tensor, y: Bounds, stored: Tensor, fmt: Fp8Format, fp8_max: float) -> str | None:
    """``y / scale``, divided in float32: where y is known exactly, so is the code."""
    divisor = torch.where(stored == 0, torch.inf, stored).float()
    ends = [(end.float() / divisor).double() for end in y]
    rising = ~(ends[0] > ends[1])  # a negative scale turns them round
    return compare.between(
        actual, torch.where(rising, ends[0], ends[1]), torch.where(rising, ends[1], ends[0]), fmt, fp8_max
    )


def sizes(y: Bounds) -> tuple[Tensor, Tensor]:
    """The least and the largest size of each value."""
    low, high = y.low.abs(), y.high.abs()
    least = torch.where((y.low < 0) & (y.high > 0), 0.0, torch.minimum(low, high))
    return least, torch.maximum(low, high)
