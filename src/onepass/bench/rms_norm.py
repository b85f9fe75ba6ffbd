"""rms_norm and rms_norm_fused_fp8, of bfloat16 rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import onepass

from ..contract.declaration import moved_bytes
from ..formats import E4M3FN
from .workload import Call, Family, Problem, Stream, Workload

EPS, GROUP = 1e-6, 128
_MODEL = tuple((m, 7168) for m in (1, 32, 128, 1024, 4096, 16384))
SHAPES = {
    ("rms_norm_fused_fp8", "cuda"): (*_MODEL, (128, 4096), (16384, 4096), (1024, 8192), (8192, 16384), (2048, 40960)),
    ("rms_norm", "cuda"): (*_MODEL, (16384, 4096), (8192, 16384), (262144, 128)),
    ("rms_norm_fused_fp8", "cpu"): (*((m, 4096) for m in (1, 16, 256, 4096)), (4096, 7168)),
    ("rms_norm", "cpu"): (*((m, 4096) for m in (1, 16, 256, 4096)), (4096, 7168)),
}

WITH_MORE = ((1, 7168), (4096, 7168))
MORE = {"rms_norm": "residual", "rms_norm_fused_fp8": f"groups of {GROUP}"}
STREAMS: dict[str, Stream] = {"rms_norm": "copy", "rms_norm_fused_fp8": "halve"}


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


def added(x: Tensor, gamma: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.rms_norm` of ``x + residual``."""
    h = x.float() + residual.float()
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * gamma.float()
    return y.to(x.dtype), h.to(x.dtype)


def grouped(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`onepass.rms_norm_fused_fp8` with a scale for each GROUP columns."""
    h = x.float()
    y = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * gamma.float()).unflatten(-1, (-1, GROUP))
    scale = y.abs().amax(-1, keepdim=True) / E4M3FN.max
    return (y / scale).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype).flatten(-2), scale.squeeze(-1)


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


def problem_with(op: str, m: int, n: int, device: str) -> Problem:
    """The same with a residual, or with a scale a group; under a name of its own, since not every peer does that."""
    x, gamma = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, n), (n,)))
    if op == "rms_norm":
        residual, out, new = (torch.randn_like(x) for _ in range(3))
        sums = partial(onepass.rms_norm, x, gamma, EPS, residual=residual, out=out, residual_out=new)
        return Problem(f"{op}, {MORE[op]}", {"onepass": sums}, added, (x, gamma, EPS, residual))
    codes, scale = torch.empty_like(x, dtype=E4M3FN.dtype), torch.empty(m, n // GROUP, device=device)
    ours = partial(onepass.rms_norm_fused_fp8, x, gamma, EPS, group_size=GROUP, out=codes, scale_output=scale)
    return Problem(f"{op}, {MORE[op]}", {"onepass": ours}, grouped, (x, gamma, EPS))


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[M, N]; at two of them also with a residual, or with a scale a group."""
    if len(shape) != 2:
        return []
    m, n = shape
    x, gamma = (torch.empty(*size, device="meta", dtype=torch.bfloat16) for size in ((m, n), (n,)))
    results = (x,) if op == "rms_norm" else onepass.rms_norm_fused_fp8(x, gamma)
    moved, stream = moved_bytes([x, gamma, *results]), STREAMS[op]
    found = [Workload(op, shape, moved, partial(problem, op, m, n), stream)]
    if shape in WITH_MORE:
        more = (x, x, x) if op == "rms_norm" else onepass.rms_norm_fused_fp8(x, gamma, group_size=GROUP)
        make = partial(problem_with, op, m, n)
        found.append(Workload(op, shape, moved_bytes([x, gamma, *more]), make, stream, {"with": MORE[op]}))
    return found


FAMILY = Family("rows", ("rms_norm_fused_fp8", "rms_norm"), SHAPES, workloads)
