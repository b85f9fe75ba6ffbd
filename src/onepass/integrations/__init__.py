"""onepass in transformers models: `patch` and `register`; `generate` and `MlaCache`, which alone import transformers."""

from typing import TYPE_CHECKING

from .families import FAMILIES, Family
from .forms import Attention, Layer, Mla, Mlp, Norm, OtherNorm, PlainAttention, register
from .patching import NothingPatchedWarning, patch
from .report import Change, Patched

if TYPE_CHECKING:
    from .generation import generate as generate
    from .mla_cache import MlaCache as MlaCache

__all__ = ["FAMILIES", "Change", "Family", "MlaCache", "NothingPatchedWarning", "Patched", "patch"]
__all__ += ["Attention", "Layer", "Mla", "Mlp", "Norm", "OtherNorm", "PlainAttention", "generate", "register"]


def __getattr__(name: str) -> object:
    """Import what needs transformers at first use."""
    if name == "generate":
        from . import generation

        return generation.generate
    if name == "MlaCache":
        from . import mla_cache

        return mla_cache.MlaCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, including those imported at first use."""
    return sorted(__all__)
