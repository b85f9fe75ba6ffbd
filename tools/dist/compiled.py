"""The sharded norms inside torch.compile and CUDA graphs: one graph, no exchange while it runs, the eager bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from onepass import dist
from onepass.testing.tensors import same_bytes
from tools.dist.cases import EPS, Check, problem
from tools.dist.ranks import Place


def _check(place: Place, backend: str, step: Callable[..., tuple[Tensor, ...]], dynamic: bool | None) -> str | None:
    """The compiled step gives the eager one's bytes, for several numbers of rows."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (3, 8, 5):
        p = problem(place, (rows,), [96] * place.size, [64] * place.size, torch.bfloat16)
        expected = step(*p.local)
        if not all(map(same_bytes, compiled(*p.local), expected)):
            return f"{backend}, {rows} rows: compiled differs from eager"
    return None


def whole_graph(place: Place) -> str | None:
    """``fullgraph=True`` with a plan, with a group that has one, with counts, gathering, in two halves, of one tensor."""
    world: Any = c10d.group.WORLD
    made = dist.plan(world, 96, 64)
    dist.plan(world, 96)

    def planned(q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor) -> tuple[Tensor, ...]:
        pending = dist.start_qk_stats(q, k, plan=made, reproducible=True)
        between = q * 2
        halves = dist.finish_qk_rms_norm(pending, gamma_q, gamma_k, EPS)
        return *dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, plan=made, weight_offset=1.0), between, *halves

    def grouped(q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor) -> tuple[Tensor, ...]:
        q, k = q + 1, k + 1
        counts = (96 * place.size, 64 * place.size)
        by_group = dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, group=world)
        dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, group=world, counts=counts, out=(q, k))
        return *by_group, q, k, dist.rms_norm(q, gamma_q, EPS, group=world)

    for backend, step, dynamic in (
        ("inductor", planned, True),
        ("aot_eager", planned, None),
        ("aot_eager", grouped, None),
    ):
        wrong = _check(place, backend, step, dynamic)
        if wrong:
            return f"{step.__name__}: {wrong}"
    return None


def whole_graph_of_replicas(place: Place) -> str | None:
    """Ranks with copies of k compile other graphs than the first of them, and still match its collectives."""
    made = dist.plan(c10d.group.WORLD, 96, 64, kv_replicas=place.size)  # type: ignore[arg-type]

    def step(q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor) -> tuple[Tensor, ...]:
        return dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, plan=made)

    return _check(place, "aot_eager", step, None)


def cuda_graph(place: Place) -> str | None:
    """Captured and replayed on new values. Gloo cannot be captured, so this needs NCCL or a single rank."""
    p = problem(place, (16,), [96] * place.size, [64] * place.size, torch.bfloat16)
    q, k, gamma_q, gamma_k = (t.contiguous() for t in p.local)
    made = dist.plan(c10d.group.WORLD, 96, 64, counts=p.counts)  # type: ignore[arg-type]

    def call() -> tuple[Tensor, Tensor]:
        return dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, plan=made)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for _ in range(3):
        q.mul_(1.5)
        k.mul_(0.5)
        graph.replay()
        if not all(map(same_bytes, results, call())):
            return "a replay differs from an eager call"
    return None


COMPILED: dict[str, Check] = {check.__name__: check for check in (whole_graph, whole_graph_of_replicas)}
CAPTURED: dict[str, Check] = {"cuda_graph": cuda_graph}
