"""``python -m onepass.bench``: speed against peers, with nothing but torch and a backend installed, as on a bare GPU machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from . import baseline, page, results
from .run import Plan, Watcher, run


class _Printer(Watcher):
    """A line a row; the file is written as it grows, so that a run that is cut short leaves what it had."""

    def __init__(self, to: Path | None) -> None:
        self.to = to

    def row(self, row: dict[str, Any], report: dict[str, Any]) -> None:
        done = results.of_report(report).rows[-1]
        times = "  ".join(f"{name} {min(us):.2f}" for name, us in done.us.items())
        print(f"{done.op:24} {done.words:>22} floor {done.floor_us:8.2f}  {times}", flush=True)
        if self.to:
            results.write(report, self.to)

    def refused(self, op: str, why: str) -> None:
        print(f"REFUSED {op}: {why}", flush=True)


def main() -> int:
    """Check, measure, print as it goes; the exit status is 1 if an op was refused."""
    parser = argparse.ArgumentParser(prog="python -m onepass.bench", description=__doc__)
    parser.add_argument(
        "--op", "--only", action="append", default=[], help="an op, or rows, gemv, qk, mla, decode-step, host"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default="all", help="decode, prefill, all, or shapes like 64x4096,1x2112x7168x1536")
    parser.add_argument("--peers", default="all", help="all, none, or parts of names: compile,liger")
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--html", type=Path, help="write a page here")
    parser.add_argument("--baseline", type=Path, help="say what got faster or slower than in this file of results")
    parser.add_argument(
        "--resume", action="store_true", help="keep what the file of --json has, measure what it has not"
    )
    parser.add_argument("--note", help="words about the machine, kept with the results")
    options = parser.parse_args()
    try:
        plan = Plan(options.device, tuple(options.op), options.shapes, options.peers)
        old = results.load([options.baseline]) if options.baseline else None
        resumed = options.resume and options.json and options.json.exists()
        report = run(plan, _Printer(options.json), json.loads(options.json.read_text()) if resumed else None)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.note:
        report["note"] = options.note
    for name, why in report["peers"].items():
        if why:
            print(f"{name}: {why}")
    for key in ("ceilings", "clocks", "host_us"):
        if key in report:
            print(key, report[key])
    if options.json:
        results.write(report, options.json)
    new = results.of_report(report)
    if options.html:
        options.html.write_text(page.html(new))
    if old is not None:
        print(baseline.text(baseline.compare(old, new)))
    return 1 if report["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
