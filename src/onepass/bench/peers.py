"""What other code takes for the same work. A peer is one small function from a problem to a call; add one here.

It returns None for work it does not do. What it needs is imported inside; if that is not there, the peer is left out and
the report says so. A library's first result is compared with torch's before the library is timed. The order here is the
order of columns in tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import util
from typing import Any

import torch
from torch import Tensor

from .workload import Call, Problem

Make = Callable[[Problem], Call | None]


@dataclass(frozen=True)
class Peer:
    """A contender: its name, how to make its call, the module it needs and the device it is for."""

    name: str
    make: Make
    module: str | None = None
    device: str | None = None
    slow: bool = False
    """Measured after everybody else, because it takes long to get ready."""

    def why_not(self, device: str) -> str:
        """In a word, why it cannot take part; empty when it can."""
        if self.device not in (None, device):
            return f"for {self.device} only"
        return "not installed" if self.module and util.find_spec(self.module) is None else ""


PEERS: dict[str, Peer] = {}


def peer(name: str, module: str | None = None, device: str | None = None, slow: bool = False) -> Callable[[Make], Make]:
    """Register a function as a peer."""

    def add(make: Make) -> Make:
        PEERS[name] = Peer(name, make, module, device, slow)
        return make

    return add


def chosen(words: str) -> dict[str, Peer]:
    """The peers whose name is, or else contains, one of the comma-separated words; ``all`` and ``none`` are what they say.

    >>> list(chosen("compile,liger")), list(chosen("torch.compile"))
    (['torch.compile', 'torch.compile max', 'Liger-Kernel'], ['torch.compile'])
    """
    if words in ("all", "none"):
        return dict(PEERS) if words == "all" else {}
    found: dict[str, Peer] = {}
    for word in (word.strip() for word in words.split(",")):
        named = [word] if word in PEERS else [name for name in PEERS if word and word.lower() in name.lower()]
        matching = {name: PEERS[name] for name in named}
        if not matching:
            raise ValueError(f"no peer {word!r}; there are {', '.join(PEERS)}")
        found |= matching
    return {name: found[name] for name in PEERS if name in found}


# --- torch ----------------------------------------------------------------------------------------------------------


_compiled: dict[tuple[Any, str], Callable[..., object]] = {}


def _compile(p: Problem, mode: str) -> Call:
    if (p.composed, mode) not in _compiled:
        torch._dynamo.config.recompile_limit = 64
        _compiled[p.composed, mode] = torch.compile(p.composed, mode=mode, dynamic=False, fullgraph=True)
    function = _compiled[p.composed, mode]
    return lambda: function(*p.arguments)


@peer("torch.compile")
def compiled(p: Problem) -> Call | None:
    """The same function compiled in default mode, for its shape alone."""
    return _compile(p, "default")


@peer("torch.compile max", device="cuda", slow=True)
def compiled_max(p: Problem) -> Call | None:
    """With max-autotune, without CUDA graphs of its own: it is captured like everybody else."""
    from torch._inductor import select_algorithm

    select_algorithm.PRINT_AUTOTUNE = False
    return _compile(p, "max-autotune-no-cudagraphs")


# --- libraries ------------------------------------------------------------------------------------------------------


@peer("Liger-Kernel", "liger_kernel", "cuda")
def liger(p: Problem) -> Call | None:
    """Liger's RMSNorm with Llama's casts, its norm with a residual, and its norm of q and of k one after the other."""
    if p.op not in ("rms_norm", "rms_norm, residual", "qk_rms_norm"):
        return None
    from liger_kernel.transformers import functional

    if p.op == "qk_rms_norm":
        q, k, *gammas = p.arguments
        of_q, of_k = (gamma.to(q.dtype) for gamma in gammas)
        return lambda: tuple(functional.liger_rms_norm(x, gamma, 1e-6) for x, gamma in ((q, of_q), (k, of_k)))
    x, gamma, eps, *residual = p.arguments
    if residual:
        return lambda: functional.liger_fused_add_rms_norm(x, *residual, gamma, eps)
    return lambda: functional.liger_rms_norm(x, gamma, eps)


@peer("FlashInfer", "flashinfer", "cuda")
def flashinfer(p: Problem) -> Call | None:
    """FlashInfer's rmsnorm into tensors made beforehand, alone, of q and k, or behind torch's matmul; its norm with a residual.

    It has no norm with a scale per row or per group and without a residual, and no norm in its MLA cache write.
    """
    if p.op not in ("rms_norm", "rms_norm, residual", "qk_rms_norm", "gemv_and_partial_norm"):
        return None
    from flashinfer import norm

    if p.op == "qk_rms_norm":
        q, k, *gammas = p.arguments
        work = [(x, gamma.to(x.dtype), torch.empty_like(x)) for x, gamma in zip((q, k), gammas, strict=True)]
        return lambda: tuple(norm.rmsnorm(x, gamma, 1e-6, out=out) for x, gamma, out in work)
    if p.op == "gemv_and_partial_norm":
        return _flashinfer_gemv(p, norm.rmsnorm)
    x, gamma, eps, *residual = p.arguments
    if not residual:
        out = torch.empty_like(x)
        return lambda: norm.rmsnorm(x, gamma, eps, out=out)
    mine, total = x.clone(), residual[0].clone()  # it writes both, and the next call goes on from there

    def added() -> tuple[Tensor, Tensor]:
        norm.fused_add_rmsnorm(mine, total, gamma, eps)
        return mine, total

    return added


def _flashinfer_gemv(p: Problem, rmsnorm: Callable[..., Tensor]) -> Call:
    act, weight, gamma, eps = p.arguments
    width = gamma.shape[0]
    out = act.new_empty(act.shape[0], width)

    def call() -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.linear(act, weight)
        return rmsnorm(y[:, :width], gamma, eps, out=out), y[:, width:]

    return call


@peer("vLLM", "vllm", "cuda")
def vllm(p: Problem) -> Call | None:
    """vLLM's norm, and its norm with a dynamic scale a token."""
    if p.op not in ("rms_norm", "rms_norm_fused_fp8"):
        return None
    from vllm import _custom_ops as ops

    x, gamma, eps = p.arguments
    if p.op == "rms_norm_fused_fp8":
        return lambda: ops.rms_norm_dynamic_per_token_quant(x, gamma, eps, torch.float8_e4m3fn)
    out = torch.empty_like(x)
    return lambda: ops.rms_norm(out, x, gamma, eps)


@peer("quack", "quack", "cuda")
def quack(p: Problem) -> Call | None:
    """Quack's rmsnorm."""
    if p.op != "rms_norm":
        return None
    from quack import rmsnorm

    x, gamma, eps = p.arguments
    return lambda: rmsnorm(x, gamma, eps=eps)


# --- torch as most people call it -----------------------------------------------------------------------------------


@peer("torch eager")
def eager(p: Problem) -> Call | None:
    """The op as a user would write it."""
    return lambda: p.composed(*p.arguments)


@peer("F.rms_norm")
def f_rms_norm(p: Problem) -> Call | None:
    """torch.nn.functional.rms_norm."""
    if p.op != "rms_norm":
        return None
    x, gamma, eps = p.arguments
    return lambda: torch.nn.functional.rms_norm(x, gamma.shape, gamma, eps)


@peer("transformers", "transformers")
def transformers(p: Problem) -> Call | None:
    """transformers' own modules: Llama's norm, and MiniMax-M2's norms of q and k one after the other."""
    if p.op == "rms_norm":
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        x, gamma, eps = p.arguments
        norm = _module(LlamaRMSNorm, gamma, eps)
        return lambda: norm(x)
    if p.op == "qk_rms_norm":
        from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RMSNorm

        q, k, *gammas = p.arguments
        of_q, of_k = (_module(MiniMaxM2RMSNorm, gamma.to(q.dtype), 1e-6) for gamma in gammas)
        return lambda: (of_q(q), of_k(k))
    return None


def _module(cls: Any, gamma: Tensor, eps: float) -> Any:
    module = cls(gamma.shape[0], eps)
    module.weight = torch.nn.Parameter(gamma, requires_grad=False)
    return module.eval()


def disagreement(theirs: object, ours: object) -> str:
    """In words, how a peer's result differs from torch's by more than roundings; empty when it does not."""
    pairs = [value if isinstance(value, (tuple, list)) else (value,) for value in (theirs, ours)]
    if len(pairs[0]) != len(pairs[1]):
        return f"{len(pairs[0])} results instead of {len(pairs[1])}"
    for a, b in zip(*pairs, strict=True):
        if not isinstance(a, Tensor) or a.shape != b.shape:
            return f"a result of shape {list(getattr(a, 'shape', ()))} instead of {list(b.shape)}"
        error = float((a.double() - b.double()).norm() / b.double().norm())
        if not error < ALIKE:
            return f"a result that is {error:.2%} off torch's"
    return ""


ALIKE = 0.01
"""The largest error of a peer's result, relative to torch's. One more rounding to bfloat16 is 0.002."""


def contenders(problems: Iterable[Problem], found: Peer) -> list[Call]:
    """A peer's calls on all sets of inputs; none if it does not do this work."""
    calls = [found.make(p) for p in problems]
    return [call for call in calls if call is not None]
