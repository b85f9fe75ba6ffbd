"""The norm, and codes and scales of its results, in float64 and unrounded. Independent of every implementation.

Only ``rounding="hf"``, a stored product with a gate, ``round_sum=True`` and a post-norm round here: they specify rounding points.
Rounding to the output format is left to the comparison (`onepass.testing.compare`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """``y``: the norm; ``h``: what was normalized; both float64 [..., N]."""

    y: Tensor
    h: Tensor


def rms_norm(
    x: Tensor,
    gamma: Tensor | None,
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

    ``gamma`` is [N], [H, N] for x [..., H, N], or None: 1.
    ``round_sum``: whether ``x + residual`` is rounded to the residual's dtype; None: with "hf".
    """
    h = x.double()
    if prologue is not None:
        h = prologue(h, *(per_column(a.double(), x.shape[-1]) for a in prologue_args))
    if residual is not None:
        h = h + residual.double()
        if rounding == "hf" if round_sum is None else round_sum:
            h = h.to(residual.dtype).double()
    g = torch.ones(1) if gamma is None else gamma
    g = g.double() + float(torch.tensor(weight_offset, dtype=torch.float32))
    v = h.square().mean(-1, keepdim=True) + float(torch.tensor(eps, dtype=torch.float32))
    rs = torch.where(v > 0, v.rsqrt(), 0.0)
    rs = torch.where(v.isfinite(), rs, torch.nan)
    if rounding == "hf":
        return Norm(((h * rs).to(x.dtype).double() * g).to(x.dtype).double(), h)
    return Norm(h * rs * g, h)


def post_norm(
    x: Tensor, gamma: Tensor, eps: float, scale: float = 1.0, weight_offset: float = 0.0, rounding: str = "once"
) -> Tensor:
    """The norm of x, rounded to x's dtype, times ``scale``, rounded to x's dtype."""
    b = rms_norm(x, gamma, eps, weight_offset=weight_offset, rounding=rounding).y.to(x.dtype)
    return (b.double() * float(torch.tensor(scale, dtype=torch.float32))).to(x.dtype)


def rms_norm_add_rms_norm(
    x: Tensor,
    gamma_post: Tensor,
    gamma_pre: Tensor,
    eps: float,
    *,
    residual: Tensor,
    branch_scale: float = 1.0,
    weight_offset: float = 0.0,
    rounding: str = "once",
    round_sum: bool | None = None,
) -> Norm:
    """The pre-norm of ``b * branch_scale + residual``, where b is the norm of x. Both products are rounded to x's dtype."""
    b = post_norm(x, gamma_post, eps, branch_scale, weight_offset, rounding)
    options = {"weight_offset": weight_offset, "rounding": rounding, "round_sum": round_sum}
    return rms_norm(b, gamma_pre, eps, residual=residual, **options)  # type: ignore[arg-type]


def activate(gate: Tensor, activation: str) -> Tensor:
    """What a gate multiplies by."""
    match activation:
        case "silu":
            return gate * gate.sigmoid()
        case "sigmoid":
            return gate.sigmoid()
    raise ValueError(activation)


def gated(x: Tensor, gate: Tensor | None, activation: str = "silu", rounding: str = "once") -> Tensor:
    """What `quantize` quantizes: x, or ``x * act(gate)``. "stored" rounds the product to x's dtype, "hf" both steps."""
    if gate is None:
        return x.double()
    factor = activate(gate.double(), activation)
    y = x.double() * (factor.to(x.dtype).double() if rounding == "hf" else factor)
    return y if rounding == "once" else y.to(x.dtype).double()


def per_column(operand: Tensor, n: int) -> Tensor:
    """A prologue's operand that broadcasts with [..., n]: a value per group of columns becomes one per column."""
    groups = operand.shape[-1]
    return operand if groups in (1, n) else operand.repeat_interleave(n // groups, -1)


def scale_values(scale: Tensor) -> Tensor:
    """Stored scales as float64. float8_e8m0fnu holds exponents, and 255 for NaN."""
    if scale.dtype != torch.float8_e8m0fnu:
        return scale.double()
    exponent = scale.view(torch.uint8).double()
    return torch.where(exponent == 255, torch.nan, torch.exp2(exponent - 127))


def divided(entry: Tensor, scale: Tensor) -> Tensor:
    """``entry / scale``; 0 where the scale is 0, unless the entry is NaN."""
    return torch.where((scale == 0) & ~entry.isnan(), 0.0, entry / scale.double())


def power_of_two_above(t: Tensor) -> Tensor:
    """The smallest power of two not below ``t``, within 2**-127 to 2**127."""
    mantissa, exponent = torch.frexp(t)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    power = torch.ldexp(torch.ones_like(t), exponent)
    return torch.where(t.isnan(), torch.nan, torch.where(t == 0, 2.0**-127, power))


def power_of_two_below(t: Tensor) -> Tensor:
    """The largest power of two that is at most ``t``, within 2**-127 to 2**127."""
    exponent = (torch.frexp(t).exponent - 1).clamp(-127, 127)
    power = torch.ldexp(torch.ones_like(t), exponent)
    return torch.where(t.isnan(), torch.nan, torch.where(t == 0, 2.0**-127, power))


def decode_table(bias: int, mantissa: int = 3) -> Tensor:
    """The values of the codes 0 to 0x7F of a float format, all of them read as numbers.

    By default it has 4 exponent and 3 mantissa bits.
    """
    code, steps = torch.arange(128, dtype=torch.float64), 2**mantissa
    exponent, rest = torch.div(code, steps, rounding_mode="floor"), code % steps
    smallest = rest * 2.0 ** (1 - bias - mantissa)
    return torch.where(exponent == 0, smallest, (steps + rest) * 2.0 ** (exponent - bias - mantissa))


def encode(values: Tensor, bias: int, fp8_max: float, nan_code: int, negative_zero: bool, mantissa: int = 3) -> Tensor:
    """Codes (uint8) of float64 values: saturating, round to nearest, ties to even. The sign is bit 7."""
    table = decode_table(bias, mantissa).to(values.device)
    size = values.abs().clamp(max=fp8_max)
    upper = torch.searchsorted(table, size).clamp(max=127)
    lower = (upper - 1).clamp(min=0)
    below, above = size - table[lower], table[upper] - size
    code = torch.where((below < above) | ((below == above) & (lower % 2 == 0)), lower, upper)
    code = torch.where(table[upper] == size, upper, code)
    negative = values.signbit() & ((code != 0) | negative_zero)
    code = torch.where(negative, code | 0x80, code)
    return torch.where(values.isnan(), nan_code, code).to(torch.uint8)


def nearest_code_value(values: Tensor, bias: int, largest: float, mantissa: int = 3) -> Tensor:
    """Non-negative numbers rounded to a float format, saturating; NaN stays NaN."""
    codes = encode(values.abs(), bias, largest, 0, True, mantissa)
    return torch.where(values.isnan(), torch.nan, decode_table(bias, mantissa)[codes.long()])
