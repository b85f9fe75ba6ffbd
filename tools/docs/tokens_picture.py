"""docs/tokens-light.svg and docs/tokens-dark.svg: the tokens per second of `generate()`, as bars."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any, Final

from tools.bench.generating import FORMS

from .page import Page

DATA: Final = Path(__file__).parents[2] / "benchmarks/h200/models.json"
BATCH: Final = 1
BARS: Final = {
    "dynamic": "transformers, eager",
    "static": "transformers, torch.compile",
    "captured-decode": "onepass",
    "captured-fp8": "onepass, fp8 weights",
}
"""The forms of `generate()` that are drawn, and their labels."""
WIDTH, LEFT, RIGHT, TOP, STEP, BAR = 760, 228, 84, 82, 44, 28
LIGHT: Final = {"ink": "#1b1f24", "soft": "#5d6670", "peer": "#b6bec7", "ours": "#e4502b", "fp8": "#b83a19"}
DARK: Final = {"ink": "#f0f3f6", "soft": "#9aa4ae", "peer": "#57606a", "ours": "#ff6b45", "fp8": "#ff9a7a"}


def rates() -> dict[str, float]:
    """Tokens per second by label."""
    times = _row()["us_per_token"]
    return {label: _row()["batch"] * 1e6 / times[FORMS[form][0]] for form, label in BARS.items()}


def subtitle() -> str:
    """What was measured, where and when."""
    report, row = json.loads(DATA.read_text()), _row()
    return f"{row['model']}, random weights, batch {row['batch']}, bfloat16, {report['machine']}, {report['date']}"


def _row() -> dict[str, Any]:
    report = json.loads(DATA.read_text())
    (row,) = (row for row in report["generated"] if row["batch"] == BATCH)
    return dict(row)


def render(colours: dict[str, str]) -> str:
    """The picture in one set of colours, on no background."""
    values, height = rates(), TOP + STEP * len(BARS) + 4
    longest = max(values.values())
    style = (
        f'svg {{ font: 15px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: {colours["ink"]}; }} '
        f".sub {{ font-size: 13px; fill: {colours['soft']}; }} .title {{ font-size: 19px; font-weight: 650; }} "
        ".name { text-anchor: end; } .ours { font-weight: 650; }"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<title>{escape(_words(values))}</title>",
        f"<style>{style}</style>",
        '<text class="title" x="2" y="26">Tokens per second with generate()</text>',
        f'<text class="sub" x="2" y="49">{escape(subtitle())}</text>',
    ]
    for i, (label, value) in enumerate(values.items()):
        y, width = TOP + i * STEP, (WIDTH - LEFT - RIGHT) * value / longest
        colour = colours["fp8" if "fp8" in label else "ours" if "onepass" in label else "peer"]
        bold = " ours" if "onepass" in label else ""
        parts += [
            f'<text class="name{bold}" x="{LEFT - 12}" y="{y + 19}">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="4" fill="{colour}"/>',
            f'<text class="number{bold}" x="{LEFT + width + 10:.1f}" y="{y + 19}">{value:,.0f}</text>',
        ]
    return "\n".join((*parts, "</svg>", ""))


def _words(values: dict[str, float]) -> str:
    """The picture for readers who cannot see it."""
    return "Tokens per second: " + ", ".join(f"{label} {value:,.0f}" for label, value in values.items())


PAGES: Final = (
    Page(Path("docs/tokens-light.svg"), lambda: render(LIGHT)),
    Page(Path("docs/tokens-dark.svg"), lambda: render(DARK)),
)
