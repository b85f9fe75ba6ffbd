"""The tables of linear: floors, goals and refusals, from invented results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.results import load, of_report, write
from tools.bench import linear
from tools.bench.linear import Sheet
from tools.bench.markdown import markers

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/h200/linear.json"
FLOOR = 4096 * 4096 * 2 / 4.55e6
"""Microseconds of a 4096 x 4096 weight in bfloat16."""


def row(op: str, shape: list[int], us: float, kind: str = "", behind: float = 0.0, **peers: float) -> dict[str, Any]:
    found: dict[str, Any] = {"op": op, "shape": shape, "bytes": 10**6, "stream": "read"}
    found["us"] = {"best copy": [1.0, 1.1], "onepass": [us + 0.5, us]}
    found["us"] |= {name.replace("_", "."): [time, time + 1.0] for name, time in peers.items()}
    if kind:
        found["with"] = kind
    if behind:
        found["behind_us"] = {"onepass": [behind, behind + 0.1], "cuBLAS": [behind + 3.0]}
    return found


def document(*rows: dict[str, Any], device: str = "cuda", **more: Any) -> dict[str, Any]:
    head: dict[str, Any] = {"machine": "M", "date": "2030-01-01", "torch": "9", "device": device}
    head |= {"threads": 2} if device == "cpu" else {"triton": "3"}
    return {**head, **more, "rows": list(rows)}


def sheet(*rows: dict[str, Any]) -> Sheet:
    return Sheet(of_report(document(*rows)))


def goals(*rows: dict[str, Any]) -> dict[tuple[str, str], list[str]]:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in linear.goals(sheet(*rows)).splitlines()[2:]]
    return {(what, words): rest for what, words, *rest in lines}


def test_the_floor_is_the_bytes_of_the_weights() -> None:
    bf16, fp8 = sheet(row("linear", [1, 4096, 4096], 8.0), row("linear, fp8", [1, 4096, 4096], 8.0, "fp8 blocks")).rows
    assert linear.floor(bf16) == pytest.approx(FLOOR) and linear.floor(fp8) == pytest.approx(FLOOR / 2)
    assert sheet(row("linear", [1, 4096, 4096], 2 * FLOOR)).share(bf16) == pytest.approx(FLOOR / 8.0)


def test_goals_count_rows_and_name_the_worst() -> None:
    found = goals(
        row("linear", [1, 4096, 4096], FLOOR / 0.9),
        row("linear", [4, 4096, 4096], FLOOR / 0.5),
        row("linear", [8, 4096, 4096], FLOOR / 0.85),
        row("linear", [16, 4096, 4096], 10.0, cuBLAS=9.0),
        row("linear, batch", [256, 4096, 4096], 10.0, cuBLAS=9.0),
        row("linear, batch", [512, 4096, 4096], 10.0, cuBLAS=8.9),
        row("linear, fp8", [1, 4096, 4096], FLOOR / 2 / 0.8, "fp8 rows"),
        row("linear, fp8", [8, 4096, 4096], FLOOR / 2 / 0.69, "fp8 blocks"),
        row("rms_norm", [1, 4096], 1.0),
    )
    assert found["bf16, M = 1 to 4", "at least 88% of the floor"] == ["1 of 2", "50% (4 x 4096 x 4096)"]
    assert found["bf16, M = 8", "at least 85% of the floor"][0] == "1 of 1"
    assert found["bf16, M = 16", "at least 100% of cuBLAS's speed"] == ["0 of 1", "90% (16 x 4096 x 4096)"]
    assert found["bf16, M = 32 to 256", "at least 90% of cuBLAS's speed"][0] == "1 of 1"
    assert found["bf16, M = 512 to 8192", "at least 90% of cuBLAS's speed"][0] == "0 of 1"
    assert found["fp8, M = 1", "at least 80% of the floor"][0] == "1 of 1"
    assert found["fp8, M = 8", "at least 70% of the floor"] == ["0 of 1", "69% (8 x 4096 x 4096, fp8 blocks)"]
    assert found["2112 x 7168, fp8 blocks, with its norm, M = 1", "at most 4.6 us"] == ["not measured", ""]


@pytest.mark.parametrize(("us", "behind", "reached"), [(4.6, 12.45, True), (4.7, 12.6, False)])
def test_goals_of_a_fused_norm(us: float, behind: float, reached: bool) -> None:
    found = goals(
        row("linear", [1, 6144, 4096], 11.0, behind=12.0),
        row("linear, fused", [1, 6144, 4096], 11.0, "norm", behind),
        row("linear, fused", [1, 2112, 7168], us, "norm, fp8 blocks"),
        row("linear, fused", [4, 2112, 7168], 99.0, "norm, fp8 blocks"),
    )
    count = f"{reached:d} of 1"
    assert found["2112 x 7168, fp8 blocks, with its norm, M = 1", "at most 4.6 us"][0] == count
    more = found["6144 x 4096 with its norm, M = 1, behind a kernel", "at most 0.5 us more than alone"]
    assert more == [count, f"{behind - 12.0:.2f} us (1 x 6144 x 4096, norm)"]


def test_every_row_shows_both_protocols_and_refusals() -> None:
    refused = row("linear, fp8", [1, 4096, 4096], 5.0, "fp8 rows") | {"refused": {"torch._scaled_mm": "Error: no"}}
    given = sheet(
        row("linear", [1, 4096, 4096], 8.0, behind=9.0, cuBLAS=12.0, torch_compile=13.0),
        refused,
        row("linear, fused", [1, 6144, 4096], 11.0, "norm"),
    )
    given.rows[2].us["norm, then onepass"] = (12.0,)  # type: ignore[index]
    text = linear.full(given, ["x.json"])
    assert (
        "| 1 x 4096 x 4096 | **8.00 / 9.00** | 92% | 1.00 | 12.00 / 12.00 | 13.00 |  | at least 88% of the floor: yes, 92% |"
        in text
    )
    fp8 = next(line for line in text.splitlines() if line.startswith("| 1 x 4096 x 4096, fp8 rows"))
    assert "| 12.00 / 12.00 |  | refused | at least 80% of the floor: NO, 74% |" in fp8, "cuBLAS is that of bfloat16"
    assert "- torch._scaled_mm, 1 rows, first 1 x 4096 x 4096, fp8 rows: `Error: no`" in text
    assert "| 1 x 6144 x 4096, norm | **11.00** | 101% | 1.00 | 12.00 |" in text
    assert "rows that are fp8 already" in text and "## Goals" in text


def test_a_cpu_has_no_goals_and_a_busy_one_no_shares() -> None:
    given = row("linear", [1, 4096, 4096], 8.0) | {"us": {"onepass": [8.0, 8.0], "memory stream": [6.0, 6.0]}}
    text = linear.full(Sheet(of_report(document(given, device="cpu"))), ["x.json"])
    assert "Goals" not in text and "| 1 x 4096 x 4096 | **8.00** | 75% | 6.00 |" in text
    busy = linear.full(Sheet(of_report(document({**given, "others": 0.5}, device="cpu"))), ["x.json"])
    assert "not quiet" in busy and "75%" not in busy and "| 1 x 4096 x 4096 | **8.00** |  | 6.00 |" in busy


def test_the_command_writes_the_page_and_the_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file, page = tmp_path / "results" / "linear.json", tmp_path / "page.md"
    file.parent.mkdir()
    ceilings = {"copy 2 GiB TB/s": 4.0, "read 1 GiB TB/s": 4.5, "empty kernel us": 1.0}
    write(document(row("linear", [1, 4096, 4096], 8.0), ceilings=ceilings), file)
    page.write_text("a\n<!-- linear:begin -->stale<!-- linear:end -->\nb\n")
    monkeypatch.setattr(sys, "argv", ["linear", str(file), "--readme", str(page)])
    linear.main()
    assert page.read_text() == linear.with_section(page.read_text(), Sheet(load([file])), "results")
    assert "stale" not in page.read_text() and "(results/linear.md)" in page.read_text()
    assert (
        "1 x 4096 x 4096" in (file.parent / "linear.md").read_text() and "bf16, M = 1 to 4" in capsys.readouterr().out
    )


def test_the_last_file_counts(tmp_path: Path) -> None:
    text = RESULTS.read_text()
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(text)
    report = json.loads(text)
    report["rows"] = report["rows"][:1]
    report["rows"][0]["us"]["onepass"] = [1234.5, 1234.5]
    second.write_text(json.dumps(report))
    before, after = Sheet(load([first])), Sheet(load([first, second]))
    assert len(after.rows) == len(before.rows) and [row.ours for row in after.rows].count(1234.5) == 1


def test_committed_pages_are_current() -> None:
    """docs/performance.md has the goals of the committed results, and linear.md every row of them."""
    files = [
        RESULTS,
        *map(RESULTS.with_name, ("linear-fp8.json", "linear-narrow.json", "linear-peers.json", "linear-batch.json")),
    ]
    found = Sheet(load(files)) if RESULTS.exists() else None
    text = (ROOT / "docs/performance.md").read_text()
    assert markers(linear.MARKER)[0] in text
    shown = " ".join(f"benchmarks/h200/{file.name}" for file in files)
    command = f"python -m tools.bench.linear {shown} --readme docs/performance.md"
    assert text == linear.with_section(text, found, "../benchmarks/h200"), f"stale; run: {command}"
    if found is not None:
        assert (RESULTS.parent / linear.FILE).read_text() == linear.full(found, [file.name for file in files]), (
            f"stale; run: {command}"
        )
    cpu = ROOT / "benchmarks/cpu/linear.json"
    command = "python -m tools.bench.linear benchmarks/cpu/linear.json"
    assert cpu.with_name(linear.FILE).read_text() == linear.full(Sheet(load([cpu])), [cpu.name]), (
        f"stale; run: {command}"
    )
