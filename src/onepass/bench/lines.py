"""A run as lines: one for each op that is checked and for each row, flushed, so that a log shows how far it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TextIO

from . import results
from .run import Watcher


class Lines(Watcher):
    """Prints a line when an op is checked, when a row is done and when an op is refused.

    With a file the report is written after every row, so that a run that is cut short leaves what it had.
    """

    def __init__(self, to: Path | None = None, out: TextIO | None = None) -> None:
        self.to, self.out = to, out
        self.shown: dict[int, set[str]] = {}

    def step(self, what: str) -> None:
        """Checks are said; contenders show in their row."""
        if what.startswith("checking "):
            self._say(what)

    def row(self, row: dict[str, Any], report: dict[str, Any]) -> None:
        """What is new in the row."""
        found = results.row_of(row, report)
        before = self.shown.get(id(row), set())
        times = "  ".join(f"{name} {_time(found, name)}" for name in found.us if name not in before)
        self.shown[id(row)] = set(found.us)
        self._say(f"{found.op:24} {found.words:>22}  us: {times or 'nothing new'}")
        if self.to:
            results.write(report, self.to)

    def refused(self, op: str, why: str) -> None:
        """At once."""
        self._say(f"REFUSED {op}: {why}")

    def _say(self, text: str) -> None:
        print(text, file=self.out or sys.stdout, flush=True)


def _time(row: results.Row, name: str) -> str:
    behind = row.behind_us.get(name)
    return f"{min(row.us[name]):.2f}" + (f" (behind a kernel {min(behind):.2f})" if behind else "")


def summary(report: dict[str, Any]) -> str:
    """What the rows do not say: who was left out and why, ceilings, clocks, and where the time went."""
    lines = [f"{name}: {why}" for name, why in report["peers"].items() if why]
    lines += [f"{key}: {report[key]}" for key in ("ceilings", "clocks", "host_us") if key in report]
    last = report["sittings"][-1]
    lines.append("seconds: " + ", ".join(f"{name} {seconds:g}" for name, seconds in last.get("seconds", {}).items()))
    if "stopped" in last:
        lines.append(f"STOPPED {last['stopped']}")
    return "\n".join(lines)
