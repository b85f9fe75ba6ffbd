"""The range that each result may lie in, computed from the inputs step by step, as docs/numerics.md groups and rounds.

Bounds are the exact value and the float32 error that the contract allows (1e-6), taken through each specified rounding.
Except near the midpoint between two numbers of the output's format, both bounds are stored as the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from onepass.formats import FLOAT32_MAX, SMALLEST_EPS, ScaleRule
from onepass.ops.qk_norm import reference as qk_norm_reference
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing import compare

FLOAT32_ERROR: Final = 1e-6
"""Relative error that float32 accumulation and the few products after it may leave."""
FLOOR: Final = 2.0**-149
"""The spacing of float32's subnormal numbers: the error of a subnormal product."""
PRODUCT: Final = 2.0**-23
"""Relative error of one or two products."""


class Bounds(NamedTuple):
    """Float64 limits of a value before it is stored; both are NaN where it must be NaN, one is where it may be."""

    low: Tensor
    high: Tensor

    def rounded(self, dtype: torch.dtype) -> Bounds:
        """The bounds after a rounding."""
        return Bounds(self.low.to(dtype).double(), self.high.to(dtype).double())

    def part(self, columns: slice) -> Bounds:
        """The bounds of some columns."""
        return Bounds(self.low[..., columns], self.high[..., columns])

    def stored(self, actual: Tensor) -> str | None:
        """None, or what is wrong with a tensor of these values."""
        return compare.between(actual, self.low, self.high)


def around(value: Tensor, radius: Tensor | float) -> Bounds:
    """``value`` plus or minus ``radius``; zeros and non-finite values are exact."""
    exact = (value == 0) | ~value.isfinite()
    return Bounds(torch.where(exact, value, value - radius), torch.where(exact, value, value + radius))


def weight(gamma: Tensor | None, offset: float) -> Tensor:
    """``gamma + weight_offset``, added in float32; 1 without gamma."""
    g = torch.ones(1) if gamma is None else gamma.float()
    return (g + torch.tensor(offset, dtype=torch.float32)).double() if offset else g.double()


@cache
def added(eps: float) -> float:
    """The number that is added to a mean: ``eps`` in float32, at least `SMALLEST_EPS`."""
    return max(float(torch.tensor(eps, dtype=torch.float32)), SMALLEST_EPS)


def root(v: Tensor) -> Tensor:
    """``1 / sqrt(v)``: 0 where v is not above 0, NaN where it is not finite."""
    return torch.where(v.isfinite(), torch.where(v > 0, v.rsqrt(), 0.0), torch.nan)


def squares(h: Tensor) -> Tensor:
    """Sums of squares [..., 1]; infinite beyond float32."""
    total = h.square().sum(-1, keepdim=True)
    return torch.where(total > FLOAT32_MAX, torch.inf, total)


def reciprocal_rms(h: Tensor, eps: float) -> Tensor:
    """[..., 1]."""
    return root(squares(h) / h.shape[-1] + added(eps))


def normed(
    h: Tensor,
    rs: Tensor,
    g: Tensor,
    rounded: torch.dtype | None,
    error: float = FLOAT32_ERROR,
    doubt: Tensor | None = None,
    overflow: bool = False,
) -> Bounds:
    """``(h * rs) * g``, unrounded, or with both products rounded ("hf").

    ``doubt`` is how far h itself may be off; ``overflow``: rs is the caller's, so products may exceed float32.
    """
    a = overflowed(h * rs) if overflow else h * rs
    radius = a.abs() * error + FLOOR
    if doubt is not None:
        radius = radius + doubt * rs + a.abs() * spread(doubt, rs)
    if rounded is None:
        y = overflowed(a * g) if overflow else a * g
        low, high = around(y, torch.where(a == 0, 0.0, radius) * g.abs() + FLOOR)
        # zeros have the sign of h, which may be in doubt
        either = (g == 0) & (a != 0) & a.isfinite() & (a.abs() <= radius)
        low, high = torch.where(either, -0.0, low), torch.where(either, 0.0, high)
        if not g.isfinite().all():  # infinity times what may be zero
            high = torch.where(g.isinf() & (a != 0) & (a.abs() <= radius), torch.nan, high)
        return Bounds(low, high)
    first = around(a, radius).rounded(rounded)
    ends = [(end * g).float().double() for end in first]  # one float32 product, so its ties are ties
    rising = ends[0] <= ends[1]  # minimum and maximum would lose the sign of zeros
    low, high = torch.where(rising, ends[0], ends[1]), torch.where(rising, ends[1], ends[0])
    low, high = around(low, FLOOR).low, around(high, FLOOR).high
    if not g.isfinite().all():  # infinity times what may be zero
        doubtful = g.isinf() & (first.low <= 0) & (first.high >= 0) & (first.low != first.high)
        low, high = torch.where(doubtful, -torch.inf, low), torch.where(doubtful, torch.nan, high)
    return Bounds(low, high).rounded(rounded)


def overflowed(t: Tensor) -> Tensor:
    """Infinite beyond float32."""
    return torch.where(t.abs() > FLOAT32_MAX, torch.inf * t.sign(), t)


def spread(doubt: Tensor, rs: Tensor) -> Tensor:
    """The relative error of the root if the numbers under it are off by ``doubt``."""
    return doubt.square().mean(-1, keepdim=True).sqrt() * rs


def rotated(y: Bounds, turn: Callable[[Tensor], qk_norm_reference.Rotated]) -> Bounds:
    """The bounds after ``turn``: errors are relative to the length of a pair, and a sum of zero has either sign."""
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


def rotated_stepwise(
    y: Bounds, freqs: Tensor, dtype: torch.dtype, *, positions: Tensor | None, style: str, dim: int
) -> Bounds:
    """The bounds of [..., heads, columns] after a rotation that rounds angles, products and sums to ``dtype``.

    Every step is one float32 operation and one rounding, so what is known exactly before is known exactly after.
    """
    cos, sin = (
        t.to(dtype).double().unsqueeze(-2)
        for t in qk_norm_reference.token_angles(freqs, y.low.shape[:-2], positions, dim)
    )

    def times(ends: Bounds, factor: Tensor) -> Bounds:
        first, second = ((end * factor).float().to(dtype).double() for end in ends)
        rising = ~(first > second)
        low, high = torch.where(rising, first, second), torch.where(rising, second, first)
        either = (
            (first == 0) & (second == 0) & (first.signbit() != second.signbit())
        )  # a comparison does not order them
        return Bounds(torch.where(either, -0.0, low), torch.where(either, 0.0, high))

    def plus(a: Bounds, b: Bounds) -> Bounds:
        return Bounds(*((one + two).float().to(dtype).double() for one, two in zip(a, b, strict=True)))

    pairs = [qk_norm_reference.pairs(end[..., :dim], style) for end in y]
    a, b = (Bounds(*ends) for ends in zip(*pairs, strict=True))
    left, right = plus(times(a, cos), times(b, -sin)), plus(times(b, cos), times(a, sin))
    ends = (qk_norm_reference.from_pairs(one, two, style) for one, two in zip(left, right, strict=True))
    return Bounds(*(torch.cat((end, old[..., dim:]), -1) for end, old in zip(ends, y, strict=True)))


# --- fp8 ------------------------------------------------------------------------------------------------------------


def largest(sizes: Tensor, group: int | None) -> Tensor:
    """The largest value per row or group; NaN where one is not finite."""
    groups: Tensor = sizes.unflatten(-1, (-1, group or sizes.shape[-1]))
    amax = groups.amax(-1)
    return torch.where(amax.isfinite(), amax, torch.nan)


def scales(
    actual: Tensor,
    low: Tensor,
    high: Tensor,
    bound: float | None,
    fp8_max: float,
    rule: ScaleRule,
    least: float = 0.0,
    overall: float = 1.0,
) -> str | None:
    """Stored scales against the bounds of amax.

    ``least`` is the smallest scale, a NaN ``bound`` means none, and ``overall`` multiplies them all.
    """
    bound = None if bound is None or math.isnan(bound) else float(torch.tensor(bound, dtype=torch.float32))
    ends = [(amax if bound is None else amax.clamp(max=bound)).clamp(min=0.0) / fp8_max for amax in (low, high)]
    if actual.shape != low.shape:
        return f"scale shape {list(actual.shape)}, expected {list(low.shape)}"
    value = rms_norm_reference.scale_values(actual)
    if math.isnan(overall):
        low = torch.full_like(low, math.nan)
    elif math.isinf(overall):  # 0 times infinity is NaN; what float32 may round to 0 is either
        either = (ends[0] < FLOOR) & value.isnan()
        low = torch.where((ends[1] == 0) | either, math.nan, low)
        ends[0] = ends[1]
    ends = [(end * overall).clamp(min=0.0) for end in ends]
    if not torch.equal(value.isnan(), low.isnan()):
        return f"scale is NaN in {int(value.isnan().sum())} places, expected in {int(low.isnan().sum())}"
    floor = float(torch.tensor(least, dtype=torch.float32))
    lowest = compare.stored_scale((ends[0] * (1 - PRODUCT)).clamp(min=floor), rule)
    highest = compare.stored_scale((ends[1] * (1 + PRODUCT)).clamp(min=floor), rule)
    bad = (value < lowest) | (value > highest)
    if bad.any():
        at = int(bad.flatten().nonzero()[0])
        expected = f"{lowest.flatten()[at]:.9g} to {highest.flatten()[at]:.9g}"
        return f"{int(bad.sum())} of {bad.numel()} scales off, first {value.flatten()[at]:.9g}, expected {expected}"
    return None


def multiplier(numerator: Tensor | float, scale: Tensor) -> Tensor:
    """``numerator / scale``: at most float32's largest number, 0 where the scale is 0, NaN where either is."""
    top = torch.as_tensor(numerator, dtype=torch.float64)
    k = (top / scale).clamp(max=FLOAT32_MAX)
    return torch.where((scale == 0) & ~top.isnan(), 0.0, k)


def codes_once(
    h: Tensor, rs: Tensor, g: Tensor, stored: Tensor, error: float = FLOAT32_ERROR, doubt: Tensor | None = None
) -> Bounds:
    """``(h * g) * (rs / scale)``; ``stored`` holds the scales, one per column or one for all."""
    product, k = h * g, multiplier(rs, stored)
    value = product * k
    radius = value.abs() * error + FLOOR * (k + product.abs())
    if doubt is None:
        return around(value, radius)
    low, high = around(value, radius + doubt * g.abs() * k + value.abs() * spread(doubt, rs))
    either = (value == 0) & (h != 0) & (h.abs() <= doubt)  # zeros have the sign of h, which may be in doubt
    return Bounds(torch.where(either, -0.0, low), torch.where(either, 0.0, high))


def codes_rounded(y: Bounds, stored: Tensor) -> Bounds:
    """``y * (1 / scale)`` of a y that was rounded."""
    k = multiplier(1.0, stored)
    return product_error(y.low * k, y.high * k)


def codes_divided(y: Bounds, stored: Tensor) -> Bounds:
    """``y / scale``, divided in float32: where y is known exactly, so is the code."""
    divisor = torch.where(stored == 0, torch.inf, stored).float()
    ends = [(end.float() / divisor).double() for end in y]
    rising = ~(ends[0] > ends[1])  # a negative scale reverses them
    return Bounds(torch.where(rising, ends[0], ends[1]), torch.where(rising, ends[1], ends[0]))


def product_error(low: Tensor, high: Tensor) -> Bounds:
    """Bounds widened by the error of a product."""
    return Bounds(*(around(end, end.abs() * PRODUCT + FLOOR)[side] for side, end in enumerate((low, high))))


def sizes(y: Bounds) -> tuple[Tensor, Tensor]:
    """The smallest and the largest absolute value."""
    low, high = y.low.abs(), y.high.abs()
    least = torch.where((y.low < 0) & (y.high > 0), 0.0, torch.minimum(low, high))
    return least, torch.maximum(low, high)
