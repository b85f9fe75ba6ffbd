"""Fixtures of the GEMV's tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Random numbers are the same in every run."""
    torch.manual_seed(0)
