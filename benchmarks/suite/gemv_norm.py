"""gemv_and_partial_norm of bfloat16 and fp8 weights, alone and after the norm that writes its input, as in a decode step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import onepass

from .linear import BLOCKS, ROWS, dequantized, random_weight, weight_bytes
from .workload import EPS, Call, Family, Problem, Workload, randoms

OP, FP8 = "gemv_and_partial_norm", "gemv_and_partial_norm, fp8"
SEPARATE = "linear, then rms_norm"
"""The op's own work as two launches of ours."""
_MODEL = tuple((m, 2112, 7168, 1536) for m in (1, 2, 4, 8, 16))
_OTHERS = ((1, 2112, 5120, 1536), (1, 2624, 6144, 2048), (1, 576, 2048, 512), (1, 4096, 4096, 1024))
_WIDE = ((1, 4096, 4096, 4096), (16, 4096, 4096, 4096), (1, 6144, 4096, 4096), (16, 6144, 4096, 4096))
SHAPES = {
    (OP, "cuda"): (*_MODEL, *_OTHERS, *_WIDE),
    (FP8, "cuda"): _MODEL[::2],
    (OP, "cpu"): _MODEL[::2],
    (FP8, "cpu"): _MODEL[:1],
}
"""M, N, K and the number of normed columns."""


def composed(act: Tensor, weight: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op as a user would write it in torch: a matmul and a norm of its first columns."""
    y = torch.nn.functional.linear(act, weight)
    width = gamma.shape[0]
    return torch.nn.functional.rms_norm(y[:, :width], (width,), gamma, eps), y[:, width:]


def composed_fp8(act: Tensor, weight: Tensor, gamma: Tensor, eps: float, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same with an fp8 weight."""
    return composed(act, dequantized(weight, scale), gamma, eps)


def problem(m: int, n: int, k: int, width: int, device: str, kind: str = "") -> Problem:
    """Random inputs, and our calls with outputs allocated beforehand. ``kind`` is empty for bfloat16 weights."""
    weight, scale = random_weight(n, k, kind, device)
    act, gamma, before, source = randoms(device, (m, k), (width,), (k,), (m, k))
    outs = [torch.empty(m, w, device=device, dtype=torch.bfloat16) for w in (width, n - width)]
    whole = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    ours = partial(onepass.gemv_and_partial_norm, act, weight, gamma, EPS, weight_scale=scale, out=outs)

    def pair() -> object:
        onepass.rms_norm(source, before, EPS, out=act)
        return ours()

    def separate() -> object:
        onepass.linear(act, weight, weight_scale=scale, static_weight=True, out=whole)
        return onepass.rms_norm(whole[:, :width], gamma, EPS, out=outs[0]), whole[:, width:]

    calls: dict[str, Call] = {"onepass": ours, "norm, then onepass": pair, SEPARATE: separate}
    if scale is None:
        return Problem(OP, calls, composed, (act, weight, gamma, EPS))
    return Problem(FP8, calls, composed_fp8, (act, weight, gamma, EPS, scale))


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[M, N, K] with all columns normed, or [M, N, K, normed]."""
    if len(shape) not in (3, 4) or shape[0] > 16:
        return []
    m, n, k, width = (*shape, shape[1])[:4]
    if width > n:
        return []
    return [_workload(op, m, n, k, width, kind) for kind in ((ROWS, BLOCKS) if op == FP8 else ("",))]


def _workload(op: str, m: int, n: int, k: int, width: int, kind: str) -> Workload:
    moved = weight_bytes(n, k, kind) + (m * k + m * n + width) * 2
    make = partial(problem, m, n, k, width, kind=kind)
    details = {"normed": width} | ({"with": kind} if kind else {})
    return Workload(op, (m, n, k), moved, make, "read", details, (OP,), cold=True)


FAMILY = Family("gemv", (OP, FP8), SHAPES, workloads, "MxNxK or MxNxKxNORMED, M up to 16")
