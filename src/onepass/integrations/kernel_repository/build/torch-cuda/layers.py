"""Layers for `kernels.kernelize`. `onepass.integrations.kernels` defines and documents them."""

from onepass.integrations.kernels import RMSNorm

__all__ = ["RMSNorm"]
