"""The plots of `benchmarks.suite.charts` as SVG files for the README."""

from __future__ import annotations

from html import escape
from typing import Final

from benchmarks.suite.charts import COLOURS, PANEL, ROOF, asset, least_us, panel, roofline, shown
from benchmarks.suite.results import Results

SHEET: Final = (
    "rms_norm_fused_fp8",
    "rms_norm",
    "gemv_and_partial_norm",
    "qk_rms_norm",
    "fused_rope_rmsnorm_quantization",
    "decode step, DeepSeek-V3 layer",
)
"""The ops of the README's plot, in this order, where they were measured."""


def standalone(body: str, width: float, height: float, title: str) -> str:
    """A file of its own, on a card that follows the reader's colours."""
    style = f"{asset('charts.css')}\n@media (prefers-color-scheme: dark) {{\n{asset('charts_dark.css')}\n}}"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" {size}><title>{escape(title)}</title>\n'
        f"<style>\n{style}\n.card {{ fill: var(--card); }}</style>\n"
        f'<rect class="card" width="{width}" height="{height}" rx="10"/>\n{body}\n</svg>\n'
    )


def time_svg(results: Results, columns: int = 3, lines: int = 2) -> str:
    """The main plot of the most important ops, on one sheet with a legend."""
    order = [*(op for op in SHEET if op in results.ops), *(op for op in results.ops if op not in SHEET)]
    groups = [rows for op in order if len(rows := results.main(op)) > 1][: columns * lines]
    at, parts = 22.0, []
    for name in reversed(shown(row for rows in groups for row in rows)):
        mark = f'<path d="M{at:.0f} 22h18"/><circle cx="{at + 9:.0f}" cy="22" r="3"/>'
        parts.append(f'<g class="line {COLOURS[name]}">{mark}</g><text x="{at + 25:.0f}" y="26">{escape(name)}</text>')
        at += 46 + 6.3 * len(name)
    width, height = PANEL
    least = least_us(results)
    for i, rows in enumerate(groups):
        place = (8 + i % columns * width, 42 + i // columns * (height + 8))
        parts.append(f"\n{panel(rows, least, place)}")
    used = -(-len(groups) // columns)
    title = f"onepass on {results.machine}"
    return standalone("".join(parts), columns * width + 16, 46 + used * (height + 8), title)


def roofline_svg(results: Results) -> str:
    """The roofline as a file."""
    width, height = ROOF
    place = f'<svg x="8" y="4" width="{width}" height="{height}" '
    body = roofline(results).replace("<svg ", place, 1)
    return standalone(body, width + 16, height + 8, f"Roofline: {results.machine}")
