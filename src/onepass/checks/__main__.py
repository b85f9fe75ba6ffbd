"""``python -m onepass.checks``: the checks with nothing but torch and a backend installed, as on a bare GPU machine."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from .case import Case
from .runner import DEVICES, MODULES, Result, run_cases, select


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m onepass.checks", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--match", default="", help="run only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--evidence", type=Path, help="with --device cuda: record the machine code that passed")
    parser.add_argument("--jobs", type=int, default=1, help="with --evidence: compile ahead in this many processes")
    parser.add_argument("--compile-share", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = select(options.op, options.match)
    if options.compile_share:
        _compile_share(cases, *map(int, options.compile_share.split("/")))
        return 0
    if options.evidence and options.jobs > 1:
        _compile_ahead(options.jobs, options.op, options.match)
    start = time.perf_counter()
    with torch.inference_mode():
        results = run_cases(cases, options.device, _print)
    failed = [r for r in results if not r.passed]
    if options.json:
        options.json.write_text(json.dumps([r.to_json() for r in results], indent=1) + "\n")
    if options.evidence:
        _write_evidence(options.evidence, cases, results)
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed on {options.device} in {time.perf_counter() - start:.1f} s")
    return 1 if failed else 0


def _print(result: Result) -> None:
    if not result.passed:
        print(f"FAILED {result.op} {result.case}: {result.message}", flush=True)


def _compile_ahead(jobs: int, ops: list[str], match: str) -> None:
    """Fill Triton's cache from several processes, so that the checks do not wait for the compiler."""
    command = [sys.executable, "-m", "onepass.checks", "--match", match, *(f"--op={op}" for op in ops)]
    running = [subprocess.Popen([*command, "--compile-share", f"{i}/{jobs}"]) for i in range(jobs)]
    for process in running:
        process.wait()


def _compile_share(cases: list[Case], share: int, of: int) -> None:
    from ..triton import evidence

    names: set[str] = set()
    for case in cases:
        for build in _builds(case, "cpu"):
            if build.name not in names:
                names.add(build.name)
                if len(names) % of == share:
                    evidence.compiled_hash(build, evidence.H200)


def _builds(case: Case, device: str) -> list:  # type: ignore[type-arg]
    from ..triton import evidence

    module = MODULES[case.op]
    arguments = module.inputs(case, device)
    return evidence.builds_of(lambda: module.call(case, arguments), evidence.H200)


def _write_evidence(path: Path, cases: list[Case], results: list[Result]) -> None:
    """Record every build all of whose cases passed on this GPU."""
    import triton

    from ..triton import evidence

    cases_of: dict[str, list[str]] = {}
    builds = {}
    failed: set[str] = set()
    for case, result in zip(cases, results, strict=True):
        for build in _builds(case, "cuda"):
            builds[build.name] = build
            cases_of.setdefault(build.name, []).append(f"{case.op} {case.name}")
            if not result.passed:
                failed.add(build.name)
    proofs = {
        name: evidence.Proof(evidence.compiled_hash(build, evidence.H200), tuple(cases_of[name]))
        for name, build in builds.items()
        if name not in failed
    }
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    evidence.write(path, machine, proofs)
    print(f"{len(proofs)} configurations proven, {len(failed)} not; written to {path}")


if __name__ == "__main__":
    sys.exit(main())
