"""The bounds of the sum of a post-norm and the residual."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tests.oracle import bounds
from tests.oracle.bounds import Bounds

_NOT_ZERO: Final = 1e-300


def post_sum(host: dict[str, Any]) -> Bounds:
    """``round(round(norm(x, gamma_post)) * branch_scale) + residual``, added in float32."""
    x, offset = host["x"], host.get("weight_offset", 0.0)
    h = x.double()
    rs = bounds.reciprocal_rms(h, host.get("eps", 1e-6))
    rounded = x.dtype if host.get("rounding") == "hf" else None
    b = bounds.normed(h, rs, bounds.weight(host["gamma_post"], offset), rounded).rounded(x.dtype)
    scale = float(torch.tensor(host.get("branch_scale", 1.0), dtype=torch.float32))
    if scale != 1.0:
        low, high = ((end.float() * scale).double() for end in (b if scale > 0 else reversed(b)))
        b = Bounds(low, high).rounded(x.dtype)
    return Bounds(*((end.float() + host["residual"].float()).double() for end in b))


def middle(values: Bounds) -> tuple[Tensor, Tensor]:
    """The values between bounds, and how far they may be off. Other bounds take zeros for exact."""
    low, high = values
    certain = (low == high) | ~(low.isfinite() & high.isfinite())
    doubt = torch.where(certain, 0.0, (high - low) / 2)
    doubt = torch.where((low == 0) & (low.signbit() != high.signbit()), _NOT_ZERO, doubt)  # zeros of either sign
    value = torch.where(certain, low, low + (high - low) / 2)
    return torch.where((value == 0) & (doubt > 0), _NOT_ZERO, value), doubt
