"""``onepass demo | check | bench | trace | env | docs``: a thin shell around the library; nothing else imports rich or typer."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .trace import app as trace

if TYPE_CHECKING:
    from ..testing.case import Check
    from ..testing.runner import Result

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Fused RMSNorm-family kernels for LLM inference. Start with [bold]onepass demo[/].",
)
app.add_typer(trace, name="trace")


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"onepass {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that need no command."""


DEMO_MODELS = ("deepseek-v3", "olmo2", "gemma3", "llama")


class Device(StrEnum):
    """Where to run."""

    cpu = "cpu"
    cuda = "cuda"
    interpreter = "interpreter"


# --- check ----------------------------------------------------------------------------------------------------------


@app.command()
def check(
    device: Annotated[
        Device, typer.Option(help="Where to run: the GPU kernels on the CPU are 'interpreter'.")
    ] = Device.cpu,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be given again.", metavar="NAME")] = None,
    match: Annotated[str, typer.Option(help="Only cases whose name contains this.", metavar="TEXT")] = "",
    to: Annotated[str, typer.Option("--json", help="Write results here as JSON; '-' is stdout.", metavar="FILE")] = "",
    evidence: Annotated[
        Path | None, typer.Option(help="With --device cuda: record the machine code that passed.", metavar="FILE")
    ] = None,
) -> None:
    """Run every case against the float64 oracle; exit status 1 if one fails."""
    if evidence is not None and device is not Device.cuda:
        raise typer.BadParameter("needs --device cuda", param_hint="--evidence")
    _require(device)
    if device is Device.interpreter and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton reads the variable once, when it is imported: a process of its own
        arguments = ["--device", "interpreter", "--match", match, "--json", to]
        raise typer.Exit(_again_interpreted([*arguments, *(f"--op={name}" for name in op or ())]))
    from ..testing import runner

    unknown = sorted(set(op or ()) - set(runner.MODULES))
    if unknown:
        raise typer.BadParameter(f"no op {unknown[0]!r}; there are {', '.join(runner.MODULES)}", param_hint="--op")
    chosen = runner.select(op or (), match, published=device is Device.cuda)
    cases = [case for case in chosen if device is not Device.interpreter or case.interpretable]
    left_out = len(chosen) - len(cases)
    if not cases:
        raise typer.BadParameter(
            f"no case has {match!r} in its name" + (" and is short enough to interpret" if left_out else ""),
            param_hint="--match",
        )
    # results on stdout must stay parseable
    console = Console(stderr=to == "-")
    start = time.perf_counter()
    results = _run(cases, device, console)
    seconds = time.perf_counter() - start
    failed = [result for result in results if not result.passed]
    if to:
        report = {
            "device": device.value,
            "passed": len(results) - len(failed),
            "failed": len(failed),
            "left_out": left_out,
            "seconds": round(seconds, 3),
            "results": [result.to_json() for result in results],
        }
        _write_json(report, to)
    _show_results(results, left_out, seconds, device, console)
    if evidence is not None:
        from tools.evidence import proof

        console.print(proof.record(evidence, cases, results))
    raise typer.Exit(1 if failed else 0)


def _require(device: Device) -> None:
    """Say what is missing before a hundred cases say it."""
    usable, why = backend_status()[{"cpu": "cpu", "cuda": "triton", "interpreter": "interpreter"}[device]]
    if not usable:
        raise typer.BadParameter(f"{device.value} cannot run here: {why}", param_hint="--device")


def _again_interpreted(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "onepass.cli.main", "check", *arguments]
    return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode


def _run(cases: list[Check], device: Device, console: Console) -> list[Result]:
    from ..testing import runner

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking", total=len(cases))

        def report(result: Result) -> None:
            progress.update(task, advance=1, description=f"{result.op:<20}")
            if not result.passed:
                progress.console.print(_failure(result))

        return runner.run_cases(cases, device.value, report)


def _failure(result: Result) -> Text:
    return Text.assemble(("FAILED ", "bold red"), (f"{result.op} ", "bold"), f"{result.case}\n       {result.message}")


def _show_results(results: list[Result], left_out: int, seconds: float, device: Device, console: Console) -> None:
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.op, result.case.split(":")[0]), []).append(result)
    table = Table("op", "group", box=None, pad_edge=False)
    table.add_column("passed", justify="right")
    table.add_column("time", justify="right")
    shown = ""
    for (op, group), members in groups.items():
        passed = sum(r.passed for r in members)
        style = "green" if passed == len(members) else "bold red"
        table.add_row(
            op if op != shown else "",
            group,
            Text(f"{passed}/{len(members)}", style=style),
            f"{sum(r.seconds for r in members):.2f} s",
        )
        shown = op
    console.print(table)
    failed = sum(not r.passed for r in results)
    verdict = Text(f"{len(results) - failed} of {len(results)} passed", style="bold red" if failed else "bold green")
    console.print(Text.assemble(verdict, f" on {device.value} in {seconds:.1f} s"))
    if left_out:
        cases = "1 case" if left_out == 1 else f"{left_out} cases"
        console.print(f"{cases} left out: rows too long, or too many, for the interpreter", style="dim")


def _write_json(report: dict[str, Any], to: str) -> None:
    text = json.dumps(report, indent=1)
    if to == "-":
        print(text)
        return
    try:
        Path(to).write_text(text + "\n")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {to}: {error.strerror}", param_hint="--json") from error


# --- bench ----------------------------------------------------------------------------------------------------------


@app.command()
def bench(
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this op, or rows, gemv, qk, mla, decode-step, host; may be given again.", metavar="NAME"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default what the machine has.", metavar="cpu|cuda")] = "",
    shapes: Annotated[
        str, typer.Option(help="decode, prefill, all, or shapes such as 64x4096.", metavar="WORD|MxN,...")
    ] = "all",
    peers: Annotated[
        str, typer.Option(help="all, none, or parts of names such as compile,liger.", metavar="NAMES")
    ] = "all",
    to: Annotated[Path | None, typer.Option("--json", help="Write results here.", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots here.", metavar="FILE")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Say what changed since this file of results.", metavar="FILE")
    ] = None,
) -> None:
    """Speed against peers and the memory's ceiling; an op that fails a check is refused, and the exit status is 1."""
    if device not in ("", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="--device")
    chosen = device or ("cuda" if backend_status()["triton"][0] else "cpu")
    _require(Device(chosen))
    from .bench import bench as run

    raise typer.Exit(0 if run(op or [], chosen, shapes, peers, to, html, baseline) else 1)


# --- env ------------------------------------------------------------------------------------------------------------


PACKAGES = ("torch", "triton", "llvmlite", "numpy", "transformers")
VARIABLES = {
    "ONEPASS_DEBUG": "1: values that kernels cannot refuse are checked on the host, which waits for the device",
    "ONEPASS_CACHE_DIR": "where compiled CPU kernels are kept; off: nowhere",
    "ONEPASS_UNPROVEN": "1: run GPU kernels whose machine code is not in the evidence",
    "TRITON_INTERPRET": "1: Triton interprets kernels instead of compiling them",
}
"""Environment variables that change what onepass does."""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def backend_status() -> dict[str, tuple[bool, str]]:
    """For each way to run: whether it works here, and why not."""
    import torch

    no_triton = "" if util.find_spec("triton") else "Triton is not installed (a CUDA build of torch brings it along)"
    no_llvm = "" if util.find_spec("llvmlite") else "llvmlite is not installed (pip install llvmlite)"
    no_gpu = ""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        no_gpu = "torch finds no GPU" if built else "this torch is a CPU build"
    numpy = _version("numpy") or ""
    no_numpy = "" if numpy else "numpy is not installed (Triton's interpreter needs it)"
    if (_version("triton") or "").startswith("3.6.") and tuple(map(int, numpy.split(".")[:2] or ())) >= (2, 4):
        no_numpy = f"the interpreter of Triton 3.6 fails with numpy >= 2.4; here is {numpy}"
    found = {"cpu": no_llvm, "triton": no_gpu or no_triton, "interpreter": no_triton or no_numpy}
    return {name: (not why, why) for name, why in found.items()}


def _environment() -> dict[str, Any]:
    import torch

    from .. import __version__
    from ..contract.declaration import short
    from ..formats import FLOATS, FP8_FORMATS, GROUP_SIZES, SCALE_FORMATS

    status = backend_status()
    backends: dict[str, dict[str, Any]] = {name: {"usable": ok, "why_not": why} for name, (ok, why) in status.items()}
    if status["cpu"][0]:
        from ..cpu.rms_norm import describe

        backends["cpu"] |= describe()
    gpus = []
    if status["triton"][0]:
        from ..triton.compiler import current_chip

        for index in range(torch.cuda.device_count()):
            chip = current_chip(index)
            cast = "hardware" if chip.casts_e4m3fn else "software"
            gpus.append({"name": torch.cuda.get_device_name(index), "arch": str(chip.arch), "e4m3fn": cast})
    return {
        "onepass": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "gpus": gpus,
        "backends": backends,
        "formats": {
            "inputs": [short(dtype) for dtype in FLOATS],
            "codes": [short(dtype) for dtype in FP8_FORMATS],
            "scales": list(SCALE_FORMATS),
            "groups": list(GROUP_SIZES),
        },
    }


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for bug reports and scripts.")] = False,
) -> None:
    """Show versions, devices and which backends work here."""
    found = _environment()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("onepass", f"{found['onepass']}, Python {found['python']}, {found['platform']}")
    table.add_row("packages", ", ".join(f"{name} {version or '-'}" for name, version in found["packages"].items()))
    for name, value in found["environment"].items():
        shown = "not set" if value is None else repr(value)
        table.add_row(name, Text(f"{shown} ({VARIABLES[name]})"))
    for gpu in found["gpus"]:
        table.add_row("gpu", f"{gpu['name']} (architecture {gpu['arch']}, e4m3fn cast in {gpu['e4m3fn']})")
    for name, backend in found["backends"].items():
        details = {k: v for k, v in backend.items() if k not in ("usable", "why_not")}
        words = (
            Text("usable", style="green") if backend["usable"] else Text(f"no: {backend['why_not']}", style="yellow")
        )
        for key, value in details.items():
            words.append(f"\n{key}: {value}", style="default")
        table.add_row(f"{name} backend" if name != "interpreter" else "interpreter", words)
    formats = found["formats"]
    table.add_row("inputs", ", ".join(formats["inputs"]))
    table.add_row("fp8 codes", f"{', '.join(formats['codes'])}, on every backend")
    table.add_row(
        "fp8 scales",
        f"{' or '.join(formats['scales'])}; per row, per {' or '.join(map(str, formats['groups']))} columns, or given",
    )
    Console().print(table)


# --- demo and docs --------------------------------------------------------------------------------------------------


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="A small model of this family, with random weights.", metavar="|".join(DEMO_MODELS))
    ] = "llama",
    path: Annotated[
        Path | None, typer.Option(help="Local weights instead: a transformers directory.", metavar="DIR")
    ] = None,
    rounding: Annotated[
        str, typer.Option(help="Where the patched model rounds; once allows more to be fused.", metavar="model|once")
    ] = "model",
    device: Annotated[str, typer.Option(help="cpu or cuda; by default what the machine has.", metavar="cpu|cuda")] = "",
    report: Annotated[Path, typer.Option(help="Where to write the report.", metavar="FILE")] = Path(
        "onepass-demo.json"
    ),
) -> None:
    """The first minute: a model generates without and with onepass; checks, speed, a fused prologue, batch invariance."""
    for value, allowed, option in (
        (model, DEMO_MODELS, "--model"),
        (rounding, ("model", "once"), "--rounding"),
    ):
        if value not in allowed:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(allowed)}", param_hint=option)
    if device not in ("", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="--device")
    if util.find_spec("transformers") is None:
        raise typer.BadParameter("transformers is not installed (pip install 'onepass[models]')", param_hint="--model")
    if path is not None and not (path / "config.json").is_file():
        raise typer.BadParameter(f"{path} has no config.json", param_hint="--path")
    chosen = device or ("cuda" if backend_status()["triton"][0] else "cpu")
    _require(Device(chosen))
    from .demo import run

    try:
        fine = run(chosen, Console(), model, path, rounding, report)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {report}: {error.strerror}", param_hint="--report") from error
    raise typer.Exit(0 if fine else 1)


@app.command()
def docs(
    output: Annotated[Path, typer.Option(help="Where to write.", metavar="FILE")] = Path("docs/ops.md"),
) -> None:
    """Write the reference of all ops, made from their contracts, and beside it that of onepass.dist."""
    from tools.docs import dist_page
    from tools.docs.ops_page import write

    for file, text in ((output, ""), (output.with_name(dist_page.PATH.name), dist_page.render())):
        try:
            changed = write(file, text)
        except OSError as error:
            raise typer.BadParameter(f"cannot write {file}: {error.strerror}", param_hint="--output") from error
        print(f"{file} {'written' if changed else 'is up to date'}")


def main() -> None:
    """The ``onepass`` command."""
    app()


if __name__ == "__main__":
    main()
