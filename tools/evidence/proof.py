"""Record evidence on a GPU, or refresh it without one: the machine code of the cases that passed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from onepass.testing.runner import Result
from tests.oracle.batch_regime import REGIMES, assuming
from tests.oracle.case import Check
from tests.oracle.runner import MODULES, run_cases

if TYPE_CHECKING:
    from onepass.gpu.chip import Chip
    from onepass.gpu.compile import Build
    from tools.evidence.records import Proof


class Undrawn(TorchFunctionMode):
    """`torch.randn` gives zeros, in a tenth of the time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.randn:
            given.pop("generator", None)
            return torch.zeros(*args, **given)
        return func(*args, **given)


def builds(case: Check, chip: Chip, device: str = "cpu") -> list[Build]:
    """The kernel configurations that a case launches on ``chip``, in every batch regime; nothing is launched.

    They depend on sizes, strides and addresses, and not on values, so random numbers are not drawn.
    """
    module = MODULES[case.op]
    with Undrawn():
        arguments = module.inputs(case, device)
    return builds_of_call(lambda: module.call(case, arguments), chip)


def builds_of_call(call: Callable[[], object], chip: Chip) -> list[Build]:
    """The same of any call."""
    from tools.evidence import records

    found: dict[str, Build] = {}
    for regime in REGIMES:
        with assuming(regime):
            found |= {build.name: build for build in records.builds_of(call, chip)}
    return list(found.values())


def distinct_builds(cases: Iterable[Check], chip: Chip) -> dict[str, Build]:
    """All configurations of these cases by name."""
    return {build.name: build for case in cases for build in builds(case, chip)}


def unproven(path: Path, cases: Iterable[Check], chip: Chip) -> tuple[dict[str, Proof], list[Check]]:
    """The proofs that still hold for the sources of these cases, and the cases that would add to them."""
    from tools.evidence import records
    from tools.evidence.digest import SourceDigests

    kept, digests = records.read(path), SourceDigests()
    needed = []
    for case in cases:
        found = builds(case, chip)
        for build in found:
            if build.name in kept and kept[build.name].source != records.digest(build, chip, digests):
                del kept[build.name]
        if any(build.name not in kept for build in found):
            needed.append(case)
    return kept, needed


def proofs_of(cases: Sequence[Check], results: Sequence[Result]) -> tuple[dict[str, Proof], set[str]]:
    """What cases that ran on this GPU prove, and the configurations that a failed case launched."""
    from onepass.gpu.chip import current_chip
    from tools.evidence import records

    chip = current_chip(torch.cuda.current_device())
    found: dict[str, Build] = {}
    ran: dict[str, list[str]] = {}
    failed: set[str] = set()
    for case, result in zip(cases, results, strict=True):
        for build in builds(case, chip, "cuda"):
            found[build.name] = build
            ran.setdefault(build.name, []).append(f"{case.op} {case.name}")
            if not result.passed:
                failed.add(build.name)
    passed = ((build, ran[name]) for name, build in found.items() if name not in failed)
    return records.prove_all(passed, chip), failed


def record(path: Path, cases: Sequence[Check], results: Sequence[Result]) -> str:
    """Write the configurations whose cases all passed on this GPU; returns a sentence for the user."""
    proofs, failed = proofs_of(cases, results)
    return _write(path, proofs, failed)


def _write(path: Path, proofs: dict[str, Proof], failed: set[str]) -> str:
    import triton

    from tools.evidence import records

    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    records.write(path, machine, proofs)
    return f"{len(proofs)} configurations proven, {len(failed)} not; written to {path}"


def run_share(cases: Sequence[Check], limit: float, to: Path) -> None:
    """Run cases on this GPU for ``limit`` seconds and write results and proofs for `record_in_shares` to join."""
    results: list[Result] = []
    end = time.monotonic() + limit
    for case in cases:
        if time.monotonic() > end:
            break
        results += run_cases([case], "cuda")
    proofs, failed = proofs_of(cases[: len(results)], results)
    told = {
        "results": [result.to_json() for result in results],
        "left_out": len(cases) - len(results),
        "failed": sorted(failed),
        "proofs": {name: asdict(proof) for name, proof in proofs.items()},
    }
    to.write_text(json.dumps(told))


def record_in_shares(
    path: Path,
    jobs: int,
    command: Sequence[str],
    kept: Callable[[], dict[str, Proof]],
    progress: Callable[[Result], None],
) -> tuple[list[Result], str]:
    """Run ``command`` in several processes, each with a share of the cases, and add what they prove to what is ``kept``.

    Returns the results and a sentence for the user. A configuration is proven if every case that launches it passed. A
    process that ends early is a failure. Each process gets one thread, since there are as many processes as cores.
    """
    results: list[Result] = []
    shares: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        running = _start(jobs, command, folder)
        before = kept()
        for share, (process, part) in enumerate(running):
            if process.wait():
                ended = f"status {process.returncode}"
                results.append(Result("evidence", f"share {share} of {jobs}", "cuda", False, ended, 0.0))
            else:
                shares.append(json.loads(part.read_text()))
                results += [Result(**told) for told in shares[-1]["results"]]
    for result in results:
        progress(result)
    proofs, failed = joined(before, shares)
    left_out = sum(share["left_out"] for share in shares)
    return results, _write(path, proofs, failed) + (f"; {left_out} cases left out" if left_out else "")


def joined(kept: dict[str, Proof], shares: Sequence[dict[str, Any]]) -> tuple[dict[str, Proof], set[str]]:
    """The proofs of all shares and those kept, without what failed in any share."""
    from tools.evidence.records import Proof

    failed = {name for share in shares for name in share["failed"]}
    proofs = dict(kept)
    for share in shares:
        for name, told in share["proofs"].items():
            before = proofs[name].cases if name in proofs else ()
            proofs[name] = Proof(**{**told, "cases": tuple(sorted({*before, *told["cases"]}))})
    return {name: proof for name, proof in proofs.items() if name not in failed}, failed


def refreshed(path: Path, cases: Iterable[Check], chip: Chip) -> tuple[dict[str, Proof], int]:
    """The proofs of these cases that need new source digests or IR hashes, and the number with new machine code."""
    from tools.evidence import records
    from tools.evidence.digest import SourceDigests

    proofs, digests = records.read(path), SourceDigests()
    noted: dict[str, Proof] = {}
    changed = 0
    for name, build in distinct_builds(cases, chip).items():
        proof = proofs.get(name)
        if proof is None:
            continue
        source = records.digest(build, chip, digests)
        if proof.stack is not None and proof.source == source:
            continue
        if proof.stack is not None and proof.ir == records.ir_hash(build, chip):
            found = replace(proof, source=source)
        else:
            found = records.prove(build, chip, proof.cases, digests)
        if found.machine_code == proof.machine_code:
            noted[name] = found
        else:
            changed += 1
    return noted, changed


def refresh_share(path: Path, cases: Iterable[Check], chip: Chip, to: Path) -> None:
    """Write what `refreshed` finds, for `refresh_in_shares` to join."""
    noted, changed = refreshed(path, cases, chip)
    to.write_text(json.dumps({"changed": changed, "proofs": {name: asdict(proof) for name, proof in noted.items()}}))


def refresh_in_shares(path: Path, jobs: int, command: Sequence[str]) -> str:
    """Like `refresh`, in several processes that run ``command``, each with a share of the cases."""
    from tools.evidence.records import Proof

    told = _shares(jobs, command)
    noted = {
        name: Proof(**{**proof, "cases": tuple(proof["cases"])})
        for part in told
        for name, proof in part["proofs"].items()
    }
    return _note(path, noted, sum(part["changed"] for part in told))


def refresh(path: Path, cases: Iterable[Check], chip: Chip) -> str:
    """Update source digests and IR hashes where the machine code is the proven one; returns a sentence for the user.

    Needs no GPU and proves nothing. Without it the tests lower or compile such configurations on every run.
    """
    return _note(path, *refreshed(path, cases, chip))


def _note(path: Path, noted: dict[str, Proof], changed: int) -> str:
    from tools.evidence import records

    machine = json.loads(path.read_text())["machine"]
    records.write(path, machine, {**records.read(path), **noted})
    return (
        f"{len(noted)} configurations have new sources but the proven machine code: updated in {path}. "
        f"{changed} have new machine code and must run on a GPU."
    )


def _shares(jobs: int, command: Sequence[str]) -> list[dict[str, Any]]:
    """Run ``command`` in several processes, and return what they wrote."""
    with tempfile.TemporaryDirectory() as folder:
        running = _start(jobs, command, folder)
        for process, _ in running:
            if process.wait():
                raise RuntimeError(f"a share of the cases ended with status {process.returncode}")
        return [json.loads(part.read_text()) for _, part in running]


def _start(jobs: int, command: Sequence[str], folder: str) -> list[tuple[subprocess.Popen[bytes], Path]]:
    """Start ``command`` in several processes with a thread and a share of the cases each; each writes the file beside it."""
    start = [sys.executable, "-m", "tools.checks", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    parts = [Path(folder, str(share)) for share in range(jobs)]
    return [
        (subprocess.Popen([*start, f"--share={share}/{jobs}", f"--part={part}"], env=environment), part)
        for share, part in enumerate(parts)
    ]
