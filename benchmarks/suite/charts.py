"""SVG plots: time against the number of rows, and a roofline. Colours are CSS classes, for light and dark pages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Final

from .peers import PEERS
from .results import BEST, CEILINGS, COMPILED, EAGER, OURS, STREAM, Results, Row

_SHADES: Final = (OURS, EAGER, "F.rms_norm", *COMPILED, "Liger-Kernel", "FlashInfer", "vLLM", "quack", "transformers")
"""Fixes the colours, whatever the order of columns."""
COLOURS: Final = {name: f"k{i}" for i, name in enumerate(_SHADES)} | {STREAM: "ks", BEST: "ks"}
PANEL: Final = (372, 262)
ROOF: Final = (1140, 470)
_MARGIN: Final = {"left": 46.0, "right": 16.0, "top": 40.0, "bottom": 36.0}


def asset(name: str) -> str:
    """A style sheet, script or template."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8").strip()


class Log:
    """A logarithmic axis from ``low`` to ``high``, drawn from ``start`` to ``end``."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, steps: Sequence[int] = (1,)) -> list[float]:
        """Decades, and the given multiples of them, within the axis."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = (step * 10.0**decade for decade in decades for step in steps)
        return [value for value in found if self.low <= value * 1.0001 and value <= self.high * 1.0001]

    def few(self) -> list[float]:
        """Decades, or on an axis with less than two of them 1, 2 and 5 of each."""
        return decades if len(decades := self.ticks()) > 1 else self.ticks((1, 2, 5))


def number(value: float) -> str:
    """Three digits: 0.94, 7.66, 82.8, 1408.

    >>> number(0.944), number(7.656), number(82.78), number(1408.6), number(10.0)
    ('0.94', '7.66', '82.8', '1409', '10.0')
    """
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def short(value: float) -> str:
    """A number on an axis: 0.5, 20, 4k, 1T."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _rate(tb: float) -> str:
    return f"{short(tb * 1e12)}B/s"


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _path(kind: str, *points: str) -> str:
    return f'<path class="{kind}" d="{"".join(points)}"/>'


def _circle(x: float, y: float, r: float, kind: str = "", title: str = "") -> str:
    inside = f"<title>{escape(title)}</title></circle>" if title else "</circle>"
    kinds = f' class="{kind}"' if kind else ""
    return f'<circle{kinds} cx="{x:.1f}" cy="{y:.1f}" r="{r}">{inside}'


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
    """Time against the number of rows on log axes. The shaded part lies below the ceiling: a copy of the same size."""
    width, height = PANEL
    names = shown(rows)
    times = [min(row.us[name]) for row in rows for name in names if name in row.us]
    floors = [row.floor_us if BEST in row.us else max(row.floor_us, least_us) for row in rows]
    x = Log(rows[0].m / 1.35, rows[-1].m * 1.35, _MARGIN["left"], width - _MARGIN["right"])
    y = Log(min(*times, *floors) / 1.5, max(times) * 1.4, height - _MARGIN["bottom"], _MARGIN["top"])
    left, right, bottom, top = x.start, x.end, y.start, y.end
    out = [_path("grid minor", *(f"M{left} {y(t):.1f}H{right}" for t in y.ticks((2, 5))))]
    out.append(_path("grid", *(f"M{left} {y(t):.1f}H{right}" for t in y.ticks())))
    labelled = y.ticks() if len(y.ticks()) > 2 else y.ticks((1, 3)) if len(y.ticks()) == 2 else y.ticks((1, 2, 5))
    out += [_text("y", left - 7, y(t) + 3.5, short(t)) for t in labelled]
    edge = [(left, floors[0]), *((x(row.m), f) for row, f in zip(rows, floors, strict=True)), (right, floors[-1])]
    shade = "".join(f"L{at:.1f} {y(f):.1f}" for at, f in edge)
    out.append(_path("floor", f"M{left} {bottom}{shade}L{right} {bottom}Z"))
    last = -99.0
    for row in rows:
        out.append(_path("tick", f"M{x(row.m):.1f} {bottom}v4"))
        if x(row.m) - last > 24:
            last = x(row.m)
            m = f"{row.m >> 10}k" if row.m >= 1024 and row.m % 1024 == 0 else str(row.m)
            out.append(_text("x", last, bottom + 16, m))
    for name in names:
        points = [(x(row.m), y(min(row.us[name]))) for row in rows if name in row.us]
        line = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        dots = "".join(_circle(a, b, 3.6 if name == OURS else 2.4) for a, b in points)
        group = f'<g class="line {COLOURS[name]}" data-name="{escape(name)}">'
        out.append(f'{group}<path d="M{line}"/>{dots}</g>')
    what = rows[0].op.removeprefix("decode step, ")
    about = rows[0].columns or "norms of one decode step"
    axis = "batch" if not rows[0].columns else "tokens" if "heads" in rows[0].columns else "rows"
    out.append(_path("base", f"M{left} {bottom}H{right}"))
    out.append(_text("title", left - 30, 16, what))
    out.append(_text("sub", left - 30, 31, f"µs · {about}"))
    out.append(_text("x", (left + right) / 2, bottom + 31, axis))
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
    """The time of the smallest copy, an empty kernel or the smallest stream."""
    if results.has_best:
        return min(row.floor_us for row in results.rows)
    empty = [run["ceilings"]["empty kernel us"] for run in results.runs if "ceilings" in run]
    return float(min(empty or [row.floor_us for row in results.rows]))


def least_words(results: Results) -> str:
    """What `least_us` measured."""
    if results.has_best:
        return "the smallest copy"
    return "an empty kernel" if results.device == "cuda" else "the smallest stream"


def panels(results: Results) -> list[list[Row]]:
    """Rows that make a plot: an op at the same columns and several numbers of rows."""
    return [rows for op in results.ops for rows in results.series(op) if len(rows) > 1]


def rates(results: Results) -> list[tuple[str, float]]:
    """The roofs in TB/s: large copies and reads on a GPU, the fastest stream on a CPU."""
    measured = [run["ceilings"] for run in results.runs if "ceilings" in run]
    if not measured:
        return [("fastest stream", max(row.bytes / row.floor_us / 1e6 for row in results.rows))]
    names = {"copy": "copy 2 GiB TB/s", "read": "read 1 GiB TB/s"}
    return [(name, max(found[key] for found in measured)) for name, key in names.items()]


def roofline(results: Results) -> str:
    """Bytes per second against bytes moved, under the slope of a launch and the roofs of memory."""
    width, height = ROOF
    roofs, least = rates(results), least_us(results)
    reached = [row.bytes / us / 1e6 for row in results.rows for us in (row.ours, row.best(COMPILED)) if us]
    sizes = [row.bytes for row in results.rows]
    x = Log(min(sizes) / 1.6, max(sizes) * 1.9, 58, width - 236)
    y = Log(min(reached) / 1.6, max(rate for _, rate in roofs) * 1.5, height - 46, 22)
    left, right, bottom, top = x.start, x.end, y.start, y.end
    out = [_path("grid", *(f"M{left} {y(t):.1f}H{right}" for t in y.few()))]
    out.append(_path("grid minor", *(f"M{x(t):.1f} {bottom}V{top}" for t in x.few())))
    out += [_text("y", left - 8, y(t) + 3.5, _rate(t)) for t in y.few()]
    out += [_text("x", x(t), bottom + 17, f"{short(t)}B") for t in x.few()]
    knee = min(max(rate for _, rate in roofs), x.high / least / 1e6)
    low = max(x.low, y.low * least * 1e6)
    begin, end = (x(low), y(low / least / 1e6)), (x(knee * least * 1e6), y(knee))
    out.append(_path("roof", f"M{begin[0]:.1f} {begin[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"))
    slope = math.degrees(math.atan2(end[1] - begin[1], end[0] - begin[0]))
    at = f"{(begin[0] + end[0]) / 2:.1f} {(begin[1] + end[1]) / 2 - 7:.1f}"
    words = f"{least_words(results)}, {number(least)} µs"
    out.append(f'<text class="roofname" transform="translate({at}) rotate({slope:.1f})">{words}</text>')
    for i, (name, rate) in enumerate(sorted(roofs, key=lambda roof: -roof[1])):
        out.append(_path("roof", f"M{x(max(x.low, rate * least * 1e6)):.1f} {y(rate):.1f}H{right}"))
        words = f"{name} {rate * 1e3:.0f} GB/s" if rate < 1 else f"{name} {rate:.2f} TB/s"
        label = y(rate) + (-3 if i == 0 else 11)
        out.append(_text("end", right + 8, label, words))
    at_y = max(top + 60, label + 24)  # below the lowest roof's name
    for i, op in enumerate(results.ops):
        marks = "".join(_mark(row, x, y, results.quiet) for row in results.of(op))
        out.append(f'<g class="op o{i % 10}" data-op="{escape(op)}">{marks}</g>')
        out.append(f'<g class="op o{i % 10}">{_circle(right + 15, at_y - 4, 5, "us")}</g>')
        out.append(_text("end", right + 26, at_y, op.removeprefix("decode step, ")))
        at_y += 17
    if results.speedup(COMPILED) is not None:
        out.append(_circle(right + 15, at_y - 4, 3, "them"))
        out.append(_text("end", right + 26, at_y, "torch.compile"))
    out.append(_path("base", f"M{left} {bottom}H{right}"))
    out.append(_text("x", (left + right) / 2, bottom + 35, "bytes that an ideal kernel moves"))
    height = max(height, math.ceil(at_y + 12))  # a long legend ends below the plot
    words = "roofline: bytes per second against bytes moved"
    head = f'<svg class="chart roofline" viewBox="0 0 {width} {height}" role="img" aria-label="{words}">'
    return f"{head}{''.join(out)}</svg>"


def _mark(row: Row, x: Log, y: Log, quiet: bool) -> str:
    """A point of the roofline, and a line from it to torch.compile."""
    a, b = x(row.bytes), y(row.bytes / row.ours / 1e6)
    about = f"{row.op} {row.words}: {number(row.ours)} µs, {_rate(row.bytes / row.ours / 1e6)}"
    about += f", {row.share:.0%} of the ceiling" if quiet else ""
    theirs = row.best(COMPILED)
    if not theirs:
        return _circle(a, b, 5, "us", about)
    c = y(row.bytes / theirs / 1e6)
    about += f"; torch.compile {number(theirs)} µs"
    return _path("gap", f"M{a:.1f} {b:.1f}V{c:.1f}") + _circle(a, c, 3, "them") + _circle(a, b, 5, "us", about)
