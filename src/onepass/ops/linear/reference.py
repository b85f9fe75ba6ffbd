"""Products with scaled weights and what follows them, in float64. Only ``rounding="hf"`` rounds here."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rms_norm.reference import rms_norm, scale_values


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
