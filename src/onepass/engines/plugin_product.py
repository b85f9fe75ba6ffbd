"""vLLM's products of unquantized layers in batch-invariant mode.

With ``VLLM_BATCH_INVARIANT=1`` each row of a product has to be bit-identical to the product of that row alone::

    y = round(x @ weight.T + bias)    sums and bias in float32

On a CPU, vLLM calls oneDNN in this mode too, whose bits depend on the number of rows. `register` replaces the function by
which a layer chooses its product after loading (``dispatch_cpu_unquantized_gemm``). The weight is not repacked.

On a GPU, ``linear_batch_invariant`` ends in ``matmul_persistent``, a Triton kernel. `register` replaces it only with
``ONEPASS_VLLM_PRODUCT=1`` in the environment, because nobody has measured the two next to each other.

Quantized layers, experts and whatever vLLM passes to torch itself stay as they are.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, ClassVar, Final

from torch import Tensor

from .. import __version__
from ..formats import FLOATS
from ..ops.linear.op import linear
from .registration import NotSupported, fingerprint

__all__ = ["CPU_CODE", "GPU_CODE", "CpuProducts", "GpuProducts", "product", "register"]

CPU_CODE: Final = ("1a4b804f7789",)
"""``cpu_unquantized_gemm``, which calls what a layer has chosen. It was read in five releases, 0.29.0 to 0.33.0."""
GPU_CODE: Final = ("f7d16775ea93", "60dd67c4a9c7")
"""The kernel of ``matmul_persistent``, in 0.29.0 to 0.31.0 and in 0.32.0 to 0.33.0; they differ in the stride of the bias."""


def register(version: str, cpu: bool) -> str:
    """Let onepass compute the products in this process.

    Args:
        version: What vLLM is called in messages.
        cpu: Whether the process computes on a CPU.

    Returns:
        What onepass computes now, for the line of `onepass.engines.plugin`; "" if nothing. A second call changes nothing.

    Raises:
        NotSupported: vLLM's code is not the code that this was written for. Nothing was replaced then.
    """
    if not cpu and os.environ.get("ONEPASS_VLLM_PRODUCT") != "1":
        return ""
    try:
        if cpu:
            from vllm.model_executor.layers import utils

            _replace(utils, "dispatch_cpu_unquantized_gemm", CpuProducts, utils.cpu_unquantized_gemm, CPU_CODE)
        else:
            from vllm.model_executor.determinism import batch_invariant

            kernel = batch_invariant.matmul_kernel_persistent
            _replace(batch_invariant, "matmul_persistent", GpuProducts, getattr(kernel, "fn", kernel), GPU_CODE)
    except (ImportError, AttributeError) as error:
        raise NotSupported(f"{version} has no batch-invariant product that onepass knows ({error})") from None
    except _OtherCode:
        raise NotSupported(
            f"{version} computes batch-invariant products by code that onepass {__version__} does not know; update one of them"
        ) from None
    return "its batch-invariant product"


class _OtherCode(Exception):
    """vLLM's code is not the code that a replacement was written for."""


def _replace(module: Any, name: str, cls: type[_Products], code: object, fingerprints: tuple[str, ...]) -> None:
    """Replace a function of one of vLLM's modules, which calls it by this name, unless that was done before."""
    native = getattr(module, name)
    if isinstance(native, cls):
        return
    if fingerprint(code) not in fingerprints or tuple(inspect.signature(native).parameters) != cls.parameters:
        raise _OtherCode
    setattr(module, name, cls(native))


class _Products:
    """What replaces one of vLLM's functions; ``native`` is that function."""

    parameters: ClassVar[tuple[str, ...]]

    def __init__(self, native: Callable[..., Any]) -> None:
        self.native = native


class CpuProducts(_Products):
    """``dispatch_cpu_unquantized_gemm``: a layer with a matrix as its weight gets `product`, others what vLLM gives them."""

    parameters = ("layer", "remove_weight")

    def __call__(self, layer: Any, remove_weight: bool) -> None:
        """Choose the product of a layer, once its weight is loaded. ``remove_weight``: vLLM may drop a weight it packed."""
        weight: Tensor = layer.weight
        if weight.device.type == "cpu" and weight.dim() == 2 and _usable(weight):
            layer.cpu_linear = product
        else:
            self.native(layer, remove_weight)


class GpuProducts(_Products):
    """``matmul_persistent(a, b, bias=None)``: a [M, K] times b [K, N], where b is the transposed weight of a layer."""

    parameters = ("a", "b", "bias")

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """``round(a @ b + bias)``; vLLM's kernel computes it if the columns of b are not contiguous."""
        weight = b.t()
        if weight.dim() != 2 or a.dtype != b.dtype or not _usable(weight):
            result: Tensor = self.native(a, b, bias)
            return result
        return product(a, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``round(x @ weight.T + bias)``, sums and bias in float32; each row is bit-identical to running it alone.

    Args:
        x: [..., K]. Strided columns are copied first, which vLLM's functions do too.
        weight: [N, K] in x's dtype, with any row stride.
        bias: [N] of any float dtype.

    Returns:
        [..., N] in x's dtype.
    """
    return linear(x if x.stride(-1) == 1 else x.contiguous(), weight, bias=bias)


def _usable(weight: Tensor) -> bool:
    """Whether `linear` takes this matrix."""
    return weight.dtype in FLOATS and weight.stride(-1) == 1 and weight.numel() > 0
