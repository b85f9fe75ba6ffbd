"""Products of each head with a weight of its own, for the decode steps of `onepass.patch`::

    out[r, h] = round(x[r, h] @ weight[h])     summed in float32, in the order of K

A row's result does not depend on other rows. Only GPUs have the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.backend import launch_for
from ...core.op import define
from ...errors import Unsupported
from ..attention.op import aligned, described, steps
from .launch import HeadCall, HeadRows, head_spec


def multiplies_heads(x: Tensor | None, weight: Tensor) -> bool:
    """Whether `head_product` takes these tensors, as far as dtypes, shapes and memory are concerned.

    Without x, whether it takes the weight with a contiguous one.
    """
    if weight.dtype not in (torch.bfloat16, torch.float16) or weight.dim() != 3:
        return False
    k, n = weight.shape[1:]
    if x is not None and (x.dtype is not weight.dtype or x.shape[1:] != weight.shape[:2] or not aligned(x)):
        return False
    return k > 0 and k % 8 == n % 8 == 0 and aligned(_in_memory(weight))


def _in_memory(weight: Tensor) -> Tensor:
    """Weights whose neighbours in memory are in the last dimension."""
    return weight if weight.stride(2) == 1 else weight.transpose(1, 2)


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """``out[r, h] = round(x[r, h] @ weight[h])`` in one launch.

    Args:
        x: [rows, heads, K].
        weight: [heads, K, N] with contiguous rows or columns.

    Returns:
        [rows, heads, N].

    Raises:
        Unsupported: If `multiplies_heads` is false for these tensors.
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.onepass.head_product.default(x, weight)
        return out
    return _multiply(x, weight)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    if not multiplies_heads(x, weight):
        raise Unsupported(f"head_product: no kernel takes x {described(x)} and weight {described(weight)}")
    out = _fake(x, weight)
    if not out.numel():
        return out
    laid = _in_memory(weight)
    spec = head_spec(x.dtype, "rows" if laid is weight else "columns")
    rows = HeadRows._make((*x.shape, weight.shape[2], *steps(x), *steps(laid)))
    launch_for("head_product", x)(HeadCall(spec, x, weight, out, rows))
    return out


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], weight.shape[2])


define("head_product(Tensor x, Tensor weight) -> Tensor", _multiply, _fake)
