"""Committed results have one line per row, and writers keep it so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import results
from onepass.testing.runner import Result
from tools import checks, compact
from tools.evidence import records

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.json"))


@pytest.mark.parametrize(
    ("document", "lines"),
    [
        ({}, 1),
        ([], 1),
        (3, 1),
        ({"a": {}, "b": [], "c": [1, 2], "d": {"e": 1}}, 6),
        ({"rows": [{"us": [1.5, 2.5]}, {"us": []}]}, 6),
        ({"builds": {"a": {"cases": ["x", "y"]}, 'b"': {}}, "n": None}, 7),
        ([{"a": [1]}, [{"b": 2}]], 4),
        ({1: {2: [3]}}, 5),
    ],
)
def test_a_row_is_a_line(document: Any, lines: int) -> None:
    text = compact.dumps(document)
    assert len(text.splitlines()) == lines and text.endswith("\n")
    assert json.loads(text) == json.loads(json.dumps(document))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "benchmarks")))
def test_committed_results_are_compact(file: Path) -> None:
    assert file.read_text() == compact.dumps(json.loads(file.read_text()))


def test_committed_results_are_few() -> None:
    """Results that pages quote, and nothing older."""
    assert FILES and sum(len(file.read_text().splitlines()) for file in FILES) <= 12_000


def test_evidence_is_a_sorted_line_per_configuration(tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    proofs = {name: records.Proof(name, ("y", "x"), "ir", 0, "source") for name in ("b", "a")}
    records.write(file, {"gpu": "none"}, proofs)
    head, *lines, end, last = file.read_text().splitlines()[3:]
    assert (head, end, last) == (' "builds": {', " }", "}")
    assert [line.strip()[:3] for line in lines] == ['"a"', '"b"']
    assert {name: proof.cases for name, proof in records.read(file).items()} == {"a": ("x", "y"), "b": ("x", "y")}


def test_the_benchmark_suite_writes_the_same_text(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    for name in ("h200/bench.json", "cpu/bench.json", "h200/invariance.json"):
        report = json.loads((ROOT / "benchmarks" / name).read_text())
        results.write(report, file)
        assert file.read_text() == compact.dumps(report)


def test_promises_are_resumed_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "promises.json"
    seen = [
        Result("promises", "bytes: rms_norm: a", "cpu", True, "", 0.1),
        Result("promises", "b", "cpu", True, "", 0.1),
    ]
    seen.append(Result("promises", "bytes: c", "cpu", False, "why", 0.1))
    file.write_text(checks.promises_text("cpu", seen, {"bytes: earlier"}))
    assert checks.kept_promises(file) == {"bytes: rms_norm: a", "b", "bytes: earlier"}
    document = json.loads(file.read_text())
    assert document["number"] == 3 and [row["case"] for row in document["broken"]] == ["bytes: c"]


def test_every_cited_sweep_is_committed() -> None:
    """Numbers in square brackets are files of tuning data, and each of these is cited."""
    pages = [ROOT / "docs/notebook/performance.md", *(ROOT / "src").rglob("tuning/h200.py")]
    text = "\n".join(page.read_text() for page in pages)
    cited = {number for group in re.findall(r"\[(\d+(?:, \d+)*)\](?!\()", text) for number in group.split(", ")}
    links = "\n".join(page.read_text() for page in (*(ROOT / "docs").rglob("*.md"), *pages))
    files = {path.name.split("-")[0] for path in (ROOT / "benchmarks/h200/tuning").glob("[0-9]*")}
    assert len(pages) == 2 and cited <= files
    assert files - cited == {number for number in files - cited if f"h200/tuning/{number}-" in links}
