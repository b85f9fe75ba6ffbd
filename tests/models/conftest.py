"""Fixtures of the model tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.modules import module as torch_module


@pytest.fixture
def clean_global_hooks() -> Iterator[None]:
    yield
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler that has compiled nothing, and whose counters are zero."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
