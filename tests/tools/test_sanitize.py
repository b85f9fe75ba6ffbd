"""`tools.sanitize`: which cases it takes, and what it makes of the tools' output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import select
from tools import sanitize
from tools.evidence.chips import MACHINES
from tools.sanitize import MORE, Section, chosen, clean, configurations, read, report, small, text, words

_CASES = small((*select(device="cuda"), *MORE))


def _lines(*reports: str, summary: str = "ERROR SUMMARY: 0 errors", passed: bool = True) -> list[str]:
    """What a process prints that runs two cases, with reports during the second."""
    ended = json.dumps({"passed": passed, "message": "" if passed else "wrong"})
    return [
        "========= COMPUTE-SANITIZER\n",
        'SANITIZED-BEGIN {"op": "rms_norm", "case": "a"}\n',
        'SANITIZED-END {"passed": true, "message": ""}\n',
        'SANITIZED-BEGIN {"op": "linear", "case": "b"}\n',
        *(line + "\n" for line in reports),
        f"SANITIZED-END {ended}\n",
        *([f"========= {summary}\n"] if summary else []),
    ]


_INVALID = (
    "========= Invalid __global__ read of size 4 bytes",
    "=========     at kernel+0x160",
    "=========     by thread (0,0,0) in block (0,0,0)",
    "=========     Saved host backtrace up to driver entry point",
    "========= ",
)
_RACE = (
    "========= Error: Race reported between Write access at kernel+0x2e0 and Read access at kernel+0x300 [16 hazards]"
)


def test_sections_have_the_reports_between_their_lines() -> None:
    part = read("memcheck", _lines(*_INVALID, *_INVALID, summary="ERROR SUMMARY: 2 errors"))
    assert [(s.case, s.passed, s.reports) for s in part.sections] == [("a", True, 0), ("b", True, 2)]
    assert part.sections[1].kinds == ["Invalid __global__ read of size 4 bytes"]
    assert (part.summary, part.reported) == (2, 2)
    raced = read("racecheck", _lines(_RACE, summary="RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"))
    assert (raced.summary, raced.sections[1].reports) == (1, 1)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (_lines(*_INVALID, summary="ERROR SUMMARY: 1 error"), "reported"),
        (_lines(*_INVALID), "reported"),
        (_lines(summary="ERROR SUMMARY: 3 errors"), "reported"),
        (_lines(summary="RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)"), "reported"),
        (_lines("========= Target application returned an error"), "reported"),
        (_lines(summary=""), "without_summary"),
        (_lines(passed=False), "failed"),
        (_lines()[:4], "failed"),
    ],
)
def test_whatever_is_wrong_is_not_clean(lines: list[str], why: str) -> None:
    fine = [read(tool, _lines()) for tool in sanitize.PARTS if tool != "memcheck"]
    found = report([*fine, read("memcheck", lines)], "a GPU")
    assert not clean(found) and found["tools"]["memcheck"][why]
    assert clean(report([*fine, read("memcheck", _lines())], "a GPU"))
    assert not clean(report(fine, "a GPU"))  # a tool that did not run


def test_the_text_has_a_line_per_case_and_tool() -> None:
    found = report([read("memcheck", _lines(*_INVALID, summary="ERROR SUMMARY: 1 error", passed=False))], "a GPU")
    lines = text(found).splitlines()
    assert "memcheck   0 reports, passed: rms_norm a" in lines
    assert "memcheck   1 reports, FAILED (wrong): linear b" in lines
    assert any(line.startswith("memcheck   2 cases, 1 failed, 1 errors or hazards in") for line in lines)


def test_the_cases_cover_every_word_and_every_group() -> None:
    machine = MACHINES["h200"]
    builds = configurations({name: case for name, case in _CASES.items() if case.op == "linear"}, machine)
    cases = {name: case for name, case in _CASES.items() if case.op == "linear"}
    taken = chosen(cases, builds)
    assert len(set(taken)) == len(taken) < len(cases) / 3
    every = {word for name in cases for build in builds[name] for word in words(build)}
    assert every == {word for name in taken for build in builds[name] for word in words(build)}
    assert {cases[name].group for name in taken} == {case.group for case in cases.values()}
    for weight in ("e4m3fn scale=row", "e4m3fn scale=block", "int8 scale=row"):
        assert any(f"weight={weight} cube" in word for word in every)


_FAKE = """#!/bin/sh
tool=$2; shift 2
echo "========= COMPUTE-SANITIZER"
"$@"
test $tool = racecheck && echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
test $tool = memcheck && echo "========= ERROR SUMMARY: 0 errors"
exit 0
"""


@pytest.mark.full  # starts three processes
def test_a_whole_run_with_a_tool_that_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compute-sanitizer").write_text(_FAKE)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitize, "PARTS", {"racecheck": 1, "memcheck": 1})
    out = tmp_path / "found.json"
    options = ["--device=cpu", "--jobs=1", "--all", "--match=rms_norm values: 9x384", f"--json={out}"]
    monkeypatch.setattr(sys, "argv", ["tools.sanitize", *options, f"--text={tmp_path / 'found.txt'}"])
    assert sanitize.main() == 0
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["tools"]["memcheck"]["cases"] == found["tools"]["racecheck"]["cases"] > 0
    assert "rms_norm values: 9x384" in (tmp_path / "found.txt").read_text()


def test_a_process_at_the_deadline_is_ended(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        'import time; print(\'SANITIZED-BEGIN {"op": "x", "case": "y"}\', flush=True); time.sleep(600)',
    ]
    [part] = sanitize._run([("memcheck", command)], 0.0, {})
    assert part.summary is None
    assert part.sections in ([], [Section("memcheck", "x", "y")])
