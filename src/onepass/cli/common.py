"""What the commands share: usage errors, this machine and its devices, tables and progress."""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import TextIO, TypeAlias

import torch

GAP = 2
"""Spaces between columns."""
EVERY = 15.0
"""Seconds between two lines about the progress, where there is no terminal."""
REFRESH = 0.2
"""The same in a terminal, where a line replaces the one before."""
_BACKEND = {"cpu": "cpu", "cuda": "triton", "interpreter": "interpreter"}


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command adds itself to the command line."""


class UsageError(argparse.ArgumentTypeError):
    """The command line asks for something that cannot be done; printed with the usage, exit status 2."""


def run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and call its ``run``; print the help of its ``parser`` if that is None."""
    options = parser.parse_args(arguments)
    if options.run is None:
        options.parser.print_help()
        return 2
    try:
        status: int = options.run(options)
    except UsageError as error:
        options.parser.error(str(error))
    return status


def name(device: str) -> str:
    """The name of the GPU, or of the CPU as the kernel reports it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or f"{platform.machine()} CPU"


def label(device: str) -> str:
    """The name, for a CPU with the number of threads."""
    threads = torch.get_num_threads()
    return name(device) if device == "cuda" else f"{name(device)}, {threads} thread{'s' if threads > 1 else ''}"


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
    reasons = {"cpu": no_llvm, "triton": no_gpu or no_triton, "interpreter": no_triton or no_numpy}
    return {name: (not why, why) for name, why in reasons.items()}


def usable_device(text: str) -> str:
    """The value of an option: cpu, cuda or interpreter, if it works here."""
    if text not in _BACKEND:
        raise UsageError(f"{text!r} is not one of {', '.join(_BACKEND)}")
    usable, why = backend_status()[_BACKEND[text]]
    if not usable:
        raise UsageError(f"{text} cannot run here: {why}")
    return text


def cpu_or_cuda(text: str) -> str:
    """The value of an option: cpu or cuda; if empty, cuda if it works here and cpu otherwise."""
    if text not in ("", "cpu", "cuda"):
        raise UsageError(f"{text!r} is neither cpu nor cuda")
    return usable_device(text or ("cuda" if backend_status()["triton"][0] else "cpu"))


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--device`` of commands that run on a CPU or a GPU."""
    words = "cpu or cuda; by default cuda if it works"
    parser.add_argument("--device", type=cpu_or_cuda, default="", metavar="cpu|cuda", help=words)


def at_least(least: int) -> Callable[[str], int]:
    """What reads the value of an option: a whole number that is not smaller."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise UsageError(f"{text!r} is not a whole number") from None
        if value < least:
            raise UsageError(f"{value} is not greater than or equal to {least}")
        return value

    return number


def cannot_write(path: object, error: OSError, option: str) -> UsageError:
    """The usage error for a file that cannot be written."""
    return UsageError(f"argument {option}: cannot write {path}: {error.strerror}")


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows as aligned columns, those in ``right`` to the right; the last column is wrapped at the terminal's edge.

    >>> print(table([("op", "time"), ("rms_norm", "1.25 s")], right=(1,)))
    op          time
    rms_norm  1.25 s
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before = sum(width + GAP for width in widths[:-1])
    room = max(24, shutil.get_terminal_size().columns - before)
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        pieces = [
            piece
            for line in row[-1].splitlines()
            for piece in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)
        ]
        lines.append((" " * GAP).join([*cells[:-1], cells[-1] if last in right else "".join(pieces[:1])]).rstrip())
        lines += [" " * before + piece for piece in pieces[1:]]
    return "\n".join(lines)


class Progress:
    """Shows how far a run is and how long the rest may take: a line that changes in a terminal, elsewhere a few lines."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.stream, self.done = total, stream or sys.stdout, 0
        self.terminal = self.stream.isatty()
        self.start = self.last = time.perf_counter()

    def step(self) -> None:
        """A part is done."""
        self.done += 1
        now = time.perf_counter()
        if self.done == self.total:
            self.clear()
            return
        if now - self.last < (REFRESH if self.terminal else EVERY):
            return
        self.last, seconds = now, now - self.start
        left = seconds / self.done * (self.total - self.done)
        self.clear()
        text = f"{self.done} of {self.total} after {seconds:.0f} s, about {left:.0f} s left"
        print(text, end="" if self.terminal else "\n", file=self.stream, flush=True)

    def clear(self) -> None:
        """Remove the line from a terminal, so that something else can be printed."""
        if self.terminal:
            print("\r\033[K", end="", file=self.stream, flush=True)
