"""What a call costs the host: an eager call at M = 1 in every form that engines use, next to torch's own ops in the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import onepass
from onepass.core import backend as dispatch
from onepass.engines import vllm
from onepass.nn import RMSNorm

from . import gemv_norm, linear, mla_cache, qk_cache, qk_norm
from . import rms_norm as rows
from .timing import alternate
from .workload import Call

TORCH = ("torch.empty_like", "x.view(1, 1, n)", "wide[:1, :n]", "x.add(1)", "F.rms_norm")
"""Torch's own: an allocation, the two kinds of views that calls below make anew, a small op and torch's norm."""
ROUNDS, INNER = 60, 50
"""Rounds in which each contender makes INNER calls. The fastest of each half counts: it is what the code costs."""


def forms(device: str, n: int) -> dict[str, Call]:
    """The forms of a norm of one row of ``n`` columns. The weights are 1, so that rows that replace themselves stay finite."""
    x, h, out = (torch.randn(1, n, device=device).bfloat16() for _ in range(3))
    wide = torch.randn(2, 2 * n, device=device).bfloat16()
    strided = wide[:1, :n]
    gamma = torch.ones(n, device=device, dtype=torch.bfloat16)
    codes, scale = onepass.rms_norm_fused_fp8(x, gamma)
    module = RMSNorm(n, 1e-6, device=device, dtype=torch.bfloat16).requires_grad_(False)
    norm, fp8 = onepass.rms_norm, onepass.rms_norm_fused_fp8
    return {
        "rms_norm, out=": lambda: norm(x, gamma, out=out),
        "rms_norm, in place": lambda: norm(out, gamma, out=out),
        "rms_norm, residual": lambda: norm(x, gamma, residual=h),
        "rms_norm, residual in place": lambda: norm(out, gamma, residual=h, out=out, residual_out=h),
        "rms_norm, strided rows": lambda: norm(strided, gamma),
        "rms_norm, new views": lambda: norm(x.view(1, 1, n), gamma),
        "rms_norm, new slices": lambda: norm(wide[:1, :n], gamma),
        "rms_norm_fused_fp8, out=": lambda: fp8(x, gamma, out=codes, scale_output=scale),
        "rms_norm_fused_fp8, residual in place": lambda: fp8(
            x, gamma, residual=h, out=codes, scale_output=scale, residual_out=h
        ),
        "engines.vllm.rms_norm": lambda: vllm.rms_norm(out, x, gamma, 1e-6),
        "engines.vllm.fused_add_rms_norm": lambda: vllm.fused_add_rms_norm(out, h, gamma, 1e-6),
        "nn.RMSNorm": lambda: module(x),
        "nn.RMSNorm, residual": lambda: module(x, h),
    }


def unproven(x: Tensor, gamma: Tensor) -> dict[str, Call]:
    """Calls of kernels that have not run on a GPU yet."""
    return {
        rows.SANDWICH: lambda: onepass.rms_norm_add_rms_norm(x, gamma, gamma, residual=x),
        f"{rows.SANDWICH}_quant": lambda: onepass.rms_norm_add_rms_norm_quant(
            x, gamma, gamma, residual=x, format="nvfp4"
        ),
        rows.QUANTIZE: lambda: onepass.quantize(x, format="nvfp4"),
    }


def contenders(device: str) -> dict[str, Call]:
    """Torch's own ops first. Sizes are small because on a CPU the kernel is part of the call."""
    x, gamma, eps = rows.problem("rms_norm", 1, 4096, device).arguments
    q, k, gamma_q, gamma_k, var = qk_norm.problem(qk_norm.APPLY, 1, 1024, 256, device).arguments
    act, weight, width, _ = gemv_norm.problem(1, 64, 256, 64, device).arguments
    p = mla_cache.problem(1, 16, mla_cache.CACHES["fp8"], mla_cache.angles(device), device)
    outs = torch.empty_like(q), torch.empty_like(k)
    cached = qk_cache.problem(1, 8, 2, 64, qk_cache.CACHES["bf16"], device)
    turn = onepass.Rope(cached.freqs, cached.positions)  # the same for all layers of a step
    wide = torch.randn(2, 8192, device=device).bfloat16()
    return {
        "torch.empty_like": lambda: torch.empty_like(x),
        "x.view(1, 1, n)": lambda: x.view(1, 1, 4096),
        "wide[:1, :n]": lambda: wide[:1, :4096],
        "x.add(1)": lambda: x.add(1),
        "F.rms_norm": lambda: torch.nn.functional.rms_norm(x, (4096,), gamma, eps),
        "rms_norm": lambda: onepass.rms_norm(x, gamma),
        "layer_norm": lambda: onepass.layer_norm(x, gamma),
        "rms_norm_fused_fp8": lambda: onepass.rms_norm_fused_fp8(x, gamma),
        **forms(device, 4096),
        **{f"{name}, 64 columns": call for name, call in forms(device, 64).items() if name.startswith("rms_norm, ")},
        "rms_norm_fused_quant": lambda: onepass.rms_norm_fused_quant(x, gamma, format="nvfp4"),
        **(unproven(x, gamma) if device == "cpu" else {}),
        linear.OP: lambda: onepass.linear(act, weight),
        gemv_norm.OP: lambda: onepass.gemv_and_partial_norm(act, weight, width),
        qk_norm.MEANS: lambda: onepass.row_mean_of_squares_qk(q, k),
        qk_norm.APPLY: lambda: onepass.apply_qk_rms_norm(*outs, gamma_q, gamma_k, var, q, k, 1e-6),
        qk_norm.FUSED: lambda: onepass.qk_rms_norm(q, k, gamma_q, gamma_k),
        mla_cache.OP: lambda: onepass.fused_rope_rmsnorm_quantization(
            None, p.q, p.kv, p.offsets, p.freqs, p.gamma, p.cache
        ),
        qk_cache.OP: lambda: onepass.qk_norm_rope_cache(
            cached.q,
            cached.k,
            cached.v,
            cached.k_cache,
            cached.v_cache,
            gamma_q=cached.gamma_q,
            gamma_k=cached.gamma_k,
            rope=turn,
            slots=cached.slots,
        ),
    }


@torch.inference_mode()
def times(device: str, skip: Callable[[str], bool] = lambda op: False) -> dict[str, list[float]]:
    """Microseconds per call, overlapping with the GPU's work; on a CPU also without kernels (validation, allocation, dispatch).

    On a GPU, repeated calls skip validation, so these parts cannot be separated.
    """
    calls = {name: call for name, call in contenders(device).items() if not skip(name)}
    found = _times(calls, device)
    if device == "cuda":
        return found
    ours = {name: call for name, call in calls.items() if name not in TORCH}
    with dispatch.launching_with(lambda family: lambda *_: None):
        bare = _times(ours, device)
    return found | {f"{name}, no kernel": us for name, us in bare.items()}


def _times(calls: dict[str, Call], device: str) -> dict[str, list[float]]:
    for call in calls.values():
        for _ in range(3):
            call()
    wait = torch.cuda.synchronize if device == "cuda" else None
    return alternate({name: [call] for name, call in calls.items()}, ROUNDS // 2, INNER, min, wait)
