"""Goals of measured rows: how many rows reach each, and cells of the tables that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from benchmarks.suite.results import Row

from .markdown import table

Sheet = TypeVar("Sheet")
"""The rows of an op, and what their goals refer to."""


class Goal(NamedTuple, Generic[Sheet]):
    """What some rows should reach: a share of at least ``limit``, or at most ``limit`` of some ``unit``.

    ``value`` is None where it was not measured.
    """

    what: str
    words: str
    applies: Callable[[Row], bool]
    value: Callable[[Sheet, Row], float | None]
    limit: float
    unit: str = ""

    def met(self, value: float) -> bool:
        """Whether a value reaches the goal."""
        return value <= self.limit if self.unit else value >= self.limit

    def shown(self, value: float) -> str:
        """A value in words."""
        return f"{value:.2f}{self.unit}" if self.unit else f"{value:.0%}"

    def values(self, sheet: Sheet, rows: Iterable[Row]) -> list[tuple[float, Row]]:
        """The measured values of the rows that the goal is for."""
        return [(v, row) for row in rows if self.applies(row) if (v := self.value(sheet, row)) is not None]


def goal_table(goals: Iterable[Goal[Sheet]], sheet: Sheet, rows: Sequence[Row]) -> str:
    """One line per goal: how many rows reach it, and the row that is farthest from it."""
    lines = []
    for goal in goals:
        found = goal.values(sheet, rows)
        if not found:
            lines.append([goal.what, goal.words, "not measured", ""])
            continue
        worst, row = (max if goal.unit else min)(found, key=lambda item: item[0])
        count = sum(goal.met(value) for value, _ in found)
        lines.append([goal.what, goal.words, f"{count} of {len(found)}", f"{goal.shown(worst)} ({row.words})"])
    return "\n".join(table(["what", "goal", "reached", "worst"], lines, 2))


def verdicts(goals: Iterable[Goal[Sheet]], sheet: Sheet, row: Row) -> list[tuple[str, str]]:
    """The goals of a row in words, each with whether the row reaches it and its value."""
    each = ((goal, value) for goal in goals for value, _ in goal.values(sheet, [row]))
    return [(goal.words, f"{'yes' if goal.met(value) else 'NO'}, {goal.shown(value)}") for goal, value in each]


def times(row: Row, names: Sequence[str]) -> str:
    """The best of some contenders in a chain and behind a kernel, or ``refused`` if none ran."""
    chain, behind = row.best(names), row.behind_kernel.best(names)
    if chain is None:
        return "refused" if any(name in row.refused for name in names) else ""
    return f"{chain:.2f}" if behind is None else f"{chain:.2f} / {behind:.2f}"
