"""Compares two result files: what got faster or slower beyond the noise.

Every time was measured twice. The noise of a row is the larger spread of its two medians, old or
new, and at least that of the median row. The median change of the peers in a row, whose code is the
same, is the drift of the machine. A change counts where it exceeds noise plus drift.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from .results import OURS, WAYS, Results, Row

LEAST = 0.01
"""Changes of one per cent are never reported."""


@dataclass(frozen=True)
class Change:
    """A row in both files; ``change`` is the new time over the old one, less 1."""

    op: str
    words: str
    old_us: float
    new_us: float
    noise: float
    drift: float

    @property
    def change(self) -> float:
        """The relative change of the time: -0.1 is a tenth less."""
        return self.new_us / self.old_us - 1

    @property
    def verdict(self) -> str:
        """faster, slower, or same (within the noise)."""
        if abs(self.change) <= self.noise + abs(self.drift):
            return "same"
        return "faster" if self.change < 0 else "slower"


@dataclass(frozen=True)
class Comparison:
    """The rows in both files, the number of rows in only one, and what makes the files hard to compare."""

    changes: tuple[Change, ...]
    only_old: int
    only_new: int
    warnings: tuple[str, ...]

    def of(self, verdict: str) -> list[Change]:
        """The changes with this verdict, largest first."""
        found = [change for change in self.changes if change.verdict == verdict]
        return sorted(found, key=lambda change: -abs(change.change))

    @property
    def summary(self) -> str:
        """How many rows are the same, and how many cannot be compared."""
        same = f"{len(self.of('same'))} of {len(self.changes)} rows are the same within the noise"
        return f"{same}; only in the baseline: {self.only_old}, only now: {self.only_new}"


def spread(us: Iterable[float]) -> float:
    """How far the medians of one contender are apart, as a fraction."""
    times = list(us)
    return max(times) / min(times) - 1


def drift(old: Row, new: Row) -> float:
    """The median change of all contenders but onepass."""
    theirs = [name for name in old.us if name in new.us and name not in (OURS, *WAYS)]
    return statistics.median([min(new.us[n]) / min(old.us[n]) - 1 for n in theirs]) if theirs else 0.0


def compare(old: Results, new: Results) -> Comparison:
    """Compare row by row."""
    before, after = {row.key: row for row in old.rows}, {row.key: row for row in new.rows}
    shared = [(before[key], row) for key, row in after.items() if key in before]
    spreads = [spread(row.us[OURS]) for pair in shared for row in pair]
    usual = max(LEAST, statistics.median(spreads)) if spreads else LEAST
    changes = tuple(
        Change(b.op, b.words, a.ours, b.ours, max(usual, spread(a.us[OURS]), spread(b.us[OURS])), drift(a, b))
        for a, b in shared
    )
    warnings = []
    for name in ("machine", "torch", "triton", "threads"):
        was, now = (sorted({str(run.get(name, "none")) for run in found.runs}) for found in (old, new))
        if was != now:
            warnings.append(f"{name} differs: {', '.join(was)}, now {', '.join(now)}")
    if any(len(row.us[OURS]) < 2 for pair in shared for row in pair):
        warnings.append("some rows were measured once: their noise is unknown")
    return Comparison(changes, len(before) - len(shared), len(after) - len(shared), tuple(warnings))


def text(comparison: Comparison) -> str:
    """As lines: warnings, what changed and by how much, and a summary."""
    lines = [f"note: {warning}" for warning in comparison.warnings]
    for verdict in ("slower", "faster"):
        lines += [
            f"{verdict} {abs(c.change):6.1%}  {c.op} {c.words}: {c.old_us:.2f} -> {c.new_us:.2f} us "
            f"(noise {c.noise:.1%}, drift {c.drift:+.1%})"
            for c in comparison.of(verdict)
        ]
    return "\n".join((*lines, comparison.summary))
