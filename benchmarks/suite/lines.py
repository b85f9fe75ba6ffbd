"""Prints a run as lines, flushed, so that a log shows its progress."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final, TextIO

from . import results
from .run import Watcher

WIDTH: Final = 100
"""Columns of output that is not a terminal."""


class Lines(Watcher):
    """Prints a line for each checked op, measured row and refused op.

    With a file, the report is written after every row, so that a run that is cut short keeps its results.
    """

    def __init__(self, to: Path | None = None, out: TextIO | None = None) -> None:
        self.to, self.out = to, out
        self.shown: dict[int, set[str]] = {}

    def step(self, what: str) -> None:
        """Print checks; contenders show in their row."""
        if what.startswith("checking "):
            self._print(what)

    def row(self, row: dict[str, Any], report: dict[str, Any]) -> None:
        """Print what is new in the row."""
        found = results.row_of(row, report)
        times = []
        for name in found.us:
            if name not in self.shown.get(id(row), ()):
                behind = found.behind_us.get(name)
                times.append(f"{name} {min(found.us[name]):.2f}")
                times[-1] += f" (behind a kernel {min(behind):.2f})" if behind else ""
        times += [f"{name} refused" for name in found.refused if name not in self.shown.get(id(row), ())]
        self.shown[id(row)] = {*found.us, *found.refused}
        self._print_row(f"{found.op:24} {found.words:>22}  us: ", times or ["nothing new"])
        if self.to:
            results.write(report, self.to)

    def refused(self, op: str, why: str) -> None:
        """Print it at once."""
        self._print(f"REFUSED {op}: {why}")

    def _print_row(self, head: str, times: list[str]) -> None:
        """Print a line, and below it what exceeds `WIDTH`."""
        line, *rest = times
        for text in rest:
            if len(head) + len(line) + len(text) + 2 > WIDTH:
                self._print(head + line)
                head, line = " " * len(head), text
            else:
                line += f"  {text}"
        self._print(head + line)

    def _print(self, text: str) -> None:
        print(text, file=self.out or sys.stdout, flush=True)
