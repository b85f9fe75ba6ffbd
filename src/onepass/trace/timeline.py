"""A traced launch in numbers, as a Chrome trace, and as a self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from string import Template
from typing import Any, Final, Literal

from ..errors import ContractError
from .blocks import PHASES, Block, Phase, Span, last
from .buffers import GemvEvent, GmemTrace
from .picture import NUMBERS, svg, tracks

__all__ = ["PHASES", "Block", "Phase", "PhaseRow", "Span", "Summary", "Timeline", "percent"]

START: Final = (
    "Start is not idle time. A block first asks memory for several steps of its weights, in portions, and waits for the first of "
    "them; then it waits for the kernel before it, if that is still running. Nothing is computed until then, so memory is busy and the "
    "block is not. Stream begins when the block may read its input."
)


@dataclass(frozen=True)
class PhaseRow:
    """One phase over all blocks, in microseconds.

    Args:
        phase: Name of the phase.
        count: Blocks that went through it.
        median: Median of their times.
        max: The longest of their times.
        share: Its part of all blocks' time.
    """

    phase: str
    count: int
    median: float
    max: float
    share: float


@dataclass(frozen=True)
class Summary:
    """A timeline in numbers, in microseconds; None where the events it needs are missing.

    Args:
        phases: One row per phase.
        total: Time from the first block's start to the last block's end.
        start_spread: Time from the first block's start to the last block's start.
        drain: Time from the end of the last K loop to the end of the launch.
        apply_tail: Time from the last block's arrival until the normed output is stored.
        gigabytes_a_second: Bytes to be read over the total.
    """

    phases: tuple[PhaseRow, ...]
    total: float
    start_spread: float
    drain: float | None
    apply_tail: float | None
    gigabytes_a_second: float | None

    def figures(self) -> tuple[tuple[str, str, str], ...]:
        """The numbers of the whole launch, as (label, value, remark)."""
        rows = [("total", f"{self.total:.2f} us", "first block in to last block out")]
        if self.gigabytes_a_second is not None:
            rows.append(("read", f"{self.gigabytes_a_second:,.1f} GB/s", "bytes to be read, over that total"))
        rows.append(("start spread", f"{self.start_spread:.2f} us", "first block in to last block in"))
        if self.drain is not None:
            rows.append(("drain", f"{self.drain:.2f} us", f"after the last K loop ends{self._of_total(self.drain)}"))
        if self.apply_tail is not None:
            remark = f"last arrival to normed output{self._of_total(self.apply_tail)}"
            rows.append(("norm", f"{self.apply_tail:.2f} us", remark))
        return tuple(rows)

    def _of_total(self, part: float) -> str:
        return f", {percent(part / self.total)} of the total" if self.total else ""


def percent(share: float) -> str:
    """Format a share with one decimal; a positive share never becomes 0.0%."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


@dataclass(frozen=True)
class Timeline:
    """One traced launch, in nanoseconds since its earliest event.

    Args:
        title: Title of the page.
        unit: "SM" or "thread".
        machine: Name of the machine, shown on the page.
        blocks: What each block did.
        parameters: Further facts to show.
        bytes_read: What the launch had to read; the summary derives a bandwidth from it.
    """

    title: str
    unit: Literal["SM", "thread"]
    machine: str
    blocks: tuple[Block, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)
    bytes_read: int = 0

    @classmethod
    def from_trace(
        cls,
        trace: GmemTrace,
        *,
        title: str,
        unit: Literal["SM", "thread"],
        machine: str,
        parameters: Mapping[str, str] | None = None,
        bytes_read: int = 0,
    ) -> Timeline:
        """Wait for the launch and read its trace. Blocks that wrote nothing are omitted.

        Args:
            trace: The trace that the launch wrote.
            title: As in `Timeline`, like all that follow.

        Returns:
            The timeline.

        Raises:
            ContractError: If no block wrote anything.
        """
        rows: list[list[int]] = trace.events().tolist()
        units: list[int] = [-1] * len(rows) if trace.units is None else trace.units.tolist()
        written = [ts for row in rows for ts in row[: len(GemvEvent)] if ts]
        if not written:
            raise ContractError("Timeline: `trace` must hold a launch, got timestamps that are all 0")
        zero = min(written)
        blocks = []
        for index, (row, ran_on) in enumerate(zip(rows, units, strict=True)):
            marks: dict[GemvEvent, int] = {}
            latest = 0
            for event in GemvEvent:
                if row[event]:
                    # the clocks of two cores may differ slightly; keep time monotonic within a block
                    latest = marks[event] = max(latest, row[event] - zero)
            if marks:
                blocks.append(Block(index, ran_on, marks))
        return cls(title, unit, machine, tuple(blocks), dict(parameters or {}), bytes_read)

    @cached_property
    def total(self) -> int:
        """Nanoseconds from the first event to the last."""
        return max(block.end for block in self.blocks)

    def summary(self) -> Summary:
        """Statistics per phase and for the whole launch."""
        lengths: dict[str, list[int]] = {phase.name: [] for phase in PHASES}
        for block in self.blocks:
            for span in block.spans:
                lengths[span.phase].append(span.end - span.begin)
        everything = sum(map(sum, lengths.values())) or 1
        phases = (
            PhaseRow(name, len(ns), median(ns) / 1e3, max(ns) / 1e3, sum(ns) / everything)
            for name, ns in lengths.items()
            if ns
        )
        begins = [block.begin for block in self.blocks]
        k_loops = last(GemvEvent.K_LOOP_END, self.blocks)
        tails = [
            (block.marks[GemvEvent.APPLY_END], block.marks[GemvEvent.AFTER_ARRIVE])
            for block in self.blocks
            if {GemvEvent.APPLY_END, GemvEvent.AFTER_ARRIVE} <= block.marks.keys()
        ]
        stored, arrived = max(tails, default=(0, 0))
        return Summary(
            phases=tuple(phases),
            total=self.total / 1e3,
            start_spread=(max(begins) - min(begins)) / 1e3,
            drain=None if k_loops is None else (self.total - k_loops) / 1e3,
            apply_tail=(stored - arrived) / 1e3 if tails else None,
            gigabytes_a_second=self.bytes_read / self.total if self.bytes_read and self.total else None,
        )

    def write_chrome(self, path: Path | str) -> None:
        """Write a Chrome trace for Perfetto: tracks per SM or thread, one slice per phase."""
        events: list[dict[str, Any]] = [_metadata("process_name", 0, name=self.title)]
        for tid, track in enumerate(tracks(self.blocks, self.unit), 1):
            events.append(_metadata("thread_name", tid, name=track.name))
            events.append(_metadata("thread_sort_index", tid, sort_index=tid))
            for block in track.blocks:
                for name, begin, end in block.spans or (("block", block.begin, block.end),):
                    about = {"ph": "X", "name": name, "cat": "gemv", "pid": 1, "tid": tid}
                    args = {"block": block.index, "segment": block.kind}
                    events.append({**about, "ts": begin / 1e3, "dur": (end - begin) / 1e3, "args": args})
        run = {"title": self.title, "machine": self.machine, **self.parameters}
        lines = ",\n".join(json.dumps(event) for event in events)
        text = f'{{"displayTimeUnit": "ns",\n"otherData": {json.dumps(run)},\n"traceEvents": [\n{lines}\n]}}\n'
        Path(path).write_text(text, encoding="utf-8")

    def write_html(self, path: Path | str) -> None:
        """Write one self-contained page with the numbers and a picture."""
        summary = self.summary()
        page = Template(_asset("html")).substitute(
            title=escape(self.title),
            machine=escape(self.machine),
            chips="".join(f"<li><b>{escape(name)}</b> {escape(value)}</li>" for name, value in self.parameters.items()),
            tiles=_tiles(summary),
            legend=self._legend(summary),
            picture=svg(self.title, self.unit, self.blocks),
            table=_table(summary.phases),
            style=_asset("css"),
            script=_asset("js"),
        )
        Path(path).write_text(page, encoding="utf-8")

    def _legend(self, summary: Summary) -> str:
        """The colors of the phases that occur; on a GPU also an explanation of the first."""
        present = [NUMBERS[row.phase] for row in summary.phases]
        items = "".join(f'<li><i class="p{i}"></i>{escape(PHASES[i].name)}</li>' for i in present)
        if any(block.kind == "tail" for block in self.blocks):
            items += '<li class="tail"><i class="p1"></i>stream, block of the tail</li>'
        explained = self.unit == "SM" and NUMBERS["start"] in present
        about = f'<p class="about">{escape(START)}</p>' if explained else ""
        return f'<ul class="legend">{items}</ul>{about}'


def _metadata(kind: str, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": tid, "args": args}


def _asset(kind: str) -> str:
    return (files(__package__) / f"assets/timeline.{kind}").read_text(encoding="utf-8")


def _tiles(summary: Summary) -> str:
    return "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value).replace(' us', ' µs')}</dd><small>{escape(remark)}</small></div>"
        for label, value, remark in summary.figures()
    )


def _table(rows: Sequence[PhaseRow]) -> str:
    return "".join(
        f'<tr><th><i class="p{NUMBERS[row.phase]}"></i>{escape(row.phase)}</th>'
        f"<td>{row.count}</td><td>{row.median:.3f}</td><td>{row.max:.3f}</td>"
        f'<td class="share">{escape(percent(row.share))}<span><b style="width:{100 * row.share:.1f}%"></b></span></td>'
        f"<td>{escape(PHASES[NUMBERS[row.phase]].meaning)}</td></tr>"
        for row in rows
    )
