"""The norm-family work of one decoder layer in one decode step, as a chain; attention and experts are left out.

DeepSeek-V3: input norm with residual, the A projections with the norm of q, the cache write (RoPE of
q, norm and RoPE of kv, fp8), then the norm before the experts with residual, as bfloat16 for the
router and as fp8 groups for the experts. Up to 16 rows the A projections and q's norm are one
launch, beyond that a matmul and a norm.

MiniMax-M2: input norm with residual as fp8 groups, the norm of whole q and k with partial RoPE on
slices of a packed projection, then the norm before the experts as above.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import onepass

from . import gemv_norm, mla_cache, qk_norm
from .workload import EPS, GROUP, Family, Problem, Workload, grouped, normed, randoms

DEEPSEEK, MINIMAX = "decode step, DeepSeek-V3 layer", "decode step, MiniMax-M2 layer"
SHAPES = {(op, device): ((1,), (8,), (64,)) for op in (DEEPSEEK, MINIMAX) for device in ("cuda", "cpu")}
FUSED_ROWS = 16
HIDDEN, Q_RANK, HEADS, NOPE = 7168, 1536, 128, 128
KV = mla_cache.LATENT + mla_cache.ROPE
SMALL_HIDDEN, HEAD, Q_HEADS, K_HEADS, TURNED = 3072, 128, 48, 8, 64
NEEDS = {
    DEEPSEEK: ("rms_norm", "rms_norm_fused_fp8", gemv_norm.OP, mla_cache.OP),
    MINIMAX: ("rms_norm_fused_fp8", qk_norm.FUSED),
}


def _before_experts(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, sum and norm, in torch."""
    h = x.float() + residual.float()
    y = normed(h, gamma)
    return *grouped(y), h.to(x.dtype), y.to(x.dtype)


def _ours_before_experts(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    return onepass.rms_norm_fused_fp8(x, gamma, EPS, residual=residual, group_size=GROUP, return_norm=True)


def deepseek(x: Tensor, residual: Tensor, weights: tuple[Tensor, ...], write: tuple[Any, ...], o: Tensor) -> object:
    """The chain in torch: norms in float32, rounded where the next module reads."""
    gamma, weight, gamma_q, gamma_o = weights
    h = x.float() + residual.float()
    y = torch.nn.functional.linear(normed(h, gamma).to(x.dtype), weight)
    q_a = normed(y[:, :Q_RANK], gamma_q).to(x.dtype)
    q, q_out, *others = write
    mla_cache.composed(q, q_out, y[:, Q_RANK:], *others)
    return q_a, q_out, *_before_experts(o, h.to(x.dtype), gamma_o)


def deepseek_problem(batch: int, device: str) -> Problem:
    """One layer's inputs, weights and cache."""
    rows = (batch, HIDDEN)
    x, residual, o, wide = randoms(device, rows, rows, rows, (batch, HEADS, NOPE + mla_cache.ROPE))
    weights = randoms(device, (HIDDEN,), (Q_RANK + KV, HIDDEN), (Q_RANK,), (HIDDEN,))
    gamma, weight, gamma_q, gamma_o = weights
    weight /= HIDDEN**0.5
    p = mla_cache.problem(batch, HEADS, mla_cache.CACHES["fp8"], mla_cache.angles(device), device)
    p = p._replace(q=wide[..., NOPE:])

    def ours() -> object:
        act, h = onepass.rms_norm(x, gamma, EPS, residual=residual)
        q_a, kv = onepass.gemv_and_partial_norm(act, weight, gamma_q, EPS, fused=batch <= FUSED_ROWS)
        return q_a, mla_cache.ours(p._replace(kv=kv)), *_ours_before_experts(o, h, gamma_o)

    q, q_out, _, *others = mla_cache.arguments(p)
    return Problem(DEEPSEEK, {"onepass": ours}, deepseek, (x, residual, tuple(weights), (q, q_out, *others), o))


def deepseek_bytes(batch: int) -> int:
    """Read: x, residual, o, q, weights and gammas; written: two sums, a norm, codes, scales, q_a, q, the entry."""
    row = HIDDEN * 2
    read = 3 * row + HEADS * mla_cache.ROPE * 2
    written = 3 * row + HIDDEN + HIDDEN // GROUP * 4 + Q_RANK * 2 + HEADS * mla_cache.ROPE * 2 + KV
    return batch * (read + written) + (Q_RANK + KV) * HIDDEN * 2 + (2 * HIDDEN + Q_RANK + mla_cache.LATENT) * 2


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial RoPE of heads: the first columns in pairs of i and i + half."""
    heads = x.unflatten(-1, (-1, HEAD))
    a, b = heads[..., : TURNED // 2], heads[..., TURNED // 2 : TURNED]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, heads[..., TURNED:]), -1).flatten(-2)


def minimax(
    x: Tensor, residual: Tensor, o: Tensor, gammas: tuple[Tensor, ...], q: Tensor, k: Tensor, freqs: Tensor, at: Tensor
) -> object:
    """The chain in torch: norms and rotations in float32, rounded at the end; ``at`` are positions."""
    gamma, gamma_q, gamma_k, gamma_o = gammas
    h = x.float() + residual.float()
    cos, sin = freqs[at].unflatten(-1, (-1, 2)).unsqueeze(1).unbind(-1)
    q_out, k_out = (_turned(normed(t, g), cos, sin).to(x.dtype) for t, g in ((q, gamma_q), (k, gamma_k)))
    return *grouped(normed(h, gamma)), q_out, k_out, *_before_experts(o, h.to(x.dtype), gamma_o)


def minimax_problem(batch: int, device: str) -> Problem:
    """One layer's inputs; q and k are slices of a packed projection."""
    rows, nq, nk = (batch, SMALL_HIDDEN), Q_HEADS * HEAD, K_HEADS * HEAD
    x, residual, o, packed = randoms(device, rows, rows, rows, (batch, nq + 2 * nk))
    gammas = tuple(randoms(device, (SMALL_HIDDEN,), (nq,), (nk,), (SMALL_HIDDEN,)))
    gamma, gamma_q, gamma_k, gamma_o = gammas
    q, k = packed[:, :nq], packed[:, nq : nq + nk]
    freqs = mla_cache.angles(device)[:, :TURNED]
    positions = torch.randint(0, mla_cache.CACHED, (batch,), device=device)
    rope = onepass.Rope(freqs, positions, "half", TURNED, HEAD)

    def ours() -> object:
        act, act_scale, h = onepass.rms_norm_fused_fp8(x, gamma, EPS, residual=residual, group_size=GROUP)
        normed_qk = onepass.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, rope=rope)
        return act, act_scale, *normed_qk, *_ours_before_experts(o, h, gamma_o)

    return Problem(MINIMAX, {"onepass": ours}, minimax, (x, residual, o, gammas, q, k, freqs, positions))


def minimax_bytes(batch: int) -> int:
    """Read: x, residual, o, q, k and gammas; written: two sums, a norm, codes and scales twice, q and k."""
    row, qk = SMALL_HIDDEN * 2, (Q_HEADS + K_HEADS) * HEAD * 2
    codes = SMALL_HIDDEN + SMALL_HIDDEN // GROUP * 4
    return batch * (3 * row + 3 * row + 2 * codes + 2 * qk) + 2 * row + qk


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[batch]."""
    if len(shape) != 1:
        return []
    if op == DEEPSEEK:
        make = partial(deepseek_problem, *shape)
        return [Workload(op, shape, deepseek_bytes(*shape), make, "read", needs=NEEDS[op], cold=True)]
    return [Workload(op, shape, minimax_bytes(*shape), partial(minimax_problem, *shape), "copy", needs=NEEDS[op])]


FAMILY = Family("decode-step", (DEEPSEEK, MINIMAX), SHAPES, workloads, "decode or all")
