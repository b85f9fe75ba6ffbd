"""``python -m tools.bench``: a long benchmark run that can be stopped and resumed; needs only torch and a backend."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite import baseline, page, results
from benchmarks.suite.document import document, plain
from benchmarks.suite.lines import Lines
from benchmarks.suite.run import Plan, run

from . import prepare


def main() -> int:
    """Check, measure and print progress; the exit status is 1 if an op was refused."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    add = parser.add_argument
    add("--op", "--only", action="append", default=[], help="an op, or rows, gemv, linear, qk, mla, decode-step, host")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--shapes", default="all", help="decode, prefill, all, or shapes like 64x4096,1x2112x7168x1536")
    add("--peers", default="all", help="all, none, or parts of names: compile,liger")
    add("--match", default="", help="only what matches this expression: '^linear (1|4)x', 'x7168', 'fp8 blocks'")
    add("--slow", help="measure slow peers (max-autotune) only at what matches this expression; '^$' for none")
    add("--json", type=Path, help="write results here, after every row")
    add("--html", type=Path, help="write an HTML page here")
    add("--baseline", type=Path, help="show what got faster or slower since this result file")
    add("--resume", action="store_true", help="keep the results in the --json file and measure the rest")
    add("--limit", type=float, help="start nothing new after this many seconds")
    add("--prepare", type=int, metavar="JOBS", help="first compile what torch.compile needs, in so many processes")
    add(
        "--prepare-limit",
        type=float,
        default=120.0,
        help="seconds for that; max-autotune is measured where it is ready",
    )
    add("--no-behind", action="store_true", help="do not time calls behind an ordinary kernel (GPU)")
    add("--seconds", type=float, default=4.0, help="how long to measure a row on a CPU")
    add("--note", help="a remark about the machine, stored with the results")
    options = parser.parse_args()
    chosen = {"match": options.match, "slow": options.slow}
    measured = (tuple(options.op), options.shapes, options.peers, options.seconds)
    try:
        plan = Plan(options.device, *measured, behind=not options.no_behind, limit=options.limit, **chosen)
        if options.prepare:
            line = prepare.options_of(options)
            done = prepare.prepare(plan, options.prepare, options.prepare_limit, line)
            print(f"{len(done)} of {len(prepare.jobs(plan))} compiled", flush=True)
            plan = replace(plan, slow=prepare.slow_peers(done))
        old = results.load([options.baseline]) if options.baseline else None
        resumed = options.resume and options.json and options.json.exists()
        report = run(plan, Lines(options.json), document(options.json) if resumed else None)
    except (ValueError, OSError) as error:
        parser.error(plain(str(error)))
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


def summary(report: dict[str, Any]) -> str:
    """What the rows do not show: who was left out and why, ceilings, clocks, and where the time went."""
    lines = [f"{name}: {why}" for name, why in report["peers"].items() if why]
    lines += [f"{key}: {report[key]}" for key in ("ceilings", "clocks", "host_us") if key in report]
    last = report["sessions"][-1]
    lines.append("seconds: " + ", ".join(f"{name} {seconds:g}" for name, seconds in last.get("seconds", {}).items()))
    if "stopped" in last:
        lines.append(f"STOPPED {last['stopped']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
