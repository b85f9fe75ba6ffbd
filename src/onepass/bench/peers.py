"""What other code takes for the same work. A peer is one small function from a problem to a call; add one here.

It returns None for work it does not do. What it needs is imported inside; if that is not there, the peer is left out and
the report says so.
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

    def why_not(self, device: str) -> str:
        """In a word, why it cannot take part; empty when it can."""
        if self.device not in (None, device):
            return f"for {self.device} only"
        return "not installed" if self.module and util.find_spec(self.module) is None else ""


PEERS: dict[str, Peer] = {}


def peer(name: str, module: str | None = None, device: str | None = None) -> Callable[[Make], Make]:
    """Register a function as a peer."""

    def add(make: Make) -> Make:
        PEERS[name] = Peer(name, make, module, device)
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


@peer("torch.compile max", device="cuda")
def compiled_max(p: Problem) -> Call | None:
    """With max-autotune, without CUDA graphs of its own: it is captured like everybody else."""
    from torch._inductor import select_algorithm

    select_algorithm.PRINT_AUTOTUNE = False
    return _compile(p, "max-autotune-no-cudagraphs")


# --- libraries ------------------------------------------------------------------------------------------------------


@peer("Liger-Kernel", "liger_kernel", "cuda")
def liger(p: Problem) -> Call | None:
    """Liger's RMSNorm, Llama's casts."""
    if p.op != "rms_norm":
        return None
    from liger_kernel.transformers.functional import liger_rms_norm

    x, gamma, eps = p.arguments
    return lambda: liger_rms_norm(x, gamma, eps)


@peer("FlashInfer", "flashinfer", "cuda")
def flashinfer(p: Problem) -> Call | None:
    """FlashInfer's rmsnorm into a tensor made beforehand."""
    if p.op != "rms_norm":
        return None
    from flashinfer.norm import rmsnorm

    x, gamma, eps = p.arguments
    out = torch.empty_like(x)
    return lambda: rmsnorm(x, gamma, eps, out=out)


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


def contenders(problems: Iterable[Problem], found: Peer) -> list[Call]:
    """A peer's calls on all sets of inputs; none if it does not do this work."""
    calls = [found.make(p) for p in problems]
    return [call for call in calls if call is not None]
