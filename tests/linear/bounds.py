"""The range that each result of `linear` may lie in: a float32 sum with its error, then each step as docs/numerics.md rounds it.

Steps after the sum are single float32 operations. They are monotone, so the ends of a range determine it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from onepass.formats import FLOATS, SCALE_BLOCK
from onepass.ops.linear import reference as linear_reference
from onepass.ops.rms_norm import reference as rms_norm_reference
from tests.oracle.bounds import FLOOR, Bounds

_SCALED: Final = 256
"""A CPU sums products with fp8 weights at 1/256 of their size, so many more of them are subnormal."""
_LOWEST: Final = {"silu_mul": -1.2784645, "gelu_tanh_mul": -0.7524614, "gelu_mul": -0.7517916}
"""Where each activation has its minimum. It falls below that gate and rises above it."""
_ACTIVATION: Final = 2.0**-20
"""Relative error of an activation in float32."""
_TINY: Final = 2.0**-119
"""Below this an activation may be 0: ``exp(-gate)`` exceeds float32."""


def products(
    act: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    on_gpu: bool,
    *,
    dtype: torch.dtype | None = None,
    doubt: Tensor | None = None,
) -> Bounds:
    """``act @ weight.T``, scaled, and the error of float32 sums. The sign of a zero depends on the order of the sum.

    ``dtype`` is that of act, unless act has it. ``doubt`` is how far act itself may be off.
    """
    n, k = weight.shape
    y, slack = linear_reference.matmul(act, weight, scale)
    if on_gpu:
        sizes = _as_tensor_cores_align(act, dtype or act.dtype), _as_tensor_cores_align(weight, weight.dtype)
        slack = linear_reference.matmul(*sizes, scale)[1]
    if doubt is not None:
        slack = slack + linear_reference.matmul(doubt, weight, scale)[1] / linear_reference.sum_error(k)
    exact = ~y.isfinite() | (slack == 0)
    slack = slack + FLOOR * k * _largest_scale(scale, n) * (1 if weight.dtype in FLOATS else _SCALED)
    return _ordered(torch.where(exact, y, y - slack), torch.where(exact, y, y + slack))


def _largest_scale(scale: Tensor | None, n: int) -> Tensor | float:
    """1 and the largest scale of each row."""
    if scale is None:
        return 1.0
    values = 1 + rms_norm_reference.scale_values(scale).abs().nan_to_num()
    if values.dim() < 2 or values.shape == (n, 1):
        return values.reshape(-1)
    return values.amax(1).repeat_interleave(SCALE_BLOCK)[:n]


def _as_tensor_cores_align(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Magnitudes that determine the error of sums: a subnormal float16 number counts as the smallest normal one."""
    return torch.where(t == 0, t, t.abs().clamp_min(2.0**-14)) if dtype == torch.float16 else t


def result(
    y: Bounds,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    add: Tensor | None = None,
    rounding: str = "once",
) -> Bounds:
    """What follows the `products` y. ``dtype`` is x's, to which "hf" rounds."""
    steps = dtype if rounding == "hf" else torch.float32
    y = _plus(y, bias).rounded(steps)
    if activation is not None:
        columns = y.low.shape[-1] // 2
        gate, up = y.part(slice(0, columns)), y.part(slice(columns, None))
        y = _times(_activated(gate, activation).rounded(steps), up).rounded(steps)
    return y if add is None else _plus(y, add).rounded(steps)


def _ordered(low: Tensor, high: Tensor) -> Bounds:
    """Bounds between which a zero may have either sign."""
    return Bounds(torch.where(low == 0, -0.0, low), torch.where(high == 0, 0.0, high))


def _plus(y: Bounds, term: Tensor | None) -> Bounds:
    """A float32 sum."""
    if term is None:
        return y
    low, high = ((end.float() + term.float()).double() for end in y)
    return _undecided(_ordered(low, high), y.low.isnan() != y.high.isnan())


def _undecided(y: Bounds, where: Tensor) -> Bounds:
    """Bounds that allow any value in some places."""
    return Bounds(torch.where(where, -torch.inf, y.low), torch.where(where, torch.nan, y.high))


def _activated(gate: Bounds, activation: str) -> Bounds:
    """The activation of a gate between bounds."""
    left, right = (_widened(end, activation) for end in gate)
    low, high = torch.minimum(left.low, right.low), torch.maximum(left.high, right.high)
    turn = torch.full_like(low, _LOWEST[activation])
    inside = (gate.low < turn) & (turn < gate.high)
    low = torch.where(inside, _widened(turn, activation).low, low)
    doubt = (gate.low.isnan() != gate.high.isnan()) | (left.low.isnan() != right.low.isnan())
    return _undecided(_ordered(low, high), doubt)


def _widened(gate: Tensor, activation: str) -> Bounds:
    """The activation and its error, relative to the value and, where 1 + erf and 1 + tanh cancel, also to the gate."""
    value = linear_reference.activate(gate, activation)
    radius = value.abs() * (_ACTIVATION + gate.abs().clamp(max=128) * 2.0**-22) + _TINY
    if activation != "silu_mul":
        radius = radius + gate.abs() * 2.0**-21
    exact = ~value.isfinite() | (gate == 0)
    return Bounds(torch.where(exact, value, value - radius), torch.where(exact, value, value + radius))


def _times(a: Bounds, b: Bounds) -> Bounds:
    """A float32 product. It is undecided where it may or may not be infinity times zero."""
    ends = torch.stack([(x.float() * y.float()).double() for x in a for y in b])
    nan = ends.isnan()
    doubt = (nan.any(0) & ~nan.all(0)) | (a.low.isnan() != a.high.isnan()) | (b.low.isnan() != b.high.isnan())
    doubt |= _may_vanish(a) & _infinite(b) | _may_vanish(b) & _infinite(a)
    return _undecided(_ordered(ends.amin(0), ends.amax(0)), doubt)


def _may_vanish(y: Bounds) -> Tensor:
    return (y.low < 0) & (y.high > 0)


def _infinite(y: Bounds) -> Tensor:
    return y.low.isinf() | y.high.isinf()
