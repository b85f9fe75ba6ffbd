"""``python -m tools.bench.headlines``: a ratchet for the figures of README.md and docs/performance.md.

benchmarks/CHIP/headlines.json has every figure (`tools.bench.figures`) with its protocol, file and commit, its ``bar``, and
the launches of ours that it must beat. The command compares the result files with that table. It fails if a figure is
more than 3 % worse than its bar, loses to launches of ours, or is missing. ``make gpu`` runs it with ``--update``.

``--update`` takes over the new values. A bar is lowered when a figure beats it by more than 3 %. It is raised only by
``--reason TEXT``, which is stored; ``--match`` limits the reason to figures with a matching name.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.suite.baseline import LEAST
from tools import compact

from .figures import HIGHER, Figure, figures

FILE: Final = "headlines.json"
LIMIT: Final = 0.03
"""How much worse a figure may be."""
LOST: Final = LEAST
"""How much longer than its separate launches a fused op may take: noise."""
ROOT: Final = Path(__file__).parents[2]

Rows = dict[tuple[str, str], dict[str, Any]]
"""The rows of a table by figure and protocol."""


def parse(text: str) -> Rows:
    """The rows of a table."""
    return {(row["figure"], row["protocol"]): row for row in json.loads(text)["rows"]}


def text(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table as a file, one line per row."""
    return compact.dumps({"rows": list(rows)})


def rounded(value: float) -> float:
    """Four digits, which a table has."""
    return float(f"{value:.4g}")


def worse(value: float, bar: float, unit: str, limit: float = LIMIT) -> bool:
    """Whether a value is worse than a bar by more than the limit."""
    low, high = (value, bar) if unit in HIGHER else (bar, value)
    return high > low * (1 + limit)


def _by(value: float, bar: float) -> str:
    return f" ({abs(value / bar - 1):.1%})" if bar else ""


def losses(row: Mapping[str, Any]) -> list[str]:
    """The launches of ours that are faster than a row's figure by more than noise."""
    beaten = row.get("must_beat", {}).items()
    return [name for name, us in beaten if us is not None and worse(row["value"], us, row["unit"], LOST)]


def row_of(figure: Figure, old: Mapping[str, Any] | None, commit: str, reason: str = "") -> dict[str, Any]:
    """A figure as a row. Its bar is the old one, unless the figure beats it by more than the limit or a reason is given."""
    value, old = rounded(figure.value), old or {}
    row = {"figure": figure.name, "protocol": figure.protocol, "value": value, "bar": old.get("bar", value)}
    row |= {"unit": figure.unit, "from": figure.source, "commit": commit}
    if figure.must_beat:
        row["must_beat"] = {name: None if us is None else rounded(us) for name, us in figure.must_beat.items()}
    kept = {name: old[name] for name in ("reason", "was") if name in old}
    if worse(value, row["bar"], figure.unit) and reason:
        kept = {"reason": reason, "was": row["bar"]}
        row["bar"] = value
    elif worse(row["bar"], value, figure.unit):
        kept = {}
        row["bar"] = value
    if lost := losses(row):
        loses = {name: why for name, why in old.get("loses", {}).items() if name in lost}
        row["loses"] = loses | (dict.fromkeys(lost, reason) if reason else {})
    return row | kept


def measured(rows: Rows) -> Rows:
    """The rows of figures that are still measured. The others say why not."""
    return {key: row for key, row in rows.items() if "gone" not in row}


def problems(rows: Rows) -> list[str]:
    """What is wrong with a table by itself: figures beyond their bars, and losses without a reason."""
    lines = []
    for row in measured(rows).values():
        where, unit = f"{row['figure']}, {row['protocol']}", row["unit"]
        if worse(row["value"], row["bar"], unit):
            by = _by(row["value"], row["bar"])
            lines.append(f"WORSE  {where}: {row['value']:g} {unit}, and the bar is {row['bar']:g}{by}")
        for name in losses(row):
            if not row.get("loses", {}).get(name):
                us = row["must_beat"][name]
                lines.append(
                    f"LOSES  {where}: {row['value']:g} {unit}, and `{name}` takes {us:g}{_by(row['value'], us)}"
                )
    return lines


def raised(before: Rows, now: Rows) -> list[str]:
    """Bars that are worse than in an earlier table, and figures that have gone, without a new reason."""
    lines = []
    for key, old in measured(before).items():
        where, row = ", ".join(key), now.get(key, {})
        if row.get("gone"):
            continue
        if not row:
            lines.append(f"GONE   {where}: it was {old['value']:g} {old['unit']}")
        elif worse(row["bar"], old["bar"], row["unit"], 0.0) and row.get("reason") in (None, "", old.get("reason")):
            lines.append(
                f"RAISED {where}: the bar was {old['bar']:g} {row['unit']} and is {row['bar']:g}, without a reason"
            )
    return lines


def unmeasured(rows: Rows) -> list[str]:
    """Figures whose separate launches no file has."""
    missing = ((key, [n for n, us in row.get("must_beat", {}).items() if us is None]) for key, row in rows.items())
    return [f"{', '.join(key)}: `{name}`" for key, names in missing for name in names]


# --- git ------------------------------------------------------------------------------------------------------------


def _git(*words: str) -> str:
    """What git prints; empty without a repository, or without git."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit_of(folder: Path, source: str) -> str:
    """The commit that a file's results came with; of a file that is not committed, the one it was measured on."""
    path = str((folder / source).resolve())
    changed = _git("status", "--porcelain", "--", path)
    return _git("log", "-1", "--format=%h", *(() if changed else ("--", path)))


def before(path: Path) -> Rows:
    """The last committed table that differs from the one on disk; none without a history."""
    name, now = path.relative_to(ROOT).as_posix(), path.read_text().strip()
    for revision in _git("log", "-2", "--format=%h", "--", name).split():
        if (old := _git("show", f"{revision}:{name}")) and old != now:
            return parse(old)
    return {}


# --- the command ----------------------------------------------------------------------------------------------------


def updated(folder: Path, old: Rows, reason: str = "", match: str = "") -> Rows:
    """The table of the result files in a folder."""
    measurements = figures(folder)
    commits = {source: commit_of(folder, source) for source in {figure.source for figure in measurements}}

    def why(name: str) -> str:
        return reason if re.search(match, name) else ""

    new = {f.key: row_of(f, old.get(f.key), commits[f.source], why(f.name)) for f in measurements}
    absent = {key: row.get("gone") or why(key[0]) for key, row in old.items() if key not in new}
    return new | {key: {"figure": key[0], "protocol": key[1], "gone": text} for key, text in absent.items() if text}


def main(arguments: list[str] | None = None) -> int:
    """Compare or update; the exit status is 1 if a figure is worse, loses, or has gone without a reason."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.headlines", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "benchmarks/h200", help="results of a chip, and its table"
    )
    parser.add_argument("--update", action="store_true", help="write the table if nothing is wrong with it")
    parser.add_argument("--reason", default="", help="why figures are worse, lose or have gone")
    parser.add_argument("--match", default="", help="only figures whose name matches this expression get the reason")
    options = parser.parse_args(arguments)
    path = options.folder.resolve() / FILE
    old = parse(path.read_text()) if path.exists() else {}
    new = updated(options.folder, old, options.reason, options.match)
    earlier = before(path) if old and path.is_relative_to(ROOT) else {}
    objections = list(dict.fromkeys((*problems(new), *raised(old, new), *raised(earlier, old))))
    print(*objections, sep="\n", end="\n" if objections else "")
    waiting = unmeasured(new)
    print(f"{len(new)} figures, {len(objections)} of them worse; {len(waiting)} alternatives are not measured yet")
    if objections:
        print("Each needs a fix, or `--update --reason TEXT` (and `--match FIGURE`) in the commit of its results.")
    elif options.update:
        path.write_text(text(new.values()))
    return 1 if objections else 0


if __name__ == "__main__":
    sys.exit(main())
