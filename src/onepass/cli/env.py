"""``onepass env``: versions, devices and which backends work here."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any

import torch

from .. import __version__
from ..core import native
from ..core.contract import short
from ..formats import FLOATS, FP8_CODES, GROUP_SIZES, SCALE_FORMATS
from .common import Commands, backend_status, table, version

PACKAGES = ("torch", "triton", "llvmlite", "numpy", "transformers")
VARIABLES = {
    "ONEPASS_DEBUG": "1: check values on the host that kernels cannot check; this waits for the device",
    "ONEPASS_CACHE_DIR": "where compiled CPU kernels are cached; off: no cache",
    "ONEPASS_NATIVE": "0: do not use the compiled fast path of eager calls",
    "ONEPASS_SGLANG_NORMS": "1: in SGLang, replace the norms of sgl_kernel too",
    "ONEPASS_VLLM_PRODUCT": "1: in vLLM's batch-invariant mode, compute products on a GPU too",
    "ONEPASS_UNPROVEN": "1: run GPU kernels that are listed as not yet run on a GPU",
    "TRITON_INTERPRET": "1: Triton interprets kernels instead of compiling them",
}
"""Environment variables that change what onepass does."""


def _environment() -> dict[str, Any]:
    status = backend_status()
    backends: dict[str, dict[str, Any]] = {name: {"usable": ok, "why_not": why} for name, (ok, why) in status.items()}
    if status["cpu"][0]:
        from ..cpu.launch import describe  # needs llvmlite

        backends["cpu"] |= describe()
    gpus = []
    if status["triton"][0]:
        from ..gpu.chip import current_chip  # needs Triton

        for index in range(torch.cuda.device_count()):
            chip = current_chip(index)
            cast = "hardware" if chip.casts_e4m3fn else "software"
            gpus.append({"name": torch.cuda.get_device_name(index), "arch": str(chip.arch), "e4m3fn": cast})
    return {
        "onepass": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES},
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "native": native.describe(),
        "gpus": gpus,
        "backends": backends,
        "formats": {
            "inputs": [short(dtype) for dtype in FLOATS],
            "codes": [short(dtype) for dtype in FP8_CODES],
            "scales": list(SCALE_FORMATS),
            "groups": list(GROUP_SIZES),
        },
    }


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    words = "show versions, devices and which backends work here"
    parser = commands.add_parser("env", help=words, description=f"{words.capitalize()}.", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON, for bug reports and scripts")
    parser.set_defaults(run=env, parser=parser)


def env(options: argparse.Namespace) -> int:
    """Print what `_environment` has."""
    facts = _environment()
    print(json.dumps(facts, indent=1) if options.json else table(_rows(facts)))
    return 0


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("onepass", f"{facts['onepass']}, Python {facts['python']}, {facts['platform']}")]
    rows.append(("packages", ", ".join(f"{name} {number or '-'}" for name, number in facts["packages"].items())))
    for name, value in facts["environment"].items():
        rows.append((name, f"{'not set' if value is None else repr(value)} ({VARIABLES[name]})"))
    rows.append(("eager calls", f"compiled fast path: {facts['native']}"))
    for gpu in facts["gpus"]:
        rows.append(("gpu", f"{gpu['name']} (architecture {gpu['arch']}, e4m3fn cast in {gpu['e4m3fn']})"))
    for name, backend in facts["backends"].items():
        lines = ["usable" if backend["usable"] else f"no: {backend['why_not']}"]
        lines += [f"{key}: {value}" for key, value in backend.items() if key not in ("usable", "why_not")]
        rows.append((name if name == "interpreter" else f"{name} backend", "\n".join(lines)))
    formats = facts["formats"]
    groups = " or ".join(map(str, formats["groups"]))
    rows.append(("inputs", ", ".join(formats["inputs"])))
    rows.append(("fp8 codes", f"{', '.join(formats['codes'])}, on every backend"))
    rows.append(("fp8 scales", f"{' or '.join(formats['scales'])}; per row, per {groups} columns, or given"))
    return rows
