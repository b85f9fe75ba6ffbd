"""Two files of results: what got faster or slower, beyond the noise.

Every time was taken twice. A row's noise is the larger spread of its two medians, old or new, and at least that of the
median row. What the peers, whose code is the same, moved by in the same row is the machine's drift; a change counts where
it is larger than noise and drift together.
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
        """-0.1 takes a tenth less time."""
        return self.new_us / self.old_us - 1

    @property
    def verdict(self) -> str:
        """faster, slower, or same: within the noise."""
        if abs(self.change) <= self.noise + abs(self.drift):
            return "same"
        return "faster" if self.change < 0 else "slower"


@dataclass(frozen=True)
class Comparison:
    """All rows in both files; how many are in one alone; and what makes the files hard to compare."""

    changes: tuple[Change, ...]
    only_old: int
    only_new: int
    warnings: tuple[str, ...]

    def of(self, verdict: str) -> list[Change]:
        """The largest first."""
        found = [change for change in self.changes if change.verdict == verdict]
        return sorted(found, key=lambda change: -abs(change.change))


def spread(us: Iterable[float]) -> float:
    """How far the medians of one contender are apart, as a fraction."""
    times = list(us)
    return max(times) / min(times) - 1


def drift(old: Row, new: Row) -> float:
    """The median change of everybody but onepass."""
    theirs = [name for name in old.us if name in new.us and name not in (OURS, *WAYS)]
    return statistics.median([min(new.us[n]) / min(old.us[n]) - 1 for n in theirs]) if theirs else 0.0


def compare(old: Results, new: Results) -> Comparison:
    """Row by row."""
    before, after = {row.key: row for row in old.rows}, {row.key: row for row in new.rows}
    shared = [(before[key], row) for key, row in after.items() if key in before]
    spreads = [spread(row.us[OURS]) for pair in shared for row in pair]
    usual = max(LEAST, statistics.median(spreads)) if spreads else LEAST
    changes = tuple(
        Change(b.op, b.words, a.ours, b.ours, max(usual, spread(a.us[OURS]), spread(b.us[OURS])), drift(a, b))
        for a, b in shared
    )
    warnings = [
        f"{name} differs: {', '.join(was)}, now {', '.join(now)}"
        for name in ("machine", "torch", "triton", "threads")
        if (was := _said(old, name)) != (now := _said(new, name))
    ]
    if any(len(row.us[OURS]) < 2 for pair in shared for row in pair):
        warnings.append("some rows were measured once: their noise is not known")
    return Comparison(changes, len(before) - len(shared), len(after) - len(shared), tuple(warnings))


def _said(results: Results, name: str) -> list[str]:
    return sorted({str(run.get(name, "none")) for run in results.runs})


def text(comparison: Comparison) -> str:
    """In lines: warnings, what changed with its noise, and a count of what did not."""
    lines = [f"note: {warning}" for warning in comparison.warnings]
    for verdict in ("slower", "faster"):
        lines += [
            f"{verdict} {abs(c.change):6.1%}  {c.op} {c.words}: {c.old_us:.2f} -> {c.new_us:.2f} us "
            f"(noise {c.noise:.1%}, drift {c.drift:+.1%})"
            for c in comparison.of(verdict)
        ]
    lines.append(f"{len(comparison.of('same'))} of {len(comparison.changes)} rows are the same within the noise")
    if comparison.only_old or comparison.only_new:
        lines.append(f"only in the baseline: {comparison.only_old}; only now: {comparison.only_new}")
    return "\n".join(lines)
