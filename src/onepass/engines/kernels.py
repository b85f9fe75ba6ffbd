"""onepass as a layer for Hugging Face ``kernels``::

    from kernels import Mode, kernelize, use_kernel_mapping
    from onepass.engines.kernels import mapping

    with use_kernel_mapping(mapping(), inherit_mapping=False):
        model = kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, device="cuda")

This replaces every layer that transformers calls "RMSNorm", 136 classes in transformers 5.19. They do not all compute
the same, so `RMSNorm.forward` looks up what the class of each module computes, as `onepass.patch` does. The module's own
forward runs if its code is unknown, or if the weight's dtype is not the input's.

The layer has no backward: in training mode `kernelize` keeps the modules' own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from ..errors import ContractError, Unsupported
from ..formats import FLOATS, Rounding
from ..models.patching.forms import TORCH, Norm, match
from ..ops.rms_norm.op import rms_norm

__all__ = ["RMSNorm", "mapping", "repository"]

DEVICES: Final = ("cpu", "cuda")
_forms: Final[dict[type, tuple[Rounding, float, str] | None]] = {}


class RMSNorm(nn.Module):
    """The norm of a transformers model; ``self`` is the module that it replaces."""

    can_torch_compile = True
    has_backward = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The bytes of the module's own forward, as far as the order of a sum allows."""
        form = form_of(type(self))
        weight = cast(Tensor, self.weight)
        if form is None or not _computes(weight, hidden_states):
            return type(self).forward(self, hidden_states)
        rounding, offset, eps = form
        return rms_norm(hidden_states, weight, getattr(self, eps), weight_offset=offset, rounding=rounding)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def form_of(cls: type[nn.Module]) -> tuple[Rounding, float, str] | None:
    """Rounding, offset of the weight and name of the epsilon of a class; None if its code is not known."""
    if cls not in _forms:
        form = match(cls, Norm).form
        usable = isinstance(form, Norm) and form is not TORCH and not form.flag
        _forms[cls] = (form.rounding, form.weight_offset, form.eps) if usable else None  # type: ignore[union-attr]
    return _forms[cls]


def _computes(weight: object, x: Tensor) -> bool:
    """Whether the op has the module's result dtype, and no derivative is needed."""
    if not isinstance(weight, Tensor) or weight.dim() != 1 or x.dtype not in FLOATS or x.stride(-1) != 1:
        return False
    recorded = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
    return weight.dtype == x.dtype and not recorded


def repository() -> Path:
    """The folder of the layer repository, in the form that ``kernels`` builds and loads."""
    return Path(str(resources.files(__package__) / "kernel_repository"))


def mapping(devices: Sequence[str] = DEVICES) -> dict[str, Any]:
    """The argument of ``kernels.use_kernel_mapping`` or ``kernels.register_kernel_mapping``.

    ``devices`` are "cpu", "cuda" or both. It is registered for inference, with and without ``torch.compile``.
    """
    wrong = [device for device in devices if device not in DEVICES]
    if wrong:
        raise ContractError(f"mapping: `devices` must be some of {', '.join(DEVICES)}, got {wrong[0]!r}")
    try:
        from kernels import LocalLayerRepository, Mode
    except ImportError as error:
        raise Unsupported(f"mapping: the package kernels is needed (pip install kernels); {error}") from None
    layer = LocalLayerRepository(repository(), layer_name="RMSNorm")
    modes = {Mode.INFERENCE: layer, Mode.INFERENCE | Mode.TORCH_COMPILE: layer}
    return {"RMSNorm": dict.fromkeys(devices, modes)}
