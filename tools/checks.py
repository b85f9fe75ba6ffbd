"""Run the checks with only torch and a backend installed, as on a bare GPU machine: ``python -m tools.checks``.

--device cpu|cuda|interpreter       every case (tests/matrix.py); on a GPU also those of published models
--promises                          guarantees tested without an oracle (tests/<op>/promises.py)
--evidence [FILE] [--extend]        on a GPU: the cases, and a record of the machine code that passed
--refresh [FILE]                    without a GPU: update that record's sources if the machine code is the same
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onepass.testing.runner import Result, matches
from tests.matrix import select
from tests.oracle.case import Check
from tests.oracle.runner import run_cases
from tools import compact
from tools.evidence import families, proof
from tools.promises.run import run_promises, run_promises_in_groups, serve

if TYPE_CHECKING:
    from tools.evidence.chips import Machine


def published(machine: Machine, ops: Sequence[str] = (), match: str = "") -> list[Check]:
    """The cases of `select` and those of published models: the machine code that a chip must have run. Needs Triton."""
    more = families.least_cases(machine.chip)
    return [
        *select(ops, match, "cuda"),
        *(case for case in more if (not ops or case.op in ops) and matches(case.name, match)),
    ]


def main() -> int:
    """Run what was chosen; the exit status is 1 if something fails."""
    options = _options()
    if options.device == "cuda":
        os.environ.setdefault("ONEPASS_UNPROVEN", "1")  # running such kernels is what the checks are for
    if options.promises:
        return _run_promises(options)
    if options.device == "cuda" or options.refresh is not None:
        from tools.evidence.chips import MACHINES

        machine = MACHINES[options.chip]
        cases = published(machine, options.op, options.match)
        if options.refresh is not None:
            return _refresh(options, machine, cases)
        if options.evidence is not None:
            return _record(options, machine, cases)
    else:
        cases = select(options.op, options.match, options.device)
    if options.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is not yet
        cases = [case for case in cases if case.interpretable]
    start = time.perf_counter()
    results = run_cases(cases, options.device, _print)
    if options.json:
        _write(options.json, results)
    return _summary(results, options.device, time.perf_counter() - start)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.checks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda", "interpreter"), default="cpu")
    add("--chip", default="h200", help="the GPU in tools/evidence/chips.py that evidence is about; default h200")
    add("--op", action="append", default=[])
    add("--match", default="", help="only cases, or promises, whose name contains this; a|b: this or that")
    add("--promises", action="store_true", help="test the promises instead of the cases")
    add("--json", type=Path, help="write results here")
    add("--resume", type=Path, help="with --promises: skip those that passed according to this file")
    add("--evidence", type=_path, nargs="?", const="", help="with --device cuda: record the machine code that passed")
    add("--extend", action="store_true", help="with --evidence: keep valid proofs and run only cases that add some")
    add("--refresh", type=_path, nargs="?", const="", help="update the sources in this evidence; no GPU needed")
    add("--jobs", type=int, default=1, help="processes that share the cases, or the promises")
    add("--limit", type=float, default=math.inf, help="start no case, or promise, after this many seconds")
    add("--serve", action="store_true", help=argparse.SUPPRESS)  # read names of promises, one line of JSON each
    add("--share", help=argparse.SUPPRESS)  # i/n of the cases
    add("--part", type=Path, help=argparse.SUPPRESS)  # where a share of the cases writes its proofs
    options = parser.parse_args()
    if options.evidence is not None and (options.device != "cuda" or options.promises):
        parser.error("--evidence needs --device cuda, and cases")
    if options.extend and options.evidence is None:
        parser.error("--extend needs --evidence")
    return options


def _path(text: str) -> Path | str:
    """A path, or "" for the chip's own file."""
    return Path(text) if text else ""


def _run_promises(options: argparse.Namespace) -> int:
    if options.serve:
        serve(options.device, sys.stdin, _print_json)
        return 0
    if options.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    done = kept_promises(options.resume) if options.resume else set()
    start, seen = time.perf_counter(), list[Result]()

    def keep(result: Result) -> None:
        _print(result)
        seen.append(result)
        if options.json:  # a run that is cut off leaves what it has
            options.json.write_text(promises_text(options.device, seen, done))

    if options.jobs > 1:
        results = run_promises_in_groups(options.device, options.jobs, keep, options.match, done, options.limit)
    else:
        results = run_promises(options.device, keep, options.match, done)
    return _summary(results, options.device, time.perf_counter() - start)


def _refresh(options: argparse.Namespace, machine: Machine, cases: list[Check]) -> int:
    """What ``--refresh`` does: all of it, or one share of the cases."""
    path = options.refresh or machine.evidence
    if options.share:
        share, of = map(int, options.share.split("/"))
        proof.refresh_share(path, cases[share::of], machine.chip, options.part)
        return 0
    command = [f"--chip={machine.name}", f"--match={options.match}", f"--refresh={path}"]
    print(proof.refresh_in_shares(path, options.jobs, [*command, *(f"--op={op}" for op in options.op)]))
    return 0


def _record(options: argparse.Namespace, machine: Machine, cases: list[Check]) -> int:
    """What ``--evidence`` does: all of it, or one share of the cases."""
    start, path = time.perf_counter(), options.evidence or machine.evidence
    if options.share:
        share, of = map(int, options.share.split("/"))
        needed = proof.unproven(path, cases, machine.chip)[1] if options.extend else cases
        proof.run_share(needed[share::of], options.limit, options.part)
        return 0
    command = ["--device=cuda", f"--chip={machine.name}", f"--match={options.match}", f"--evidence={path}"]
    command += [*(f"--op={op}" for op in options.op), f"--limit={options.limit}", *["--extend"] * options.extend]
    results, summary = proof.record_in_shares(
        path,
        options.jobs,
        command,
        lambda: proof.unproven(path, cases, machine.chip)[0] if options.extend else {},
        _print,
    )
    if options.json:
        _write(options.json, results)
    print(summary)
    return _summary(results, "cuda", time.perf_counter() - start)


def _summary(results: Sequence[Result], device: str, seconds: float) -> int:
    failed = sum(not result.passed for result in results)
    print(f"{len(results) - failed} passed, {failed} failed on {device} in {seconds:.1f} s")
    return 1 if failed or not results else 0


def _write(path: Path, results: Sequence[Result]) -> None:
    path.write_text(compact.dumps([r.to_json() for r in results]))


def promises_text(device: str, results: Sequence[Result], before: Iterable[str] = ()) -> str:
    """A file of promises: for each that was kept, now or ``before``, what it was tested with, and what broke others."""
    kept: dict[str, list[str]] = {}
    for name in sorted({*before, *(result.case for result in results if result.passed)}):
        promise, _, subject = name.partition(": ")
        kept.setdefault(promise, []).append(subject)
    broken = [result.to_json() for result in results if not result.passed]
    number = sum(map(len, kept.values()))
    return compact.dumps({"device": device, "number": number, "broken": broken, "kept": kept})


def kept_promises(path: Path) -> set[str]:
    """The names of the promises that were kept according to a file."""
    kept = json.loads(path.read_text())["kept"]
    return {f"{promise}: {subject}" if subject else promise for promise, of in kept.items() for subject in of}


def _print_json(result: Result) -> None:
    print(json.dumps(result.to_json()), flush=True)


def _print(result: Result) -> None:
    if not result.passed:
        print(f"FAILED {result.op} {result.case}: {result.message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
