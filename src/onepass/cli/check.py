"""``onepass check``: every case against the float64 oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..testing import runner
from ..testing.case import Check
from ..testing.runner import Result
from .common import Device, cannot_write, progress_bar, require, table, wide_console

EVERY = 15.0
"""Seconds between two lines about the progress, where there is no terminal."""


def check(
    device: Annotated[
        Device, typer.Option(help="Where to run; 'interpreter' runs the GPU kernels on the CPU.")
    ] = Device.cpu,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; repeatable.", metavar="NAME")] = None,
    match: Annotated[str, typer.Option(help="Only cases whose name contains this.", metavar="TEXT")] = "",
    to: Annotated[str, typer.Option("--json", help="Write results here as JSON; '-' is stdout.", metavar="FILE")] = "",
) -> None:
    """Run every case against the float64 oracle; exit status 1 if one fails."""
    require(device)
    if device is Device.interpreter and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton reads the variable once, when it is imported, so this takes a new process.
        command = [sys.executable, "-m", "onepass.cli", "check", *(f"--op={name}" for name in op or ())]
        command += ["--device", "interpreter", "--match", match, "--json", to]
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False)
        raise typer.Exit(done.returncode)
    unknown = sorted(set(op or ()) - set(runner.OPS))
    if unknown:
        raise typer.BadParameter(f"no op {unknown[0]!r}; choose from {', '.join(runner.OPS)}", param_hint="--op")
    chosen = runner.select(op or (), match, device.value)
    cases = [case for case in chosen if device is not Device.interpreter or case.interpretable]
    skipped = len(chosen) - len(cases)
    if not cases:
        limit = " and is short enough to interpret" if skipped else ""
        raise typer.BadParameter(f"no case has {match!r} in its name{limit}", param_hint="--match")
    console = wide_console(stderr=to == "-")  # results on stdout must stay parseable
    start = time.perf_counter()
    results = _run(cases, device, console)
    seconds = time.perf_counter() - start
    failed = sum(not result.passed for result in results)
    if to:
        counts = {"device": device.value, "passed": len(results) - failed, "failed": failed, "left_out": skipped}
        report = {**counts, "seconds": round(seconds, 3), "results": [result.to_json() for result in results]}
        _write(json.dumps(report, indent=1), to)
    _show(results, console)
    verdict = Text(f"{len(results) - failed} of {len(results)} passed", style="bold red" if failed else "bold green")
    console.print(Text.assemble(verdict, f" on {device.value} in {seconds:.1f} s"))
    if skipped:
        what = "1 case" if skipped == 1 else f"{skipped} cases"
        console.print(f"{what} left out: rows too long, or too many, for the interpreter", style="dim")
    raise typer.Exit(1 if failed else 0)


def _run(cases: list[Check], device: Device, console: Console) -> list[Result]:
    total = len(cases)
    cached = "" if device is Device.interpreter else "; compiled kernels are cached, so a second run is shorter"
    console.print(f"{total} cases on {device.value}{cached}", highlight=False)
    with progress_bar(console, disable=not console.is_terminal) as progress:
        task = progress.add_task("checking", total=total)
        lines = None if console.is_terminal else _Lines(total, console)

        def report(result: Result) -> None:
            progress.update(task, advance=1, description=f"{result.op:<20}")
            if lines is not None:
                lines.step()
            if not result.passed:
                title = ("FAILED ", "bold red"), (f"{result.op} ", "bold")
                progress.console.print(Text.assemble(*title, f"{result.case}\n       {result.message}"))

        return runner.run_cases(cases, device.value, report)


class _Lines:
    """Prints how far a run is and how long the rest may take, every `EVERY` seconds."""

    def __init__(self, total: int, console: Console) -> None:
        self.total, self.console, self.done = total, console, 0
        self.start = self.last = time.perf_counter()

    def step(self) -> None:
        """A case is done."""
        self.done += 1
        now = time.perf_counter()
        if now - self.last < EVERY or self.done == self.total:
            return
        self.last, seconds = now, now - self.start
        left = seconds / self.done * (self.total - self.done)
        self.console.print(f"{self.done} of {self.total} after {seconds:.0f} s, about {left:.0f} s left")


def _show(results: list[Result], console: Console) -> None:
    """Print one line per op and group of cases."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.op, result.case.split(":")[0]), []).append(result)
    shown = table("op", "group", right=("passed", "time"))
    previous = ""
    for (op, group), members in groups.items():
        passed = sum(result.passed for result in members)
        count = Text(f"{passed}/{len(members)}", style="green" if passed == len(members) else "bold red")
        shown.add_row("" if op == previous else op, group, count, f"{sum(r.seconds for r in members):.2f} s")
        previous = op
    console.print(shown)


def _write(text: str, to: str) -> None:
    if to == "-":
        print(text)
        return
    try:
        Path(to).write_text(text + "\n")
    except OSError as error:
        raise cannot_write(to, error, "--json") from error
