"""A timeline's Chrome trace and its HTML page."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from onepass.trace import GmemTrace, Timeline, picture, timeline
from tests.trace.recorded import FOUR, LAST, page_of, random_blocks, recorded, timeline_of

# --- tracks and the Chrome trace ------------------------------------------------------------------------------------


def chrome_of(found: Timeline, directory: Path) -> dict[str, Any]:
    found.write_chrome(directory / "trace.json")
    report: dict[str, Any] = json.loads((directory / "trace.json").read_text())
    return report


def slices(report: dict[str, Any]) -> dict[int, list[tuple[int, int, int]]]:
    """The slices of each track in file order: (begin, end, block), in nanoseconds."""
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
    blocks = [*random_blocks(), (3, {0: 100})]
    found = timeline_of(blocks, unit="SM")
    by_track = slices(chrome_of(found, tmp_path))
    for track in by_track.values():
        for (_, end, _), (begin, _, _) in pairwise(track):
            assert end <= begin
    where = {(block, tid) for tid, track in by_track.items() for *_, block in track}
    assert sorted(block for block, _ in where) == list(range(len(blocks))), "each block is on one track"


def test_there_are_as_many_tracks_as_blocks_at_once() -> None:
    found = timeline_of(random_blocks())
    for unit in range(7):
        blocks = [block for block in found.blocks if block.unit == unit]
        at_once = max(sum(other.begin <= block.begin < other.end for other in blocks) for block in blocks)
        assert at_once > 1
        assert sum(track.unit == unit for track in picture.tracks(found.blocks, "thread")) == at_once


def test_tracks_without_units() -> None:
    trace = GmemTrace(recorded(FOUR).buffer)
    found = picture.tracks(Timeline.from_trace(trace, title="a launch", unit="SM", machine="here").blocks, "SM")
    assert [(track.name, [block.index for block in track.blocks]) for track in found] == [
        ("lane 1", [0, 2]),
        ("lane 2", [1]),
        ("lane 3", [3]),
    ]


def test_page_shows_every_block(tmp_path: Path) -> None:
    blocks = [*random_blocks(), (3, {0: 100})]
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


def test_page_is_self_contained(tmp_path: Path) -> None:
    text, page = page_of(timeline_of(FOUR), tmp_path)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    assert not page.having("src")
    assert not page.having("href")
    assert not page.having("xlink:href")


def test_page_explains_the_start_of_a_block_on_a_gpu(tmp_path: Path) -> None:
    """It can fill half of the picture, so the page explains it above. CPU threads have no such wait."""
    for unit, explained in (("SM", True), ("thread", False)):
        text, _ = page_of(timeline_of(FOUR, unit=unit), tmp_path)
        assert ("Start is not idle time." in text) == explained
        assert not explained or text.index("Start is not idle time.") < text.index("<svg")
    committed = (Path(__file__).parents[2] / "benchmarks/h200/trace-gemv.html").read_text()
    assert timeline.START in committed


def test_page_escapes_text(tmp_path: Path) -> None:
    nasty = "<b>&\"'</script>"
    text, page = page_of(timeline_of(FOUR, title=nasty, machine=nasty, parameters={nasty: nasty}), tmp_path)
    assert nasty not in text
    assert page.text["h1"] == page.text["p"] == [nasty]
    assert page.text["title"][0] == nasty
    assert [attributes["aria-label"] for attributes in page.having("aria-label")] == [nasty]
    assert text.count("<b>") == 1, "only the tag around the parameter's name"


@pytest.mark.parametrize(("units", "resident"), [(1, 1), (2, 1), (132, 1), (132, 4), (16, 40)])
def test_rows_do_not_overlap_and_fit_the_picture(units: int, resident: int, tmp_path: Path) -> None:
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
    """The area of all phases is the total time of all blocks."""
    found = timeline_of(random_blocks())
    width = found.total / picture.BINS
    filled = sum(sum(bins) * width for *_, bins in picture.activity(found.blocks, found.total))
    assert filled == pytest.approx(sum(span.end - span.begin for block in found.blocks for span in block.spans))
    assert picture.peak(timeline_of(FOUR).blocks) == 3


@pytest.mark.parametrize("total", [0, 1, 37, 999, 12_480, 1_999_999, 2_000_000, 31_000_000_000])
def test_ticks_are_round_and_few(total: int) -> None:
    ticks, scale, name = picture.ticks(total)
    assert (scale, name) == ((1e6, "ms") if total >= 2_000_000 else (1e3, "µs"))
    assert ticks[0] == 0
    assert ticks[-1] <= total
    assert len(ticks) <= 11
    if total > 10:
        assert len(ticks) >= 4
        assert re.fullmatch("[125]0*", str(ticks[1]))


def test_a_launch_of_zero_length_is_drawn(tmp_path: Path) -> None:
    text, page = page_of(timeline_of([(0, {0: 5, 9: 5})]), tmp_path)
    assert len(page.having("data-block")) == 1
    assert not re.search(r"\b(nan|inf)\b", text)
