"""The GEMV with partial norm on a GPU beside cuBLAS and a norm, torch.compile, and a plain read of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

import onepass

from .timing import graph_times

SHAPES = (
    *((m, 2112, 7168, 1536) for m in (1, 2, 4, 8, 16)),
    (1, 2112, 5120, 1536),
    (1, 4096, 4096, 4096),
    (1, 2624, 6144, 2048),
)
"""M, N, K and normed columns."""
SETS = 12
"""Weights in rotation: 12 times 30 MB are cold in an L2 of 60 MB."""


@triton.jit
def _read_kernel(source, target, n, BLOCK: tl.constexpr):
    cuda.gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(source + place, mask=place < n, other=0, eviction_policy="evict_first"), 0)
    cuda.gdc_wait()
    if total == 123456789:
        tl.store(target, total)


def composed(act: Tensor, weight: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op as a user would write it in torch: a matmul and a norm of its first columns."""
    y = torch.nn.functional.linear(act, weight)
    width = gamma.shape[0]
    return torch.nn.functional.rms_norm(y[:, :width], (width,), gamma, eps), y[:, width:]


def rows(peers: bool = True) -> Iterator[dict[str, Any]]:
    """One result a shape: bytes of weights, times (two medians each) of onepass, its pair with a norm, and every peer."""
    contenders: dict[str, Callable[..., object]] = {}
    if peers:
        torch._dynamo.config.recompile_limit = 64
        contenders = {
            "torch eager": composed,
            "torch.compile": torch.compile(composed, dynamic=False, fullgraph=True),
        }
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    for m, n, k, width in SHAPES:
        gamma, before = (torch.randn(size, device="cuda").bfloat16() for size in (width, k))
        acts = [torch.randn(m, k, device="cuda").bfloat16() for _ in range(SETS)]
        weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(SETS)]
        sets = list(zip(acts, weights, strict=True))
        outs = [torch.empty(m, w, device="cuda", dtype=torch.bfloat16) for w in (width, n - width)]
        source = torch.randn(m, k, device="cuda").bfloat16()
        times = {
            "onepass": graph_times([partial(_ours, a, w, gamma, outs) for a, w in sets]),
            "norm, then onepass": graph_times([partial(_pair, source, before, a, w, gamma, outs) for a, w in sets]),
            "read of the weights": graph_times([partial(_read, w, flag) for w in weights]),
        }
        for name, function in contenders.items():
            times[name] = graph_times([partial(function, a, w, gamma, 1e-6) for a, w in sets])
        yield {
            "op": "gemv_and_partial_norm",
            "shape": [m, n, k],
            "normed": width,
            "dtype": "bfloat16",
            "bytes": (n * k + m * k + m * n + width) * 2,
            "sets": SETS,
            "us": times,
        }


def _ours(act: Tensor, weight: Tensor, gamma: Tensor, outs: list[Tensor]) -> object:
    return onepass.gemv_and_partial_norm(act, weight, gamma, out=outs)


def _pair(source: Tensor, before: Tensor, act: Tensor, weight: Tensor, gamma: Tensor, outs: list[Tensor]) -> object:
    """What decode runs: a norm that writes act, then the GEMV."""
    onepass.rms_norm(source, before, out=act)
    return onepass.gemv_and_partial_norm(act, weight, gamma, out=outs)


def _read(weight: Tensor, flag: Tensor) -> object:
    words = weight.view(torch.int32)
    return _read_kernel[(triton.cdiv(words.numel(), 8192),)](
        words, flag, words.numel(), 8192, num_warps=8, launch_pdl=True
    )
