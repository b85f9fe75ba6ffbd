"""Layers for `kernels.kernelize`. `onepass.engines.kernels` defines and documents them."""

from onepass.engines.kernels import RMSNorm

__all__ = ["RMSNorm"]
