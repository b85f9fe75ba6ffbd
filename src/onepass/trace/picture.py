"""A traced launch as SVG: blocks in flight above, one row per track below, on one time axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from .blocks import PHASES, Block, last
from .buffers import GemvEvent

WIDTH, LEFT, RIGHT = 1200, 70, 92
PLOT = WIDTH - LEFT - RIGHT
STRIP_TOP, STRIP, LABEL = 24, 84, 11  # LABEL: the height of a line of small text
ROWS_TOP = STRIP_TOP + STRIP + 34
BINS = 260
NUMBERS: Final = {phase.name: i for i, phase in enumerate(PHASES)}


class Track(NamedTuple):
    """Blocks that ran one after another on one SM or thread, which may have several tracks."""

    name: str
    unit: int
    blocks: list[Block]


def tracks(blocks: Sequence[Block], unit: str) -> list[Track]:
    """Tracks by SM or thread; a block goes to the first one that is free when it begins."""
    rows_of_unit = []
    ordered = sorted(blocks, key=lambda block: (block.unit, block.begin, block.end))
    for number, members in groupby(ordered, key=lambda block: block.unit):
        lanes: list[list[Block]] = []
        for block in members:
            free = next((lane for lane in lanes if lane[-1].end <= block.begin), None)
            if free is None:
                lanes.append([block])
            else:
                free.append(block)
        for index, lane in enumerate(lanes, 1):
            again = f" ({index})" if index > 1 else ""
            rows_of_unit.append(Track(f"{unit} {number}{again}" if number >= 0 else f"lane {index}", number, lane))
    return rows_of_unit


class Row(NamedTuple):
    """A track and its position in the picture."""

    track: Track
    top: float
    height: float


def _rows(tracks: list[Track]) -> tuple[list[Row], float]:
    """The position of every track, tall if there are few, and where the last one ends."""
    pitch = min(30.0, max(3.0, 960 / len(tracks)))
    apart = min(6.0, 0.25 * pitch) if pitch > 6 else 1.5
    several = len(tracks) > len({track.unit for track in tracks})
    within = 0.0 if pitch < 4 else 0.5
    rows, top, unit = [], float(ROWS_TOP), tracks[0].unit
    for track in tracks:
        top += apart if track.unit != unit else 0
        unit = track.unit
        rows.append(Row(track, top, pitch - (within if several else 0)))
        top += pitch
    return rows, top


def ticks(total: int) -> tuple[list[int], float, str]:
    """The positions of the axis labels in nanoseconds, and the size and name of their unit."""
    scale, name = (1e6, "ms") if total >= 2e6 else (1e3, "µs")
    step = next(s for e in range(12) for s in (10**e, 2 * 10**e, 5 * 10**e) if total / s <= 10)
    return list(range(0, total + 1, step)), scale, name


def activity(blocks: Sequence[Block], total: int) -> list[tuple[int, bool, list[float]]]:
    """The average number of normed and tail blocks per phase in each of `BINS` slices of time."""
    width = max(total, 1) / BINS
    counts = {(i, tail): [0.0] * BINS for i in range(len(PHASES)) for tail in (False, True)}
    for block in blocks:
        for name, begin, end in block.spans:
            bins = counts[NUMBERS[name], block.kind == "tail"]
            first, stop = begin / width, end / width
            for i in range(int(first), min(int(stop) + 1, BINS)):
                bins[i] += min(stop, i + 1) - max(first, i)
    return [(i, tail, bins) for (i, tail), bins in counts.items() if any(bins)]


def peak(blocks: Sequence[Block]) -> int:
    """The largest number of blocks that ran at the same time."""
    steps = sorted((ns, step) for block in blocks for ns, step in ((block.begin, 1), (block.end, -1)))
    return max(1, *accumulate(step for _, step in steps))


def _strip(blocks: Sequence[Block], total: int) -> Iterator[str]:
    """Blocks in flight as stacked areas; the strip is as high as the busiest moment."""
    highest = peak(blocks)
    at = [round(i * total / BINS) for i in range(BINS + 1)]
    floor = [0.0] * BINS
    for phase, tail, bins in activity(blocks, total):
        ceiling = [low + more for low, more in zip(floor, bins, strict=True)]
        used = [i for i, count in enumerate(bins) if count]
        span = range(used[0], used[-1] + 1)
        forth, back = [(ceiling[i], at[i + 1]) for i in span], [(floor[i], at[i]) for i in reversed(span)]
        levels = [(f"{STRIP_TOP + STRIP * (1 - count / highest):.1f}", x) for count, x in (*forth, *back)]
        steps = (f"V{y}H{list(run)[-1][1]}" for y, run in groupby(levels, key=lambda level: level[0]))
        outline = f'<path class="p{phase}" d="M{at[span[0]]} {STRIP_TOP + STRIP}{"".join(steps)}Z"/>'
        yield f"<g{' class=tail' if tail else ''}>{outline}</g>"
        floor = ceiling
    yield f'<path class="base" d="M0 {STRIP_TOP + STRIP}H{total}"/>'


def _block(block: Block, row: Row, unit: str) -> str:
    """One block's rectangles and its tooltip."""
    lines = [f"block {block.index}, {block.kind}", row.track.name if row.track.unit >= 0 else f"{unit} unknown"]
    lines.append(f"{block.begin / 1e3:.3f} to {block.end / 1e3:.3f} µs")
    lines += [f"{name}: {(end - begin) / 1e3:.3f} µs" for name, begin, end in block.spans]
    extent = f'y="{row.top:.1f}" height="{row.height:.1f}"'
    rects = "".join(
        f'<rect class="p{NUMBERS[name]}" x="{begin}" width="{end - begin}" {extent}/>'
        for name, begin, end in block.spans
        if end > begin
    )
    behind = f'<rect class="whole" x="{block.begin}" width="{block.end - block.begin}" {extent}/>'
    edge = f'<path class="edge" d="M{block.begin} {row.top:.1f}v{row.height:.1f}"/>'
    title = f"<title>{escape(chr(10).join(lines))}</title>"
    kind = " tail" if block.kind == "tail" else ""
    return f'<g class="block{kind}" data-block="{block.index}">{title}{behind}{rects}{edge}</g>'


def _labels(rows: list[Row]) -> Iterator[str]:
    """As many unit names as fit, and an arrow at each last arriver."""
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
            arrived_last = any(block.kind == "normed, last to arrive" for block in row.track.blocks)
            if arrived_last and middle - arrow >= LABEL:
                yield f'<text class="last" x="{LEFT + PLOT + 6}" y="{middle + 3.5:.1f}">◂ last to arrive</text>'
                arrow = middle


def _axis(total: int, bottom: float) -> Iterator[str]:
    at, scale, name = ticks(total)
    for ns in at:
        x = LEFT + ns * PLOT / max(total, 1)
        text = f"{ns / scale:g}" if ns else f"0 {name}"
        yield f'<path d="M{x:.1f} {STRIP_TOP}V{bottom:.1f}"/>'
        yield from (f'<text x="{x:.1f}" y="{y:.1f}">{text}</text>' for y in (ROWS_TOP - 12, bottom + 16))


def _moments(blocks: Sequence[Block]) -> list[tuple[int, str]]:
    """The times after which only stragglers, or only the norm, still run: lines in the picture."""
    last_arrivers = [block for block in blocks if block.kind == "normed, last to arrive"]
    moments = [
        (last(GemvEvent.K_LOOP_END, blocks), "last K loop ends"),
        (last(GemvEvent.AFTER_ARRIVE, last_arrivers), "last arrival"),
    ]
    return sorted((ns, text) for ns, text in moments if ns is not None)


def svg(title: str, unit: str, blocks: Sequence[Block]) -> str:
    """The picture."""
    rows, bottom = _rows(tracks(blocks, unit))
    end = max(block.end for block in blocks)
    total, at_once = max(end, 1), peak(blocks)
    height = bottom + 26
    widths = sorted(block.end - block.begin for block in blocks)
    median = widths[len(widths) // 2]
    dense = " dense" if median * PLOT / total < 3 else ""
    parts = [
        f'<svg class="timeline{dense}" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}"',
        f' data-total="{total}" data-left="{LEFT}" data-plot="{PLOT}" data-top="{STRIP_TOP}" data-bottom="{bottom:.1f}"',
        f' data-axis="{ROWS_TOP - 12}" data-median="{median}">',
        *_labels(rows),
        f'<g class="axis">{"".join(_axis(end, bottom))}</g>',
        f'<text class="name" x="{LEFT - 8}" y="{STRIP_TOP + 8}">{at_once} block{"s" * (at_once > 1)}</text>',
        f'<text class="name" x="{LEFT - 8}" y="{STRIP_TOP + 8 + LABEL}">in flight</text>',
        f'<svg x="{LEFT}" y="0" width="{PLOT}" height="{height:.0f}"><g class="zoom" transform="scale({PLOT / total:.9g} 1)">',
        *_strip(blocks, total),
        *(_block(block, row, unit) for row in rows for block in row.track.blocks),
    ]
    moments = _moments(blocks)
    parts += (f'<path class="mark" d="M{ns} {STRIP_TOP - 6}V{bottom:.1f}"/>' for ns, _ in moments)
    parts.append("</g></svg>")
    for number, (ns, text) in enumerate(moments):
        x = LEFT + ns * PLOT / total
        side = " left" if number == 0 and len(moments) > 1 else ""
        parts.append(f'<text class="mark{side}" data-ns="{ns}" x="{x:.1f}" y="{STRIP_TOP - 10}">{text}</text>')
    return "".join(parts) + "</svg>"
