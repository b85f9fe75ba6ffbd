"""rms_norm and rms_norm_fused_fp8, of bfloat16 rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import onepass

from ..contract import moved_bytes
from ..formats import E4M3FN
from .workload import Call, Family, Problem, Workload

EPS = 1e-6
_MODEL = tuple((m, 7168) for m in (1, 32, 128, 1024, 4096, 16384))
SHAPES = {
    ("rms_norm_fused_fp8", "cuda"): (*_MODEL, (128, 4096), (16384, 4096), (1024, 8192), (8192, 16384), (2048, 40960)),
    ("rms_norm", "cuda"): (*_MODEL, (16384, 4096), (8192, 16384), (262144, 128)),
    ("rms_norm_fused_fp8", "cpu"): (*((m, 4096) for m in (1, 16, 256, 4096)), (4096, 7168)),
    ("rms_norm", "cpu"): (*((m, 4096) for m in (1, 16, 256, 4096)), (4096, 7168)),
}


def norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """`onepass.rms_norm` as a user would write it in torch."""
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * gamma.float()).to(x.dtype)


def quantized(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`onepass.rms_norm_fused_fp8` as a user would write it in torch."""
    h = x.float()
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * gamma.float()
    scale = y.abs().amax(-1, keepdim=True) / E4M3FN.max
    return (y / scale).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype), scale


def problem(op: str, m: int, n: int, device: str) -> Problem:
    """Random inputs, and our call into tensors made beforehand."""
    x, gamma = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, n), (n,)))
    ours: Call
    if op == "rms_norm":
        ours = partial(onepass.rms_norm, x, gamma, EPS, out=torch.empty_like(x))
    else:
        out, scale = torch.empty_like(x, dtype=E4M3FN.dtype), torch.empty(m, 1, device=device)
        ours = partial(onepass.rms_norm_fused_fp8, x, gamma, EPS, out=out, scale_output=scale)
    return Problem(op, {"onepass": ours}, norm if op == "rms_norm" else quantized, (x, gamma, EPS))


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[M, N]."""
    if len(shape) != 2:
        return []
    m, n = shape
    x, gamma = (torch.empty(*size, device="meta", dtype=torch.bfloat16) for size in ((m, n), (n,)))
    results = (x,) if op == "rms_norm" else onepass.rms_norm_fused_fp8(x, gamma)
    moved = moved_bytes([x, gamma, *results])
    return [Workload(op, shape, moved, partial(problem, op, m, n), "copy" if op == "rms_norm" else "halve")]


FAMILY = Family("rows", ("rms_norm_fused_fp8", "rms_norm"), SHAPES, workloads)
