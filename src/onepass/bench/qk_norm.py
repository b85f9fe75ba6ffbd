"""The QK-RMSNorm ops, of bfloat16 rows and float32 weights, as the models have them; the fused call beside its two halves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import onepass

from ..contract.declaration import moved_bytes
from .workload import Call, Family, Problem, Workload

EPS = 1e-6
SUMS, MEANS, APPLY, FUSED = "row_sum_of_squares_qk", "row_mean_of_squares_qk", "apply_qk_rms_norm", "qk_rms_norm"
_MODEL = tuple((m, 6144, 1024) for m in (1, 16, 256, 4096))
_FEW = tuple((m, 6144, 1024) for m in (1, 64, 1024))
SHAPES = {
    (SUMS, "cuda"): _MODEL[1::2],
    (MEANS, "cuda"): _MODEL,
    (APPLY, "cuda"): (*_MODEL, (16384, 1536, 256)),
    (FUSED, "cuda"): (*_MODEL, (16384, 1536, 256), (4096, 4096, 4096)),
    (SUMS, "cpu"): _FEW[1:],
    (MEANS, "cpu"): _FEW,
    (APPLY, "cpu"): _FEW,
    (FUSED, "cpu"): _FEW,
}
"""M and the columns of q and of k: MiniMax-M2, one of its four ranks, and heads in equal numbers."""


def sums(q: Tensor, k: Tensor) -> Tensor:
    """`onepass.row_sum_of_squares_qk` as a user would write it in torch."""
    return torch.stack([t.float().square().sum(-1) for t in (q, k)], -1)


def means(q: Tensor, k: Tensor) -> Tensor:
    """`onepass.row_mean_of_squares_qk`, likewise."""
    return torch.stack([t.float().square().mean(-1) for t in (q, k)], -1)


def applied(q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.apply_qk_rms_norm`, likewise."""
    normed_q = (q.float() * torch.rsqrt(var[..., :1] + EPS) * gamma_q).to(q.dtype)
    normed_k = (k.float() * torch.rsqrt(var[..., 1:] + EPS) * gamma_k).to(k.dtype)
    return normed_q, normed_k


def fused(q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.qk_rms_norm`, likewise."""
    return applied(q, k, gamma_q, gamma_k, means(q, k))


COMPOSED: dict[str, Callable[..., object]] = {SUMS: sums, MEANS: means, APPLY: applied, FUSED: fused}


def problem(op: str, m: int, nq: int, nk: int, device: str) -> Problem:
    """Random inputs, and our calls into tensors made beforehand."""
    q, k = (torch.randn(m, n, device=device, dtype=torch.bfloat16) for n in (nq, nk))
    if op in (SUMS, MEANS):
        function, out = getattr(onepass, op), torch.empty(m, 2, device=device)
        return Problem(op, {"onepass": partial(function, q, k, out)}, COMPOSED[op], (q, k))
    gamma_q, gamma_k = (torch.randn(n, device=device) for n in (nq, nk))
    var = torch.rand(m, 2, device=device) + 0.5
    outs = torch.empty_like(q), torch.empty_like(k)

    def application() -> tuple[Tensor, Tensor]:
        onepass.apply_qk_rms_norm(*outs, gamma_q, gamma_k, var, q, k, EPS)
        return outs

    def halves() -> tuple[Tensor, Tensor]:
        onepass.row_mean_of_squares_qk(q, k, var)
        return application()

    if op == APPLY:
        return Problem(op, {"onepass": application}, applied, (q, k, gamma_q, gamma_k, var))
    whole: Call = partial(onepass.qk_rms_norm, q, k, gamma_q, gamma_k, EPS, out=outs)
    ours = {"onepass": whole, "statistics, then application": halves}
    return Problem(op, ours, fused, (q, k, gamma_q, gamma_k))


def moved(op: str, m: int, nq: int, nk: int) -> int:
    """Bytes an ideal kernel moves."""
    q, k, var = (torch.empty(m, n, device="meta", dtype=torch.bfloat16) for n in (nq, nk, 4))
    gammas = torch.empty(nq + nk, device="meta")
    if op in (SUMS, MEANS):
        return moved_bytes([q, k, var])
    return moved_bytes([q, k, gammas, q, k, var if op == APPLY else None])


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[M, Nq, Nk]."""
    if len(shape) != 3:
        return []
    m, nq, nk = shape
    make = partial(problem, op, m, nq, nk)
    return [Workload(op, shape, moved(op, m, nq, nk), make, "read" if op in (SUMS, MEANS) else "copy")]


FAMILY = Family("qk", (SUMS, MEANS, APPLY, FUSED), SHAPES, workloads)
