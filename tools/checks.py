"""``python -m tools.checks``: the checks with nothing but torch and a backend installed, as on a bare GPU machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from onepass.testing.case import Check
from onepass.testing.runner import DEVICES, Result, run_cases, run_promises, run_promises_in_shares, select
from tools.evidence import proof


def main() -> int:
    """Run the chosen cases; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.checks", description=__doc__)
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
        "--extend",
        action="store_true",
        help="with --evidence: keep what the file proves of the current sources and run only the cases that prove more",
    )
    parser.add_argument(
        "--refresh", type=Path, help="note in this evidence the sources that still give the proven code"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that share the cases of --evidence, or the promises"
    )
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="with --evidence: begin no case after this many seconds"
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)  # i/n of the promises, a line of JSON each, or of the cases
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)  # where a share of the cases leaves what it proves
    options = parser.parse_args()
    if options.evidence and (options.device != "cuda" or options.promises):
        parser.error("--evidence needs --device cuda, and cases")
    if options.extend and not options.evidence:
        parser.error("--extend needs --evidence")
    before = [Result(**told) for told in json.loads(options.resume.read_text())] if options.resume else []
    before = [result for result in before if result.passed]
    kept = {result.case for result in before}
    if options.share and options.promises:
        share, of = map(int, options.share.split("/"))
        run_promises(options.device, _tell, options.match, kept, share, of)
        return 0
    machine_code = options.device == "cuda" or options.refresh
    cases = select(options.op, options.match, published=bool(machine_code) and not options.promises)
    if options.refresh:
        print(proof.refresh(options.refresh, cases))
        return 0
    if options.evidence:
        return _record(options, cases)
    if options.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is not yet
        cases = [case for case in cases if case.interpretable]
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
    if options.json:
        _write(options.json, [*before, *results])
    return _summary(results, options.device, time.perf_counter() - start)


def _record(options: argparse.Namespace, cases: list[Check]) -> int:
    """What ``--evidence`` does: all of it, or one share of the cases."""
    from tools.evidence.records import H200

    start = time.perf_counter()
    if options.share:
        share, of = map(int, options.share.split("/"))
        needed = proof.unproven(options.evidence, cases, H200)[1] if options.extend else cases
        proof.run_share(needed[share::of], options.limit, options.part)
        return 0
    command = ["--device=cuda", f"--match={options.match}", *(f"--op={op}" for op in options.op)]
    command += [f"--evidence={options.evidence}", f"--limit={options.limit}", *(["--extend"] if options.extend else [])]
    results, told = proof.record_in_shares(
        options.evidence,
        options.jobs,
        command,
        lambda: proof.unproven(options.evidence, cases, H200)[0] if options.extend else {},
        _print,
    )
    if options.json:
        _write(options.json, results)
    print(told)
    return _summary(results, "cuda", time.perf_counter() - start)


def _summary(results: Sequence[Result], device: str, seconds: float) -> int:
    failed = sum(not result.passed for result in results)
    print(f"{len(results) - failed} passed, {failed} failed on {device} in {seconds:.1f} s")
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
