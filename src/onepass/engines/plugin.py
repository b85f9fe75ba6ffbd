"""onepass in vLLM: a provider of its IR ops, and its RMSNorm layer in batch-invariant mode.

vLLM calls `register` in each of its processes, because onepass has an entry point in the group
``vllm.general_plugins``. That makes ``onepass`` a provider of ``rms_norm`` and ``fused_add_rms_norm``. To use it::

    vllm serve MODEL --ir-op-priority.rms_norm=onepass,native --ir-op-priority.fused_add_rms_norm=onepass,native

Both are bit-identical to vLLM's native ops, except where the order of a sum changes the last bit of ``rs``. With ``rs``
from the unrounded ``h = x + x_residual``::

    weight of x's dtype      y = round(round(h * rs) * weight)
    weight of float32        y = round((h * rs) * weight)
    no weight                y = round(h * rs)

With ``VLLM_BATCH_INVARIANT=1``, vLLM's layer `RMSNorm` calls other kernels on a GPU. `register` then replaces the
layer too (`onepass.engines.plugin_layer`), and on CPUs the product (`onepass.engines.plugin_product`).

``python -m onepass.engines.plugin`` prints what `register` does on this machine.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Final

import torch
from torch import Tensor

from .. import __version__
from ..formats import FLOATS, Rounding
from ..ops.rms_norm.op import rms_norm as _rms_norm
from . import plugin_product
from .registration import NotSupported, announced, fingerprint

__all__ = ["PROVIDER", "register"]

PROVIDER: Final = "onepass"
NATIVE: Final = {"rms_norm": ("610e69ad666b",), "fused_add_rms_norm": ("83ed1689ffd1",)}
"""The code of vLLM's native ops that the functions below reproduce. It was read in eight releases, 0.22.1 to 0.33.0."""

_log = logging.getLogger("vllm.plugins.onepass")


def register() -> str:
    """Make onepass a provider in this process. Returns one line that says what was done, or why nothing was.

    A second call changes nothing. If vLLM is absent, too old or too new, it keeps its own
    implementations, and the line is logged as a warning.
    """
    return announced(_log, _register)


def _register() -> str:
    try:
        import vllm
    except ImportError:
        raise NotSupported("vLLM is not installed") from None
    version = f"vLLM {getattr(vllm, '__version__', '')}".strip()
    try:
        from vllm import envs
        from vllm.ir import ops
        from vllm.platforms import current_platform

        wanted = [(getattr(ops, op), function, supports) for op, function, supports in _IMPLEMENTATIONS]
        same_code = all(_fingerprint(op) in NATIVE[op.name] for op, *_ in wanted)
        invariant = bool(envs.VLLM_BATCH_INVARIANT)
        has_kernels = current_platform.is_cuda_alike() or current_platform.is_cpu()
    except (ImportError, AttributeError) as error:
        raise NotSupported(f"{version} has no IR ops that onepass knows ({error})") from None
    if not same_code:
        raise NotSupported(
            f"{version} computes its native norms by code that onepass {__version__} does not know; update one of them"
        )
    for op, function, supports in wanted:
        if PROVIDER in op.impls:
            continue
        try:
            implementation = op.register_impl(
                PROVIDER, supported=has_kernels, supports_args=supports, inplace=op.name == "fused_add_rms_norm"
            )(function)
        except (AssertionError, TypeError, ValueError) as error:
            raise NotSupported(f"{version} does not accept it ({error})") from None
        implementation.uuid = _Uuid(implementation.uuid())  # what a compiled model is cached by
    parts = ["rms_norm", "fused_add_rms_norm"]
    if invariant:
        parts += filter(None, _batch_invariant(version, current_platform.is_cpu()))
    return f"onepass {__version__} provides {', '.join(parts[:-1])} and {parts[-1]} of {version}"


def _batch_invariant(version: str, cpu: bool) -> Iterator[str]:
    """What else onepass computes in batch-invariant mode. A part that it cannot compute is one warning."""
    try:
        from . import plugin_layer

        plugin_layer.register()
        yield "its batch-invariant RMSNorm layer"
    except (ImportError, AttributeError) as error:
        _log.warning("onepass replaces no layer: %s has no RMSNorm that onepass knows (%s)", version, error)
    try:
        yield plugin_product.register(version, cpu)
    except NotSupported as why:
        _log.warning("onepass computes no products: %s", why)


def _fingerprint(op: Any) -> str:
    native = op.impls.get("native")
    return fingerprint(getattr(native, "impl_fn", None))


class _Uuid:
    """What identifies an implementation: vLLM hashes its file only, but onepass is more than this file."""

    def __init__(self, of_file: str) -> None:
        parts = (of_file, __version__, metadata.version("torch"))
        self.value = hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def __call__(self) -> str:
        return self.value


# --- the implementations; vLLM requires the names, annotations and defaults of its own ------------------------------


def norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """``rms_norm`` of vLLM."""
    return _rms_norm(x, weight, epsilon, rounding=_rounding(x, weight))


def norm_of_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """``fused_add_rms_norm`` of vLLM; overwrites both activations."""
    return _rms_norm(
        x,
        weight,
        epsilon,
        residual=x_residual,
        rounding=_rounding(x, weight),
        round_sum=False,
        out=x,
        residual_out=x_residual,
    )


def _rounding(x: Tensor, weight: Tensor | None) -> Rounding:
    return "hf" if weight is not None and weight.dtype == x.dtype else "once"


def supports_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether `norm` computes this call."""
    columns = x.shape[-1]
    return (
        x.dtype in FLOATS
        and x.stride(-1) == 1
        and variance_size in (None, columns)
        and (weight is None or (weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()))
    )


def supports_norm_of_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Whether `norm_of_sum` computes this call."""
    alike = x_residual.dtype == x.dtype and x_residual.shape == x.shape and x_residual.stride(-1) == 1
    return alike and supports_norm(x, weight, epsilon, variance_size)


_IMPLEMENTATIONS: Final = (
    ("rms_norm", norm, supports_norm),
    ("fused_add_rms_norm", norm_of_sum, supports_norm_of_sum),
)

if __name__ == "__main__":
    print(register())
