"""The maths in float64, unrounded. Imports only torch and is independent of every implementation.

Only ``rounding="hf"`` and ``round_sum=True`` round here: they specify rounding points. Rounding to the output format is
left to the comparison (`onepass.testing.compare`).
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


def sum_error(k: int) -> float:
    """The relative error of ``k`` products that are added in float32, 16 at a time: an ulp for each of ``k / 16 + 8`` steps."""
    return (k / 16 + 8) * 2.0**-23


def matmul(x: Tensor, weight: Tensor, scale: Tensor | None = None, block: int = 128) -> tuple[Tensor, Tensor]:
    """``x @ weight.T`` with scaled weights, and the error of float32 sums.

    ``scale`` has one element, one per row, or one per ``block`` rows and columns. The error is
    `sum_error` of the sum of absolute products.
    """
    x, weight = x.double(), weight.double()
    n, k = weight.shape
    error = sum_error(k)
    if scale is None or scale.numel() == 1 or scale.dim() == 1 or scale.shape[1] == 1 < n == scale.shape[0]:
        factor = torch.ones(1).double() if scale is None else scale_values(scale).reshape(-1)
        return (x @ weight.T) * factor, (x.abs() @ weight.abs().T) * factor.abs() * error
    y = slack = torch.zeros(x.shape[0], n, dtype=torch.float64)
    factors = scale_values(scale).repeat_interleave(block, 0)[:n]
    for index, begin in enumerate(range(0, k, block)):
        a, w, factor = x[:, begin : begin + block], weight[:, begin : begin + block], factors[:, index]
        y, slack = y + (a @ w.T) * factor, slack + (a.abs() @ w.abs().T) * factor.abs()
    return y, slack * error


def activate(gate: Tensor, activation: str) -> Tensor:
    """The function that an activation applies to the gate."""
    match activation:
        case "silu_mul":
            return gate / (1 + torch.exp(-gate))
        case "gelu_tanh_mul":
            cube = 0.044715 * gate**3
            return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + cube)))
        case "gelu_mul":
            rest: Tensor = torch.special.erfc(-gate / 2**0.5)
            return 0.5 * gate * rest
    raise ValueError(activation)


class Linear(NamedTuple):
    """``y`` is the result, ``a`` what weight is multiplied by, rounded, ``h`` what was normalized. All are float64."""

    y: Tensor
    a: Tensor
    h: Tensor


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    gamma: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    activation: str | None = None,
    add: Tensor | None = None,
    rounding: str = "once",
) -> Linear:
    """The product of weight with x [M, K] or with its norm, then scale, bias, activation and addition."""

    def rounded(t: Tensor) -> Tensor:
        return t.to(x.dtype).double() if rounding == "hf" else t

    if gamma is not None:
        norm, h = rms_norm(x, gamma, eps, weight_offset=weight_offset, residual=residual, rounding=rounding)
    else:
        norm = h = x.double() if residual is None else x.double() + residual.double()
    a = norm.to(x.dtype).double()
    y, _ = matmul(a, weight, weight_scale)
    if bias is not None:
        y = y + bias.double()
    y = rounded(y)
    if activation is not None:
        gate, up = y.chunk(2, -1)
        y = rounded(rounded(activate(gate, activation)) * up)
    if add is not None:
        y = rounded(y + add.double())
    return Linear(y, a, h)


def mean_of_squares(x: Tensor) -> Tensor:
    """[..., 1]."""
    return x.double().square().mean(-1, keepdim=True)


class Rotated(NamedTuple):
    """``y``: the result; ``size``: the length of each element's pair, to which float errors of y are relative."""

    y: Tensor
    size: Tensor


def rotate(
    y: Tensor,
    freqs: Tensor,
    head_dim: int,
    *,
    positions: Tensor | None = None,
    style: str = "half",
    dim: int | None = None,
) -> Rotated:
    """RoPE of the first ``dim`` columns of every ``head_dim`` of y [..., N]; freqs [P, dim] has cos, sin, cos, sin, ...

    The position of a token is its index in the last leading dimension unless ``positions`` [...] has it.
    """
    dim = dim or freqs.shape[1]
    cos, sin = (t.unsqueeze(-2) for t in token_angles(freqs, y.shape[:-1], positions, dim))
    heads = y.double().unflatten(-1, (-1, head_dim))
    turning, rest = heads[..., :dim], heads[..., dim:]
    a, b = pairs(turning, style)
    size = (a.square() + b.square()).sqrt() * (cos.square() + sin.square()).sqrt()

    def joined(first: Tensor, second: Tensor, others: Tensor) -> Tensor:
        return torch.cat((from_pairs(first, second, style), others), -1).flatten(-2)

    return Rotated(joined(a * cos - b * sin, b * cos + a * sin, rest), joined(size, size, rest.abs()))


def token_angles(freqs: Tensor, lead: torch.Size, positions: Tensor | None, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [*lead, dim / 2] of every token, in float64; a position outside freqs uses the nearest row."""
    if positions is None:
        positions = torch.arange(lead[-1] if lead else 1, device=freqs.device).expand(lead or (1,)).reshape(lead)
    angles = freqs.double()[positions.long().clamp(0, freqs.shape[0] - 1)][..., :dim]
    return angles[..., 0::2], angles[..., 1::2]


def pairs(columns: Tensor, style: str) -> tuple[Tensor, Tensor]:
    """The first and the second column of each pair that rotates."""
    first, second = columns.chunk(2, -1) if style == "half" else (columns[..., 0::2], columns[..., 1::2])
    return first, second


def from_pairs(first: Tensor, second: Tensor, style: str) -> Tensor:
    """The inverse of `pairs`."""
    return torch.cat((first, second), -1) if style == "half" else torch.stack((first, second), -1).flatten(-2)


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


class Slots(NamedTuple):
    """Per token: the row of freqs to use, and the slot (page * page_size + entry), -1 for none; int64 [T]."""

    position: Tensor
    slot: Tensor


def slots(
    tokens: int,
    pages: int,
    page_size: int,
    offsets: Tensor | None = None,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
    mapping: Tensor | None = None,
    positions: Tensor | None = None,
) -> Slots:
    """Token by token, by the definition; ``mapping`` and ``positions`` override what follows from the tables."""
    position, slot = [0] * tokens, [-1] * tokens
    if offsets is not None and lengths is not None:
        begins = [int(v) for v in offsets.tolist()]
        rows = table.tolist() if table is not None else []
        for request, length in enumerate(lengths.tolist()):
            for token in range(max(begins[request], 0), min(begins[request + 1], tokens)):
                at = position[token] = length + token - begins[request]
                column = at // page_size
                if table is not None and at >= 0 and column < table.shape[1] and 0 <= rows[request][column] < pages:
                    slot[token] = rows[request][column] * page_size + at % page_size
    if mapping is not None:
        slot = [s if 0 <= s < pages * page_size else -1 for s in mapping.tolist()]
    return Slots(positions.long() if positions is not None else torch.tensor(position), torch.tensor(slot).long())
