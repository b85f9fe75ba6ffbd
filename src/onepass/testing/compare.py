"""How close is close enough: outputs against the float64 oracle, as docs/numerics.md states it.

Every function returns None when the output passes and a sentence saying what is wrong when it does not. An all-zero
output passes none of them (unless zero is right).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Fp8Format, ScaleRule
from . import oracle

FLOAT32_ERROR = 1e-6
"""Relative error that float32 accumulation and the few products after it may leave."""

_INTEGER = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def ordered(values: Tensor) -> Tensor:
    """Floats as integers that count units in the last place (int64, +0 and -0 both 0)."""
    bits = values.view(_INTEGER[values.dtype]).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * values.element_size() - 1) - 1)), bits)


FEW = 8
"""Values that may be near the middle between two numbers in any case: of a single row of a few hundred, a share says little."""


def floats(
    actual: Tensor,
    exact: Tensor,
    *,
    ulps: int = 1,
    share: float = 0.999,
    error: float = FLOAT32_ERROR,
    size: Tensor | None = None,
) -> str | None:
    """bf16/f16: within ``ulps`` of the rounded oracle and ``share`` of them equal; float32: within ``error``, relatively.

    Of a few values `FEW` may differ, if the error reaches beyond the middle between two numbers there.
    ``size`` is what the error is relative to where a difference of larger numbers was taken. Then a small bf16/f16
    result may be as far from the exact one as a float32 one may, and a step of its own.
    """
    if actual.shape != exact.shape:
        return f"shape {list(actual.shape)}, expected {list(exact.shape)}"
    if actual.numel() == 0:
        return None
    actual = actual.contiguous()
    nan = exact.isnan()
    if (actual.isnan() != nan).any():
        return f"NaN in {int(actual.isnan().sum())} places, expected in {int(nan.sum())}"
    if actual.dtype == torch.float32:
        scale = exact.abs() if size is None else size
        bad = ~nan & ((actual.double() - exact).abs() > error * scale + 1e-43) & (actual.double() != exact)
        if bad.any():
            worst = ((actual.double() - exact).abs() / exact.abs())[bad].max()
            return f"{int(bad.sum())} of {bad.numel()} values off, by up to {worst:.1e} relative"
        return None
    rounded = exact.to(actual.dtype)
    apart = torch.where(nan, 0, (ordered(actual) - ordered(rounded)).abs())
    if size is not None:
        step = torch.finfo(actual.dtype).eps * exact.abs()
        near = (actual.double() - exact).abs() <= error * size + step
        apart = torch.where(near & (apart > ulps), ulps, apart)
    if int(apart.max()) > ulps:
        return f"{int((apart > ulps).sum())} of {apart.numel()} values more than {ulps} ulp off, by up to {int(apart.max())} ulp"
    doubt = torch.where(exact.isinf() | nan, 0.0, error * (exact.abs() if size is None else size))
    low, high = ((exact + e).to(actual.dtype) for e in (-doubt, doubt))
    between = (actual >= low) & (actual <= high)
    for different, few in ((apart > 0, FEW), ((apart > 0) & ~between, 1)):
        count = int(different.sum())
        if count > max(few, (1 - share) * apart.numel()):
            return f"{count} of {apart.numel()} values not equal to the rounded oracle (at most {1 - share:.1%} may differ)"
    return None


def near(actual: Tensor, exact: Tensor, error: Tensor) -> str | None:
    """Within ``error`` (absolute, one a value) of the oracle before the store's rounding, and mostly equal after it."""
    if actual.shape != exact.shape:
        return f"shape {list(actual.shape)}, expected {list(exact.shape)}"
    if actual.numel() == 0:
        return None
    nan = exact.isnan()
    if (actual.isnan() != nan).any():
        return f"NaN in {int(actual.isnan().sum())} places, expected in {int(nan.sum())}"
    error = torch.where(exact.isinf(), 0.0, error)
    low, high = ((exact + e).to(actual.dtype) for e in (-error, error))
    bad = ~nan & ~((actual >= low) & (actual <= high))
    if bad.any():
        return f"{int(bad.sum())} of {bad.numel()} values beyond the error bound, first {actual[bad][0]}, expected {exact[bad][0]:.9g}"
    if actual.dtype != torch.float32:
        different = int((~nan & (actual != exact.to(actual.dtype))).sum())
        if different > max(2, 0.01 * actual.numel()):
            return f"{different} of {actual.numel()} values not equal to the rounded oracle"
    return None


def stored(actual: Tensor, exact: Tensor, error: Tensor, fmt: Fp8Format | None, *, share: float | None) -> str | None:
    """Floats, or with ``fmt`` its codes: what is stored for some value within ``error`` of the exact one.

    With ``share``, that many of them must be what is stored for the exact value itself. Another value is right only where the error
    reaches beyond the middle between two numbers, which is rare.
    """
    if actual.shape != exact.shape:
        return f"shape {list(actual.shape)}, expected {list(exact.shape)}"
    if actual.numel() == 0:
        return None
    nan = exact.isnan()
    got_nan = actual.isnan() if fmt is None else actual.contiguous().view(torch.uint8) == fmt.nan_code
    if (got_nan != nan).any():
        return f"NaN in {int(got_nan.sum())} places, expected in {int(nan.sum())}"
    got = _order(actual, fmt)
    allowed = torch.where(exact.isinf() | nan, 0.0, error)
    low, high = (_order(_stored_as(actual.dtype, exact + e, fmt), fmt) for e in (-allowed, allowed))
    bad = ~nan & ((got < low) | (got > high))
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        first = f"first at {at}: {float(actual[at]):.9g}, expected {float(exact[at]):.9g}"
        return f"{int(bad.sum())} of {bad.numel()} values beyond the error bound, {first}"
    different = int((~nan & (got != _order(_stored_as(actual.dtype, exact, fmt), fmt))).sum())
    if share is not None and different > max(FEW, (1 - share) * actual.numel()):
        return (
            f"{different} of {actual.numel()} values not those of the exact ones (at most {1 - share:.1%} may differ)"
        )
    return None


def between(
    actual: Tensor, low: Tensor, high: Tensor, fmt: Fp8Format | None = None, fp8_max: float | None = None
) -> str | None:
    """What is stored for some value from ``low`` to ``high``: floats, or with ``fmt`` its codes.

    NaN where both bounds are, anything where one of them is. Where both bounds are stored as numbers of one sign, so is
    the value: zeros have the sign they must have.
    """
    if actual.shape != low.shape:
        return f"shape {list(actual.shape)}, expected {list(low.shape)}"
    if actual.numel() == 0:
        return None
    if fmt is None:
        nan, got_nan = low.isnan(), actual.isnan()
        least, most = low.to(actual.dtype), high.to(actual.dtype)
        right = (actual >= least) & (actual <= most)
        sign = actual.signbit()
        right &= (sign == least.signbit()) | (sign == most.signbit())
    else:
        got = actual.contiguous().view(torch.uint8)
        ends = torch.stack((low, high)).contiguous()
        codes = oracle.encode(ends, fmt.bias, fp8_max or fmt.max, fmt.nan_code, fmt.has_negative_zero)
        nan, got_nan = low.isnan(), got == fmt.nan_code
        rank, (least, most) = _rank(got), _rank(codes)
        signs = (got ^ codes) < 0x80
        right = (rank >= least) & (rank <= most) & (signs[0] | signs[1])
    either = nan != high.isnan()
    if ((nan != got_nan) & ~either).any():
        return f"NaN in {int(got_nan.sum())} places, expected in {int(nan.sum())}"
    bad = ~(right | nan | either)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        bounds = f"{float(low[at]):.9g} to {float(high[at]):.9g}"
        return f"{int(bad.sum())} of {bad.numel()} values out of bounds, first at {at}: {float(actual[at]):.9g}, expected {bounds}"
    return None


def _stored_as(dtype: torch.dtype, values: Tensor, fmt: Fp8Format | None) -> Tensor:
    if fmt is None:
        return values.to(dtype)
    return oracle.encode(values.contiguous(), fmt.bias, fmt.max, fmt.nan_code, fmt.has_negative_zero)


def _order(values: Tensor, fmt: Fp8Format | None) -> Tensor:
    """Numbers that are ordered as the stored values are."""
    return values.double() if fmt is None else _rank(values.contiguous().view(torch.uint8))


def scales(actual: Tensor, exact: Tensor, rule: ScaleRule, *, error: float = FLOAT32_ERROR) -> str | None:
    """Stored scales: between what the exact step gives when nudged down and up by ``error``."""
    if actual.shape != exact.shape:
        return f"scale shape {list(actual.shape)}, expected {list(exact.shape)}"
    if actual.numel() == 0:
        return None
    value = actual.double() if actual.dtype != torch.float8_e8m0fnu else _e8m0(actual)
    if (value.isnan() != exact.isnan()).any():
        return f"scale is NaN in {int(value.isnan().sum())} places, expected in {int(exact.isnan().sum())}"
    low, high = (stored_scale(exact * (1 + nudge), rule) for nudge in (-error, error))
    bad = ~exact.isnan() & ((value < low) | (value > high))
    if bad.any():
        at = int(bad.flatten().nonzero()[0])
        return f"{int(bad.sum())} of {bad.numel()} scales off, first {value.flatten()[at]:.9g}, expected {exact.flatten()[at]:.9g}"
    return None


def _e8m0(codes: Tensor) -> Tensor:
    exponent = codes.view(torch.uint8).double()
    return torch.where(exponent == 255, torch.nan, torch.exp2(exponent - 127))


def scale_values(scale: Tensor) -> Tensor:
    """Stored scales as float64."""
    return _e8m0(scale) if scale.dtype == torch.float8_e8m0fnu else scale.double()


def stored_scale(step: Tensor, rule: ScaleRule) -> Tensor:
    """The scale that is stored for a quotient ``amax / fp8_max``, as float64."""
    if rule.ue8m0:
        return oracle.power_of_two_above(step)
    step = torch.where(step < 2.0**-126, 0.0, step.clamp(max=torch.finfo(rule.dtype).max))
    return step.to(rule.dtype).double()


def codes(
    actual: Tensor, y: Tensor, scale: Tensor, fmt: Fp8Format, fp8_max: float, *, error: float = FLOAT32_ERROR,
    stray: float = 0.0, ties: float = 0.001,
) -> str | None:  # fmt: skip
    """fp8 codes: equal to the exact code of y / scale, or to that of a value within float32 error of it.

    ``scale`` holds the scales as stored, broadcast over ``y``. ``stray`` is the share that may be one code off without
    that excuse (for products, whose error may be larger than ``error``); ``ties`` the share that may need the excuse
    (values with few mantissa bits are often exact ties).
    """
    if actual.shape != y.shape:
        return f"shape {list(actual.shape)}, expected {list(y.shape)}"
    if actual.numel() == 0:
        return None
    exact = torch.where(scale == 0, torch.where(y.isnan(), y, y * 0), y / scale)
    got = actual.contiguous().view(torch.uint8)
    form = (fmt.bias, fp8_max, fmt.nan_code, fmt.has_negative_zero)
    middle, low, high = (oracle.encode(exact * (1 + e), *form) for e in (0.0, -error, error))
    wrong = (got != middle) & (got != low) & (got != high)
    nan = exact.isnan()
    if ((got == fmt.nan_code) != nan).any():
        return f"NaN codes in {int((got == fmt.nan_code).sum())} places, expected in {int(nan.sum())}"
    if wrong.any():
        apart = (_rank(got) - _rank(middle)).abs()
        if int(apart[wrong].max()) > 1:
            return f"{int(wrong.sum())} of {wrong.numel()} codes wrong, by up to {int(apart[wrong].max())} codes"
        if int(wrong.sum()) > stray * wrong.numel() + (1 if stray else 0):
            return f"{int(wrong.sum())} of {wrong.numel()} codes wrong and not near a rounding boundary"
    near = (got != middle).double().mean()
    if near > ties and int((got != middle).sum()) > 1:
        return f"{float(near):.2%} of codes differ from the exact ones (boundary cases may be {ties:.1%})"
    return None


def _rank(code: Tensor) -> Tensor:
    """Codes as signed integers in value order."""
    size = (code & 0x7F).long()
    return torch.where(code >= 0x80, -size, size)
