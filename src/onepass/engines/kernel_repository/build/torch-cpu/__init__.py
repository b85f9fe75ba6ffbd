"""What the Hugging Face kernels package loads: the layers of the installed onepass."""

from . import layers

__all__ = ["layers"]
