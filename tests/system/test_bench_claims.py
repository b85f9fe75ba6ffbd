"""What a benchmark may claim: nothing on a busy machine, and nothing about peers without naming them."""

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

from benchmarks.suite import command, page, peers, results, rms_norm, run, timing, words
from benchmarks.suite.document import document as read
from examples.demo import demo
from examples.demo.screen import Screen
from tests.helpers.command import invoke
from tools.bench import report

H200 = Path(__file__).parents[2] / "benchmarks/h200/bench.json"
CONTENDERS = (results.OURS, *peers.PEERS)
CLAIM = re.compile(r"\d(\.\d+)?x\b|of the ceiling|faster than|is ahead")


def document(others: float) -> dict[str, Any]:
    """A run on a CPU during which other processes used a share of the cores."""
    us = {
        "memory stream": [5.0, 5.1],
        "onepass": [8.0, 8.1],
        "torch.compile": [16.0, 16.2],
        "torch eager": [40.0, 41.0],
    }
    row = {"op": "rms_norm", "shape": [4, 4096], "bytes": 65536, "us": us, "others": others}
    wide = {**row, "shape": [4096, 4096], "bytes": 67108864, "others": 0.0}
    peers = {"torch.compile": "", "torch eager": "", "Liger-Kernel": "for cuda only", "vLLM": "not installed"}
    head = {"machine": "M", "date": "2030-01-01", "torch": "9", "device": "cpu", "threads": 2}
    return {**head, "rows": [row, wide], "refused": {}, "peers": peers}


def printed(given: dict[str, Any], width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    command._show(results.of_report(given), given, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- a busy machine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0.05, 0.75])
def test_a_busy_machine_gets_a_banner_and_no_claims(others: float) -> None:
    """The times are the same in both cases; only the recorded load differs."""
    found = results.of_report(document(others))
    body = page.html(found).split("</style>")[1].split("<script>")[0]
    texts = [printed(document(others), 200), body, report.full(found, ["x.json"]), report.section(found, "there")]
    for text in texts:
        assert ("other processes had up to 75% of its cores" in text) == (others > timing.BUSY)
        shown = re.sub(r"Brackets show how many times longer[^.]*\.|click a name|The ceiling is[^.]*\.", "", text)
        assert bool(CLAIM.search(re.sub(r"<th>of the ceiling</th>|\| of the ceiling", "", shown))) == (
            others <= timing.BUSY
        )
        assert "16.00" in text or "16.0" in text, "times stay"


def test_the_load_is_measured_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With faked clocks by which other processes use half of all cores, the command prints the banner."""
    seconds = itertools.count(0.0, 1.0)
    monkeypatch.setattr(timing, "_clocks", lambda: (t := next(seconds), t * 4, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("time.sleep", lambda s: None)
    monkeypatch.setattr(run, "turns", lambda calls, **k: timing.turns(calls, **{**k, "seconds": 0.02}))
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["--device", "cpu", "--op", "rms_norm", "--shapes", "4x256", "--peers", "eager"]
    result = invoke(command.main, *arguments)
    assert result.exit_code == 0, result.output
    assert "This machine was not quiet: other processes had up to 50% of its cores." in result.output
    assert not CLAIM.search(result.output), result.output


@pytest.mark.parametrize("busy", [False, True])
def test_the_demo_claims_no_speedup_on_a_busy_machine(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By faked clocks, other processes use none or half of two cores."""
    seconds = itertools.count(0.0, 1.0)
    monkeypatch.setattr(timing, "_clocks", lambda: (t := next(seconds), t * busy, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    console = Console(width=200, file=io.StringIO(), color_system=None)
    screen = Screen(console, "cpu", timing.Load(wait=0.0))
    screen.warn()
    cells = [screen.speedup(4.0, 1.0), screen.speedup(1.0, 2.0)]
    assert [cell.plain for cell in cells] == (["not quiet"] * 2 if busy else ["4.0x", "0.5x"])
    screen.warn()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("This machine is not quiet") == busy


def test_load_remembers_the_worst_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    readings = iter([(0.0, 0.0, 0.0), (0.2, 0.2, 0.0), (1.0, 0.05, 0.0), (2.0, 1.0, 0.0), (3.0, 1.0, 0.0)])
    monkeypatch.setattr(timing, "_clocks", lambda: next(readings))
    load = timing.Load(wait=0.0)
    assert [load.quiet() for _ in range(4)] == [True, True, False, False] and load.worst == pytest.approx(0.95)


def test_every_comparison_of_the_demo_checks_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of the demo shows a speed-up on a busy machine."""
    import torch

    monkeypatch.setattr(Screen, "seconds", lambda self, *calls: [4.0e-3, 1.0e-3])
    console = Console(width=200, file=io.StringIO(), color_system=None)

    class Loud:
        worst = 0.9

        def quiet(self) -> bool:
            return False

    screen = Screen(console, "cpu", Loud())  # type: ignore[arg-type]
    with torch.inference_mode():
        demo._show_speed(screen)
        demo._show_prologue(screen)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("not quiet") == len(demo.SHAPES) + 1 and "4.0x" not in text and "4.00 ms" in text


# --- peers by name --------------------------------------------------------------------------------------------------


def test_counts_of_peers_ahead_name_the_peers() -> None:
    found = results.of_report(document(0.0))
    named = "Peers: torch.compile, torch eager. Not measured: "
    texts = [words.ahead_words(found), printed(document(0.0), 200), page.html(found), report.full(found, ["x.json"])]
    for text in texts:
        assert named in text
        assert "Liger-Kernel (for cuda only)" in text and "vLLM (not installed)" in text and "quack" in text


def test_peers_that_were_not_tried_have_no_reason() -> None:
    """With ``--peers none`` no peer has one."""
    untried = results.of_report({**document(0.0), "peers": {"Liger-Kernel": "for cuda only"}})
    assert "Not measured: torch.compile max, FlashInfer, vLLM, " in untried.peer_words.replace("Liger-Kernel, ", "")
    assert "; Liger-Kernel (for cuda only)" in untried.peer_words and "(not measured)" not in untried.peer_words


def test_committed_pages_name_the_peers() -> None:
    found = results.load([H200])
    root = H200.parents[2]
    pages = [page for page in (root / "README.md", *root.glob("docs/*.md")) if "speed:begin" in page.read_text()]
    for text in (*(file.read_text() for file in (*pages, H200.parent / "README.md")), page.html(found)):
        assert found.peer_words in text
    others = {
        name for name, peer in peers.PEERS.items() if peer.ops and all(op.startswith("linear") for op in peer.ops)
    }
    assert pages and set(found.measured) | set(found.absent) == set(peers.PEERS) - others


def test_nothing_is_called_out_of_reach() -> None:
    sources = [file.read_text() for file in (H200.parents[2] / "benchmarks/suite").glob("*.py")]
    assert sources
    for text in (*sources, page.html(results.load([H200]))):
        assert "out of reach" not in text


# --- terminals and pipes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 100, 240])
def test_a_narrow_terminal_gets_fewer_columns(width: int) -> None:
    """Every committed row of the H200; numbers are shown whole or not at all."""
    given = read(H200)
    text = printed(given, width)
    assert "\u2026" not in text
    tables = text.split("left out to fit")[0] if width < 240 else text
    found = results.of_report(given)
    for row in found.rows:
        assert any(row.words in line and f" {row.ours:.2f}" in line for line in tables.splitlines()), row.key
    assert not [line for line in text.splitlines() if len(line.rstrip()) > width]
    assert ("left out to fit" in text) == (width < 240)
    if width >= 80:
        heads = [line for line in tables.splitlines() if line.startswith("shape")]
        assert all("us" in head.split() for head in heads) and sum("torch.compile" in head for head in heads) >= 8


def test_output_that_is_no_terminal_has_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of a row with many contenders, and the tables."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def measure(self: run.Run, workload: Any, row: dict[str, Any], peers: Any, ours: bool) -> None:
        names = (*CONTENDERS, results.STREAM)
        row["us"] = {name: [1000.0 * number, 1001.0 * number] for number, name in enumerate(names, 1)}

    monkeypatch.setattr(run.Run, "measure", measure)
    monkeypatch.setattr(run, "check", lambda op, device: [])
    result = invoke(command.main, "--device", "cpu", "--op", "rms_norm")
    assert result.exit_code == 0, result.output
    wide = [len(line.rstrip()) for line in result.output.splitlines()]
    assert 80 < max(wide) <= 100, result.output
    for number, name in enumerate(CONTENDERS, 1):
        assert f"{name} {number}000.00" in result.output, "each contender stays in one line"


PIPED = """
import sys
from benchmarks.suite import run
def measure(self, workload, row, peers, ours):
    if workload.shape != (1, 64) or workload.about:
        sys.stdin.readline()
    row["us"] = {"onepass": [2.0, 2.0]}
run.Run.measure = measure
run.check = lambda op, device: []
from benchmarks.suite.command import main
sys.argv = ["benchmarks", "--device", "cpu", "--op", "rms_norm", "--peers", "none"]
main()
"""


def test_a_pipe_gets_each_row_as_soon_as_it_is_measured() -> None:
    """The second row is measured only after the first was read here: a buffered line would never come."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PIPED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        give_up = threading.Timer(120, process.kill)
        give_up.start()
        first = [process.stdout.readline() for _ in range(2)]
        rest, _ = process.communicate("\n" * 30)
        give_up.cancel()
    assert process.returncode == 0, "the first rows never came"
    lines = [*first, *rest.splitlines()]
    assert lines[0] == "checking rms_norm\n"
    shapes = [line.split("us:")[0].split("rms_norm")[1].strip() for line in lines if " us: onepass 2.00" in line]
    plain = [f"{m} x {n}" for m, n in rms_norm.SHAPES["rms_norm", "cpu"]]
    assert shapes == [f"{shape}{more}" for shape in plain for more in ("", ", residual")]
