"""Plots drawn by hand as SVG: time against the number of rows, a roofline, bars. Colours are classes, light and dark."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from .peers import PEERS
from .results import BEST, CEILINGS, COMPILED, EAGER, OURS, STREAM, Results, Row

_SHADES: Final = (
    OURS, EAGER, "F.rms_norm", "torch.compile", "torch.compile max", "Liger-Kernel", "FlashInfer", "vLLM", "quack", "transformers",
)  # fmt: skip
"""Who has which colour; a peer's place among the columns does not change its colour."""
COLOURS: Final = {name: f"k{i}" for i, name in enumerate(_SHADES)} | {STREAM: "ks", BEST: "ks"}
SHEET: Final = (
    "rms_norm_fused_fp8", "rms_norm", "gemv_and_partial_norm", "qk_rms_norm", "fused_rope_rmsnorm_quantization",
    "decode step, DeepSeek-V3 layer",
)  # fmt: skip
"""What the README's plot shows, where it was measured."""
PANEL: Final = (372, 262)
ROOF: Final = (1140, 470)
_MARGIN: Final = {"left": 46.0, "right": 16.0, "top": 40.0, "bottom": 36.0}


class Log:
    """A logarithmic axis from ``low`` to ``high`` between two places."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, steps: Sequence[int] = (1,)) -> list[float]:
        """Decades, and the given multiples of them, within the axis."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = (step * 10.0**decade for decade in decades for step in steps)
        return [value for value in found if self.low <= value * 1.0001 and value <= self.high * 1.0001]


def number(value: float) -> str:
    """Three digits: 0.94, 7.66, 82.8, 1408.

    >>> number(0.944), number(7.656), number(82.78), number(1408.6), number(10.0)
    ('0.94', '7.66', '82.8', '1409', '10.0')
    """
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def short(value: float) -> str:
    """An axis' number: 0.5, 20, 4k, 1T."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def rows_short(m: int) -> str:
    """Numbers of rows are powers of two: 16384 is 16k."""
    return f"{m >> 10}k" if m >= 1024 and m % 1024 == 0 else str(m)


def shown(rows: Iterable[Row]) -> list[str]:
    """Contenders of a time plot, onepass last so that it lies on top."""
    seen = {name for row in rows for name in row.us}
    return [name for name in (*CEILINGS, *reversed(PEERS), OURS) if name in seen]


def legend(names: Iterable[str]) -> str:
    """Names and colours as list items; onepass first."""
    return "".join(
        f'<li><button type="button" data-name="{escape(name)}"><i class="{COLOURS[name]}"></i>{escape(name)}</button></li>'
        for name in reversed(list(names))
    )


def panel(rows: Sequence[Row], least_us: float, place: tuple[float, float] | None = None) -> str:
    """Time against the number of rows on log axes; the shaded part is below the ceiling: a copy of as many bytes."""
    width, height = PANEL
    names = shown(rows)
    times = [min(row.us[name]) for row in rows for name in names if name in row.us]
    floors = [row.floor_us if BEST in row.us else max(row.floor_us, least_us) for row in rows]
    x = Log(rows[0].m / 1.35, rows[-1].m * 1.35, _MARGIN["left"], width - _MARGIN["right"])
    y = Log(min(*times, *floors) / 1.5, max(times) * 1.4, height - _MARGIN["bottom"], _MARGIN["top"])
    left, right, bottom, top = x.start, x.end, y.start, y.end
    out = [
        f'<path class="grid minor" d="{"".join(f"M{left} {y(t):.1f}H{right}" for t in y.ticks((2, 5)))}"/>',
        f'<path class="grid" d="{"".join(f"M{left} {y(t):.1f}H{right}" for t in y.ticks())}"/>',
    ]
    labelled = y.ticks() if len(y.ticks()) > 2 else y.ticks((1, 3)) if len(y.ticks()) == 2 else y.ticks((1, 2, 5))
    out += [f'<text class="y" x="{left - 7}" y="{y(t) + 3.5:.1f}">{short(t)}</text>' for t in labelled]
    edge = [(left, floors[0]), *((x(row.m), f) for row, f in zip(rows, floors, strict=True)), (right, floors[-1])]
    shade = "".join(f"L{at:.1f} {y(f):.1f}" for at, f in edge)
    out.append(f'<path class="floor" d="M{left} {bottom}{shade}L{right} {bottom}Z"/>')
    last = -99.0
    for row in rows:
        out.append(f'<path class="tick" d="M{x(row.m):.1f} {bottom}v4"/>')
        if x(row.m) - last > 24:
            last = x(row.m)
            out.append(f'<text class="x" x="{last:.1f}" y="{bottom + 16}">{rows_short(row.m)}</text>')
    for name in names:
        points = [(x(row.m), y(min(row.us[name]))) for row in rows if name in row.us]
        line = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{3.6 if name == OURS else 2.4}"/>' for a, b in points)
        out.append(
            f'<g class="line {COLOURS[name]}" data-name="{escape(name)}"><path d="M{line}"/>{dots}</g>'
        )  # fmt: skip
    out.append(f'<path class="base" d="M{left} {bottom}H{right}"/>')
    what = rows[0].op.removeprefix("decode step, ")
    about = rows[0].columns or "norms of one decode step"
    axis = "batch" if not rows[0].columns else "tokens" if "heads" in rows[0].columns else "rows"
    out.append(f'<text class="title" x="{left - 30}" y="16">{escape(what)}</text>')
    out.append(f'<text class="sub" x="{left - 30}" y="31">µs · {escape(about)}</text>')
    out.append(f'<text class="x" x="{(left + right) / 2:.0f}" y="{bottom + 31}">{axis}</text>')
    data = [
        [round(x(row.m), 1), f"{axis} {row.m}", {n: min(row.us[n]) for n in reversed(names) if n in row.us}]
        for row in rows
    ]
    where = f'x="{place[0]}" y="{place[1]}" width="{width}" height="{height}"' if place else ""
    return (
        f'<svg class="chart panel" viewBox="0 0 {width} {height}" {where} role="img" '
        f'aria-label="{escape(what)}: microseconds against {axis}" data-top="{top}" data-bottom="{bottom}" '
        f'data-at="{escape(json.dumps(data))}">{"".join(out)}</svg>'
    )


def least_us(results: Results) -> float:
    """What the smallest copy, an empty kernel or the smallest stream takes."""
    if results.has_best:
        return min(row.floor_us for row in results.rows)
    empty = [run["ceilings"]["empty kernel us"] for run in results.runs if "ceilings" in run]
    return float(min(empty or [row.floor_us for row in results.rows]))


def least_words(results: Results) -> str:
    """What `least_us` is the time of."""
    if results.has_best:
        return "the smallest copy"
    return "an empty kernel" if results.device == "cuda" else "the smallest stream"


def panels(results: Results) -> list[list[Row]]:
    """Rows that make a plot: those of an op with the same columns and several numbers of rows."""
    found: list[list[Row]] = []
    for op in results.ops:
        groups: dict[str, list[Row]] = {}
        for row in results.of(op):
            groups.setdefault(row.columns, []).append(row)
        found += [sorted(rows, key=lambda row: row.m) for rows in groups.values() if len(rows) > 1]
    return found


def rates(results: Results) -> list[tuple[str, float]]:
    """The roofs in TB/s: large copies and reads on a GPU, the fastest stream on a CPU."""
    measured = [run["ceilings"] for run in results.runs if "ceilings" in run]
    if not measured:
        return [("fastest stream", max(row.bytes / row.floor_us / 1e6 for row in results.rows))]
    names = {"copy": "copy 2 GiB TB/s", "read": "read 1 GiB TB/s"}
    return [(name, max(found[key] for found in measured)) for name, key in names.items()]


def roofline(results: Results) -> str:
    """Bytes moved against bytes a second: under a launch's slope and memory's roofs; a line leads to torch.compile."""
    width, height = ROOF
    roofs, least = rates(results), least_us(results)
    reached = [row.bytes / us / 1e6 for row in results.rows for us in (row.ours, row.best(COMPILED)) if us]
    sizes = [row.bytes for row in results.rows]
    x = Log(min(sizes) / 1.6, max(sizes) * 1.9, 58, width - 236)
    y = Log(min(reached) / 1.6, max(rate for _, rate in roofs) * 1.5, height - 46, 22)
    left, right, bottom, top = x.start, x.end, y.start, y.end
    out = [f'<path class="grid" d="{"".join(f"M{left} {y(t):.1f}H{right}" for t in y.ticks())}"/>']
    out.append(f'<path class="grid minor" d="{"".join(f"M{x(t):.1f} {bottom}V{top}" for t in x.ticks())}"/>')
    out += [f'<text class="y" x="{left - 8}" y="{y(t) + 3.5:.1f}">{_rate(t)}</text>' for t in y.ticks()]
    out += [f'<text class="x" x="{x(t):.1f}" y="{bottom + 17}">{short(t)}B</text>' for t in x.ticks()]
    knee = min(max(rate for _, rate in roofs), x.high / least / 1e6)
    begin = max(x.low, y.low * least * 1e6)
    out.append(
        f'<path class="roof" d="M{x(begin):.1f} {y(begin / least / 1e6):.1f}L{x(knee * least * 1e6):.1f} {y(knee):.1f}"/>'
    )
    middle = math.sqrt(begin * knee * least * 1e6)
    slope = math.degrees(math.atan2(y(knee) - y(begin / least / 1e6), x(knee * least * 1e6) - x(begin)))
    word = least_words(results)
    at = f"{x(middle):.1f} {y(middle / least / 1e6) - 7:.1f}"
    out.append(
        f'<text class="roofname" transform="translate({at}) rotate({slope:.1f})">{word}, {number(least)} µs</text>'
    )
    for i, (name, rate) in enumerate(sorted(roofs, key=lambda roof: -roof[1])):
        out.append(f'<path class="roof" d="M{x(max(x.low, rate * least * 1e6)):.1f} {y(rate):.1f}H{right}"/>')
        words = f"{name} {rate * 1e3:.0f} GB/s" if rate < 1 else f"{name} {rate:.2f} TB/s"
        out.append(f'<text class="end" x="{right + 8}" y="{y(rate) + (-3 if i == 0 else 11):.1f}">{words}</text>')
    for number_, op in enumerate(results.ops):
        marks = []
        for row in results.of(op):
            a, b = x(row.bytes), y(row.bytes / row.ours / 1e6)
            theirs = row.best(COMPILED)
            if theirs:
                c = y(row.bytes / theirs / 1e6)
                marks.append(
                    f'<path class="gap" d="M{a:.1f} {b:.1f}V{c:.1f}"/><circle class="them" cx="{a:.1f}" cy="{c:.1f}" r="3"/>'
                )
            about = f"{row.op} {row.words}: {number(row.ours)} µs, {_rate(row.bytes / row.ours / 1e6)}"
            if results.quiet:
                about += f", {row.share:.0%} of the ceiling"
            if theirs:
                about += f"; torch.compile {number(theirs)} µs"
            marks.append(f'<circle class="us" cx="{a:.1f}" cy="{b:.1f}" r="5"><title>{escape(about)}</title></circle>')
        out.append(f'<g class="op o{number_ % 10}" data-op="{escape(op)}">{"".join(marks)}</g>')
    for number_, op in enumerate(results.ops):
        at_y = top + 60 + 17 * number_
        name = op.removeprefix("decode step, ")
        out.append(f'<g class="op o{number_ % 10}"><circle class="us" cx="{right + 15}" cy="{at_y - 4}" r="5"/></g>')
        out.append(f'<text class="end" x="{right + 26}" y="{at_y}">{escape(name)}</text>')
    at_y = top + 60 + 17 * len(results.ops)
    out.append(f'<circle class="them" cx="{right + 15}" cy="{at_y - 4}" r="3"/>')
    out.append(f'<text class="end" x="{right + 26}" y="{at_y}">torch.compile</text>')
    out.append(f'<path class="base" d="M{left} {bottom}H{right}"/>')
    out.append(f'<text class="x" x="{(left + right) / 2:.0f}" y="{bottom + 35}">bytes an ideal kernel moves</text>')
    return (
        f'<svg class="chart roofline" viewBox="0 0 {width} {height}" role="img" aria-label="roofline: bytes a second against '
        f'bytes moved">{"".join(out)}</svg>'
    )  # fmt: skip


def _rate(tb: float) -> str:
    return f"{short(tb * 1e12)}B/s"


STYLE: Final = """
.chart { --ink: #1b1f24; --soft: #5d6670; --line: #d9dde1; --card: #ffffff; --shade: #eef0f2;
  font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums; }
.k0 { color: #e4502b; } .k1 { color: #98a1ab; } .k2 { color: #3f9d5c; } .k3 { color: #2f73d6; } .k4 { color: #78abef; }
.k5 { color: #9a5fc4; } .k6 { color: #7f9a1e; } .k7 { color: #c99700; } .k8 { color: #c4447f; } .k9 { color: #b07646; }
.ks { color: #7c858f; }
.o0 { color: #e4502b; } .o1 { color: #e29a00; } .o2 { color: #2f73d6; } .o3 { color: #79b4c9; } .o4 { color: #3f9d5c; }
.o5 { color: #92bf3b; } .o6 { color: #12807c; } .o7 { color: #9a5fc4; } .o8 { color: #c4447f; } .o9 { color: #8a6a4f; }
.chart text { fill: var(--soft); } .chart .title { fill: var(--ink); font-weight: 640; font-size: 13px; }
.chart .y { text-anchor: end; } .chart .x { text-anchor: middle; } .chart .roofname { text-anchor: middle; }
.grid { stroke: var(--line); fill: none; } .minor { opacity: 0.45; } .base, .tick { stroke: var(--soft); fill: none; }
.floor { fill: var(--shade); } .roof { stroke: var(--ink); stroke-width: 1.4; fill: none; opacity: 0.75; }
.line path { fill: none; stroke: currentColor; stroke-width: 1.5; stroke-linejoin: round; } .line circle { fill: currentColor; }
.line.k0 path { stroke-width: 2.6; } .line.k0 circle { stroke: var(--card); stroke-width: 1.2; }
.line.ks path { stroke-dasharray: 2 3; } .line.ks circle { display: none; } .line.k4 path { stroke-dasharray: 6 3; }
.us { fill: currentColor; stroke: var(--card); stroke-width: 1.2; } .them { fill: var(--card); stroke: #8d96a0; stroke-width: 1.4; }
.gap { stroke: currentColor; opacity: 0.45; fill: none; }
"""
DARK: Final = """
.chart { --ink: #e9ecef; --soft: #9aa4ae; --line: #2c333a; --card: #161a1f; --shade: #20262c; }
.k0, .o0 { color: #ff6b45; } .k1 { color: #77818c; } .k2, .o4 { color: #55b873; } .k3, .o2 { color: #5a96f2; } .k4 { color: #9cc4fb; }
.k5, .o7 { color: #b886dd; } .k6 { color: #a3bf3d; } .k7, .o1 { color: #e8b730; } .k8, .o8 { color: #e26aa0; } .k9, .o9 { color: #cd9463; }
.o6 { color: #2fb3ad; } .ks { color: #8a949e; }
"""


def standalone(body: str, width: float, height: float, title: str) -> str:
    """A file of its own, on a card that follows the reader's colours."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{escape(title)}</title>\n<style>{STYLE}@media (prefers-color-scheme: dark) {{{DARK}}}"
        ".card { fill: var(--card); }</style>\n"
        f'<rect class="card" width="{width}" height="{height}" rx="10"/>\n{body}\n</svg>\n'
    )


def time_svg(results: Results, columns: int = 3, lines: int = 2) -> str:
    """The main plot of the ops that matter most, on one sheet with a legend."""
    order = [*(op for op in SHEET if op in results.ops), *(op for op in results.ops if op not in SHEET)]
    groups = [rows for op in order if len(rows := results.main(op)) > 1][: columns * lines]
    names = shown(row for rows in groups for row in rows)
    least = least_us(results)
    at, marks = 22.0, []
    for name in reversed(names):
        marks.append(
            f'<g class="line {COLOURS[name]}"><path d="M{at:.0f} 22h18"/><circle cx="{at + 9:.0f}" cy="22" r="3"/></g>'
            f'<text x="{at + 25:.0f}" y="26">{escape(name)}</text>'
        )
        at += 46 + 6.3 * len(name)
    width, height = PANEL
    body = "".join(
        panel(rows, least, (8 + i % columns * width, 42 + i // columns * (height + 8))) + "\n"
        for i, rows in enumerate(groups)
    )
    lines = -(-len(groups) // columns)
    return standalone(
        "".join(marks) + "\n" + body, columns * width + 16, 46 + lines * (height + 8), f"onepass on {results.machine}"
    )


def roofline_svg(results: Results) -> str:
    """The roofline as a file."""
    return standalone(
        roofline(results).replace("<svg ", '<svg x="8" y="4" width="1140" height="470" ', 1),
        1156,
        478,
        f"Roofline: {results.machine}",
    )
