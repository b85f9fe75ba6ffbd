"""Floats against the float64 oracle in units in the last place, for tests and the distributed checks."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tests.oracle.bounds import FLOAT32_ERROR

FEW: Final = 8
"""Values that may always lie near a midpoint: a share means little for a single row of a few hundred."""
_INTEGER: Final = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def ordered(values: Tensor) -> Tensor:
    """Floats as integers that count units in the last place (int64, +0 and -0 both 0)."""
    bits = values.view(_INTEGER[values.dtype]).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * values.element_size() - 1) - 1)), bits)


def floats(
    actual: Tensor,
    exact: Tensor,
    *,
    ulps: int = 1,
    share: float = 0.999,
    error: float = FLOAT32_ERROR,
    size: Tensor | None = None,
) -> str | None:
    """bf16, f16: within ``ulps`` of the rounded oracle, a ``share`` of them equal. float32: within relative ``error``.

    Up to `FEW` values may differ where the error crosses the midpoint between two numbers. If larger numbers were
    subtracted, errors are relative to ``size``, and bf16 and f16 may be off by a float32's error plus one step.
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
            return f"{count} of {apart.numel()} values differ from the rounded oracle (at most {1 - share:.1%} may)"
    return None
