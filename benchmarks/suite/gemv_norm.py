"""gemv_and_partial_norm of bfloat16 weights, alone and after the norm that writes its input, as in a decode step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import onepass

from .workload import EPS, Call, Family, Problem, Workload, randoms

OP = "gemv_and_partial_norm"
SEPARATE = "linear, then rms_norm"
"""The op's own work as two launches of ours."""
_MODEL = tuple((m, 2112, 7168, 1536) for m in (1, 2, 4, 8, 16))
_OTHERS = ((1, 2112, 5120, 1536), (1, 2624, 6144, 2048), (1, 576, 2048, 512), (1, 4096, 4096, 1024))
_WIDE = ((1, 4096, 4096, 4096), (1, 6144, 4096, 4096), (16, 6144, 4096, 4096))
SHAPES = {(OP, "cuda"): (*_MODEL, *_OTHERS, *_WIDE), (OP, "cpu"): _MODEL[::2]}
"""M, N, K and the number of normed columns."""


def composed(act: Tensor, weight: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op as a user would write it in torch: a matmul and a norm of its first columns."""
    y = torch.nn.functional.linear(act, weight)
    width = gamma.shape[0]
    return torch.nn.functional.rms_norm(y[:, :width], (width,), gamma, eps), y[:, width:]


def problem(m: int, n: int, k: int, width: int, device: str) -> Problem:
    """Random inputs, and our calls with outputs allocated beforehand."""
    act, weight, gamma, before, source = randoms(device, (m, k), (n, k), (width,), (k,), (m, k))
    outs = [torch.empty(m, w, device=device, dtype=torch.bfloat16) for w in (width, n - width)]
    whole = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    ours = partial(onepass.gemv_and_partial_norm, act, weight, gamma, EPS, out=outs)

    def pair() -> object:
        onepass.rms_norm(source, before, EPS, out=act)
        return ours()

    def separate() -> object:
        onepass.linear(act, weight, static_weight=True, out=whole)
        return onepass.rms_norm(whole[:, :width], gamma, EPS, out=outs[0]), whole[:, width:]

    calls: dict[str, Call] = {"onepass": ours, "norm, then onepass": pair, SEPARATE: separate}
    return Problem(OP, calls, composed, (act, weight, gamma, EPS))


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[M, N, K] with all columns normed, or [M, N, K, normed]."""
    if len(shape) not in (3, 4) or shape[0] > 16:
        return []
    m, n, k, width = (*shape, shape[1])[:4]
    if width > n:
        return []
    moved = (n * k + m * k + m * n + width) * 2
    make = partial(problem, m, n, k, width)
    return [Workload(OP, (m, n, k), moved, make, "read", {"normed": width}, cold=True)]


FAMILY = Family("gemv", (OP,), SHAPES, workloads, "MxNxK or MxNxKxNORMED, M up to 16")
