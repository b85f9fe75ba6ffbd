"""What the commands share: which devices work here, tables and progress bars."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import util
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..bench.lines import WIDTH
from ..bench.machine import version


class Device(StrEnum):
    """Where kernels run; the interpreter runs GPU kernels on the CPU."""

    cpu = "cpu"
    cuda = "cuda"
    interpreter = "interpreter"


INSTALL = "pip install '.[models]' in a checkout"
"""How transformers, which the demo needs, is installed."""
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda; by default cuda if it works.", metavar="cpu|cuda")]
_BACKEND = {"cpu": "cpu", "cuda": "triton", "interpreter": "interpreter"}


def backend_status() -> dict[str, tuple[bool, str]]:
    """Whether each backend works here, and if not, why."""
    no_triton = "" if util.find_spec("triton") else "Triton is not installed (a CUDA build of torch includes it)"
    no_llvm = "" if util.find_spec("llvmlite") else "llvmlite is not installed (pip install llvmlite)"
    no_gpu = ""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        no_gpu = "torch finds no GPU" if built else "this torch is a CPU build"
    numpy = version("numpy") or ""
    no_numpy = "" if numpy else "numpy is not installed (Triton's interpreter needs it)"
    if (version("triton") or "").startswith("3.6.") and tuple(map(int, numpy.split(".")[:2] or ())) >= (2, 4):
        no_numpy = f"the interpreter of Triton 3.6 fails with numpy >= 2.4; {numpy} is installed"
    found = {"cpu": no_llvm, "triton": no_gpu or no_triton, "interpreter": no_triton or no_numpy}
    return {name: (not why, why) for name, why in found.items()}


def require(device: str) -> None:
    """Raise a usage error if a device does not work here."""
    usable, why = backend_status()[_BACKEND[device]]
    if not usable:
        raise typer.BadParameter(f"{device} cannot run here: {why}", param_hint="--device")


def choose_device(device: str) -> str:
    """``device``, by default cuda if it works here and cpu otherwise."""
    if device not in ("", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="--device")
    chosen = device or ("cuda" if backend_status()["triton"][0] else "cpu")
    require(chosen)
    return chosen


def cannot_write(path: object, error: OSError, option: str) -> typer.BadParameter:
    """The usage error for a file that cannot be written."""
    return typer.BadParameter(f"cannot write {path}: {error.strerror}", param_hint=option)


def table(*left: str, right: tuple[str, ...] = (), **options: Any) -> Table:
    """A table without lines; the columns named in ``right`` are aligned to the right."""
    made = Table(*left, **{"box": None, "pad_edge": False, **options})
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def wide_console(**options: Any) -> Console:
    """A console as wide as the terminal. Elsewhere it has `WIDTH` columns, unless COLUMNS says otherwise."""
    console = Console(**options)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def progress_bar(console: Console, **options: Any) -> Progress:
    """A progress bar with an estimate of the time left, as wide as the console. It disappears at the end."""
    times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left"))
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), *times)
    # The period makes the estimate follow the whole run: single steps differ too much.
    return Progress(*columns, console=console, transient=True, expand=True, speed_estimate_period=3600.0, **options)


@contextmanager
def live(console: Console, *parts: Any) -> Iterator[None]:
    """Update ``parts`` in a terminal while they grow; elsewhere print the first of them at the end."""
    if console.is_terminal:
        with Live(Group(*parts), console=console, refresh_per_second=8):
            yield
    else:
        yield
        console.print(parts[0])
