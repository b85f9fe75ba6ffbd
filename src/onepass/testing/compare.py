"""Stored results against bounds and against the float64 oracle, as docs/numerics.md states the tolerances.

Every function returns None if the result passes, else a sentence that names the error. All-zero results fail, unless
zero is correct.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import E4M3FN, CodeFormat, ScaleRule
from ..ops.rms_norm import reference as rms_norm_reference


def between(
    actual: Tensor, low: Tensor, high: Tensor, fmt: CodeFormat | None = None, fp8_max: float | None = None
) -> str | None:
    """Each value is the rounding of some number from ``low`` to ``high``: a float, or a code of ``fmt`` in a byte.

    4-bit codes have their sign in bit 7, as `encoded` returns them. The value is NaN where both bounds are (0 in a format
    without NaN), and anything where one of them is. Where both bounds round to numbers of one sign, the value has that
    sign, zeros included.
    """
    if actual.shape != low.shape:
        return f"shape {list(actual.shape)}, expected {list(low.shape)}"
    if actual.numel() == 0:
        return None
    nan = low.isnan()
    if fmt is None:
        got_nan, sign = actual.isnan(), actual.signbit()
        least, most = low.to(actual.dtype), high.to(actual.dtype)
        right = (actual >= least) & (actual <= most)
        right &= (sign == least.signbit()) | (sign == most.signbit())
    else:
        got = actual.contiguous().view(torch.uint8)
        ends = encoded(torch.stack((low, high)), fmt, fp8_max)
        rank, (least, most) = _rank(got, fmt), _rank(ends, fmt)
        got_nan = got == fmt.nan_code if fmt.has_nan else nan & (got == 0)
        right = (rank >= least) & (rank <= most)
        if not fmt.integer:
            signs = (got ^ ends) < 0x80
            right &= signs[0] | signs[1]
    either = nan != high.isnan()
    if ((nan != got_nan) & ~either).any():
        return f"NaN in {int(got_nan.sum())} places, expected in {int(nan.sum())}"
    bad = ~(right | nan | either)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        first = f"first at {at}: {float(actual[at]):.9g}, expected {float(low[at]):.9g} to {float(high[at]):.9g}"
        return f"{int(bad.sum())} of {bad.numel()} values out of bounds, {first}"
    return None


def mostly_equal(actual: Tensor, exact: Tensor, fmt: CodeFormat | None = None, share: float = 0.99) -> str | None:
    """At least a ``share`` of the values, or all but two, equal the rounded exact ones.

    Errors rarely cross the midpoint between two numbers, so wide bounds alone would hide a wrong rounding.
    """
    if fmt is None:
        different = actual != exact.to(actual.dtype)
    else:
        different = _rank(actual.contiguous().view(torch.uint8), fmt) != _rank(encoded(exact, fmt), fmt)
    count = int((different & ~exact.isnan()).sum())
    if actual.dtype != torch.float32 and count > max(2, (1 - share) * actual.numel()):
        return f"{count} of {actual.numel()} values differ from the rounded oracle (at most {1 - share:.1%} may)"
    return None


def encoded(values: Tensor, fmt: CodeFormat, limit: float | None = None) -> Tensor:
    """The codes of float64 values as bytes; the sign of a float is bit 7."""
    limit = limit or fmt.max
    if fmt.integer:
        return values.nan_to_num(0.0).clamp(-limit, limit).round().to(torch.int8).view(torch.uint8)
    return rms_norm_reference.encode(
        values.contiguous(), fmt.bias, limit, fmt.nan_code, fmt.has_negative_zero, fmt.mantissa
    )


def _rank(code: Tensor, fmt: CodeFormat) -> Tensor:
    """Codes as signed integers in value order."""
    if fmt.integer:
        return code.view(torch.int8).long()
    size = (code & 0x7F).long()
    return torch.where(code >= 0x80, -size, size)


def stored_scale(step: Tensor, rule: ScaleRule) -> Tensor:
    """The scale that is stored for a quotient ``amax / fp8_max``, as float64."""
    if rule.floor:
        return rms_norm_reference.power_of_two_below(step)
    if rule.ue8m0:
        return rms_norm_reference.power_of_two_above(step)
    if rule.dtype == E4M3FN.dtype:
        return rms_norm_reference.nearest_code_value(step, E4M3FN.bias, E4M3FN.max)
    step = torch.where(step < 2.0**-126, 0.0, step.clamp(max=torch.finfo(rule.dtype).max))
    return step.to(rule.dtype).double()
