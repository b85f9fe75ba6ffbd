"""A `Timeline` as a Chrome trace and as a page that needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from itertools import accumulate, groupby
from typing import Any, Final, NamedTuple

from . import PHASES, Block, GemvEvent, Timeline, percent

WIDTH: Final = 1200
LEFT: Final = 70
RIGHT: Final = 92
PLOT: Final = WIDTH - LEFT - RIGHT
STRIP_TOP: Final = 24
STRIP: Final = 84
ROWS_TOP: Final = STRIP_TOP + STRIP + 34
BINS: Final = 260
LABEL: Final = 11
"""Height of a line of small text."""
NUMBERS: Final = {phase.name: i for i, phase in enumerate(PHASES)}


class Track(NamedTuple):
    """Blocks that follow one another on one SM or thread; those resident together lie on several tracks."""

    name: str
    unit: int
    blocks: list[Block]


def tracks(timeline: Timeline) -> list[Track]:
    """By unit; each block goes to the first track of its unit that is free when it begins."""
    found = []
    blocks = sorted(timeline.blocks, key=lambda block: (block.unit, block.begin, block.end))
    for unit, members in groupby(blocks, key=lambda block: block.unit):
        lanes: list[list[Block]] = []
        for block in members:
            for lane in lanes:
                if lane[-1].end <= block.begin:
                    lane.append(block)
                    break
            else:
                lanes.append([block])
        for number, lane in enumerate(lanes, 1):
            again = f" ({number})" if number > 1 else ""
            found.append(Track(f"{timeline.unit} {unit}{again}" if unit >= 0 else f"lane {number}", unit, lane))
    return found


# --- Chrome trace ---------------------------------------------------------------------------------------------------


def chrome(timeline: Timeline) -> str:
    """The JSON that Perfetto opens: one track an SM or thread, one slice a phase, times in microseconds."""
    events: list[dict[str, Any]] = [_metadata("process_name", 0, name=timeline.title)]
    for tid, track in enumerate(tracks(timeline), 1):
        events.append(_metadata("thread_name", tid, name=track.name))
        events.append(_metadata("thread_sort_index", tid, sort_index=tid))
        for block in track.blocks:
            for name, begin, end in block.spans or (("block", block.begin, block.end),):
                about = {"ph": "X", "name": name, "cat": "gemv", "pid": 1, "tid": tid}
                args = {"block": block.index, "segment": block.kind}
                events.append({**about, "ts": begin / 1e3, "dur": (end - begin) / 1e3, "args": args})
    run = {"title": timeline.title, "machine": timeline.machine, **timeline.parameters}
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ns",\n"otherData": {json.dumps(run)},\n"traceEvents": [\n{lines}\n]}}'


def _metadata(kind: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": tid, "args": args}


# --- the picture ----------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A track with its place in the picture."""

    track: Track
    top: float
    height: float


def _rows(timeline: Timeline) -> tuple[list[Row], float]:
    """Every track's place, and where the last one ends: a few are tall, hundreds are thin, SMs stand apart."""
    found = tracks(timeline)
    pitch = min(30.0, max(3.0, 960 / len(found)))
    apart = min(6.0, 0.25 * pitch) if pitch > 6 else 1.5
    several = len(found) > len({track.unit for track in found})
    within = 0.0 if pitch < 4 else 0.5
    rows, top, unit = [], float(ROWS_TOP), found[0].unit
    for track in found:
        top += apart if track.unit != unit else 0
        unit = track.unit
        rows.append(Row(track, top, pitch - (within if several else 0)))
        top += pitch
    return rows, top


def _ticks(total: int) -> tuple[list[int], float, str]:
    """Where the axis is marked, its unit in nanoseconds and that unit's name."""
    scale, name = (1e6, "ms") if total >= 2e6 else (1e3, "µs")
    step = next(s for e in range(12) for s in (10**e, 2 * 10**e, 5 * 10**e) if total / s <= 10)
    return list(range(0, total + 1, step)), scale, name


def _activity(timeline: Timeline) -> list[tuple[int, bool, list[float]]]:
    """How many blocks are in each phase, normed and tail apart, on average over each of `BINS` slices of time."""
    width = max(timeline.total, 1) / BINS
    counts = {(i, tail): [0.0] * BINS for i in range(len(PHASES)) for tail in (False, True)}
    for block in timeline.blocks:
        for name, begin, end in block.spans:
            bins = counts[NUMBERS[name], block.kind == "tail"]
            first, last = begin / width, end / width
            for i in range(int(first), min(int(last) + 1, BINS)):
                bins[i] += min(last, i + 1) - max(first, i)
    return [(i, tail, bins) for (i, tail), bins in counts.items() if any(bins)]


def _peak(timeline: Timeline) -> int:
    """The most blocks that ever ran at one time."""
    steps = sorted((ns, step) for block in timeline.blocks for ns, step in ((block.begin, 1), (block.end, -1)))
    return max(1, *accumulate(step for _, step in steps))


def _strip(timeline: Timeline) -> Iterator[str]:
    """Blocks in flight as stacked areas, the busiest moment as high as the strip."""
    total, peak = max(timeline.total, 1), _peak(timeline)
    at = [round(i * total / BINS) for i in range(BINS + 1)]
    floor = [0.0] * BINS
    for phase, tail, bins in _activity(timeline):
        ceiling = [low + more for low, more in zip(floor, bins, strict=True)]
        used = [i for i, count in enumerate(bins) if count]
        span = range(used[0], used[-1] + 1)
        there, back = [(ceiling[i], at[i + 1]) for i in span], [(floor[i], at[i]) for i in reversed(span)]
        levels = [(f"{STRIP_TOP + STRIP * (1 - count / peak):.1f}", x) for count, x in (*there, *back)]
        steps = (f"V{y}H{list(run)[-1][1]}" for y, run in groupby(levels, key=lambda level: level[0]))
        outline = f'<path class="p{phase}" d="M{at[span[0]]} {STRIP_TOP + STRIP}{"".join(steps)}Z"/>'
        yield f"<g{' class=tail' if tail else ''}>{outline}</g>"
        floor = ceiling
    yield f'<path class="base" d="M0 {STRIP_TOP + STRIP}H{total}"/>'


def _block(block: Block, row: Row, unit: str) -> str:
    """One block's rectangles, and what hovering tells."""
    lines = [f"block {block.index}, {block.kind}", row.track.name if row.track.unit >= 0 else f"{unit} unknown"]
    lines.append(f"{block.begin / 1e3:.3f} to {block.end / 1e3:.3f} µs")
    lines += [f"{name}: {(end - begin) / 1e3:.3f} µs" for name, begin, end in block.spans]
    place = f'y="{row.top:.1f}" height="{row.height:.1f}"'
    rects = "".join(
        f'<rect class="p{NUMBERS[name]}" x="{begin}" width="{end - begin}" {place}/>'
        for name, begin, end in block.spans
        if end > begin
    )
    behind = f'<rect class="whole" x="{block.begin}" width="{block.end - block.begin}" {place}/>'
    edge = f'<path class="edge" d="M{block.begin} {row.top:.1f}v{row.height:.1f}"/>'
    title = f"<title>{escape(chr(10).join(lines))}</title>"
    kind = " tail" if block.kind == "tail" else ""
    return f'<g class="block{kind}" data-block="{block.index}">{title}{behind}{rects}{edge}</g>'


def _labels(rows: list[Row]) -> Iterator[str]:
    """Names of the units, as many as fit, and an arrow at each last arriver."""
    shown = arrow = 0.0
    for number, (_, members) in enumerate(groupby(rows, key=lambda row: row.track.unit)):
        group = list(members)
        top, bottom = group[0].top, group[-1].top + group[-1].height
        if number % 2 == 0 and group[0].track.unit >= 0:
            yield f'<rect class="band" x="{LEFT}" width="{PLOT}" y="{top:.1f}" height="{bottom - top:.1f}"/>'
        lines = group if group[0].track.unit < 0 else group[:1]
        for row in lines:
            middle = (top + bottom) / 2 if len(lines) == 1 else row.top + row.height / 2
            if middle - shown >= LABEL:
                yield f'<text class="name" x="{LEFT - 8}" y="{middle + 3.5:.1f}">{escape(row.track.name)}</text>'
                shown = middle
        for row in group:
            middle = row.top + row.height / 2
            last = any(block.kind == "normed, last to arrive" for block in row.track.blocks)
            if last and middle - arrow >= LABEL:
                yield f'<text class="last" x="{LEFT + PLOT + 6}" y="{middle + 3.5:.1f}">◂ last to arrive</text>'
                arrow = middle


def _axis(timeline: Timeline, bottom: float) -> Iterator[str]:
    at, scale, name = _ticks(timeline.total)
    for ns in at:
        x = LEFT + ns * PLOT / max(timeline.total, 1)
        text = f"{ns / scale:g}" if ns else f"0 {name}"
        yield f'<path d="M{x:.1f} {STRIP_TOP}V{bottom:.1f}"/>'
        yield from (f'<text x="{x:.1f}" y="{y:.1f}">{text}</text>' for y in (ROWS_TOP - 12, bottom + 16))


def _moments(timeline: Timeline) -> list[tuple[int, str]]:
    """What gets a line through all tracks: from there on only the stragglers run, or only the norm."""
    arrivals = (b.marks.get(GemvEvent.AFTER_ARRIVE) for b in timeline.blocks if b.kind == "normed, last to arrive")
    found = [
        (timeline.last_k_loop_end, "last K loop ends"),
        (max(filter(None, arrivals), default=None), "last arrival"),
    ]
    return sorted((ns, text) for ns, text in found if ns is not None)


def svg(timeline: Timeline) -> str:
    """The picture: blocks in flight above, every track below, on one axis of time."""
    rows, bottom = _rows(timeline)
    total, peak = max(timeline.total, 1), _peak(timeline)
    height = bottom + 26
    widths = sorted(block.end - block.begin for block in timeline.blocks)
    dense = " dense" if widths[len(widths) // 2] * PLOT / total < 3 else ""
    parts = [
        f'<svg class="timeline{dense}" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(timeline.title)}"',
        f' data-total="{total}" data-left="{LEFT}" data-plot="{PLOT}" data-top="{STRIP_TOP}" data-bottom="{bottom:.1f}"',
        f' data-axis="{ROWS_TOP - 12}" data-median="{widths[len(widths) // 2]}">',
        *_labels(rows),
        f'<g class="axis">{"".join(_axis(timeline, bottom))}</g>',
        f'<text class="name" x="{LEFT - 8}" y="{STRIP_TOP + 8}">{peak} block{"s" * (peak > 1)}</text>',
        f'<text class="name" x="{LEFT - 8}" y="{STRIP_TOP + 8 + LABEL}">in flight</text>',
        f'<svg x="{LEFT}" y="0" width="{PLOT}" height="{height:.0f}"><g class="zoom" transform="scale({PLOT / total:.9g} 1)">',
        *_strip(timeline),
        *(_block(block, row, timeline.unit) for row in rows for block in row.track.blocks),
    ]
    moments = _moments(timeline)
    parts += (f'<path class="mark" d="M{ns} {STRIP_TOP - 6}V{bottom:.1f}"/>' for ns, _ in moments)
    parts.append("</g></svg>")
    for number, (ns, text) in enumerate(moments):
        x = LEFT + ns * PLOT / total
        side = " left" if number == 0 and len(moments) > 1 else ""
        parts.append(f'<text class="mark{side}" data-ns="{ns}" x="{x:.1f}" y="{STRIP_TOP - 10}">{text}</text>')
    return "".join(parts) + "</svg>"


# --- the page -------------------------------------------------------------------------------------------------------


START: Final = (
    "Start is not idle time. A block first asks memory for several steps of its weights, in portions, and waits for the first of "
    "them; then it waits for the kernel before it, if that is still running. Nothing is computed until then, so memory is busy and the "
    "block is not. Stream begins when the block may read its input."
)


def page(timeline: Timeline) -> str:
    """One HTML file: figures, picture, table of phases; light or dark as the reader has it."""
    summary = timeline.summary()
    tiles = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value).replace(' us', ' µs')}</dd><small>{escape(remark)}</small></div>"
        for label, value, remark in summary.figures()
    )
    chips = "".join(f"<li><b>{escape(name)}</b> {escape(value)}</li>" for name, value in timeline.parameters.items())
    present = [NUMBERS[row.phase] for row in summary.phases]
    legend = "".join(f'<li><i class="p{i}"></i>{escape(PHASES[i].name)}</li>' for i in present)
    about = f'<p class="about">{escape(START)}</p>' if timeline.unit == "SM" and NUMBERS["start"] in present else ""
    if any(block.kind == "tail" for block in timeline.blocks):
        legend += '<li class="tail"><i class="p1"></i>stream, block of the tail</li>'
    table = "".join(
        f'<tr><th><i class="p{NUMBERS[row.phase]}"></i>{escape(row.phase)}</th>'
        f"<td>{row.count}</td><td>{row.median:.3f}</td><td>{row.max:.3f}</td>"
        f'<td class="share">{escape(percent(row.share))}<span><b style="width:{100 * row.share:.1f}%"></b></span></td>'
        f"<td>{escape(PHASES[NUMBERS[row.phase]].meaning)}</td></tr>"
        for row in summary.phases
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(timeline.title)}</title>\n<style>{STYLE}</style></head>\n<body><main>"
        f"<header><h1>{escape(timeline.title)}</h1><p>{escape(timeline.machine)}</p><ul>{chips}</ul></header>\n"
        f'<dl>{tiles}</dl>\n<figure><ul class="legend">{legend}</ul>{about}\n<div>{svg(timeline)}</div></figure>\n'
        "<table><thead><tr><th>phase</th><th>blocks</th><th>median, µs</th><th>max, µs</th><th>of all block time</th>"
        f"<th>what a block does</th></tr></thead><tbody>{table}</tbody></table>\n"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


STYLE: Final = """
:root { color-scheme: light dark; --bg: #f7f7f5; --card: #fff; --ink: #1b1f24; --soft: #666e78; --line: #e2e4e6;
  --band: #f4f5f5; }
.p0 { color: #c3d4ee; } .p1 { color: #4479d4; } .p2 { color: #1fa890; } .p3 { color: #f0ab2e; } .p4 { color: #ea6a3c; }
.p5 { color: #c93a86; } .p6 { color: #7b4bd1; } .p7, .whole { color: #cfd4da; } .tail .p1 { color: #86b4ea; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #0f1215; --card: #161a1f; --ink: #e8ebee; --soft: #98a1ab; --line: #2b3138; --band: #1b2026; }
  .p0 { color: #33465f; } .p1 { color: #4f86e0; } .p2 { color: #27b79d; } .p3 { color: #f4b544; } .p4 { color: #f1774a; }
  .p5 { color: #dc5299; } .p6 { color: #9a70ea; } .p7, .whole { color: #464e58; } .tail .p1 { color: #31548c; }
}
* { box-sizing: border-box; margin: 0; padding: 0; }
body { background: var(--bg); color: var(--ink); font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
  font-variant-numeric: tabular-nums; padding: 36px 24px 56px; }
main { max-width: 1280px; margin: auto; }
h1 { font-size: 24px; line-height: 1.25; font-weight: 650; letter-spacing: -0.01em; }
header p, small, thead th { color: var(--soft); }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; }
header ul { margin-top: 10px; font-size: 13px; gap: 6px; }
header li { border: 1px solid var(--line); border-radius: 99px; padding: 1px 11px; background: var(--card); }
header b { font-weight: 400; color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 24px 0 12px; }
dl > div, figure, table { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
dl > div { padding: 12px 16px 13px; }
dt { color: var(--soft); font-size: 13px; }
dd { font-size: 23px; line-height: 1.3; font-weight: 600; letter-spacing: -0.01em; }
small { display: block; font-size: 12px; line-height: 1.35; }
figure { padding: 16px 18px 8px; }
figure > div { overflow-x: auto; }
.legend { font-size: 13px; margin-bottom: 6px; } .about { color: var(--soft); font-size: 13px; max-width: 100ch; margin: 4px 0 6px; }
.hint { margin-left: auto; color: var(--soft); }
i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px; vertical-align: -1px;
  background: currentColor; }
table { width: 100%; margin-top: 12px; border-collapse: separate; border-spacing: 0; padding: 8px 18px 10px; }
th, td { padding: 5px 18px 5px 0; text-align: right; font-weight: 400; }
th:first-child, th:last-child, td:last-child { text-align: left; }
td:last-child { color: var(--soft); }
thead th { font-size: 12px; }
tbody th, tbody td { border-top: 1px solid var(--line); }
.share span { display: inline-block; width: 96px; height: 8px; margin-left: 12px; border-radius: 2px; background: var(--band); }
.share b { display: block; height: 8px; border-radius: 2px; background: var(--soft); opacity: 0.6; }
.timeline { display: block; width: 100%; min-width: 860px; user-select: none; cursor: crosshair; }
.timeline text { font-size: 10.5px; fill: var(--soft); }
.timeline .name { text-anchor: end; }
.timeline .last { fill: var(--ink); }
.axis path { stroke: var(--line); }
.axis text { text-anchor: middle; }
.band { fill: var(--band); }
.base, .mark, .edge { vector-effect: non-scaling-stroke; fill: none; }
.base { stroke: var(--soft); stroke-width: 0.8; }
path.mark { stroke: var(--ink); stroke-dasharray: 3 3; stroke-width: 1; pointer-events: none; }
text.mark.left { text-anchor: end; }
.edge { stroke: var(--card); stroke-width: 0.7; stroke-opacity: 0.55; }
.dense .edge { display: none; }
.zoom [class] { fill: currentColor; }
.whole { opacity: 0.5; }
.block:hover { filter: brightness(1.18) saturate(1.1); }
.cursor { stroke: var(--ink); stroke-width: 0.8; opacity: 0.6; pointer-events: none; }
.timeline .now { fill: var(--ink); stroke: var(--card); stroke-width: 3px; paint-order: stroke; pointer-events: none; }
.drag { fill: var(--ink); opacity: 0.12; pointer-events: none; }
"""

SCRIPT: Final = """
(() => {
  const svg = document.querySelector(".timeline"), zoom = svg.querySelector(".zoom"), axis = svg.querySelector(".axis");
  const marks = svg.querySelectorAll("text.mark"), number = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, +v]));
  const { total, left, plot, top, bottom, median } = number, add = (name, cls) => {
    const node = document.createElementNS(svg.namespaceURI, name);
    node.setAttribute("class", cls);
    return svg.appendChild(node);
  };
  const cursor = add("path", "cursor"), drag = add("rect", "drag"), now = add("text", "now");
  let from = 0, to = total, down = null;
  const xOf = (ns) => left + (ns - from) * plot / (to - from);
  const nsOf = (x) => from + (x - left) * (to - from) / plot;
  const words = (ns) => total >= 2e6 ? [ns / 1e6, "ms"] : [ns / 1e3, "µs"];
  const draw = () => {
    const k = plot / (to - from), power = 10 ** Math.floor(Math.log10((to - from) / 10));
    const step = [1, 2, 5, 10].map((s) => s * power).find((s) => (to - from) / s <= 10);
    zoom.setAttribute("transform", `scale(${k} 1) translate(${-from} 0)`);
    svg.classList.toggle("dense", median * k < 3);
    let out = "";
    for (let ns = Math.ceil(from / step) * step, first = true; ns <= to; ns += step, first = false) {
      const [value, unit] = words(ns), text = +value.toPrecision(9) + (first ? " " + unit : ""), x = xOf(ns).toFixed(1);
      out += `<path d="M${x} ${top}V${bottom}"/>`;
      for (const y of [number.axis, bottom + 16]) out += `<text x="${x}" y="${y}">${text}</text>`;
    }
    axis.innerHTML = out;
    for (const mark of marks) {
      const x = xOf(+mark.dataset.ns);
      mark.setAttribute("x", x);
      mark.style.display = x < left || x > left + plot ? "none" : "";
    }
  };
  const at = (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    return Math.min(left + plot, Math.max(left, x));
  };
  svg.addEventListener("pointerdown", (event) => { if (event.button === 0) { down = at(event); svg.setPointerCapture(event.pointerId); } });
  svg.addEventListener("pointermove", (event) => {
    const x = at(event), [value, unit] = words(nsOf(x));
    cursor.setAttribute("d", `M${x} ${top}V${bottom}`);
    now.textContent = value.toPrecision(5) + " " + unit;
    now.setAttribute("x", x + 4);
    now.setAttribute("y", top + 8);
    if (down === null) return;
    for (const [k, v] of Object.entries({ x: Math.min(x, down), width: Math.abs(x - down), y: top, height: bottom - top }))
      drag.setAttribute(k, v);
  });
  svg.addEventListener("pointerup", (event) => {
    const range = [at(event), down ?? at(event)].sort((a, b) => a - b).map(nsOf);
    const wide = down !== null && Math.abs(at(event) - down) > 3;
    down = null;
    drag.setAttribute("width", 0);
    if (wide && range[1] - range[0] >= 20) { [from, to] = range; draw(); }
  });
  svg.addEventListener("dblclick", () => { from = 0; to = total; draw(); });
  const hint = document.createElement("li");
  hint.className = "hint";
  hint.textContent = "drag to zoom, double-click to reset";
  document.querySelector(".legend").append(hint);
})();
"""
