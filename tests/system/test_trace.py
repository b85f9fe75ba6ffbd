"""``onepass trace gemv``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import onepass
from onepass.__main__ import main
from onepass.trace import PHASES
from tests.helpers.command import Result, invoke
from tests.trace.recorded import Page


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


def trace_gemv(*arguments: str) -> Result:
    return invoke(main, "trace", "gemv", "--device", "cpu", *arguments)


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
def test_command_reports_what_the_op_rejects(arguments: tuple[str, ...], names: str, tmp_path: Path) -> None:
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
        (("--dtype", "int8"), "choose from 'bfloat16', 'float16', 'float32'"),
        (("--runs", "0"), "greater than or equal to 1"),
        (("--n", "-1"), "greater than or equal to 0"),
    ],
)
def test_command_usage_errors(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = trace_gemv("--out", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
