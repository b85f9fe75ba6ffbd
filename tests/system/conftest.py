from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onepass.core.backend import launching_with


@pytest.fixture
def wrong_kernel() -> Iterator[None]:
    """A kernel that writes zeros."""

    def zeros(call: Any) -> None:
        for name in ("norm", "codes", "scale", "new_residual", "out", "residual_out"):
            tensor = getattr(call, name, None)
            if tensor is not None:
                tensor.view(torch.uint8).zero_()

    with launching_with(lambda family: zeros):
        yield
