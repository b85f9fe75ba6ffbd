"""Which machine code the check cases need, and proof that it ran: recorded on a GPU, compared where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..ops._launch import launching_with
from ._compile import Build, compile_build, is_unproven, machine_hash
from ._config import Chip

H200 = Chip("cuda", 90, 32)
FORMAT = 1


@dataclass(frozen=True)
class Proof:
    """One configuration that passed its cases on a GPU."""

    machine_code: str
    cases: tuple[str, ...]


def builds_of(call: Callable[[], Any], chip: Chip) -> list[Build]:
    """The builds that ``call`` would launch on ``chip``; nothing is launched and no GPU is needed."""
    found: list[Build] = []

    def recorder(family: str) -> Callable[..., None]:
        builds = import_module(f"onepass.triton.{family}").builds
        return lambda *arguments: found.extend(builds(chip, *arguments))

    with launching_with(recorder), torch.inference_mode():
        call()
    return found


def compiled_hash(build: Build, chip: Chip) -> str:
    """The hash of the build's machine code for ``chip``."""
    return machine_hash(compile_build(build, chip))


def write(path: Path, machine: dict[str, str], proofs: dict[str, Proof]) -> None:
    """Write the evidence file, sorted so that diffs read well."""
    body = {
        "format": FORMAT,
        "machine": machine,
        "builds": {
            name: {"machine_code": p.machine_code, "cases": sorted(p.cases)} for name, p in sorted(proofs.items())
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")


def read(path: Path) -> dict[str, Proof]:
    """The proofs of an evidence file by configuration name."""
    body = json.loads(path.read_text())
    if body.get("format") != FORMAT:
        raise ValueError(f"{path}: evidence format {body.get('format')}, expected {FORMAT}")
    return {name: Proof(p["machine_code"], tuple(p["cases"])) for name, p in body["builds"].items()}


def missing(builds: Iterable[Build], proofs: dict[str, Proof], chip: Chip) -> list[str]:
    """Names of the builds whose machine code is not among the proofs, each with the reason; admitted gaps left out."""
    problems = []
    for build in builds:
        if is_unproven(build):
            continue
        proof = proofs.get(build.name)
        if proof is None:
            problems.append(f"{build.name}: never run on a GPU")
        elif proof.machine_code != compiled_hash(build, chip):
            problems.append(f"{build.name}: its machine code has changed since it ran on a GPU")
    return problems
