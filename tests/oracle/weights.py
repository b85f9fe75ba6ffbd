"""Weights of 8 bits, and scales of them, for the cases of products."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from onepass.formats import SCALE_BLOCK

_SPREAD: Final = 8.0
"""Standard deviation of int8 weights, for results near 1 with `scales`."""


def whole_numbers(normal: Tensor) -> Tensor:
    """Normal numbers as int8 weights."""
    return (normal * _SPREAD).round().clamp(-128, 127).to(torch.int8)


def scales(kind: str, n: int, k: int, generator: torch.Generator, apart: bool = False) -> Tensor:
    """Positive scales of weights [n, k]: for "tensor", "row" and "column" ([n, 1]) near each other.

    Those of a "block", float32 or powers of two ("ue8m0"), differ more. ``apart``: there are gaps between their rows.
    """
    if kind not in ("block", "ue8m0"):
        shape = {"tensor": (1,), "row": (n,), "column": (n, 1)}[kind]
        return 0.02 + 0.01 * torch.rand(shape, generator=generator)
    rows, columns = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    exponents = torch.randint(-8, -2, (rows, columns + 3), generator=generator)
    whole = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    if kind == "block":
        whole = torch.exp2(exponents.float()) * (1 + torch.rand(exponents.shape, generator=generator))
    part = whole[:, 1 : 1 + columns]
    return part if apart else part.contiguous()
