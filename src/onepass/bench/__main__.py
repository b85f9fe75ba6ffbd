"""``python -m onepass.bench``: speed against peers, with nothing but torch and a backend installed, as on a bare GPU machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from . import baseline, page, results
from .lines import Lines, summary
from .run import Plan, run


def main() -> int:
    """Check, measure, print as it goes; the exit status is 1 if an op was refused."""
    parser = argparse.ArgumentParser(prog="python -m onepass.bench", description=__doc__)
    parser.add_argument(
        "--op", "--only", action="append", default=[], help="an op, or rows, gemv, qk, mla, decode-step, host"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default="all", help="decode, prefill, all, or shapes like 64x4096,1x2112x7168x1536")
    parser.add_argument("--peers", default="all", help="all, none, or parts of names: compile,liger")
    parser.add_argument("--json", type=Path, help="write results here, after every row")
    parser.add_argument("--html", type=Path, help="write a page here")
    parser.add_argument("--baseline", type=Path, help="say what got faster or slower than in this file of results")
    parser.add_argument(
        "--resume", action="store_true", help="keep what the file of --json has, measure what it has not"
    )
    parser.add_argument("--limit", type=float, help="begin nothing new after this many seconds")
    parser.add_argument("--no-behind", action="store_true", help="do not time calls behind an ordinary kernel (GPU)")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long to measure a row on a CPU")
    parser.add_argument("--note", help="words about the machine, kept with the results")
    options = parser.parse_args()
    try:
        plan = Plan(
            options.device, tuple(options.op), options.shapes, options.peers, options.seconds, not options.no_behind,
            options.limit,
        )  # fmt: skip
        old = results.load([options.baseline]) if options.baseline else None
        resumed = options.resume and options.json and options.json.exists()
        report = run(plan, Lines(options.json), results.document(options.json) if resumed else None)
    except (ValueError, OSError) as error:
        parser.error(results.plain(str(error)))
    if options.note:
        report["note"] = options.note
    print(summary(report), flush=True)
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
