"""``onepass source``: the code that onepass generates for an op."""

from __future__ import annotations

import argparse
from enum import StrEnum
from importlib import import_module
from typing import Any

import torch

from ..core import backend as dispatch
from ..core import op as registration
from ..ops.rms_norm.contract import RMS_NORM_FUSED_FP8
from ..testing import runner
from ..testing.call import Case
from .common import UsageError, backend_status


class Part(StrEnum):
    """The kinds of generated code."""

    validation = "validation"
    cpu = "cpu"
    triton = "triton"


def add(commands: Any) -> None:
    """Add the command to the command line."""
    words = "print the code generated for an op"
    description = f"{words.capitalize()}: validation, CPU kernel as LLVM IR, prologues in Triton."
    parser = commands.add_parser("source", help=words, description=description, allow_abbrev=False)
    parser.add_argument("op", metavar="OP", help="a public op, such as rms_norm")
    parser.add_argument("--part", choices=[part.value for part in Part], help="only this kind of generated code")
    parser.set_defaults(run=source, parser=parser)


def source(options: argparse.Namespace) -> int:
    """Print the parts that were asked for."""
    if options.op not in runner.OPS:
        raise UsageError(f"argument OP: no op {options.op!r}; choose from {', '.join(runner.OPS)}")
    for part in [Part(options.part)] if options.part else list(Part):
        texts = _validation(options.op) if part is Part.validation else _backend(options.op, part)
        for title, text in texts.items():
            comment = ";" if title == "LLVM IR" else "#"
            print(f"{comment} --- {part}: {title}\n{text.strip()}\n")
    return 0


def _validation(op: str) -> dict[str, str]:
    """The validation generated from the contract of an op, or of the op that it is an alias of."""
    alias = RMS_NORM_FUSED_FP8
    return registration.generated_sources(alias.contract.name if op == alias.name else op)


def _backend(op: str, backend: Part) -> dict[str, str]:
    """The code that a backend generates for the smallest case of the op: LLVM IR, or a prologue's Triton source."""
    usable, why = backend_status()[backend]
    if not usable:
        return {f"not available: {why}": ""}
    spec = _sample(op, backend)
    if backend is Part.cpu:
        ir: str = import_module("onepass.cpu.launch").ir_of(spec)
        return {"LLVM IR": ir}
    prologues: dict[str, str] = import_module("onepass.gpu.prologue").generated_sources()
    return prologues or {"no code is generated for this op; its kernels are in onepass/ops": ""}


def _sample(op: str, backend: Part) -> object:
    """Call the op on its smallest case; return the spec of the kernel that it launched."""
    seen: list[object] = []
    module, device = ("cpu", "cpu") if backend is Part.cpu else ("gpu", "cuda")

    def recording(family: str) -> dispatch.Launch:
        launch: dispatch.Launch = import_module(f"onepass.ops.{family}.{module}").launch

        def record(call: dispatch.SomeCall[object]) -> None:
            seen.append(call.spec)
            launch(call)

        return record

    def rank(case: Case) -> tuple[bool, bool, int]:  # Triton code is generated for prologues alone
        return backend is Part.triton and "prologue" not in case.arguments, case.group != "short", len(case.name)

    case = min(runner.select([op]), key=rank)
    with torch.inference_mode(), dispatch.launching_with(recording):
        runner.call(case, case.draw(device))
    return seen[-1]
