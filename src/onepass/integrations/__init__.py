"""onepass inside other people's models: `patch` for Hugging Face transformers. Nothing here imports transformers."""

from .families import FAMILIES, Family
from .patching import Change, Patched, patch

__all__ = ["FAMILIES", "Change", "Family", "Patched", "patch"]
