"""Attention to a cache whose bytes depend on neither the batch nor the run, on NVIDIA GPUs.

For few queries torch splits a long context. cuDNN, its first choice, then gives other bytes from run to run, and flash
splits by the batch. `ops.attention` has a kernel for up to 16 tokens of heads with up to 256 columns, in 16 bits. This
module is for all others. torch's memory-efficient kernel gives a block of queries of one head to one program, which
goes through the keys in order. The blocks depend on the dtype and the columns of a head, and on nothing else. A masked
entry adds zero. So a token also has the same bytes among other tokens of a step, and in a static cache of any length.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from .biases import ALIGNED, biases
from .forwards import FUSED_ROWS

KERNEL: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
"""(q, k, v, bias, whether to return sums, scale=...), all [batch, heads, tokens, columns]. The first result is the output."""

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_chips: dict[int, bool] = {}


def takes(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel takes these queries, values and mask."""
    if q.dtype not in _DTYPES or (mask is not None and mask.dim() != 4):
        return False
    return q.shape[-1] % ALIGNED == 0 and v.shape[-1] % ALIGNED == 0 and has_kernels(q)


def has_kernels(q: Tensor) -> bool:
    """Whether queries are on an NVIDIA GPU since Ampere. torch is asked once: that costs the host more than a call."""
    if not q.is_cuda:
        return False
    device = q.get_device()
    known = _chips.get(device)
    if known is None:
        known = _since_ampere(device)
        if not torch.compiler.is_compiling():
            _chips[device] = known
    return known


def _since_ampere(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_properties(device).major >= 8


def attend_unsplit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, layer: int) -> Tensor:
    """Rows [batch, tokens, columns] of queries that attend to all keys which the mask allows.

    For few tokens the heads of keys are a batch, and query heads that share one are rows: nothing is copied. Many tokens
    get a copy of keys and values per query head, as in the model. A mask with a row per query head would be larger.
    """
    batch, heads, length, columns = q.shape
    keys, context = k.shape[1:3]
    groups, bias = heads // keys, None
    if groups == 1 or length > FUSED_ROWS:
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if mask is not None:
            bias = biases.aligned(mask, q.dtype, layer).expand(batch, heads, length, context)
        out: Tensor = KERNEL(q, k, v, bias, False, scale=scaling)[0]
        return out.transpose(1, 2).reshape(batch, length, -1)
    rows = q.reshape(batch * keys, 1, groups * length, columns)
    if mask is not None:
        bias = biases.grouped(mask, q.dtype, layer, (batch, keys, groups)).expand(
            batch * keys, 1, groups * length, context
        )
    out = KERNEL(rows, k.flatten(0, 1).unsqueeze(1), v.flatten(0, 1).unsqueeze(1), bias, False, scale=scaling)[0]
    return out.reshape(batch, heads, length, -1).transpose(1, 2).reshape(batch, length, -1)
