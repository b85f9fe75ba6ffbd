"""What a call costs the host: time of an eager call at M = 1, outputs allocated, beside torch's own ops in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import onepass

from ..ops import dispatch
from . import gemv_norm, mla_cache
from . import qk_norm as qk
from . import rms_norm as rows
from .workload import Call

TORCH = ("torch.empty_like", "x.add(1)", "F.rms_norm")
ROUNDS, INNER = 60, 50
"""Rounds in which each contender takes its turn with INNER calls. Of each half of them the quickest counts: what the code costs,
not what the machine was doing."""


def contenders(device: str) -> dict[str, Call]:
    """Torch's own ops first. Sizes are small: on a CPU the kernel is part of the call."""
    x, gamma, eps = rows.problem("rms_norm", 1, 4096, device).arguments
    q, k, gamma_q, gamma_k, var = qk.problem(qk.APPLY, 1, 1024, 256, device).arguments
    act, weight, width, _ = gemv_norm.problem(1, 64, 256, 64, device).arguments
    p = mla_cache.problem(1, 16, mla_cache.CACHES["fp8"], mla_cache.angles(device), device)
    outs = torch.empty_like(q), torch.empty_like(k)
    return {
        "torch.empty_like": lambda: torch.empty_like(x),
        "x.add(1)": lambda: x.add(1),
        "F.rms_norm": lambda: torch.nn.functional.rms_norm(x, (4096,), gamma, eps),
        "rms_norm": lambda: onepass.rms_norm(x, gamma),
        "rms_norm_fused_fp8": lambda: onepass.rms_norm_fused_fp8(x, gamma),
        "gemv_and_partial_norm": lambda: onepass.gemv_and_partial_norm(act, weight, width),
        "row_mean_of_squares_qk": lambda: onepass.row_mean_of_squares_qk(q, k),
        "apply_qk_rms_norm": lambda: onepass.apply_qk_rms_norm(*outs, gamma_q, gamma_k, var, q, k, 1e-6),
        "qk_rms_norm": lambda: onepass.qk_rms_norm(q, k, gamma_q, gamma_k),
        "fused_rope_rmsnorm_quantization": lambda: onepass.fused_rope_rmsnorm_quantization(
            None, p.q, p.kv, p.offsets, p.freqs, p.gamma, p.cache
        ),
    }


def times(device: str, skip: Callable[[str], bool] = lambda op: False) -> dict[str, list[float]]:
    """Microseconds a call, the GPU's work overlapping; on a CPU also without kernels: checks, allocation, dispatch.

    On a GPU a call that is like an earlier one checks nothing, so there is nothing to tell apart.
    """
    calls = {name: call for name, call in contenders(device).items() if not skip(name)}
    found = _turns(calls, device)
    if device == "cuda":
        return found
    ours = {name: call for name, call in calls.items() if name not in TORCH}
    with dispatch.launching_with(lambda family: _nothing):
        bare = _turns(ours, device)
    return found | {f"{name}, no kernel": us for name, us in bare.items()}


def _turns(calls: dict[str, Call], device: str) -> dict[str, list[float]]:
    for call in calls.values():
        for _ in range(3):
            call()
    quickest: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2):
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS // 2):
            for name, call in calls.items():
                if device == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(INNER):
                    call()
                samples[name].append((time.perf_counter() - start) / INNER * 1e6)
        for name, found in samples.items():
            quickest[name].append(min(found))
    return quickest


def _nothing(*_: object) -> None:
    return None
