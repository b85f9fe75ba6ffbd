"""``onepass check``: the library against its float64 oracle, on this machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from ..testing import runner
from ..testing.call import Case
from ..testing.runner import Result
from .common import Commands, Progress, UsageError, cannot_write, table, usable_device

_NOT_RUN = "these kernels have not run on a GPU yet, and ONEPASS_UNPROVEN=1 runs them"


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    words = "run a representative set of cases against the float64 oracle"
    description = (
        "Run cases against the float64 oracle; the exit status is 1 if one fails. Together they have every op, and every "
        "dtype, format and option of each kernel family: about a minute."
    )
    parser = commands.add_parser("check", help=words, description=description, allow_abbrev=False)
    option = parser.add_argument
    where = "cpu, cuda, or interpreter, which runs the GPU kernels on the CPU; default cpu"
    option("--device", type=usable_device, default="cpu", metavar="DEVICE", help=where)
    option("--op", action="append", default=[], metavar="NAME", help="only this op; repeatable")
    option("--match", default="", metavar="TEXT", help="only cases whose name contains this; a|b: this or that")
    option("--json", default="", metavar="FILE", help="write results here as JSON; '-' is stdout")
    parser.set_defaults(run=check, parser=parser)


def check(options: argparse.Namespace) -> int:
    """Run the cases, print a line per op and group; 1 if one fails."""
    device: str = options.device
    if device == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton reads the variable once, when it is imported, so this takes a new process.
        command = [sys.executable, "-m", "onepass", "check", *(f"--op={name}" for name in options.op)]
        command += ["--device", device, f"--match={options.match}", f"--json={options.json}"]
        return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    cases, skipped = _chosen(options)
    stream = sys.stderr if options.json == "-" else sys.stdout  # results on stdout must stay parseable
    start = time.perf_counter()
    results = _run(cases, device, stream)
    seconds = time.perf_counter() - start
    failed = sum(not result.passed for result in results)
    if options.json:
        counts = {"device": device, "passed": len(results) - failed, "failed": failed, "left_out": skipped}
        report = {**counts, "seconds": round(seconds, 3), "results": [result.to_json() for result in results]}
        _write(json.dumps(report, indent=1), options.json)
    print(_by_group(results), file=stream)
    print(f"{len(results) - failed} of {len(results)} passed on {device} in {seconds:.1f} s", file=stream)
    if skipped:
        what = "1 case" if skipped == 1 else f"{skipped} cases"
        print(f"{what} left out: rows too long, or too many, for the interpreter", file=stream)
    if absent := runner.left_out(device):
        print(f"left out: {', '.join(absent)}: {_NOT_RUN}", file=stream)
    return 1 if failed else 0


def _chosen(options: argparse.Namespace) -> tuple[list[Case], int]:
    """The cases to run, and how many more the interpreter cannot run."""
    ops = runner.OPS if options.device == "cpu" else runner.ALL_OPS
    unknown = sorted(set(options.op) - set(ops))
    if unknown:
        raise UsageError(f"argument --op: no op {unknown[0]!r}; choose from {', '.join(ops)}")
    chosen = runner.select(options.op, options.match, options.device)
    cases = [case for case in chosen if options.device != "interpreter" or case.interpretable]
    skipped = len(chosen) - len(cases)
    if options.op and set(options.op) <= set(runner.left_out(options.device)):
        raise UsageError(f"argument --op: {', '.join(options.op)}: {_NOT_RUN}")
    if not cases:
        limit = " and is short enough to interpret" if skipped else ""
        raise UsageError(f"argument --match: no case has {options.match!r} in its name{limit}")
    return cases, skipped


def _run(cases: list[Case], device: str, stream: TextIO) -> list[Result]:
    cached = "" if device == "interpreter" else "; compiled kernels are cached, so a second run is shorter"
    what = "1 case" if len(cases) == 1 else f"{len(cases)} cases"
    print(f"{what} on {device}{cached}", file=stream, flush=True)
    progress = Progress(len(cases), stream)

    def report(result: Result) -> None:
        progress.step()
        if not result.passed:
            progress.clear()
            print(f"FAILED {result.op} {result.case}\n       {result.message}", file=stream, flush=True)

    return runner.run_cases(cases, device, report)


def _by_group(results: list[Result]) -> str:
    """One line per op and group of cases."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.op, result.case.split(":")[0]), []).append(result)
    rows = [("op", "group", "passed", "time")]
    previous = ""
    for (op, group), members in groups.items():
        passed = f"{sum(result.passed for result in members)}/{len(members)}"
        rows.append(("" if op == previous else op, group, passed, f"{sum(r.seconds for r in members):.2f} s"))
        previous = op
    return table(rows, right=(2, 3))


def _write(text: str, to: str) -> None:
    if to == "-":
        print(text)
        return
    try:
        Path(to).write_text(text + "\n")
    except OSError as error:
        raise cannot_write(to, error, "--json") from error
