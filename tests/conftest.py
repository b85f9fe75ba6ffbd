"""Shared by all tests: compiled CPU kernels go to a directory of the test run's own, and OpenMP's threads wait asleep."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when torch is imported, here and in the processes that tests start. There are as many workers as cores and each has a
# team of as many threads: awake, those that wait for others take the cores from them, which is most of some tests' time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: one that begins last would keep a worker busy when the others have ended."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Path]:
    """The kernel cache of this run, the same for all of its workers."""
    base = tmp_path_factory.getbasetemp()
    chosen = os.environ.get("ONEPASS_TEST_CACHE")  # tests/mutation keeps one from run to run
    directory = Path(chosen) if chosen else (base if worker_id == "master" else base.parent) / "objects"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEPASS_CACHE_DIR", str(directory))
        yield directory
