"""The maths in float64, unrounded, importing torch alone and knowing nothing of any implementation.

Only ``rounding="hf"`` and ``round_sum=True``, which *are* a choice of rounding points, round here. Rounding to the output format otherwise
belongs to whoever compares (`onepass.testing.compare`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """``y`` the norm and ``h`` what was normalized, both float64 [..., N]."""

    y: Tensor
    h: Tensor


def rms_norm(
    x: Tensor,
    gamma: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    prologue: Callable[..., Tensor] | None = None,
    prologue_args: Sequence[Tensor] = (),
    rounding: str = "once",
    round_sum: bool | None = None,
) -> Norm:
    """RMSNorm of the last dimension. A row with a non-finite value is all NaN; a row of zeros is all zero.

    ``round_sum``: whether ``x + residual`` is rounded to the residual's dtype; None: with "hf".
    """
    h = x.double()
    if prologue is not None:
        h = prologue(h, *(per_column(a.double(), x.shape[-1]) for a in prologue_args))
    if residual is not None:
        h = h + residual.double()
        if rounding == "hf" if round_sum is None else round_sum:
            h = h.to(residual.dtype).double()
    g = gamma.double() + float(torch.tensor(weight_offset, dtype=torch.float32))
    v = h.square().mean(-1, keepdim=True) + float(torch.tensor(eps, dtype=torch.float32))
    rs = torch.where(v > 0, v.rsqrt(), 0.0)
    rs = torch.where(v.isfinite(), rs, torch.nan)
    if rounding == "hf":
        return Norm(((h * rs).to(x.dtype).double() * g).to(x.dtype).double(), h)
    return Norm(h * rs * g, h)


def per_column(operand: Tensor, n: int) -> Tensor:
    """A prologue's tensor so that it broadcasts with [..., n]: one value per group of columns becomes one per column."""
    groups = operand.shape[-1]
    return operand if groups in (1, n) else operand.repeat_interleave(n // groups, -1)


def matmul(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``x @ weight.T``, rows of weight times ``scale``, and how far float32 sums may be from it.

    The bound is ``2**-20`` of the sum of the products' sizes: 16 roundings, each of all that was summed.
    """
    x, weight = x.double(), weight.double()
    if scale is not None:
        weight = weight * scale.double().reshape(-1, 1)
    return x @ weight.T, (x.abs() @ weight.abs().T) * 2.0**-20


def mean_of_squares(x: Tensor) -> Tensor:
    """[..., 1]."""
    return x.double().square().mean(-1, keepdim=True)


def apply_rms_norm(
    x: Tensor,
    gamma: Tensor,
    mean: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> Tensor:
    """RMSNorm of the last dimension from the mean of squares [..., 1], which need not be that of x."""
    g = gamma.double() + float(torch.tensor(weight_offset, dtype=torch.float32))
    v = mean.double() + float(torch.tensor(eps, dtype=torch.float32))
    rs = torch.where(v > 0, v.rsqrt(), 0.0)
    rs = torch.where(v.isfinite(), rs, torch.nan)
    if rounding == "hf":
        return ((x.double() * rs).to(x.dtype).double() * g).to(x.dtype).double()
    return x.double() * rs * g


class Rotated(NamedTuple):
    """``y`` what was rotated, and ``size`` of each element's pair: the float error of y is relative to that."""

    y: Tensor
    size: Tensor


def rotate(
    y: Tensor, freqs: Tensor, head_dim: int, *, positions: Tensor | None = None, style: str = "half", dim: int | None = None
) -> Rotated:  # fmt: skip
    """RoPE of the first ``dim`` columns of every ``head_dim`` of y [..., N]; freqs [P, dim] has cos, sin, cos, sin, ...

    The position of a token is its index in the last leading dimension unless ``positions`` [...] has it.
    """
    dim = dim or freqs.shape[1]
    lead = y.shape[:-1]
    if positions is None:
        positions = torch.arange(lead[-1] if lead else 1, device=y.device).expand(lead or (1,)).reshape(lead)
    angles = freqs.double()[positions.long().clamp(0, freqs.shape[0] - 1)][..., None, :dim]
    cos, sin = angles[..., 0::2], angles[..., 1::2]
    heads = y.double().unflatten(-1, (-1, head_dim))
    turning, rest = heads[..., :dim], heads[..., dim:]
    a, b = turning.chunk(2, -1) if style == "half" else (turning[..., 0::2], turning[..., 1::2])
    size = (a.square() + b.square()).sqrt() * (cos.square() + sin.square()).sqrt()

    def joined(first: Tensor, second: Tensor, others: Tensor) -> Tensor:
        pairs = torch.cat((first, second), -1) if style == "half" else torch.stack((first, second), -1).flatten(-2)
        return torch.cat((pairs, others), -1).flatten(-2)

    return Rotated(joined(a * cos - b * sin, b * cos + a * sin, rest), joined(size, size, rest.abs()))


def quantization_step(
    y: Tensor,
    fp8_max: float,
    *,
    group_size: int | None = None,
    scale_ub: float | None = None,
    min_scale: float = 0.0,
) -> Tensor:
    """``max(min(amax, scale_ub) / fp8_max, min_scale)`` of each row or group, unrounded: [..., groups].

    NaN where a value is not finite; a bound that is NaN is none.
    """
    groups = y.unflatten(-1, (-1, group_size or y.shape[-1]))
    amax = groups.abs().amax(-1)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    if scale_ub is not None and scale_ub == scale_ub:
        amax = amax.clamp(max=scale_ub)
    return (amax / fp8_max).clamp(min=float(torch.tensor(min_scale, dtype=torch.float32)))


def power_of_two_above(t: Tensor) -> Tensor:
    """The smallest power of two not below ``t``, within 2**-127 to 2**127."""
    mantissa, exponent = torch.frexp(t)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    power = torch.ldexp(torch.ones_like(t), exponent)
    return torch.where(t.isnan(), torch.nan, torch.where(t == 0, 2.0**-127, power))


def decode_table(bias: int) -> Tensor:
    """The values of the codes 0 to 0x7E of an fp8 format with 4 exponent and 3 mantissa bits, then of 0x7F read as a number."""
    code = torch.arange(128, dtype=torch.float64)
    exponent, mantissa = torch.div(code, 8, rounding_mode="floor"), code % 8
    return torch.where(exponent == 0, mantissa * 2.0 ** (-2 - bias), (8 + mantissa) * 2.0 ** (exponent - bias - 3))


def encode(values: Tensor, bias: int, fp8_max: float, nan_code: int, negative_zero: bool) -> Tensor:
    """fp8 codes (uint8) of float64 values: saturating, round to nearest, ties to even."""
    table = decode_table(bias).to(values.device)
    size = values.abs().clamp(max=fp8_max)
    upper = torch.searchsorted(table, size).clamp(max=127)
    lower = (upper - 1).clamp(min=0)
    below, above = size - table[lower], table[upper] - size
    code = torch.where((below < above) | ((below == above) & (lower % 2 == 0)), lower, upper)
    code = torch.where(table[upper] == size, upper, code)
    negative = values.signbit() & ((code != 0) | negative_zero)
    code = torch.where(negative, code | 0x80, code)
    return torch.where(values.isnan(), nan_code, code).to(torch.uint8)
