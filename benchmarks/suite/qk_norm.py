"""The QK-norm ops of bfloat16 rows and float32 weights; the fused call is also compared with its two halves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import onepass

from .workload import EPS, Family, Problem, Stream, Workload, metas, moved_bytes, randoms

SUMS, MEANS, APPLY, FUSED = "row_sum_of_squares_qk", "row_mean_of_squares_qk", "apply_qk_rms_norm", "qk_rms_norm"
STATISTICS = (SUMS, MEANS)
HALVES, SEPARATE = "statistics, then application", "rms_norm of q, then of k"
"""`qk_rms_norm` as two launches of ours."""
_MODEL = tuple((m, 6144, 1024) for m in (1, 16, 256, 4096))
_FEW = tuple((m, 6144, 1024) for m in (1, 64, 1024))
SHAPES = {
    (SUMS, "cuda"): _MODEL[1::2],
    (MEANS, "cuda"): _MODEL,
    (APPLY, "cuda"): (*_MODEL, (16384, 1536, 256)),
    (FUSED, "cuda"): (*_MODEL, (16384, 1536, 256), (4096, 4096, 4096)),
    (SUMS, "cpu"): _FEW[1:],
    **dict.fromkeys(((MEANS, "cpu"), (APPLY, "cpu"), (FUSED, "cpu")), _FEW),
}
"""M and the columns of q and k: MiniMax-M2, one of its four ranks, and equally many heads."""


def sums(q: Tensor, k: Tensor) -> Tensor:
    """`onepass.row_sum_of_squares_qk` in torch."""
    return torch.stack([t.float().square().sum(-1) for t in (q, k)], -1)


def means(q: Tensor, k: Tensor) -> Tensor:
    """`onepass.row_mean_of_squares_qk` in torch."""
    return torch.stack([t.float().square().mean(-1) for t in (q, k)], -1)


def applied(q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.apply_qk_rms_norm` in torch."""
    normed_q = (q.float() * torch.rsqrt(var[..., :1] + EPS) * gamma_q).to(q.dtype)
    normed_k = (k.float() * torch.rsqrt(var[..., 1:] + EPS) * gamma_k).to(k.dtype)
    return normed_q, normed_k


def fused(q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.qk_rms_norm` in torch."""
    return applied(q, k, gamma_q, gamma_k, means(q, k))


COMPOSED: dict[str, Callable[..., object]] = {SUMS: sums, MEANS: means, APPLY: applied, FUSED: fused}


def problem(op: str, m: int, nq: int, nk: int, device: str) -> Problem:
    """Random inputs, and our calls with outputs allocated beforehand."""
    q, k = randoms(device, (m, nq), (m, nk))
    if op in STATISTICS:
        statistics = partial(getattr(onepass, op), q, k, torch.empty(m, 2, device=device))
        return Problem(op, {"onepass": statistics}, COMPOSED[op], (q, k))
    gammas = torch.randn(nq, device=device), torch.randn(nk, device=device)
    var = torch.rand(m, 2, device=device) + 0.5
    outs = torch.empty_like(q), torch.empty_like(k)

    def application() -> tuple[Tensor, Tensor]:
        onepass.apply_qk_rms_norm(*outs, *gammas, var, q, k, EPS)
        return outs

    def halves() -> tuple[Tensor, Tensor]:
        onepass.row_mean_of_squares_qk(q, k, var)
        return application()

    def separate() -> tuple[object, object]:
        return onepass.rms_norm(q, gammas[0], EPS, out=outs[0]), onepass.rms_norm(k, gammas[1], EPS, out=outs[1])

    if op == APPLY:
        return Problem(op, {"onepass": application}, applied, (q, k, *gammas, var))
    whole = partial(onepass.qk_rms_norm, q, k, *gammas, EPS, out=outs)
    return Problem(op, {"onepass": whole, HALVES: halves, SEPARATE: separate}, fused, (q, k, *gammas))


def moved(op: str, m: int, nq: int, nk: int) -> int:
    """Bytes that an ideal kernel moves; ``var`` is two float32 values per row."""
    q, k, var = metas((m, nq), (m, nk), (m, 4))
    if op in STATISTICS:
        return moved_bytes([q, k, var])
    return moved_bytes([q, k, torch.empty(nq + nk, device="meta"), q, k, var if op == APPLY else None])


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[M, Nq, Nk]."""
    if len(shape) != 3:
        return []
    stream: Stream = "read" if op in STATISTICS else "copy"
    return [Workload(op, shape, moved(op, *shape), partial(problem, op, *shape), stream)]


FAMILY = Family("qk", (SUMS, MEANS, APPLY, FUSED), SHAPES, workloads, "MxNqxNk")
