"""Other implementations of the same work. A peer is a function from a problem to a call; add new ones to `PEERS`.

A peer imports what it needs itself. A library that is not installed is left out, and the report
mentions that. A library's first result is compared with torch's before the library is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import util
from typing import Any

import torch
from torch import Tensor

from .workload import EPS, Call, Problem, grouped, quantized

NORM, ADDED, FP8 = "rms_norm", "rms_norm, residual", "rms_norm_fused_fp8"
STATIC = "rms_norm_fused_quant, e4m3fn, given scale"
QK, GEMV = "qk_rms_norm", "gemv_and_partial_norm"
LINEAR, LINEAR_ADD, LINEAR_ROWS, LINEAR_BLOCKS = "linear", "linear, add", "linear, fp8 rows", "linear, fp8 blocks"
ALIKE = 0.01
"""The largest error of a peer's result, relative to torch's. One more rounding to bfloat16 is 0.002."""


@dataclass(frozen=True)
class Peer:
    """A contender: its name, how to make its call, the module it needs and the device it runs on."""

    name: str
    make: Callable[[Problem], Call]
    module: str | None = None
    device: str | None = None
    ops: tuple[str, ...] = ()
    """The ops whose work it does; empty means all."""
    gpu_ops: tuple[str, ...] = ()
    """Those of its ops that it does on a GPU only."""
    slow: bool = False
    """Measured last because preparing it takes long."""

    def why_not(self, device: str) -> str:
        """Why it cannot take part; empty if it can."""
        if self.device not in (None, device):
            return f"for {self.device} only"
        return "not installed" if self.module and util.find_spec(self.module) is None else ""

    def calls(self, problems: Sequence[Problem]) -> list[Call]:
        """Its calls on all sets of inputs; empty if it does not do this work."""
        op = problems[0].op
        if (self.ops and op not in self.ops) or (op in self.gpu_ops and problems[0].arguments[0].is_cpu):
            return []
        return [self.make(p) for p in problems]


def chosen(words: str) -> dict[str, Peer]:
    """The peers whose name equals, or else contains, one of the comma-separated words; also ``all`` and ``none``.

    >>> list(chosen("compile,liger")), list(chosen("torch.compile"))
    (['torch.compile', 'torch.compile max', 'Liger-Kernel'], ['torch.compile'])
    """
    if words in ("all", "none"):
        return dict(PEERS) if words == "all" else {}
    found: set[str] = set()
    for word in (word.strip() for word in words.split(",")):
        named = {word} if word in PEERS else {name for name in PEERS if word and word.lower() in name.lower()}
        if not named:
            raise ValueError(f"no peer {word!r}; choose from {', '.join(PEERS)}")
        found |= named
    return {name: peer for name, peer in PEERS.items() if name in found}


_compiled: dict[tuple[Any, str], Callable[..., object]] = {}


def _compile(p: Problem, mode: str) -> Call:
    if (p.composed, mode) not in _compiled:
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 512  # one per shape
        _compiled[p.composed, mode] = torch.compile(p.composed, mode=mode, dynamic=False, fullgraph=True)
    return partial(_compiled[p.composed, mode], *p.arguments)


def compiled(p: Problem) -> Call:
    """The torch code compiled in default mode, for one shape."""
    return _compile(p, "default")


def compiled_max(p: Problem) -> Call:
    """max-autotune without CUDA graphs of its own: it is captured like all contenders."""
    from torch._inductor import select_algorithm

    select_algorithm.PRINT_AUTOTUNE = False
    return _compile(p, "max-autotune-no-cudagraphs")


def liger(p: Problem) -> Call:
    """Liger's RMSNorm with Llama's casts, its norm with a residual, and its norms of q and k in sequence."""
    from liger_kernel.transformers import functional

    if p.op == QK:
        work = _qk(p)
        return lambda: tuple(functional.liger_rms_norm(x, gamma, EPS) for x, gamma in work)
    x, gamma, eps, *residual = p.arguments
    if residual:
        return lambda: functional.liger_fused_add_rms_norm(x, *residual, gamma, eps)
    return lambda: functional.liger_rms_norm(x, gamma, eps)


def flashinfer(p: Problem) -> Call:
    """FlashInfer's rmsnorm with outputs allocated beforehand: alone, to fp8, of q and k, after torch's matmul, with a residual.

    It has no norm with dynamic scales and without a residual, and no norm in its MLA cache write.
    """
    from flashinfer import norm

    if p.op == QK:
        outs = [(x, gamma, torch.empty_like(x)) for x, gamma in _qk(p)]
        return lambda: tuple(norm.rmsnorm(x, gamma, EPS, out=out) for x, gamma, out in outs)
    if p.op == GEMV:
        act, weight, gamma, eps = p.arguments
        width = gamma.shape[0]
        product = act.new_empty(act.shape[0], width)

        def matmul() -> tuple[Tensor, Tensor]:
            y = torch.nn.functional.linear(act, weight)
            return norm.rmsnorm(y[:, :width], gamma, eps, out=product), y[:, width:]

        return matmul
    if p.op == STATIC:
        return _flashinfer_codes(p)
    x, gamma, eps, *residual = p.arguments
    if not residual:
        return partial(norm.rmsnorm, x, gamma, eps, out=torch.empty_like(x))
    return _overwriting(p, norm.fused_add_rmsnorm)


def _flashinfer_codes(p: Problem) -> Call:
    """FlashInfer's norm with fp8 codes of a given scale, which is a number in its older versions."""
    from flashinfer import norm

    x, gamma, eps, scale = p.arguments
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    given: Any = scale
    try:
        norm.rmsnorm_quant(out, x, gamma, scale, eps)
    except (RuntimeError, TypeError, ValueError):
        given = float(scale)

    def codes() -> Tensor:
        norm.rmsnorm_quant(out, x, gamma, given, eps)
        return out

    return codes


def vllm(p: Problem) -> Call:
    """vLLM's norm, also of a sum, in place, and its norm with one dynamic scale per token."""
    from vllm import _custom_ops as ops

    x, gamma, eps, *residual = p.arguments
    if p.op == FP8:
        return lambda: ops.rms_norm_dynamic_per_token_quant(x, gamma, eps, torch.float8_e4m3fn)
    if residual:
        return _overwriting(p, ops.fused_add_rms_norm)
    out = torch.empty_like(x)

    def norm() -> Tensor:
        ops.rms_norm(out, x, gamma, eps)
        return out

    return norm


def _overwriting(p: Problem, norm: Callable[[Tensor, Tensor, Tensor, float], object]) -> Call:
    """A norm that overwrites x and the residual. The next call continues from there."""
    x, gamma, eps, residual = p.arguments
    mine, total = x.clone(), residual.clone()

    def added() -> tuple[Tensor, Tensor]:
        norm(mine, total, gamma, eps)
        return mine, total

    return added


def quack(p: Problem) -> Call:
    """Quack's rmsnorm."""
    from quack import rmsnorm

    x, gamma, eps = p.arguments
    return lambda: rmsnorm(x, gamma, eps=eps)


def eager(p: Problem) -> Call:
    """The op as a user would write it."""
    return lambda: p.composed(*p.arguments)


def f_rms_norm(p: Problem) -> Call:
    """torch.nn.functional.rms_norm."""
    x, gamma, eps = p.arguments
    return lambda: torch.nn.functional.rms_norm(x, gamma.shape, gamma, eps)


def transformers(p: Problem) -> Call:
    """transformers' own modules: Llama's norm, and MiniMax-M2's norms of q and k in sequence."""

    def module(cls: Any, gamma: Tensor, eps: float) -> Any:
        made = cls(gamma.shape[0], eps)
        made.weight = torch.nn.Parameter(gamma, requires_grad=False)
        return made.eval()

    if p.op == NORM:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        x, gamma, eps = p.arguments
        return partial(module(LlamaRMSNorm, gamma, eps), x)
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RMSNorm

    work = [(module(MiniMaxM2RMSNorm, gamma, EPS), x) for x, gamma in _qk(p)]
    return lambda: tuple(norm(x) for norm, x in work)


def cublas(p: Problem) -> Call:
    """cuBLAS through torch.mm, or torch.addmm where something is added, with outputs allocated beforehand."""
    x, weight, *add = p.arguments
    out = x.new_empty(x.shape[0], weight.shape[0])
    if add:
        return partial(torch.addmm, *add, x, weight.t(), out=out)
    return partial(torch.mm, x, weight.t(), out=out)


def scaled_mm(p: Problem) -> Call:
    """torch._scaled_mm. Its rows are fp8 too, so it is less accurate than ours. Their quantization is not timed."""
    x, weight, scale = p.arguments
    if p.op == LINEAR_ROWS:
        codes, factors = quantized(x.float())
        return partial(
            torch._scaled_mm,
            codes,
            weight.t(),
            scale_a=factors,
            scale_b=scale[None],
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    codes, factors = grouped(x.float())
    factors = factors.t().contiguous().t()  # it requires the scales of 1 x 128 columns to be stored by column
    return partial(torch._scaled_mm, codes, weight.t(), scale_a=factors, scale_b=scale.t(), out_dtype=x.dtype)


def _qk(p: Problem) -> list[tuple[Tensor, Tensor]]:
    """q and k, each with its gamma in its dtype."""
    q, k, gamma_q, gamma_k = p.arguments
    return [(q, gamma_q.to(q.dtype)), (k, gamma_k.to(k.dtype))]


def disagreement(theirs: object, ours: object) -> str:
    """How a peer's result differs from torch's by more than rounding; empty if it does not."""
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


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("torch.compile", compiled),
        Peer("torch.compile max", compiled_max, device="cuda", slow=True),
        Peer("Liger-Kernel", liger, "liger_kernel", "cuda", (NORM, ADDED, QK)),
        Peer("FlashInfer", flashinfer, "flashinfer", "cuda", (NORM, ADDED, STATIC, QK, GEMV)),
        Peer("vLLM", vllm, "vllm", ops=(NORM, ADDED, FP8), gpu_ops=(FP8,)),
        Peer("quack", quack, "quack", "cuda", (NORM,)),
        Peer("torch eager", eager),
        Peer("F.rms_norm", f_rms_norm, ops=(NORM,)),
        Peer("transformers", transformers, "transformers", ops=(NORM, QK)),
        Peer("cuBLAS", cublas, device="cuda", ops=(LINEAR, LINEAR_ADD)),
        Peer("torch._scaled_mm", scaled_mm, device="cuda", ops=(LINEAR_ROWS, LINEAR_BLOCKS)),
    )
}
"""In the order of table columns."""
