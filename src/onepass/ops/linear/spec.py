"""What one `linear` kernel computes (`LinearSpec`), and one call of it (`LinearCall`).

With ``h = x + residual`` and everything in float32::

    a = round((h * rs) * (gamma + weight_offset))       without gamma: a = round(h)
    y = (a @ weight.T) * weight_scale + bias
    y = act(y[:, :I]) * y[:, I:]                        with an activation; weight is [2 * I, K]
    y = y + add

A scale per 128 x 128 block of weight multiplies the partial sum of its 128 columns:
``y = sum over blocks b of (a_b @ weight_b.T) * scale_b``, each step one fused multiply-add. The order
is that of docs/numerics.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ...formats import Rounding, WeightScale

Activation = Literal["silu_mul", "gelu_tanh_mul", "gelu_mul"]
ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu_mul", "gelu_tanh_mul", "gelu_mul")


@dataclass(frozen=True, eq=False)
class LinearSpec:
    """Everything except sizes that affects the machine code. `linear_spec` interns it, so identity is equality.

    Optional tensors are given by their dtypes, None if absent. ``rounding="hf"`` rounds y, the
    activation, its product with the other half and the sum with ``add`` to ``out``. ``static``: weights may be
    read before the previous kernel has ended.
    """

    x: torch.dtype
    weight: torch.dtype
    weight_scale: WeightScale
    gamma: torch.dtype | None
    residual: torch.dtype | None
    bias: torch.dtype | None
    activation: Activation | None
    add: torch.dtype | None
    out: torch.dtype
    rounding: Rounding
    static: bool = False


@cache
def linear_spec(
    x: torch.dtype,
    weight: torch.dtype,
    weight_scale: WeightScale = "none",
    gamma: torch.dtype | None = None,
    residual: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    activation: Activation | None = None,
    add: torch.dtype | None = None,
    out: torch.dtype | None = None,
    rounding: Rounding = "once",
    static: bool = False,
) -> LinearSpec:
    """The interned `LinearSpec` with these properties. Results have x's dtype unless ``out`` says otherwise."""
    return LinearSpec(x, weight, weight_scale, gamma, residual, bias, activation, add, out or x, rounding, static)


class LinearCall(NamedTuple):
    """One call of a `linear` kernel: its spec, tensors and numbers, all validated.

    ``x``, ``residual``, ``add``, ``out`` and ``residual_out`` have two dimensions, any row stride and
    contiguous rows. ``residual_out`` is None unless there is a residual. A backend may add memory for ``sums``
    and for the ``counter`` of programs that have finished theirs.
    """

    spec: LinearSpec
    x: Tensor
    weight: Tensor
    out: Tensor
    weight_scale: Tensor | None = None
    gamma: Tensor | None = None
    residual: Tensor | None = None
    bias: Tensor | None = None
    add: Tensor | None = None
    residual_out: Tensor | None = None
    eps: float = 0.0
    weight_offset: float = 0.0
    sums: Tensor | None = None
    counter: Tensor | None = None

    @property
    def n(self) -> int:
        """Rows of weight."""
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        """Terms of each sum."""
        return self.weight.shape[1]
