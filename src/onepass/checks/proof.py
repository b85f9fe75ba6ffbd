"""Evidence from a GPU: which machine code the cases that passed ran on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .case import Check
from .crowds import CROWDS, assuming
from .runner import MODULES, Result

if TYPE_CHECKING:
    from ..triton._compile import Build
    from ..triton._config import Chip


def builds(case: Check, chip: Chip, device: str = "cpu") -> list[Build]:
    """The kernel configurations that a case launches on ``chip``, also if its rows were more; nothing is launched."""
    from ..triton import evidence

    module = MODULES[case.op]
    arguments = module.inputs(case, device)
    found: dict[str, Build] = {}
    for crowd in CROWDS:
        with assuming(crowd):
            for build in evidence.builds_of(lambda: module.call(case, arguments), chip):
                found[build.name] = build
    return list(found.values())


def distinct_builds(cases: Iterable[Check], chip: Chip) -> dict[str, Build]:
    """All configurations of these cases by name."""
    return {build.name: build for case in cases for build in builds(case, chip)}


def compile_ahead(jobs: int, ops: Sequence[str], match: str) -> None:
    """Fill Triton's cache from several processes, so that the checks do not wait for the compiler."""
    command = [sys.executable, "-m", "onepass.checks", "--match", match, *(f"--op={op}" for op in ops)]
    running = [subprocess.Popen([*command, "--compile-share", f"{i}/{jobs}"]) for i in range(jobs)]
    for process in running:
        process.wait()


def compile_share(cases: Iterable[Check], share: int, of: int) -> None:
    """Compile every ``of``-th configuration, beginning with number ``share``."""
    from ..triton import evidence

    for index, build in enumerate(distinct_builds(cases, evidence.H200).values()):
        if index % of == share:
            evidence.compiled_hash(build, evidence.H200)


def record(path: Path, cases: Sequence[Check], results: Sequence[Result]) -> str:
    """Write the configurations all of whose cases passed on this GPU; returns a sentence for the user."""
    import triton

    from ..triton import evidence
    from ..triton._compile import current_chip

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
    proofs = evidence.prove_all(((build, ran[name]) for name, build in found.items() if name not in failed), chip)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    evidence.write(path, machine, proofs)
    return f"{len(proofs)} configurations proven, {len(failed)} not; written to {path}"


def refresh(path: Path, cases: Iterable[Check]) -> str:
    """Note in an evidence file the sources and the IR of configurations whose machine code is the proven one; a sentence for the user.

    Needs no GPU and proves nothing. Without it the tests make the IR of such configurations, or compile them, on every run.
    """
    from ..triton import evidence
    from ..triton._digest import SourceDigests

    machine = json.loads(path.read_text())["machine"]
    proofs = evidence.read(path)
    digests = SourceDigests()
    noted = changed = 0
    for name, build in distinct_builds(cases, evidence.H200).items():
        proof = proofs.get(name)
        if proof is None:
            continue
        source = evidence.digest(build, evidence.H200, digests)
        if proof.stack is not None and proof.source == source:
            continue
        if proof.stack is not None and proof.ir == evidence.ir_hash(build, evidence.H200):
            found = replace(proof, source=source)
        else:
            found = evidence.prove(build, evidence.H200, proof.cases, digests)
        if found.machine_code == proof.machine_code:
            proofs[name] = found
            noted += 1
        else:
            changed += 1
    evidence.write(path, machine, proofs)
    return (
        f"{noted} configurations have another source and the machine code that was proven: noted in {path}. "
        f"{changed} have another machine code and must run on a GPU."
    )
