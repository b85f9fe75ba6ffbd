"""The tables of formats: shares, ratios and refusals, from invented results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.results import load, of_report, write
from benchmarks.suite.rms_norm_quant import FORMATS, GATED, OP
from tools.bench import formats
from tools.bench.formats import Sheet
from tools.bench.markdown import markers

ROOT = Path(__file__).parents[2]


def row(op: str, m: int, us: float, kind: str = "", copy: float = 10.0, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"op": op, "shape": [m, 7168], "bytes": 10**6, "stream": "halve"}
    found["us"] = {"best copy": [copy, copy + 1], "onepass": [us + 0.5, us], "torch.compile": [3 * us]}
    return found | ({"with": kind} if kind else {}) | more


def document(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    head = {"machine": "M", "date": "2030-01-01", "torch": "9", "device": "cuda", "triton": "3"}
    return {**head, **more, "rows": list(rows)}


def goals(*rows: dict[str, Any]) -> dict[str, list[str]]:
    text = formats.goals(Sheet(of_report(document(*rows))))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    return {what: rest for what, _, *rest in lines}


def test_goals_count_rows_and_name_the_worst() -> None:
    found = goals(
        row(OP, 4096, 10.0 / 0.96, "int8"),
        row(OP, 16384, 10.0 / 0.9, "mxfp8"),
        row(OP, 4096, 10.0, "nvfp4"),
        row(OP, 1, 1.9, "int8", behind_us={"onepass": [2.5]}),
        row(OP, 1, 1.5, "nvfp4"),
        row("rms_norm_fused_fp8", 1, 1.5, behind_us={"onepass": [2.0]}),
        row("rms_norm_fused_fp8", 1, 0.1, "groups of 128"),
        row("rms_norm_fused_fp8", 4096, 99.0),
    )
    assert found["8-bit codes, M = 4096 and 16384"] == ["1 of 2", "90% (16384 x 7168, mxfp8)"]
    assert found["4-bit codes, M = 4096 and 16384"] == ["1 of 1", "100% (4096 x 7168, nvfp4)"]
    assert found["gated norm, M = 4096 and 16384"] == ["not measured", ""]
    assert found["every format, M = 1"] == ["1 of 2", "1.27x (1 x 7168, int8)"]
    assert found["every format, M = 1, behind a kernel"] == ["0 of 1", "1.25x (1 x 7168, int8)"]


def test_without_the_other_op_nothing_is_compared_with_it() -> None:
    found = goals(row(OP, 1, 1.0, "int8"), row(GATED, 4096, 9.0))
    assert found["every format, M = 1"] == ["not measured", ""]
    assert found["gated norm, M = 4096 and 16384"][0] == "1 of 1"


def test_every_format_belongs_to_a_goal() -> None:
    given = Sheet(of_report(document(*(row(OP, 4096, 10.0, kind) for kind in FORMATS))))
    assert all(any(goal.applies(found) for goal in formats.GOALS) for found in given.rows)
    assert {formats.bits(found) for found in given.rows} == {4, 8}


def test_the_command_writes_the_page_and_the_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, page = tmp_path / "results" / "formats.json", tmp_path / "page.md"
    file.parent.mkdir()
    refused = row(OP, 4096, 20.0, "int8", refused={"FlashInfer": "Error: no"})
    ceilings = {"copy 2 GiB TB/s": 4.0, "read 1 GiB TB/s": 4.5, "empty kernel us": 1.0}
    write(document(refused, row("rms_norm_fused_fp8", 4096, 10.5), ceilings=ceilings), file)
    page.write_text("a\n<!-- formats:begin -->stale<!-- formats:end -->\nb\n")
    monkeypatch.setattr(sys, "argv", ["formats", str(file), "--readme", str(page)])
    formats.main()
    assert page.read_text() == formats.with_section(page.read_text(), Sheet(load([file])), "results")
    assert "stale" not in page.read_text() and "(results/formats.md)" in page.read_text()
    text = (file.parent / "formats.md").read_text()
    wanted = "| `rms_norm_fused_quant` | 4096 x 7168, int8 | **20.00** | 50% | 10.00 | 60.00 |  | refused | NO, 50% |"
    assert wanted in text and "- FlashInfer, 4096 x 7168, int8: `Error: no`" in text
    assert "| `rms_norm_fused_fp8` | 4096 x 7168 | **10.50** |" in text


def test_committed_pages_are_current() -> None:
    results = ROOT / "benchmarks/h200/formats.json"
    found = Sheet(load([results])) if results.exists() else None
    text = (ROOT / "docs/performance.md").read_text()
    assert markers(formats.MARKER)[0] in text
    assert formats.with_section(text, found, "../benchmarks/h200") == text
    if found is not None:
        assert results.with_name(formats.FILE).read_text() == formats.full(found, [results.name])
