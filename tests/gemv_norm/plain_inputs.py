"""Inputs of a GEMV that several tests share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.testing.case import same_bytes

Three = tuple[Tensor, Tensor, Tensor]


def inputs(m: int = 3, n: int = 50, k: int = 64, width: int = 30, dtype: torch.dtype = torch.bfloat16) -> Three:
    """act, weight and gamma."""
    act, weight, gamma = torch.randn(m, k), torch.randn(n, k), 1 + 0.25 * torch.randn(width)
    return act.to(dtype), weight.to(dtype), gamma.to(dtype)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Random numbers of each test of a file that imports this are the same in every run."""
    torch.manual_seed(0)


def all_same(a: Any, b: Any) -> bool:
    return all(same_bytes(x, y) for x, y in zip(a, b, strict=True))
