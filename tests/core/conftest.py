"""Fixtures of the tests of calls."""

from __future__ import annotations

import linecache
from collections.abc import Iterator

import pytest

from tests.core.fast_path import driver as driver


@pytest.fixture(autouse=True)
def generated_sources() -> Iterator[None]:
    """Restore the shown source of ops whose eager call a test generates again with a stand-in."""
    before = {name: entry for name, entry in linecache.cache.items() if name.startswith("<onepass eager call of ")}
    yield
    linecache.cache.update(before)
