"""Traces: what the slots mean, the numbers of a timeline worked out by hand, its two exports, and the command."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import onepass
from onepass.cli import main as cli
from onepass.errors import ContractError
from onepass.trace import (
    GEMV_TRACE_EVENTS_PER_BLOCK,
    PHASES,
    GemvEvent,
    GmemTrace,
    NullTrace,
    Timeline,
    TraceBuf,
    timeline,
)

Slots = dict[int, int]
NORMED: Slots = {0: 0, 1: 100, 2: 1100, 3: 1150, 4: 1250, 9: 1270}
LAST: Slots = {0: 200, 1: 300, 2: 1500, 3: 1600, 4: 1700, 5: 1710, 6: 2010, 7: 2210, 8: 2610, 9: 2700}
TAIL: Slots = {0: 1300, 1: 1350, 2: 2450, 9: 2500}
BESIDE: Slots = {0: 400, 1: 450, 2: 1450, 9: 1480}
"""A tail block that runs while `LAST` does."""
FOUR = [(0, NORMED), (1, LAST), (0, TAIL), (1, BESIDE)]


def recorded(blocks: list[tuple[int, Slots]], base: int = 1_700_000_000_000_000_000) -> GmemTrace:
    """What a launch would have left: for each block its unit and its timestamps after ``base``."""
    trace = GmemTrace.allocate(len(blocks), "cpu")
    assert trace.units is not None
    for block, (unit, slots) in enumerate(blocks):
        trace.units[block] = unit
        for slot, ns in slots.items():
            trace.store(GEMV_TRACE_EVENTS_PER_BLOCK * block + slot, base + ns)
    return trace


def timeline_of(blocks: list[tuple[int, Slots]], **words: Any) -> Timeline:
    return Timeline.from_trace(recorded(blocks), **{"title": "a launch", "unit": "thread", "machine": "here"} | words)


def crowd(blocks: int = 200, units: int = 7) -> list[tuple[int, Slots]]:
    """Blocks of all kinds that begin when they like, many at a time on each unit; some share a timestamp."""
    dice = random.Random(4)
    kinds = [NORMED, LAST, TAIL, BESIDE]
    found = []
    for _ in range(blocks):
        slots, begin = dice.choice(kinds), dice.randrange(0, 9000, 50)
        found.append((dice.randrange(units), {slot: begin + ns for slot, ns in slots.items()}))
    return found


# --- buffers --------------------------------------------------------------------------------------------------------


def test_roles() -> None:
    assert GEMV_TRACE_EVENTS_PER_BLOCK == 16
    assert [(event.value, event.name) for event in GemvEvent] == [
        (0, "ENTER"),
        (1, "K_LOOP_START"),
        (2, "K_LOOP_END"),
        (3, "BEFORE_ARRIVE"),
        (4, "AFTER_ARRIVE"),
        (5, "APPLY_START"),
        (6, "LOADS_DONE"),
        (7, "REDUCE_DONE"),
        (8, "APPLY_END"),
        (9, "EXIT"),
    ]


def test_null_trace_has_nothing_to_write_to() -> None:
    trace = NullTrace()
    assert isinstance(trace, TraceBuf)
    trace.store(0, 5)
    assert trace.tensors() == (None, None)
    assert repr(trace) == "NullTrace()"


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_gmem_trace(dtype: torch.dtype) -> None:
    trace = GmemTrace(torch.zeros(48, dtype=dtype), torch.zeros(3, dtype=torch.int32))
    assert isinstance(trace, TraceBuf)
    assert trace.blocks == 3
    trace.store(16 * 2 + GemvEvent.EXIT, 1 << 62)
    events = trace.events()
    assert (events.dtype, events.shape) == (torch.int64, (3, 16))
    assert events[2, 9] == 1 << 62
    assert events.count_nonzero() == 1
    assert trace.tensors()[0] is trace.buffer
    trace.tensors()[1].fill_(7)  # type: ignore[union-attr]
    trace.clear()
    assert events[2, 9] == 1 << 62, "events() must be a copy"
    assert not trace.events().any()
    assert trace.units is not None
    assert not trace.units.any()


def test_allocate_has_room_for_every_block() -> None:
    trace = GmemTrace.allocate(5, "cpu")
    assert trace.blocks == 5
    assert trace.buffer.numel() == 5 * 16
    assert trace.units is not None
    assert trace.units.shape == (5,)
    assert not trace.buffer.any()
    assert not trace.units.any()
    assert repr(trace) == "GmemTrace(blocks=5, device='cpu', units=True)"


LONG = torch.zeros(32, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LONG.float(),), "GmemTrace: `buffer` must be int64 or uint64, got float32"),
        ((LONG.view(2, 16),), "GmemTrace: `buffer` must be 1-D, got shape [2, 16]"),
        ((torch.zeros(64, dtype=torch.int64)[::2],), "GmemTrace: `buffer` must be contiguous, got strides [2]"),
        ((LONG[:20],), "GmemTrace: `buffer` must hold 16 slots for each block, got 20 elements"),
        ((LONG, LONG[:2]), "GmemTrace: `units` must be int32, got int64"),
        ((LONG, LONG[:1].int()[0]), "GmemTrace: `units` must be 1-D, got shape []"),
        ((LONG, LONG[:4].int()[::2]), "GmemTrace: `units` must be contiguous, got strides [2]"),
        (
            (LONG, LONG[:3].int()),
            "GmemTrace: `units` must have one element for each of the 2 blocks of `buffer`, got 3",
        ),
        ((LONG, LONG[:2].int().to("meta")), "GmemTrace: `units` must be on cpu like `buffer`, got meta"),
    ],
)
def test_what_a_trace_refuses(arguments: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(ContractError) as error:
        GmemTrace(*arguments)
    assert str(error.value) == message


# --- numbers --------------------------------------------------------------------------------------------------------


def test_summary() -> None:
    summary = timeline_of(FOUR, bytes_read=5400).summary()
    everything = 300 + 4300 + 230 + 200 + 300 + 200 + 400 + 110
    expected = {
        "start": (4, 0.075, 0.1, 300),
        "stream": (4, 1.05, 1.2, 4300),
        "store": (4, 0.05, 0.1, 230),
        "arrive": (2, 0.1, 0.1, 200),
        "load y": (1, 0.3, 0.3, 300),
        "reduce": (1, 0.2, 0.2, 200),
        "apply": (1, 0.4, 0.4, 400),
        "exit": (2, 0.055, 0.09, 110),
    }
    assert [row.phase for row in summary.phases] == list(expected) == [phase.name for phase in PHASES]
    for row in summary.phases:
        count, median, longest, ns = expected[row.phase]
        assert row.count == count
        assert (row.median, row.max, row.share) == pytest.approx((median, longest, ns / everything))
    assert summary.total == pytest.approx(2.7)
    assert summary.start_spread == pytest.approx(1.3)
    assert summary.drain == pytest.approx(0.25)
    assert summary.apply_tail == pytest.approx(0.91)
    assert summary.gigabytes_a_second == pytest.approx(2.0)
    assert summary.figures() == (
        ("total", "2.70 us", "first block in to last block out"),
        ("read", "2.0 GB/s", "what must be read, over that total"),
        ("start spread", "1.30 us", "first block in to last block in"),
        ("drain", "0.25 us", "after the last K loop ends, 9.3% of the total"),
        ("norm", "0.91 us", "last arrival to normed output, 33.7% of the total"),
    )


def test_the_norm_is_that_of_the_segment_finished_last() -> None:
    early = {slot: ns // 2 for slot, ns in LAST.items()}
    assert timeline_of([(0, LAST), (1, early)]).summary().apply_tail == pytest.approx(0.91)


def test_kinds() -> None:
    assert [b.kind for b in timeline_of(FOUR).blocks] == ["normed", "normed, last to arrive", "tail", "tail"]


def test_blocks_that_wrote_nothing_are_left_out() -> None:
    found = timeline_of([(0, {}), (1, TAIL), (0, {}), (1, BESIDE)])
    assert [(block.index, block.unit) for block in found.blocks] == [(1, 1), (3, 1)]
    assert found.blocks[1].begin == 0, "time counts from the earliest block"
    assert found.total == 2100


def test_missing_slots() -> None:
    """Phases that lack an end are not there; nothing else is disturbed."""
    no_loop_start = {slot: ns for slot, ns in LAST.items() if slot != 1}
    no_exit = {slot: ns for slot, ns in TAIL.items() if slot != 9}
    found = timeline_of([(0, no_loop_start), (0, no_exit), (1, {0: 500})])
    assert [[span.phase for span in block.spans] for block in found.blocks] == [
        ["store", "arrive", "load y", "reduce", "apply", "exit"],
        ["start", "stream"],
        [],
    ]
    summary = found.summary()
    assert {row.phase: row.count for row in summary.phases}["stream"] == 1
    assert summary.total == pytest.approx(2.5)
    alone = timeline_of([(0, {0: 500})]).summary()
    assert (alone.phases, alone.total, alone.drain, alone.apply_tail) == ((), 0, None, None)
    assert [label for label, *_ in alone.figures()] == ["total", "start spread"]


def test_reserved_slots_are_not_events() -> None:
    assert timeline_of([(0, TAIL | {10: 9000, 15: 1})]).total == 1200


def test_time_never_runs_backwards_within_a_block() -> None:
    (block,) = timeline_of([(0, {0: 0, 1: 100, 2: 90, 9: 200})]).blocks
    assert [(span.begin, span.end) for span in block.spans] == [(0, 100), (100, 100), (100, 200)]


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ContractError, match=r"^Timeline: `trace` must hold a launch, got timestamps that are all 0$"):
        timeline_of([(0, {}), (1, {})])


# --- tracks and the Chrome trace ------------------------------------------------------------------------------------


def chrome_of(found: Timeline, directory: Path) -> dict[str, Any]:
    found.write_chrome(directory / "trace.json")
    report: dict[str, Any] = json.loads((directory / "trace.json").read_text())
    return report


def slices(report: dict[str, Any]) -> dict[int, list[tuple[int, int, int]]]:
    """For each track its slices in the file's order: begin, end, block; in nanoseconds."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for event in report["traceEvents"]:
        if event["ph"] == "X":
            begin, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            found.setdefault(event["tid"], []).append((begin, end, event["args"]["block"]))
    return found


def test_chrome_trace(tmp_path: Path) -> None:
    report = chrome_of(timeline_of(FOUR, parameters={"N": "64"}), tmp_path)
    assert report["otherData"] == {"title": "a launch", "machine": "here", "N": "64"}
    events = report["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid", "args"} <= event.keys()
        assert event["ph"] in ("M", "X")
        if event["ph"] == "X":
            assert isinstance(event["ts"], float)
            assert isinstance(event["dur"], float)
            assert event["dur"] >= 0
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "thread 0", 2: "thread 1", 3: "thread 1 (2)"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["a launch"]
    blocks = {tid: list(dict.fromkeys(block for *_, block in found)) for tid, found in slices(report).items()}
    assert blocks == {1: [0, 2], 2: [1], 3: [3]}
    stream = next(e for e in events if e["name"] == "stream" and e["args"]["block"] == 2)
    assert (stream["ts"], stream["dur"]) == pytest.approx((1.35, 1.1))
    assert stream["args"]["segment"] == "tail"


def test_slices_of_one_track_never_overlap(tmp_path: Path) -> None:
    blocks = [*crowd(), (3, {0: 100})]
    found = timeline_of(blocks, unit="SM")
    by_track = slices(chrome_of(found, tmp_path))
    for track in by_track.values():
        for (_, end, _), (begin, _, _) in pairwise(track):
            assert end <= begin
    where = {(block, tid) for tid, track in by_track.items() for *_, block in track}
    assert sorted(block for block, _ in where) == list(range(len(blocks))), "each block lies on one track"


def test_no_more_tracks_than_blocks_at_once() -> None:
    found = timeline_of(crowd())
    for unit in range(7):
        blocks = [block for block in found.blocks if block.unit == unit]
        at_once = max(sum(other.begin <= block.begin < other.end for other in blocks) for block in blocks)
        assert at_once > 1
        assert sum(track.unit == unit for track in timeline.tracks(found)) == at_once


def test_tracks_without_units() -> None:
    trace = GmemTrace(recorded(FOUR).buffer)
    found = timeline.tracks(Timeline.from_trace(trace, title="a launch", unit="SM", machine="here"))
    assert [(track.name, [block.index for block in track.blocks]) for track in found] == [
        ("lane 1", [0, 2]),
        ("lane 2", [1]),
        ("lane 3", [3]),
    ]


# --- the page -------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on a tag that is not closed in order."""

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


def test_page_shows_every_block(tmp_path: Path) -> None:
    blocks = [*crowd(), (3, {0: 100})]
    found = timeline_of(blocks, unit="SM", machine="a machine", parameters={"K": "7168"})
    text, page = page_of(found, tmp_path)
    assert sorted(int(block["data-block"]) for block in page.having("data-block")) == list(range(len(blocks)))
    hover = [title for title in page.text["title"] if title.startswith("block ")]
    assert len(hover) == len(blocks)
    assert all("SM" in title for title in hover)
    for word in ("a machine", "7168", "last to arrive", *(f"SM {unit}" for unit in range(7))):
        assert word in text
    for label, value, remark in found.summary().figures():
        for words in (label, value.replace(" us", " µs"), remark):
            assert any(words == data for parts in page.text.values() for data in parts), words


def test_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    text, page = page_of(timeline_of(FOUR), tmp_path)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    assert not page.having("src")
    assert not page.having("href")
    assert not page.having("xlink:href")


def test_page_explains_the_start_of_a_block_on_a_gpu(tmp_path: Path) -> None:
    """Half of the picture: it is said above it, not left to the reader. A thread of a CPU has no such wait."""
    for unit, said in (("SM", True), ("thread", False)):
        text, _ = page_of(timeline_of(FOUR, unit=unit), tmp_path)
        assert ("Start is not idle time." in text) == said
        assert not said or text.index("Start is not idle time.") < text.index("<svg")
    committed = (Path(__file__).parents[2] / "benchmarks/h200/trace-gemv.html").read_text()
    assert timeline.START in committed


def test_page_escapes_text(tmp_path: Path) -> None:
    nasty = "<b>&\"'</script>"
    text, page = page_of(timeline_of(FOUR, title=nasty, machine=nasty, parameters={nasty: nasty}), tmp_path)
    assert nasty not in text
    assert page.text["h1"] == page.text["p"] == [nasty]
    assert page.text["title"][0] == nasty
    assert [attributes["aria-label"] for attributes in page.having("aria-label")] == [nasty]
    assert text.count("<b>") == 1, "only the one around the parameter's name"


@pytest.mark.parametrize(("units", "resident"), [(1, 1), (2, 1), (132, 1), (132, 4), (16, 40)])
def test_rows_lie_apart_and_inside_the_picture(units: int, resident: int, tmp_path: Path) -> None:
    found = timeline_of([(unit, LAST) for unit in range(units) for _ in range(resident)], unit="SM")
    _, page = page_of(found, tmp_path)
    picture = next(attributes["viewbox"] for tag, attributes in page.tags if tag == "svg")
    height = float(picture.split()[3])
    tops = {float(a["y"]): float(a["height"]) for tag, a in page.tags if tag == "rect" and a.get("class") == "whole"}
    assert len(tops) == units * resident
    for (top, tall), (below, _) in pairwise([*sorted(tops.items()), (height, 0.0)]):
        assert tall >= 2
        assert top + tall <= below + 0.11
    for words in ("name", "last"):
        labels = sorted(float(a["y"]) for tag, a in page.tags if tag == "text" and a.get("class") == words)
        assert all(below - above > 10 for above, below in pairwise(labels)), "labels must not overlap"
    for tag, attributes in page.tags:
        if tag == "rect" and attributes.get("class", "").startswith("p"):
            assert 0 <= int(attributes["x"]) <= int(attributes["x"]) + int(attributes["width"]) <= found.total


def test_strip_counts_blocks_in_flight() -> None:
    """All phases together fill, over time, exactly what the blocks lasted."""
    found = timeline_of(crowd())
    width = found.total / timeline.BINS
    filled = sum(sum(bins) * width for *_, bins in timeline._activity(found))
    assert filled == pytest.approx(sum(span.end - span.begin for block in found.blocks for span in block.spans))
    assert timeline._peak(timeline_of(FOUR)) == 3


@pytest.mark.parametrize("total", [0, 1, 37, 999, 12_480, 1_999_999, 2_000_000, 31_000_000_000])
def test_ticks_are_round_and_few(total: int) -> None:
    ticks, scale, name = timeline._ticks(total)
    assert (scale, name) == ((1e6, "ms") if total >= 2_000_000 else (1e3, "µs"))
    assert ticks[0] == 0
    assert ticks[-1] <= total
    assert len(ticks) <= 11
    if total > 10:
        assert len(ticks) >= 4
        assert re.fullmatch("[125]0*", str(ticks[1]))


def test_a_launch_of_no_length_is_drawn(tmp_path: Path) -> None:
    text, page = page_of(timeline_of([(0, {0: 5, 9: 5})]), tmp_path)
    assert len(page.having("data-block")) == 1
    assert not re.search(r"\b(nan|inf)\b", text)


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


def trace_gemv(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ("trace", "gemv", "--device", "cpu", *arguments))


SMALL = ("--n", "96", "--k", "256", "--normed", "64", "--runs", "3")


def test_command(tmp_path: Path) -> None:
    result = trace_gemv(*SMALL, "--m", "2", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["onepass-trace-gemv.html", "onepass-trace-gemv.json"]
    for path in tmp_path.iterdir():
        assert f"wrote {path}" in result.output
    for phase in PHASES:
        assert re.search(rf"^{phase.name} +\d+ +\d+\.\d+", result.output, re.MULTILINE), phase.name
    act, weight = torch.zeros(2, 256, dtype=torch.bfloat16), torch.zeros(96, 256, dtype=torch.bfloat16)
    blocks = onepass.gemv_trace_blocks(act, weight, torch.zeros(64, dtype=torch.bfloat16))
    report = json.loads((tmp_path / "onepass-trace-gemv.json").read_text())
    assert {e["args"]["block"] for e in report["traceEvents"] if e["ph"] == "X"} == set(range(blocks))
    kinds = [e["args"]["segment"] for e in report["traceEvents"] if e["name"] == "stream"]
    assert kinds.count("normed, last to arrive") == 1
    assert "tail" in kinds
    page = Page((tmp_path / "onepass-trace-gemv.html").read_text(encoding="utf-8"))
    assert len(page.having("data-block")) == blocks


def test_command_shows_the_median_run(tmp_path: Path) -> None:
    result = trace_gemv(*SMALL, "--out", str(tmp_path))
    found = re.search(r"median of 3 runs, which took (\S+) to (\S+) us", result.output)
    total = re.search(r"^total +(\S+) us", result.output, re.MULTILINE)
    assert found and total, result.output
    assert float(found[1]) <= float(total[1]) <= float(found[2])


@pytest.mark.parametrize(
    ("arguments", "names"),
    [(("--normed", "97"), "gamma"), (("--m", "17"), "act"), (("--k", "0"), "act")],
)
def test_command_says_what_the_op_refuses(arguments: tuple[str, ...], names: str, tmp_path: Path) -> None:
    result = trace_gemv(*SMALL, *arguments, "--out", str(tmp_path))
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert re.match(r"gemv\w*: ", line)
    assert f"`{names}`" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "/nonexistent/directory"), "there is no directory /nonexistent/directory"),
        (("--device", "tpu"), "'tpu' is neither cpu nor cuda"),
        (("--dtype", "int8"), "int8"),
        (("--runs", "0"), "greater than or equal to 1"),
        (("--n", "-1"), "greater than or equal to 0"),
    ],
)
def test_command_usage_errors(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = trace_gemv("--out", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
