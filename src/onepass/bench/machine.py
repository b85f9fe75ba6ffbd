"""What a run was made on: the machine and the versions."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import onepass

PACKAGES = ("liger-kernel", "flashinfer-python", "vllm", "quack-kernels", "transformers", "llvmlite")


def describe(device: str) -> dict[str, Any]:
    """The machine and the versions."""
    found: dict[str, Any] = {
        "onepass": onepass.__version__,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "machine": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        import triton

        found["triton"] = triton.__version__
    else:
        found["threads"] = torch.get_num_threads()
    found["packages"] = {name: version for name in PACKAGES if (version := _version(name))}
    return found


def cpu_name() -> str:
    """As the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
