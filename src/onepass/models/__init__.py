"""onepass inside transformers models.

- `patch` replaces a model's norms, and with ``decode=True`` its projections. `register` adds classes with other code.
- `score` returns log-probabilities of given tokens.
- `generate` replays decode steps from a CUDA graph. `MlaCache` is a cache for latent attention. Only these two import
  transformers.
"""

from typing import TYPE_CHECKING

from .generation.score import score
from .patching.forms import Attention, Layer, Mla, Mlp, Norm, OtherNorm, PlainAttention, register
from .patching.patch import NothingPatchedWarning, patch
from .patching.report import Change, Patched

if TYPE_CHECKING:
    from .generation.generate import generate as generate
    from .generation.mla_cache import MlaCache as MlaCache

__all__ = ["Change", "MlaCache", "NothingPatchedWarning", "Patched", "patch"]
__all__ += ["Attention", "Layer", "Mla", "Mlp", "Norm", "OtherNorm", "PlainAttention", "generate", "register", "score"]


def __getattr__(name: str) -> object:
    """Import what needs transformers at first use."""
    if name == "generate":
        from .generation import generate

        return generate.generate
    if name == "MlaCache":
        from .generation import mla_cache

        return mla_cache.MlaCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, including those imported at first use."""
    return sorted(__all__)
