"""Layers for Hugging Face ``kernels``: `onepass.engines.kernels` maps modules to them, and `tools.hf_kernel` copies them
into a repository that works without onepass.

`RMSNorm` replaces every layer that transformers calls "RMSNorm", 136 classes in transformers 5.19. These classes
differ, so its forward looks up what the class of each module computes, as `onepass.patch` does. If the code is unknown,
the weight's dtype is not the input's, or the device has no kernels, it calls the module's own forward.

The layer has no backward: in training mode `kernelize` keeps the modules' own forward.
"""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor, nn

from ..core.backend import can_launch
from ..formats import FLOATS, Rounding
from ..models.patching.forms import TORCH, Norm, match
from ..ops.rms_norm.op import rms_norm

__all__ = ["RMSNorm"]

_forms: Final[dict[type, tuple[Rounding, float, str] | None]] = {}


class RMSNorm(nn.Module):
    """The norm of a transformers model; ``self`` is the module that it replaces."""

    can_torch_compile = True
    has_backward = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Bit-identical to the module's own forward, except for the order of a sum."""
        form = form_of(type(self))
        weight = cast(Tensor, self.weight)
        if form is None or not computes("rms_norm", hidden_states, weight) or weight.dim() != 1:
            return type(self).forward(self, hidden_states)
        rounding, offset, eps = form
        return rms_norm(hidden_states, weight, getattr(self, eps), weight_offset=offset, rounding=rounding)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def form_of(cls: type[nn.Module]) -> tuple[Rounding, float, str] | None:
    """Rounding, offset of the weight and name of the epsilon of a class; None if its code is unknown."""
    if cls not in _forms:
        form = match(cls, Norm).form
        usable = isinstance(form, Norm) and form is not TORCH and not form.flag
        _forms[cls] = (form.rounding, form.weight_offset, form.eps) if usable else None  # type: ignore[union-attr]
    return _forms[cls]


def computes(op: str, x: Tensor, *weights: object) -> bool:
    """Whether an op has kernels and the modules' result dtype, and no derivative is needed."""
    if x.dtype not in FLOATS or x.stride(-1) != 1:
        return False
    if not all(isinstance(weight, Tensor) and weight.dtype == x.dtype for weight in weights):
        return False
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *cast(tuple[Tensor, ...], weights)))
    return not recorded and _has_kernels(op, x.device.type)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernels(op: str, device: str) -> bool:
    return can_launch(op, device)
