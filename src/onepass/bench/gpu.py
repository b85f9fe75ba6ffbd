"""The row ops on a GPU beside their peers and the copy ceiling, all in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

import onepass

from ..contract import moved_bytes
from .peers import PEERS, Problem
from .timing import graph_times, host_time

SHAPES = {
    "rms_norm_fused_fp8": (
        (1, 7168), (32, 7168), (128, 4096), (1024, 8192), (4096, 7168), (16384, 7168), (16384, 4096), (8192, 16384), (2048, 40960)
    ),
    "rms_norm": ((1, 7168), (1024, 7168), (4096, 7168), (16384, 4096), (8192, 16384), (262144, 128)),
}  # fmt: skip
COLD_BYTES = 300_000_000
"""Inputs rotate through at least this much memory where 32 sets suffice; the H200's L2 holds 60 MB."""


@triton.jit
def _copy_kernel(source, target, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < n), mask=place < n)


@triton.jit
def _read_kernel(source, target, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(source + place, mask=place < n, other=0), 0)
    if total == 123456789:
        tl.store(target, total)


@triton.jit
def _empty_kernel(target):
    tl.static_assert(True)


def _streaming(kernel: Any, source: torch.Tensor, target: torch.Tensor, block: int) -> Callable[[], object]:
    n = source.numel()
    return lambda: kernel[(triton.cdiv(n, block),)](source, target, n, block, num_warps=block // 512)


def ceilings() -> dict[str, float]:
    """Copy and read bandwidth (TB/s, best of several block sizes) and an empty kernel in a chain (us), here and now."""
    results: dict[str, float] = {}
    for label, size in (("copy 2 GiB", 1 << 30), ("copy 128 MiB", 64 << 20), ("read 1 GiB", 1 << 30)):
        reads = label.startswith("read")
        pair = [torch.randint(0, 100, (size // 4,), dtype=torch.int32, device="cuda") for _ in range(2)]
        times = []
        for block in (1024, 2048, 4096):
            kernel = _read_kernel if reads else _copy_kernel
            times += graph_times([_streaming(kernel, a, b, block) for a, b in (pair, pair[::-1])])
        results[f"{label} TB/s"] = size * (1 if reads else 2) / min(times) / 1e6
    flag = torch.zeros(1, device="cuda")
    results["empty kernel us"] = min(graph_times([lambda: _empty_kernel[(1,)](flag)]))
    return results


def _ours(problem: Problem) -> Callable[[], object]:
    x, gamma, eps = problem.x, problem.gamma, problem.eps
    if problem.fp8:
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scale = torch.empty(x.shape[0], 1, device=x.device)
        return lambda: onepass.rms_norm_fused_fp8(x, gamma, eps, out=out, scale_output=scale)
    out = torch.empty_like(x)
    return lambda: onepass.rms_norm(x, gamma, eps, out=out)


def rows(peers: bool = True) -> Iterator[dict[str, Any]]:
    """One result a shape: bytes moved, times (two medians each) of onepass and of every peer."""
    for op, shapes in SHAPES.items():
        fp8 = op == "rms_norm_fused_fp8"
        for m, n in shapes:
            gamma = torch.randn(n, device="cuda", dtype=torch.bfloat16)
            like = torch.empty(m, n, device="meta", dtype=torch.bfloat16)
            results = onepass.rms_norm_fused_fp8(like, gamma.to("meta")) if fp8 else (like,)
            moved = moved_bytes([like, gamma, *results])
            sets = max(2, min(32, -(-COLD_BYTES // moved)))
            problems = [
                Problem(torch.randn(m, n, device="cuda", dtype=torch.bfloat16), gamma, 1e-6, fp8) for _ in range(sets)
            ]
            times = {"onepass": graph_times([_ours(p) for p in problems])}
            for name, peer in PEERS.items() if peers else ():
                calls = [peer(p) for p in problems]
                if calls[0] is not None:
                    times[name] = graph_times([c for c in calls if c is not None])
            yield {"op": op, "shape": [m, n], "dtype": "bfloat16", "bytes": moved, "sets": sets, "us": times}


def host_rows() -> dict[str, float]:
    """Host microseconds of an eager call at 1 x 4096, beside torch's own ops."""
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    gamma = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "torch.empty_like": lambda: torch.empty_like(x),
        "x.add(1)": lambda: x.add(1),
        "F.rms_norm": lambda: torch.nn.functional.rms_norm(x, (4096,), gamma, 1e-6),
        "onepass.rms_norm": lambda: onepass.rms_norm(x, gamma),
        "onepass.rms_norm_fused_fp8": lambda: onepass.rms_norm_fused_fp8(x, gamma),
    }
    for call in calls.values():
        call()
    return {name: host_time(call) for name, call in calls.items()}
