"""``onepass env``: versions, devices and which backends work here."""

from __future__ import annotations

import json
import os
import platform
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..bench.machine import version
from ..core import native
from ..core.contract import short
from ..formats import FLOATS, FP8_CODES, GROUP_SIZES, SCALE_FORMATS
from .common import backend_status, table

PACKAGES = ("torch", "triton", "llvmlite", "numpy", "transformers")
VARIABLES = {
    "ONEPASS_DEBUG": "1: check values on the host that kernels cannot check; this waits for the device",
    "ONEPASS_CACHE_DIR": "where compiled CPU kernels are cached; off: no cache",
    "ONEPASS_NATIVE": "0: do not use the compiled fast path of eager calls",
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


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for bug reports and scripts.")] = False,
) -> None:
    """Show versions, devices and which backends work here."""
    found = _environment()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    shown = table(show_header=False)
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    shown.add_row("onepass", f"{found['onepass']}, Python {found['python']}, {found['platform']}")
    shown.add_row("packages", ", ".join(f"{name} {number or '-'}" for name, number in found["packages"].items()))
    for name, value in found["environment"].items():
        shown.add_row(name, Text(f"{'not set' if value is None else repr(value)} ({VARIABLES[name]})"))
    shown.add_row("eager calls", f"compiled fast path: {found['native']}")
    for gpu in found["gpus"]:
        shown.add_row("gpu", f"{gpu['name']} (architecture {gpu['arch']}, e4m3fn cast in {gpu['e4m3fn']})")
    for name, backend in found["backends"].items():
        state = Text("usable", "green") if backend["usable"] else Text(f"no: {backend['why_not']}", "yellow")
        for key, value in backend.items():
            if key not in ("usable", "why_not"):
                state.append(f"\n{key}: {value}", style="default")
        shown.add_row(name if name == "interpreter" else f"{name} backend", state)
    formats = found["formats"]
    groups = " or ".join(map(str, formats["groups"]))
    shown.add_row("inputs", ", ".join(formats["inputs"]))
    shown.add_row("fp8 codes", f"{', '.join(formats['codes'])}, on every backend")
    shown.add_row("fp8 scales", f"{' or '.join(formats['scales'])}; per row, per {groups} columns, or given")
    Console().print(shown)
