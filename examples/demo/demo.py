"""What ``make demo`` runs. Every number printed is measured on the spot."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from torch import Tensor

from benchmarks.suite.console import live, table
from onepass.cli.common import UsageError, add_device, cannot_write, label, run
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.ops.rms_norm.op import rms_norm_fused_fp8
from onepass.prologues import prologue, sigmoid
from onepass.testing.runner import CASES, run_case
from onepass.testing.tensors import same_bytes

from . import generate, model
from .screen import Screen, verdict

EPS: Final = 1e-6
FP8_MAX: Final = 448.0
SHAPES: Final = ((1, 4096), (64, 7168), (512, 4096))
SHOWN_CASES: Final = (
    ("linear", "norm"),
    ("rms_norm", "short"),
    ("rms_norm", "wide"),
    ("rms_norm", "dtypes"),
    ("rms_norm", "sums"),
    ("rms_norm", "gate"),
    ("layer_norm", "dtypes"),
    ("rms_norm_fused_fp8", "short"),
    ("rms_norm_fused_fp8", "groups"),
    ("rms_norm_fused_fp8", "values"),
    ("rms_norm_fused_quant", "formats"),
    ("rms_norm_fused_quant", "places"),
)
"""Twelve groups of the cases of ``onepass check``, chosen for variety; the first case of each."""
NEXT: Final = {
    "make demo DEMO='--path DIR'": "the same with a model of yours",
    "make bench": "every op next to torch and peers",
    "{onepass} check --device {device}": "every op against a float64 oracle",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status is 1 if something is wrong, or if nothing was patched."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Tokens per second without and with onepass; checks, speed, a fused prologue, batch invariance.",
        allow_abbrev=False,
    )
    option = parser.add_argument
    option("--model", choices=model.MODELS, default="llama", help="a small model of this family, with random weights")
    option("--path", type=Path, metavar="DIR", help="load a local transformers directory instead")
    rounding = "where the patched model rounds; 'once' fuses more"
    option("--rounding", choices=("hf", "once"), default="hf", help=rounding)
    add_device(parser)
    report = Path("onepass-demo.json")
    option("--report", type=Path, default=report, metavar="FILE", help=f"where to write the report; default {report}")
    parser.set_defaults(run=demo, parser=parser)
    return run(parser, arguments)


def demo(options: argparse.Namespace) -> int:
    """All parts, one below the other."""
    if util.find_spec("transformers") is None:
        raise UsageError("transformers is not installed (pip install '.[models]' in a checkout)")
    if options.path is not None and not (options.path / "config.json").is_file():
        raise UsageError(f"argument --path: {options.path} has no config.json")
    device = options.device
    start = time.perf_counter()
    torch.manual_seed(0)
    screen = Screen(Console(), device)
    with torch.inference_mode():
        screen.console.print(Text(f"onepass on {label(device)}, torch {torch.__version__}", style="bold"))
        screen.warn()
        screen.heading(1, "Tokens per second: onepass.patch(model, decode=True)")
        generated = generate.show(options.path, screen)
        screen.heading(2, "What onepass.patch(model) replaces, and how close the results are")
        found = model.show(options.model, options.path, options.rounding, screen)
        found |= {"generate": generated, "fine": found["fine"] and generated["fine"]}
        try:
            options.report.parent.mkdir(parents=True, exist_ok=True)
            options.report.write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise cannot_write(options.report, error, "--report") from error
        screen.console.print(f"Report written to {options.report}", soft_wrap=True)
        right = [found["fine"], _show_checks(screen)]
        _show_speed(screen)
        _show_prologue(screen)
        right.append(_show_invariance(screen))
        screen.warn()
    grid = Table.grid(padding=(0, 2))
    for command, what in NEXT.items():
        grid.add_row(Text(command.format(onepass=_command(), device=device), "bold"), what)
    screen.console.print()
    screen.console.print(Panel(grid, title="What to try next", title_align="left", expand=False))
    screen.console.print(f"That took {time.perf_counter() - start:.1f} s.", style="dim")
    if not all(right):
        screen.console.print("The demo failed. What is WRONG is marked above.", style="bold red")
    return 0 if all(right) else 1


def gated(x, gate):  # type: ignore[no-untyped-def]
    """What the demo fuses; written as a user would write it."""
    return x * sigmoid(gate)


def composed(x: Tensor, gamma: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same results from torch's own operators, in float32 like onepass."""
    h = x.float()
    if gate is not None:
        h = h * torch.sigmoid(gate.float())
    y = F.rms_norm(h, gamma.shape, gamma.float(), EPS)
    scale = y.abs().amax(-1, keepdim=True) / FP8_MAX
    return (y / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def dequantization_error(result: tuple[Tensor, ...], exact: Tensor) -> float:
    """The largest ``|code * scale - y|`` as a share of the row's largest ``|y|``."""
    codes, scale = result[:2]
    difference = (codes.double() * scale.double()).cpu() - exact
    return float((difference.abs() / exact.abs().amax(-1, keepdim=True)).max())


def _command() -> str:
    """How to call onepass from here: `make demo` does not activate its environment."""
    installed = Path(sys.executable).with_name("onepass")
    if shutil.which("onepass") or not installed.exists():
        return "onepass"
    return os.path.relpath(installed)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _inputs(rows: int, columns: int, count: int) -> list[Tensor]:
    """``count`` random tensors of rows, then a gamma; bfloat16, on the CPU."""
    found = [torch.randn(rows, columns, dtype=torch.bfloat16) for _ in range(count)]
    return [*found, 1 + 0.25 * torch.randn(columns, dtype=torch.bfloat16)]


def _comparison() -> Table:
    return table("bfloat16", right=("torch", "onepass", "speed-up", "error, torch", "error, onepass"))


def _compare(shown: Table, ours: Callable[[], Any], theirs: Callable[[], Any], exact: Tensor, screen: Screen) -> None:
    """Add one row of a comparison."""
    slow, fast = screen.seconds(theirs, ours)
    errors = (f"{dequantization_error(call(), exact):.3%}" for call in (theirs, ours))
    shape = " x ".join(map(str, exact.shape))
    shown.add_row(shape, _time(slow), _time(fast), screen.speedup(slow, fast), *errors)


def _show_checks(screen: Screen) -> bool:
    screen.heading(3, "A dozen checks against a float64 oracle")
    shown = table("", "op", "case", right=("time",))
    first = {(case.op, case.group): case for case in reversed(CASES)}
    right = True
    with live(screen.console, shown):
        for op, group in SHOWN_CASES:
            case = first[op, group]
            result = run_case(case, screen.device)
            right = right and result.passed
            words = case.name if result.passed else f"{case.name}\n{result.message}"
            shown.add_row(verdict(result.passed), op, words, _time(result.seconds))
    screen.console.print("Times cover the whole case: inputs, oracle, two runs and the first compilation.", style="dim")
    return right


def _show_speed(screen: Screen) -> None:
    screen.heading(4, "rms_norm_fused_fp8 against the same thing written with torch operators")
    shown = _comparison()
    with live(screen.console, shown):
        for rows, columns in SHAPES:
            x, gamma = _inputs(rows, columns, 1)
            exact = rms_norm_reference.rms_norm(x, gamma, EPS).y
            x, gamma = x.to(screen.device), gamma.to(screen.device)

            def ours(x: Tensor = x, gamma: Tensor = gamma) -> object:
                return rms_norm_fused_fp8(x, gamma, EPS)

            def theirs(x: Tensor = x, gamma: Tensor = gamma) -> object:
                return composed(x, gamma)

            _compare(shown, ours, theirs, exact, screen)
    where = "in a CUDA graph, " if screen.device == "cuda" else ""
    screen.console.print(
        f"Time per call, {where}with warm inputs: the smaller of two medians. Error against float64: the largest "
        "|code * scale - y| as a share of the row's largest |y|; half an fp8 step at the top is 3.571%.",
        style="dim",
    )


def _show_prologue(screen: Screen) -> None:
    screen.heading(5, "Your own function, compiled into the load")
    body = inspect.getsource(gated).replace("  # type: ignore[no-untyped-def]", "").splitlines()
    code = ["@onepass.prologue", *(line for line in body if '"""' not in line), ""]
    code += ["rms_norm_fused_fp8(x, gamma, prologue=gated, prologue_args=(gate,))", ""]
    screen.console.print(Syntax("\n".join(code), "python", theme="ansi_dark", background_color="default"))
    fused = prologue(gated)
    x, gate, gamma = _inputs(*SHAPES[-1], 2)
    exact = rms_norm_reference.rms_norm(x, gamma, EPS, prologue=fused, prologue_args=(gate,)).y
    x, gate, gamma = (tensor.to(screen.device) for tensor in (x, gate, gamma))
    shown = _comparison()
    with live(screen.console, shown):
        _compare(
            shown,
            lambda: rms_norm_fused_fp8(x, gamma, EPS, prologue=fused, prologue_args=(gate,)),
            lambda: composed(x, gamma, gate),
            exact,
            screen,
        )


def _show_invariance(screen: Screen) -> bool:
    screen.heading(6, "A row gives the same bits alone and in any batch")
    x, gamma = (tensor.to(screen.device) for tensor in _inputs(1024, 7168, 1))
    whole = rms_norm_fused_fp8(x, gamma, EPS)
    shown = table("rows per call", "calls", "same codes and scales as 1024 rows at once")
    right = True
    with live(screen.console, shown):
        for size in (1, 3, 32, 500):
            starts = range(0, 1024 - size, max(size, 64))
            equal = 0
            for first in starts:
                part = rms_norm_fused_fp8(x[first : first + size], gamma, EPS)
                equal += all(same_bytes(p, w[first : first + size]) for p, w in zip(part, whole, strict=True))
            right = right and equal == len(starts)
            style = "green" if equal == len(starts) else "bold red"
            shown.add_row(str(size), str(len(starts)), Text(f"{equal} of {len(starts)}", style=style))
    return right
