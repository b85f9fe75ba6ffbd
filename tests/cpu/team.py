"""A fixture of the tests of products on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from onepass.ops.gemv_norm import cpu as gemv_norm
from onepass.ops.linear import cpu as linear


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Two threads share the work of a product, however little it is."""
    for module in (gemv_norm, linear):
        monkeypatch.setattr(module, "SERIAL_BELOW", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield monkeypatch
    torch.set_num_threads(before)
