"""Cosines and sines of a decode step's positions in three launches, with the bits of the model's own module.

transformers' rotary embeddings multiply positions and frequencies (before 5.22 as matrices), then copy, scale and round:
nine launches per step, and a tenth of a millisecond of Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from .norm import FUSED_ROWS


class Angles(NamedTuple):
    """What a rotary embedding returns: float32 values or the dtype of its input, for all layers or for a type of them."""

    wide: bool = False
    by_layer: bool = False


class Frequencies:
    """The frequencies of a module's buffers, each twice, in float32. Copies and pickles start without them."""

    def __init__(self) -> None:
        self.doubled: dict[str, tuple[Tensor, int, Tensor]] = {}

    def __reduce__(self) -> tuple[type[Frequencies], tuple[()]]:
        return Frequencies, ()

    def of(self, name: str, buffer: Tensor) -> Tensor | None:
        """The frequencies of a buffer. None while a CUDA graph is recorded, unless they are there."""
        version = 0 if buffer.is_inference() else buffer._version
        source, then, twice = self.doubled.get(name, (None, 0, buffer))
        if source is buffer and then == version:
            return twice
        if buffer.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # what is allocated here belongs to the graph
        with torch.inference_mode(mode=False):  # a later call may be outside of it
            twice = torch.cat((buffer, buffer)).float()
        self.doubled[name] = buffer, version, twice
        return twice


class AnglesRecord(NamedTuple):
    """A rotary embedding."""

    form: Angles
    frequencies: Frequencies


class AnglesModule(nn.Module):
    """What is read of a rotary embedding."""

    _onepass: AnglesRecord


def angles_forward(
    self: AnglesModule, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of few positions [batch, tokens]."""
    form, frequencies = self._onepass
    prefix = f"{layer_type}_" if form.by_layer else ""
    twice = None
    few = position_ids.dim() == 2 and math.prod(position_ids.shape) <= FUSED_ROWS
    if few and not torch.compiler.is_compiling() and torch.get_float32_matmul_precision() == "highest":
        twice = frequencies.of(prefix, getattr(self, f"{prefix}inv_freq"))
    if twice is None or twice.device != x.device:
        more = () if layer_type is None else (layer_type,)
        return cast(tuple[Tensor, Tensor], type(self).forward(self, x, position_ids, *more))
    scaling = getattr(self, f"{prefix}attention_scaling")
    dtype = torch.float32 if form.wide else x.dtype
    turned = position_ids.unsqueeze(-1) * twice
    return _rounded(torch.cos, turned, scaling, dtype), _rounded(torch.sin, turned, scaling, dtype)


def _rounded(function: Callable[..., Tensor], turned: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """A function of float32 angles, scaled in float32 and rounded once. Without a scale it is one launch."""
    if scaling == 1:
        return function(turned, out=torch.empty_like(turned, dtype=dtype))
    return function(turned).mul_(scaling).to(dtype)
