"""docs/invariance.svg: the rows that change with the batch, as bars."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any, Final

from benchmarks.suite.invariance import OURS
from tools.bench.svg import standalone

from .invariance_page import documents

PATH: Final = Path("docs/invariance.svg")
WIDTH, LEFT, RIGHT, STEP, TOP = 720, 236, 92, 24, 62
_STYLE: Final = (
    "<style>.bar { fill: #b4552d; } .none { fill: #2a8f6a; } .name { text-anchor: end; } .number { text-anchor: start; } "
    ".ours { font-weight: 700; }</style>"
)


def render() -> str:
    """A bar for each implementation: the most rows that changed with any size of batch, on the first machine."""
    d = documents()[0]
    parts, at = [_STYLE, _text("title", 24, 30, f"Rows of {d['rows']:,} that change with the batch")], TOP
    parts.append(_text("sub", 24, 48, f"most of any split into 1, 16, 255, 256 or {d['rows']:,} rows · {d['machine']}"))
    for work in dict.fromkeys(entry["work"] for entry in d["contenders"]):
        at += 14
        for entry in (e for e in d["contenders"] if e["work"] == work):
            parts.append(_bar(entry, d["rows"], at))
            at += STEP
    return standalone("\n".join(parts), WIDTH, at + 12, f"Rows that change with the batch, {d['machine']}")


def _bar(entry: dict[str, Any], rows: int, at: int) -> str:
    most = max(entry["changed"].values())
    length = max(3.0, (WIDTH - LEFT - RIGHT) * most / rows)
    ours = " ours" if entry["name"] == OURS else ""
    bar = f'<rect class="{"bar" if most else "none"}" x="{LEFT}" y="{at}" width="{length:.1f}" height="15" rx="2"/>'
    label = _text(f"name{ours}", LEFT - 10, at + 12, f"{entry['work']}, {entry['name']}")
    return label + bar + _text(f"number{ours}", LEFT + length + 8, at + 12, f"{most:,}")


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
