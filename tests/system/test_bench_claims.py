"""What a benchmark may claim: nothing from a machine that is not quiet, and nothing about peers without their names."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from onepass.bench import page, peers, results, run, timing, words
from onepass.cli import bench as cli_bench
from onepass.cli import demo
from onepass.cli import main as cli
from tools.bench import report

H200 = Path(__file__).parents[2] / "benchmarks/h200/bench.json"
CLAIM = re.compile(r"\d(\.\d+)?x\b|of the ceiling|faster than|is ahead")


def document(others: float) -> dict[str, Any]:
    """A run on a CPU during which other processes had a share of the cores."""
    us = {
        "memory stream": [5.0, 5.1],
        "onepass": [8.0, 8.1],
        "torch.compile": [16.0, 16.2],
        "torch eager": [40.0, 41.0],
    }
    row = {"op": "rms_norm", "shape": [4, 4096], "bytes": 65536, "us": us, "others": others}
    wide = {**row, "shape": [4096, 4096], "bytes": 67108864, "others": 0.0}
    return {
        "machine": "M", "date": "2030-01-01", "torch": "9", "device": "cpu", "threads": 2, "rows": [row, wide], "refused": {},
        "peers": {"torch.compile": "", "torch eager": "", "Liger-Kernel": "for cuda only", "vLLM": "not installed"},
    }  # fmt: skip


def printed(given: dict[str, Any], width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    cli_bench._show(results.of_report(given), given, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- a machine that is not quiet ------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0.05, 0.75])
def test_a_busy_machine_gets_a_banner_and_no_claims(others: float) -> None:
    """The same times in both cases; only the recorded load of others decides."""
    found = results.of_report(document(others))
    body = page.html(found).split("</style>")[1].split("<script>")[0]
    texts = [printed(document(others), 200), body, report.full(found, ["x.json"]), report.section(found, "there")]
    for text in texts:
        assert ("other processes had up to 75% of its cores" in text) == (others > timing.BUSY)
        shown = re.sub(r"In brackets how many times longer[^.]*\.|click a name|The ceiling is[^.]*\.", "", text)
        assert bool(CLAIM.search(re.sub(r"<th>of the ceiling</th>|\| of the ceiling", "", shown))) == (
            others <= timing.BUSY
        )
        assert "16.00" in text or "16.0" in text, "times stay"


def test_the_load_of_others_comes_from_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A faked reading of the clocks, in which others have half of all cores, ends in the banner of the command."""
    seconds = itertools.count(0.0, 1.0)
    monkeypatch.setattr(timing, "_clocks", lambda: (t := next(seconds), t * 4, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("time.sleep", lambda s: None)
    monkeypatch.setattr(run, "turns", lambda calls, **k: timing.turns(calls, **{**k, "seconds": 0.02}))
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["bench", "--device", "cpu", "--op", "rms_norm", "--shapes", "4x256", "--peers", "eager"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "This machine was not quiet: other processes had up to 50% of its cores." in result.output
    assert not CLAIM.search(result.output), result.output


@pytest.mark.parametrize("busy", [False, True])
def test_the_demo_claims_no_speedup_on_a_busy_machine(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have none or half of two cores, by a faked reading."""
    seconds = itertools.count(0.0, 1.0)
    monkeypatch.setattr(timing, "_clocks", lambda: (t := next(seconds), t * busy, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    speedup = demo.Speedup(timing.Load(wait=0.0))
    console = Console(width=200, file=io.StringIO(), color_system=None)
    speedup.warn(console)
    cells = [speedup(4.0, 1.0), speedup(1.0, 2.0)]
    assert [cell.plain for cell in cells] == (["not quiet"] * 2 if busy else ["4.0x", "0.5x"])
    speedup.warn(console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("This machine is not quiet") == busy


def test_load_remembers_the_worst_and_waits_for_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    readings = iter([(0.0, 0.0, 0.0), (0.2, 0.2, 0.0), (1.0, 0.05, 0.0), (2.0, 1.0, 0.0), (3.0, 1.0, 0.0)])
    monkeypatch.setattr(timing, "_clocks", lambda: next(readings))
    load = timing.Load(wait=0.0)
    assert [load.quiet() for _ in range(4)] == [True, True, False, False] and load.worst == pytest.approx(0.95)


def test_the_demo_shows_no_speedup_but_through_this(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part that compares times asks `Speedup`."""
    import torch

    monkeypatch.setattr(demo, "median_seconds", lambda calls, device: [4.0e-3, 1.0e-3])
    console = Console(width=200, file=io.StringIO(), color_system=None)

    class Loud:
        worst = 0.9

        def quiet(self) -> bool:
            return False

    speedup = demo.Speedup(Loud())  # type: ignore[arg-type]
    with torch.inference_mode():
        demo._show_speed("cpu", console, speedup)
        demo._show_prologue("cpu", console, speedup)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("not quiet") == len(demo.SHAPES) + 1 and "4.0x" not in text and "4.00 ms" in text


# --- peers by name --------------------------------------------------------------------------------------------------


def test_counts_of_peers_ahead_name_the_peers() -> None:
    found = results.of_report(document(0.0))
    said = "Peers: torch.compile, torch eager. Not measured: "
    texts = [words.ahead_words(found), printed(document(0.0), 200), page.html(found), report.full(found, ["x.json"])]
    for text in texts:
        assert said in text
        assert "Liger-Kernel (for cuda only)" in text and "vLLM (not installed)" in text and "quack" in text


def test_committed_headlines_name_the_peers() -> None:
    found = results.load([H200])
    for file in (H200.parents[2] / "README.md", H200.parent / "README.md", H200.parent / "bench.html"):
        assert found.peer_words in file.read_text(), file
    assert set(found.measured) | set(found.absent) == set(peers.PEERS)


def test_nothing_is_called_out_of_reach() -> None:
    for file in (*(H200.parents[2] / "src/onepass/bench").glob("*.py"), H200.parent / "bench.html"):
        assert "out of reach" not in file.read_text(), file


# --- terminals and pipes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 100, 240])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_numbers(width: int) -> None:
    """Every committed row of the H200, each number as it is or not at all."""
    given = results.document(H200)
    text = printed(given, width)
    assert "\u2026" not in text
    tables = text.split("left out to fit")[0] if width < 240 else text
    found = results.of_report(given)
    for row in found.rows:
        assert any(row.words in line and f" {row.ours:.2f}" in line for line in tables.splitlines()), row.key
    long = [line for line in tables.splitlines() if len(line) > width and not line.startswith(("left out", "A peer"))]
    assert not long
    assert ("left out to fit" in text) == (width < 240)
    if width >= 80:
        heads = [line for line in tables.splitlines() if line.startswith("shape")]
        assert all("us" in head.split() for head in heads) and sum("torch.compile" in head for head in heads) >= 8


PIPED = """
import sys
from onepass.bench import run
def measure(workload, plan, usable, row, notes, watch, clock, behind=None, ours=True):
    if workload.shape[0] > 1:
        sys.stdin.readline()
    row["us"] = {"onepass": [2.0, 2.0]}
run.measure = measure
run.gate.check = lambda ops, device: {op: [] for op in ops}
from onepass import cli
sys.argv = ["onepass", "bench", "--device", "cpu", "--op", "rms_norm", "--peers", "none"]
cli.app()
"""


def test_a_pipe_gets_a_line_per_row_while_the_run_goes_on() -> None:
    """The second row is not measured before the first one was read here: a line kept back would never come."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PIPED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        give_up = threading.Timer(120, process.kill)
        give_up.start()
        first = [process.stdout.readline() for _ in range(2)]
        rest, _ = process.communicate("\n" * 9)
        give_up.cancel()
    assert process.returncode == 0, "the first rows never came"
    lines = [*first, *rest.splitlines()]
    assert lines[0] == "checking rms_norm\n"
    shapes = [line.split("us:")[0].split("rms_norm")[1].strip() for line in lines if " us: onepass 2.00" in line]
    assert shapes == ["1 x 4096", "16 x 4096", "256 x 4096", "4096 x 4096", "4096 x 7168", "4096 x 7168, residual"]
