"""Fixtures of the model tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.nn.modules import module as torch_module


@pytest.fixture
def clean_global_hooks() -> Iterator[None]:
    yield
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks
