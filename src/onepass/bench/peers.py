"""What other code takes for the same work. A peer is one small function from a problem to a call; add one here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import E4M3FN


@dataclass(frozen=True)
class Problem:
    """One set of inputs of a row op: ``fp8`` asks for codes and row scales, otherwise the norm is stored."""

    x: Tensor
    gamma: Tensor
    eps: float
    fp8: bool


Result = Tensor | tuple[Tensor, Tensor]


def composed(x: Tensor, gamma: Tensor, eps: float, fp8: bool) -> Result:
    """The op as a user would write it in torch."""
    h = x.float()
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * gamma.float()
    if not fp8:
        return y.to(x.dtype)
    scale = y.abs().amax(-1, keepdim=True) / E4M3FN.max
    return (y / scale).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype), scale


def eager(problem: Problem) -> Callable[[], Result] | None:
    """torch eager."""
    return lambda: composed(problem.x, problem.gamma, problem.eps, problem.fp8)


def f_rms_norm(problem: Problem) -> Callable[[], Result] | None:
    """torch.nn.functional.rms_norm (no fp8)."""
    if problem.fp8:
        return None
    return lambda: torch.nn.functional.rms_norm(problem.x, problem.gamma.shape, problem.gamma, problem.eps)


_compiled: dict[str, Callable[..., Result]] = {}


def _compile(mode: str, problem: Problem) -> Callable[[], Result]:
    if mode not in _compiled:
        torch._dynamo.config.recompile_limit = 64
        _compiled[mode] = torch.compile(composed, mode=mode, dynamic=False, fullgraph=True)
    function = _compiled[mode]
    return lambda: function(problem.x, problem.gamma, problem.eps, problem.fp8)


def compiled(problem: Problem) -> Callable[[], Result] | None:
    """torch.compile, default mode."""
    return _compile("default", problem)


def compiled_max(problem: Problem) -> Callable[[], Result] | None:
    """torch.compile, max-autotune without its own CUDA graphs."""
    return _compile("max-autotune-no-cudagraphs", problem) if problem.x.is_cuda else None


PEERS: dict[str, Callable[[Problem], Callable[[], Result] | None]] = {
    "torch eager": eager,
    "F.rms_norm": f_rms_norm,
    "torch.compile": compiled,
    "torch.compile max": compiled_max,
}
