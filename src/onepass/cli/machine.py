"""The names of this machine and of what is installed on it."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import torch


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
