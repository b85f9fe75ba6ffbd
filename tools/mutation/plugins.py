"""Two pytest plugins: one notes which lines each test runs and how long it takes, one runs chosen tests in a chosen order."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

Lines = dict[str, set[int]]
IMPORT: Final = "import"
"""What is run before the first test."""


class Measure:
    """Lines of the watched files by test.

    A kernel is built by the first test that needs it and kept, so the lines run while a spec is launched count for every
    test that launches it.
    """

    def __init__(self, source: Path, files: Sequence[str]) -> None:
        self.names = {str(source / file): file for file in files}
        self.tests: dict[str, Lines] = defaultdict(lambda: defaultdict(set))
        self.specs: dict[Any, Lines] = defaultdict(lambda: defaultdict(set))
        self.used: dict[str, set[Any]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.passed: set[str] = set()
        self.test = IMPORT
        self.spec: Any = None

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        file = self.names.get(frame.f_code.co_filename)
        if file is None:
            return None
        spec = frame.f_locals.get("spec") if frame.f_code.co_name == "launch" and "/cpu/" in file else None
        if spec is not None:
            self.spec = (file, spec)
            self.used[self.test].add(self.spec)

        def line(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                self.tests[self.test][file].add(frame.f_lineno)
                if self.spec is not None:
                    self.specs[self.spec][file].add(frame.f_lineno)
            elif event == "return" and spec is not None:
                self.spec = None
            return line

        return line

    def pytest_sessionstart(self) -> None:
        """Watch, from the imports on."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Whose lines they are."""
        self.test, self.spec = item.nodeid, None
        sys.settrace(self._enter)  # a test may have put its own there
        result = yield
        self.test = IMPORT
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """How long it took, and whether it can be used."""
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        if report.failed:
            self.passed.discard(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Watch no more."""
        sys.settrace(None)
        threading.settrace(None)

    def known(self) -> dict[str, Any]:
        """Tests that pass, with their seconds and lines; as JSON has it."""
        for test, specs in self.used.items():
            for spec in specs:
                for file, lines in self.specs[spec].items():
                    self.tests[test][file] |= lines
        return {
            test: {"seconds": self.seconds[test], "lines": {f: sorted(lines) for f, lines in self.tests[test].items()}}
            for test in (IMPORT, *sorted(self.passed))
        }


class Judge:
    """Runs the chosen tests in their order and says on a stream which failed; one that hangs ends the process.

    Being out of time is no verdict: the tests that are left are not run.
    """

    def __init__(self, order: Sequence[str], seconds: dict[str, float], budget: float, verdict: Any) -> None:
        self.place = {test: i for i, test in enumerate(order)}
        self.seconds, self.budget, self.verdict = seconds, budget, verdict
        self.begun = time.monotonic()
        self.session: pytest.Session | None = None

    def say(self, **words: object) -> None:
        """Tell whoever waits."""
        self.verdict.write(json.dumps(words) + "\n")
        self.verdict.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """The chosen ones."""
        self.session = session
        items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test ten times as long as it was, and 30 seconds, hangs."""
        self.say(running=nodeid)
        faulthandler.dump_traceback_later(30 + 10 * self.seconds[nodeid], exit=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The first failure decides."""
        if report.failed:
            self.say(failed=report.nodeid)
            assert self.session is not None
            self.session.shouldstop = "decided"

    def pytest_runtest_logfinish(self) -> None:
        """Out of time?"""
        faulthandler.cancel_dump_traceback_later()
        self.say(ran=1)
        if time.monotonic() - self.begun > self.budget and self.session is not None:
            self.say(stopped="out of time")
            self.session.shouldstop = "out of time"
