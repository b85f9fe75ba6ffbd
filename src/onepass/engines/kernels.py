"""onepass as a layer for Hugging Face ``kernels``::

    from kernels import Mode, kernelize, use_kernel_mapping
    from onepass.engines.kernels import mapping

    with use_kernel_mapping(mapping(), inherit_mapping=False):
        model = kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, device="cuda")

This replaces every layer that transformers calls "RMSNorm"; `onepass.engines.layers` has the replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ContractError, Unsupported
from .layers import RMSNorm

__all__ = ["RMSNorm", "mapping"]

DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True)
class _Installed:
    """What ``kernels`` calls a repository: the layer of the installed package, so no files are loaded."""

    layer: type[RMSNorm]

    def load(self) -> type[RMSNorm]:
        return self.layer


def mapping(devices: Sequence[str] = DEVICES) -> dict[str, Any]:
    """The argument of ``kernels.use_kernel_mapping`` or ``kernels.register_kernel_mapping``.

    Args:
        devices: "cpu", "cuda" or both.

    Returns:
        The layer for each device, for inference with and without ``torch.compile``.

    Raises:
        Unsupported: If the package ``kernels`` is not installed.
    """
    wrong = [device for device in devices if device not in DEVICES]
    if wrong:
        raise ContractError(f"mapping: `devices` must be some of {', '.join(DEVICES)}, got {wrong[0]!r}")
    try:
        from kernels import Mode
    except ImportError as error:
        raise Unsupported(f"mapping: the package kernels is needed (pip install kernels); {error}") from None
    layer = _Installed(RMSNorm)
    modes = {Mode.INFERENCE: layer, Mode.INFERENCE | Mode.TORCH_COMPILE: layer}
    return {"RMSNorm": dict.fromkeys(devices, modes)}
