"""The machine code that cases need, and the record that it ran: written on a GPU, compared without one."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars, ir
from triton.compiler import make_backend

from onepass.core.backend import launching_with
from onepass.gpu.chip import Chip
from onepass.gpu.compile import Build, compile_build, is_unproven, machine_hash, setting
from tools import compact
from tools.evidence.chips import H200 as H200
from tools.evidence.digest import SourceDigests, source_digest

FORMAT = 2
TOOLS = 8
"""Concurrent processes of NVIDIA's tool."""
READABLE = (1, FORMAT)
"""Formats that `read` accepts. 1 has no source digests: proofs are found by their IR until `--refresh` adds them."""


@dataclass(frozen=True)
class Proof:
    """One configuration that passed its cases on a GPU."""

    machine_code: str
    cases: tuple[str, ...]
    ir: str | None = None
    """`ir_hash` of a build with this machine code. Another IR may compile to it too."""
    stack: int | None = None
    """Bytes that a thread spills to memory; None if unknown."""
    source: str | None = None
    """`digest` of a build with this machine code. Another source may give it too, so the IR and then the compiler decide."""


def builds_of(call: Callable[[], Any], chip: Chip) -> list[Build]:
    """The builds that ``call`` would launch on ``chip``; nothing is launched and no GPU is needed."""
    found: list[Build] = []

    def recorder(family: str) -> Callable[..., None]:
        builds = import_module(f"onepass.ops.{family}.gpu").builds
        return lambda call: found.extend(builds(chip, call))

    with launching_with(recorder), torch.inference_mode():
        call()
    return found


def compiled_hash(build: Build, chip: Chip) -> str:
    """The hash of the build's machine code for ``chip``."""
    return machine_hash(compile_build(build, chip))


def lowered(build: Build, chip: Chip, stage: str) -> str:
    """The output of one compiler stage ("ttir", "ttgir", "llir", "ptx") for ``chip``; later stages do not run."""
    target, options, backend = _compiler(build, chip)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        source = build.source()
        backend.add_stages(stages, options, source.language)
        functions = backend.get_codegen_implementation(options)
        module = source.make_ir(target, options, functions, backend.get_module_map(), context)
        metadata: dict[str, Any] = {}
        for name, lower in stages.items():
            module = lower(module, metadata)
            if name == stage:
                return str(module)
    raise ValueError(f"no stage {stage} for {chip}")


def _compiler(build: Build, chip: Chip) -> tuple[Any, Any, Any]:
    """Target, options and back end, as in `triton.compiler`."""
    target, options = setting(build, chip)
    backend = make_backend(target)
    return target, backend.parse_options(options), backend


def ir_hash(build: Build, chip: Chip, ttir: str | None = None) -> str:
    """A hash of all that determines the machine code: the IR of Triton's front end, the chip, the options, the compiler.

    Triton's own cache assumes the same; the front end is a quarter of the work.
    """
    whole = f"{_named_compiler(build, chip)}\n"
    whole += lowered(build, chip, "ttir") if ttir is None else ttir
    return hashlib.sha256(whole.encode()).hexdigest()[:24]


def _named_compiler(build: Build, chip: Chip) -> str:
    """Compiler, chip and options as text."""
    target, options, backend = _compiler(build, chip)
    variables = sorted(get_cache_invalidating_env_vars().items())
    return f"{triton.__version__} {backend.hash()} {target} {options.hash()} {variables}"


def digest(build: Build, chip: Chip, digests: SourceDigests | None = None) -> str:
    """A digest of the sources and settings that determine the IR: milliseconds, where the IR takes a quarter of a second.

    ``digests`` caches the sources that were read: pass one object for many builds.
    """
    return source_digest(build, _named_compiler(build, chip), digests or SourceDigests())


def resources(compiled: Any) -> dict[str, int]:
    """Registers, stack, local and shared memory, as NVIDIA's tool reads them from the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        # Triton changes the environment while it compiles in another thread, so the tool gets an empty one
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True, env={}
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def prove(build: Build, chip: Chip, cases: Iterable[str], digests: SourceDigests | None = None) -> Proof:
    """The proof of a build that passed ``cases``."""
    return prove_all([(build, cases)], chip, digests)[build.name]


def prove_all(
    passed: Iterable[tuple[Build, Iterable[str]]], chip: Chip, digests: SourceDigests | None = None
) -> dict[str, Proof]:
    """The proofs of many builds by name. Only NVIDIA's tool runs in parallel: settings of Triton's compiler are process-wide."""
    digests = digests or SourceDigests()
    with ThreadPoolExecutor(TOOLS) as pool:
        found = {}
        for build, cases in passed:
            compiled = compile_build(build, chip)
            usage = pool.submit(resources, compiled) if chip.backend == "cuda" else None
            ir = ir_hash(build, chip, compiled.asm["ttir"])
            found[build.name] = machine_hash(compiled), tuple(cases), ir, usage, digest(build, chip, digests)
        return {
            name: Proof(code, cases, ir, None if usage is None else _spilled(usage.result()), source)
            for name, (code, cases, ir, usage, source) in found.items()
        }


def _spilled(usage: dict[str, int]) -> int:
    return usage["STACK"] + usage["LOCAL"]


def write(path: Path, machine: dict[str, str], proofs: dict[str, Proof]) -> None:
    """Write the evidence file, sorted so that diffs read well."""
    body = {
        "format": FORMAT,
        "machine": machine,
        "builds": {
            name: {
                "machine_code": p.machine_code,
                "ir": p.ir,
                "source": p.source,
                "stack": p.stack,
                "cases": sorted(p.cases),
            }
            for name, p in sorted(proofs.items())
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact.dumps(body))


def read(path: Path) -> dict[str, Proof]:
    """The proofs of an evidence file by configuration name."""
    body = json.loads(path.read_text())
    if body.get("format") not in READABLE:
        known = " or ".join(map(str, READABLE))
        raise ValueError(f"{path}: evidence format {body.get('format')}, expected {known}")
    return {
        name: Proof(p["machine_code"], tuple(p["cases"]), p.get("ir"), p.get("stack"), p.get("source"))
        for name, p in body["builds"].items()
    }


def missing(builds: Iterable[Build], proofs: dict[str, Proof], chip: Chip) -> list[str]:
    """Builds whose machine code is not among the proofs, each with the reason; declared gaps are left out.

    A build with a proof's source has its machine code. With another source the IR is compared, and with another IR the
    build is compiled.
    """
    digests = SourceDigests()
    problems = []
    for build in builds:
        if is_unproven(build):
            continue
        proof = proofs.get(build.name)
        if proof is None:
            problems.append(f"{build.name}: never run on a GPU")
        elif not _has_machine_code(proof, build, chip, digests):
            problems.append(f"{build.name}: its machine code has changed since it ran on a GPU")
    return problems


def _has_machine_code(proof: Proof, build: Build, chip: Chip, digests: SourceDigests) -> bool:
    """Whether a build compiles to what was proven; cheapest comparison first."""
    if proof.source is not None and proof.source == digest(build, chip, digests):
        return True
    return proof.ir == ir_hash(build, chip) or proof.machine_code == compiled_hash(build, chip)


def unproven(call: Callable[[], Any], path: Path, chip: Chip = H200) -> list[str]:
    """The builds of a call whose machine code never ran on a GPU, each with the reason. Nothing is launched.

    ``path`` is the evidence file of a machine (`tools.evidence.chips`), which is in the repository but in no package.
    """
    return missing(builds_of(call, chip), read(path), chip)
