"""Recorded launches and parsed pages for the trace tests."""

from __future__ import annotations

import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from onepass.trace import GEMV_TRACE_EVENTS_PER_BLOCK, GmemTrace, Timeline

Slots = dict[int, int]
NORMED: Slots = {0: 0, 1: 100, 2: 1100, 3: 1150, 4: 1250, 9: 1270}
LAST: Slots = {0: 200, 1: 300, 2: 1500, 3: 1600, 4: 1700, 5: 1710, 6: 2010, 7: 2210, 8: 2610, 9: 2700}
TAIL: Slots = {0: 1300, 1: 1350, 2: 2450, 9: 2500}
BESIDE: Slots = {0: 400, 1: 450, 2: 1450, 9: 1480}
"""A tail block that runs while `LAST` does."""
FOUR = [(0, NORMED), (1, LAST), (0, TAIL), (1, BESIDE)]


def recorded(blocks: list[tuple[int, Slots]], base: int = 1_700_000_000_000_000_000) -> GmemTrace:
    """The trace of a launch: for each block its unit and its timestamps relative to ``base``."""
    trace = GmemTrace.allocate(len(blocks), "cpu")
    assert trace.units is not None
    for block, (unit, slots) in enumerate(blocks):
        trace.units[block] = unit
        for slot, ns in slots.items():
            trace.store(GEMV_TRACE_EVENTS_PER_BLOCK * block + slot, base + ns)
    return trace


def timeline_of(blocks: list[tuple[int, Slots]], **options: Any) -> Timeline:
    defaults = {"title": "a launch", "unit": "thread", "machine": "here"}
    return Timeline.from_trace(recorded(blocks), **defaults | options)


def random_blocks(blocks: int = 200, units: int = 7) -> list[tuple[int, Slots]]:
    """Blocks of all kinds with random start times, many at once on each unit; some share a timestamp."""
    dice = random.Random(4)
    kinds = [NORMED, LAST, TAIL, BESIDE]
    found = []
    for _ in range(blocks):
        slots, begin = dice.choice(kinds), dice.randrange(0, 9000, 50)
        found.append((dice.randrange(units), {slot: begin + ns for slot, ns in slots.items()}))
    return found


class Page(HTMLParser):
    """The tags, attributes and text of a page; fails if tags are not properly nested."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def having(self, name: str) -> list[dict[str, str]]:
        return [attributes for _, attributes in self.tags if name in attributes]


def page_of(found: Timeline, directory: Path) -> tuple[str, Page]:
    found.write_html(directory / "page.html")
    text = (directory / "page.html").read_text(encoding="utf-8")
    return text, Page(text)
