"""``python -m onepass.checks``: the checks with nothing but torch and a backend installed, as on a bare GPU machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import proof
from .runner import DEVICES, Result, run_cases, run_promises, run_promises_in_shares, select


def main() -> int:
    """Run the chosen cases; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m onepass.checks", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument(
        "--match", default="", help="run only cases, or promises, whose name contains this; a|b: this or that"
    )
    parser.add_argument("--promises", action="store_true", help="test the promises instead of the cases")
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--resume", type=Path, help="with --promises: leave out those that this file says were kept")
    parser.add_argument("--evidence", type=Path, help="with --device cuda: record the machine code that passed")
    parser.add_argument(
        "--refresh", type=Path, help="note in this evidence the sources that still give the proven code"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that compile ahead (--evidence) or share the promises"
    )
    parser.add_argument("--compile-share", help=argparse.SUPPRESS)
    parser.add_argument("--share", help=argparse.SUPPRESS)  # promises, i/n of them, a line of JSON each
    options = parser.parse_args()
    if options.evidence and (options.device != "cuda" or options.promises):
        parser.error("--evidence needs --device cuda, and cases")
    before = [Result(**told) for told in json.loads(options.resume.read_text())] if options.resume else []
    before = [result for result in before if result.passed]
    kept = {result.case for result in before}
    if options.share:
        share, of = map(int, options.share.split("/"))
        run_promises(options.device, _tell, options.match, kept, share, of)
        return 0
    machine_code = options.device == "cuda" or options.compile_share or options.refresh
    cases = select(options.op, options.match, published=bool(machine_code) and not options.promises)
    if options.compile_share:
        proof.compile_share(cases, *map(int, options.compile_share.split("/")))
        return 0
    if options.refresh:
        print(proof.refresh(options.refresh, cases))
        return 0
    if options.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is not yet
        cases = [case for case in cases if case.interpretable]
    if options.evidence and options.jobs > 1:
        proof.compile_ahead(options.jobs, options.op, options.match)
    start = time.perf_counter()
    if options.promises:
        seen = before.copy()

        def keep(result: Result) -> None:
            _print(result)
            seen.append(result)
            if options.json:  # so far: a run that is cut off leaves what it saw
                _write(options.json, seen)

        if options.jobs > 1:
            results = run_promises_in_shares(options.device, options.jobs, keep, options.match, options.resume)
        else:
            results = run_promises(options.device, keep, options.match, kept)
    else:
        results = run_cases(cases, options.device, _print)
    failed = [r for r in results if not r.passed]
    if options.json:
        _write(options.json, [*before, *results])
    if options.evidence:
        print(proof.record(options.evidence, cases, results))
    seconds = time.perf_counter() - start
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed on {options.device} in {seconds:.1f} s")
    return 1 if failed or not results else 0


def _write(path: Path, results: Sequence[Result]) -> None:
    path.write_text(json.dumps([r.to_json() for r in results], indent=1) + "\n")


def _tell(result: Result) -> None:
    print(json.dumps(result.to_json()), flush=True)


def _print(result: Result) -> None:
    if not result.passed:
        print(f"FAILED {result.op} {result.case}: {result.message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
