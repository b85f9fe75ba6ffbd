"""Two pytest plugins: one records each test's lines and time, one runs chosen tests in a given order."""

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
"""Lines that run before the first test."""
LAUNCH: Final = ("cpu/launch.py", "launch")
"""The function that runs a CPU kernel: its file and its name."""


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
        call = frame.f_locals.get("call") if (file, frame.f_code.co_name) == LAUNCH else None
        if call is not None:
            self.spec = (type(call), call.spec)
            self.used[self.test].add(self.spec)

        def line(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                self.tests[self.test][file].add(frame.f_lineno)
                if self.spec is not None:
                    self.specs[self.spec][file].add(frame.f_lineno)
            elif event == "return" and call is not None:
                self.spec = None
            return line

        return line

    def pytest_sessionstart(self) -> None:
        """Watch, from the imports on."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Attribute lines to this test."""
        self.test, self.spec = item.nodeid, None
        sys.settrace(self._enter)  # a test may have put its own there
        result = yield
        self.test = IMPORT
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record its time, and whether it is usable."""
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        if report.failed:
            self.passed.discard(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Stop watching."""
        sys.settrace(None)
        threading.settrace(None)

    def known(self) -> dict[str, Any]:
        """Passing tests with their seconds and lines, for JSON."""
        for test, specs in self.used.items():
            for spec in specs:
                for file, lines in self.specs[spec].items():
                    self.tests[test][file] |= lines
        return {
            test: {"seconds": self.seconds[test], "lines": {f: sorted(lines) for f, lines in self.tests[test].items()}}
            for test in (IMPORT, *sorted(self.passed))
        }


class RunChosen:
    """Runs the chosen tests in order and reports failures on a stream; a hanging test ends the process.

    When time runs out, the remaining tests are skipped and nothing is decided.
    """

    def __init__(self, order: Sequence[str], seconds: dict[str, float], budget: float, verdict: Any) -> None:
        self.order = {test: i for i, test in enumerate(order)}
        self.seconds, self.budget, self.verdict = seconds, budget, verdict
        self.begun = time.monotonic()
        self.session: pytest.Session | None = None

    def report(self, **event: object) -> None:
        """Report to the parent."""
        self.verdict.write(json.dumps(event) + "\n")
        self.verdict.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Keep the chosen tests, in their order."""
        self.session = session
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test hangs after ten times its usual time plus 30 seconds."""
        self.report(running=nodeid)
        faulthandler.dump_traceback_later(30 + 10 * self.seconds[nodeid], exit=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Stop at the first failure."""
        if report.failed:
            self.report(failed=report.nodeid)
            assert self.session is not None
            self.session.shouldstop = "decided"

    def pytest_runtest_logfinish(self) -> None:
        """Stop if time has run out."""
        faulthandler.cancel_dump_traceback_later()
        self.report(ran=1)
        if time.monotonic() - self.begun > self.budget and self.session is not None:
            self.report(stopped="out of time")
            self.session.shouldstop = "out of time"
