"""Cosines and sines of a decode step's positions in three launches, with the bits of the model's own module.

transformers' rotary embeddings multiply positions and frequencies (before 5.22 as matrices), then copy, scale and round:
nine launches per step, and a tenth of a millisecond of Python. The modules are found by the fingerprint of their forward.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from .code import NotComparable, fingerprint_of
from .forwards import FUSED_ROWS

_AROUND: Final = {"torch.utils._contextlib", "transformers.modeling_rope_utils"}
"""Modules whose decorators change nothing here: `torch.no_grad`, and the update of rotations that are not `_FIXED`."""
OTHER_ANGLES: Final = "its code is not one of the supported rotary embeddings"
_FIXED: Final = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotations whose frequencies do not depend on the length of a sequence."""


class Angles(NamedTuple):
    """What a rotary embedding returns: float32 values or the dtype of its input, for all layers or for a type of them."""

    wide: bool = False
    by_layer: bool = False


FORMS: Final = {
    "2da0f96d1313": Angles(),  # Llama, and most others
    "7de828183bf3": Angles(),  # Gemma 2
    "e765f0ce0a0a": Angles(by_layer=True),  # Gemma 3
    "81c896e5b9a7": Angles(wide=True),  # OLMo-2, ERNIE 4.5
    "d6a13f54655e": Angles(wide=True, by_layer=True),  # OLMo-3
    # the same since transformers 5.22, which multiplies without matrices
    "fc02ce14f4d1": Angles(),  # Llama, Gemma 2, and most others
    "df5df0269190": Angles(by_layer=True),
    "b4221af660e7": Angles(wide=True),
    "c812b4a5f78c": Angles(wide=True, by_layer=True),
    # the same in transformers 4.57
    "f12680bccbb7": Angles(),  # Llama, and most others
    "8016b4cf435f": Angles(wide=True),  # OLMo-2
    "b521da35bada": Angles(wide=True),  # ERNIE 4.5
}
"""Fingerprint of a forward -> what it returns; in transformers 5.17 unless stated."""


class Frequencies:
    """The frequencies of a module's buffers, each twice, in float32. Copies and pickles start without them."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Tensor, int, Tensor]] = {}

    def __reduce__(self) -> tuple[type[Frequencies], tuple[()]]:
        return Frequencies, ()

    def of(self, name: str, buffer: Tensor) -> Tensor | None:
        """The frequencies of a buffer. None while a CUDA graph is recorded, unless they are known."""
        version = 0 if buffer.is_inference() else buffer._version
        source, then, twice = self.known.get(name, (None, 0, buffer))
        if source is buffer and then == version:
            return twice
        if buffer.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # what is allocated here belongs to the graph
        with torch.inference_mode(mode=False):  # a later call may be outside of it
            twice = torch.cat((buffer, buffer)).float()
        self.known[name] = buffer, version, twice
        return twice


class AnglesStep(NamedTuple):
    """A rotary embedding."""

    form: Angles
    frequencies: Frequencies
    projections: tuple[Any, ...] = ()


def angles_of(module: nn.Module) -> Angles | str | None:
    """What a rotary embedding computes, or why it cannot be replaced; None for other modules."""
    if not any(name.endswith("inv_freq") for name in module._buffers):
        return None
    types = getattr(module, "rope_type", None)
    kinds = types.values() if isinstance(types, dict) else [types]
    other = [kind for kind in kinds if kind not in _FIXED]
    if other:
        return f"its rope_type is {other[0]!r}"
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__"):
        home = forward.__globals__.get("__name__")
        if home not in _AROUND:
            return f"its forward is wrapped by code of {home}"
        forward = forward.__wrapped__
    try:
        return FORMS.get(fingerprint_of(forward), OTHER_ANGLES)
    except NotComparable as error:
        return f"its code cannot be compared: {error}"


def angles_step(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of few positions [batch, tokens]."""
    how: AnglesStep = self._onepass_decode
    prefix = f"{layer_type}_" if how.form.by_layer else ""
    twice = None
    few = position_ids.dim() == 2 and math.prod(position_ids.shape) <= FUSED_ROWS
    if few and not torch.compiler.is_compiling() and torch.get_float32_matmul_precision() == "highest":
        twice = how.frequencies.of(prefix, getattr(self, f"{prefix}inv_freq"))
    if twice is None or twice.device != x.device:
        more = () if layer_type is None else (layer_type,)
        return cast(tuple[Tensor, Tensor], type(self).forward(self, x, position_ids, *more))
    scaling = getattr(self, f"{prefix}attention_scaling")
    dtype = torch.float32 if how.form.wide else x.dtype
    turned = position_ids.unsqueeze(-1) * twice
    return _rounded(torch.cos, turned, scaling, dtype), _rounded(torch.sin, turned, scaling, dtype)


def _rounded(function: Any, turned: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """A function of float32 angles, scaled in float32 and rounded once. Without a scale it is one launch."""
    if scaling == 1:
        made: Tensor = function(turned, out=torch.empty_like(turned, dtype=dtype))
        return made
    return cast(Tensor, function(turned).mul_(scaling).to(dtype))
