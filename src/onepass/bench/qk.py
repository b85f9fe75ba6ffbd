"""The QK-RMSNorm ops on a GPU beside torch eager and torch.compile; the fused call beside its two halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass

from ..contract import moved_bytes
from .gpu import COLD_BYTES
from .timing import graph_times

SHAPES = {
    "row_mean_of_squares_qk": ((16, 6144, 1024), (4096, 6144, 1024)),
    "apply_qk_rms_norm": ((16, 6144, 1024), (4096, 6144, 1024), (16384, 1536, 256)),
    "qk_rms_norm": ((1, 6144, 1024), (16, 6144, 1024), (4096, 6144, 1024), (16384, 1536, 256), (4096, 4096, 4096)),
}
EPS = 1e-6
Call = Callable[[], object]


class Problem(NamedTuple):
    """One set of inputs: bfloat16 rows, float32 weights, as the models have them; ``var`` where statistics are given."""

    q: Tensor
    k: Tensor
    gamma_q: Tensor
    gamma_k: Tensor
    var: Tensor


def means(p: Problem) -> Tensor:
    """`onepass.row_mean_of_squares_qk` as a user would write it in torch."""
    return torch.stack([t.float().square().mean(-1) for t in (p.q, p.k)], -1)


def applied(p: Problem, var: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.apply_qk_rms_norm` as a user would write it in torch."""
    q = (p.q.float() * torch.rsqrt(var[..., :1] + EPS) * p.gamma_q).to(p.q.dtype)
    k = (p.k.float() * torch.rsqrt(var[..., 1:] + EPS) * p.gamma_k).to(p.k.dtype)
    return q, k


COMPOSED: dict[str, Callable[[Problem], object]] = {
    "row_mean_of_squares_qk": means,
    "apply_qk_rms_norm": lambda p: applied(p, p.var),
    "qk_rms_norm": lambda p: applied(p, means(p)),
}


def ours(op: str, p: Problem) -> dict[str, Call]:
    """Our calls into tensors made beforehand: the op and, beside the fused one, its two halves."""
    var, out = torch.empty_like(p.var), (torch.empty_like(p.q), torch.empty_like(p.k))
    if op == "row_mean_of_squares_qk":
        return {"onepass": lambda: onepass.row_mean_of_squares_qk(p.q, p.k, var)}

    def second_half(given: Tensor) -> tuple[Tensor, Tensor]:
        onepass.apply_qk_rms_norm(*out, p.gamma_q, p.gamma_k, given, p.q, p.k, EPS)
        return out

    def halves() -> tuple[Tensor, Tensor]:
        onepass.row_mean_of_squares_qk(p.q, p.k, var)
        return second_half(var)

    if op == "apply_qk_rms_norm":
        return {"onepass": lambda: second_half(p.var)}
    return {
        "onepass": lambda: onepass.qk_rms_norm(p.q, p.k, p.gamma_q, p.gamma_k, EPS, out=out),
        "statistics, then application": halves,
    }


def problem(m: int, nq: int, nk: int, device: str = "cuda") -> Problem:
    """Random inputs."""
    q, k = (torch.randn(m, n, device=device, dtype=torch.bfloat16) for n in (nq, nk))
    gamma_q, gamma_k = (torch.randn(n, device=device) for n in (nq, nk))
    return Problem(q, k, gamma_q, gamma_k, torch.rand(m, 2, device=device) + 0.5)


def moved(op: str, p: Problem) -> int:
    """Bytes an ideal kernel moves."""
    if op == "row_mean_of_squares_qk":
        return moved_bytes([p.q, p.k, p.var])
    given = p.var if op == "apply_qk_rms_norm" else None
    return moved_bytes([p.q, p.k, p.gamma_q, p.gamma_k, given, p.q, p.k])


def rows(peers: bool = True) -> Iterator[dict[str, Any]]:
    """One result a shape [M, Nq, Nk]: bytes moved, times (two medians each) of onepass and of every peer."""
    torch._dynamo.config.recompile_limit = 64
    for op, shapes in SHAPES.items():
        contenders: dict[str, Callable[[Problem], object]] = {}
        if peers:
            contenders["torch eager"] = COMPOSED[op]
            for name, mode in (("torch.compile", "default"), ("torch.compile max", "max-autotune-no-cudagraphs")):
                contenders[name] = torch.compile(COMPOSED[op], mode=mode, dynamic=False, fullgraph=True)
        for shape in shapes:
            size = moved(op, problem(*shape, device="meta"))
            problems = [problem(*shape) for _ in range(max(2, min(32, -(-COLD_BYTES // size))))]
            calls = [ours(op, p) for p in problems]
            times = {name: graph_times([c[name] for c in calls]) for name in calls[0]}
            for name, function in contenders.items():
                times[name] = graph_times([_bound(function, p) for p in problems])
            yield {
                "op": op,
                "shape": list(shape),
                "dtype": "bfloat16",
                "bytes": size,
                "sets": len(problems),
                "us": times,
            }


def _bound(function: Callable[[Problem], object], p: Problem) -> Call:
    return lambda: function(p)
