"""Shared by all tests: a kernel cache per run, what `sampled` leaves out, and CPU-seconds by ``--cpu``."""

from __future__ import annotations

import gc
import os
import resource
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import pytest

NEED_ENGINES = [
    "engines/calls.py",
    "engines/serve.py",
    "engines/test_kernels.py",
    "engines/test_vllm_ops.py",
    "engines/test_vllm_serving.py",
    "engines/test_vllm_versions.py",
]
"""`make engines` runs these in an environment that has the engines."""
NEED_SGLANG = ["engines/test_sglang_source.py"]
"""Run by hand: SGLang has no build without CUDA libraries."""
collect_ignore = [
    *([] if find_spec("vllm") and find_spec("kernels") else NEED_ENGINES),
    *([] if find_spec("sglang") else NEED_SGLANG),
]

# Read when torch is imported, here and in the processes that tests start. There is one worker per
# core, each with one thread per core: threads that spin while they wait would slow the others down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A kernel is generated from tens of thousands of small objects. With Python's own thresholds the garbage collector
# walks through everything that torch and the tests have imported again and again: a fifth of the time of tests
# that compile kernels.
gc.set_threshold(50_000, 20, 50)

COLLECTED = pytest.StashKey[list[str]]()
"""The node ids of all tests that were collected, before some of them are deselected."""


class Spent:
    """CPU time of this process and of its children that have ended."""

    seconds = 0.0

    @classmethod
    def since_last_time(cls) -> float:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        before, cls.seconds = cls.seconds, sum(part.ru_utime + part.ru_stime for part in usage)
        return cls.seconds - before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu",
        choices=("folder", "file", "test", "case"),
        help="print the CPU-seconds of each folder, file, test or case",
    )


def left_out(sampled: Iterable[tuple[str, int]]) -> set[str]:
    """The node ids of tests with the marker ``sampled(n)`` that become `full`, from all of them with their n.

    About one in n stays, and at least the first of each group of cases, whose ids are "group: details". The choice
    depends on the ids alone, so every run on every machine makes the same one.
    """
    rest, groups = set(), set()
    for name, n in sampled:
        test, _, parameters = name.partition("[")
        group = (test, n, parameters.partition(":")[0] if ":" in parameters else "")
        if group in groups and crc32(parameters.encode()) % n:
            rest.add(name)
        groups.add(group)
    return rest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out. Start long tests first, so that none runs alone at the end."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    marks = [(item, item.get_closest_marker("sampled")) for item in items if not item.get_closest_marker("full")]
    rest = left_out((item.nodeid, mark.args[0]) for item, mark in marks if mark is not None)
    for item in items:
        if item.nodeid in rest:
            item.add_marker("full")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    Spent.since_last_time()


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected out of later collections of garbage.

    A walk through it takes a third of a second. Tests that read memory, measure or compile often ask for one.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the CPU time of a test's setup, call or teardown to its report, which xdist sends on."""
    report = yield
    report.user_properties.append(("cpu", Spent.since_last_time()))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table that ``--cpu`` asks for."""
    depth = config.getoption("--cpu")
    if depth is None:
        return
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        file, _, test = getattr(report, "nodeid", "").partition("::")
        names = {"folder": str(Path(file).parent), "file": file, "test": f"{file}::{test.partition('[')[0]}"}
        for name, spent in getattr(report, "user_properties", ()):
            if name == "cpu":
                seconds[names.get(depth, report.nodeid)] += spent
    terminalreporter.section(f"CPU-seconds: {seconds.total():.1f}, without imports and collection")
    for name, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:8.1f}  {name}")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of this run alone, shared by its workers."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session", autouse=True)
def cache(run_folder: Path) -> Iterator[Path]:
    """The kernel cache, shared by the workers of this run."""
    chosen = os.environ.get("ONEPASS_TEST_CACHE")  # .ci/run and tools.mutation keep one from run to run
    directory = Path(chosen) if chosen else run_folder / "objects"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEPASS_CACHE_DIR", str(directory))
        yield directory
