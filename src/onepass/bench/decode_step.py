"""The norm-family work of one decoder layer in one decode step, as a chain: what surrounds it (attention, experts) is left out.

DeepSeek-V3: input norm with residual, the A projections with the norm of q, the cache write (RoPE of q, norm and RoPE of
kv, fp8), then the norm before the experts with residual, as bfloat16 for the router and as fp8 groups for the experts.
Up to 16 rows the A projections and q's norm are one launch, beyond that a matmul and a norm.

MiniMax-M2: input norm with residual as fp8 groups, the norm of whole q and k with partial RoPE on slices of a packed
projection, then the norm before the experts as above.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import onepass

from ..formats import E4M3FN
from . import mla_cache
from .workload import Family, Problem, Workload

EPS, GROUP = 1e-6, 128
BATCHES = (1, 8, 64)
FUSED_ROWS = 16
DEEPSEEK, MINIMAX = "decode step, DeepSeek-V3 layer", "decode step, MiniMax-M2 layer"
SHAPES = {(op, device): tuple((b,) for b in BATCHES) for op in (DEEPSEEK, MINIMAX) for device in ("cuda", "cpu")}
HIDDEN, Q_RANK, HEADS, NOPE = 7168, 1536, 128, 128
KV = mla_cache.LATENT + mla_cache.ROPE
SMALL_HIDDEN, HEAD, Q_HEADS, K_HEADS, TURNED = 3072, 128, 48, 8, 64
NEEDS = {
    DEEPSEEK: ("rms_norm", "rms_norm_fused_fp8", "gemv_and_partial_norm", mla_cache.OP),
    MINIMAX: ("rms_norm_fused_fp8", "qk_rms_norm"),
}


def _norm(x: Tensor, gamma: Tensor) -> Tensor:
    h = x.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * gamma.float()


def _grouped(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.float().unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / E4M3FN.max
    codes = (groups / scale).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype)
    return codes.flatten(-2), scale.squeeze(-1)


def _before_experts(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, norm and sum, in torch."""
    h = x.float() + residual.float()
    y = _norm(h, gamma)
    return *_grouped(y), y.to(x.dtype), h.to(x.dtype)


# --- DeepSeek-V3 ----------------------------------------------------------------------------------------------------


def deepseek(
    x: Tensor, residual: Tensor, gamma: Tensor, weight: Tensor, gamma_q: Tensor, write: tuple[Any, ...], o: Tensor, gamma_o: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    """The chain in torch: the norms in float32, rounded where the next module reads."""
    h = x.float() + residual.float()
    y = torch.nn.functional.linear(_norm(h, gamma).to(x.dtype), weight)
    q_a = _norm(y[:, :Q_RANK], gamma_q).to(x.dtype)
    q, q_out, freqs, gamma_kv, entries, positions, slots = write
    mla_cache.composed(q, q_out, y[:, Q_RANK:], freqs, gamma_kv, entries, positions, slots)
    return q_a, q_out, *_before_experts(o, h.to(x.dtype), gamma_o)


def deepseek_problem(batch: int, device: str) -> Problem:
    """One layer's inputs, weights and cache."""
    sizes = ((batch, HIDDEN), (batch, HIDDEN), (HIDDEN,), (Q_RANK + KV, HIDDEN), (Q_RANK,), (batch, HIDDEN), (HIDDEN,))
    x, residual, gamma, weight, gamma_q, o, gamma_o = (
        torch.randn(*size, device=device, dtype=torch.bfloat16) for size in sizes
    )
    weight /= HIDDEN**0.5
    p = mla_cache.problem(batch, HEADS, mla_cache.CACHES["fp8"], mla_cache.angles(device), device)
    wide = torch.randn(batch, HEADS, NOPE + mla_cache.ROPE, device=device, dtype=torch.bfloat16)
    q, q_out = wide[..., NOPE:], p.out

    def ours() -> tuple[Tensor, ...]:
        act, h = onepass.rms_norm(x, gamma, EPS, residual=residual)
        q_a, kv = onepass.gemv_and_partial_norm(act, weight, gamma_q, EPS, fused=batch <= FUSED_ROWS)
        onepass.fused_rope_rmsnorm_quantization(q_out, q, kv, p.offsets, p.freqs, p.gamma, p.cache, EPS)
        codes, scale, more, normed = onepass.rms_norm_fused_fp8(
            o, gamma_o, EPS, residual=h, group_size=GROUP, return_norm=True
        )
        return q_a, q_out, codes, scale, normed, more

    write = (q, q_out, p.freqs, p.gamma, mla_cache.entries(p.cache.blocks), p.positions, p.slots)
    return Problem(
        DEEPSEEK, {"onepass": ours}, deepseek, (x, residual, gamma, weight, gamma_q, write, o, gamma_o)
    )  # fmt: skip


def deepseek_bytes(batch: int) -> int:
    """Read: x, residual, o, q, weights and gammas; written: two sums, a norm, codes, scales, q_a, q, the entry."""
    row = HIDDEN * 2
    read = 3 * row + HEADS * mla_cache.ROPE * 2
    written = 3 * row + HIDDEN + HIDDEN // GROUP * 4 + Q_RANK * 2 + HEADS * mla_cache.ROPE * 2 + KV
    return batch * (read + written) + (Q_RANK + KV) * HIDDEN * 2 + (2 * HIDDEN + Q_RANK + mla_cache.LATENT) * 2


# --- MiniMax-M2 -----------------------------------------------------------------------------------------------------


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial RoPE of heads: the first columns in pairs of i and i + half."""
    heads = x.unflatten(-1, (-1, HEAD))
    a, b = heads[..., : TURNED // 2], heads[..., TURNED // 2 : TURNED]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, heads[..., TURNED:]), -1).flatten(-2)


def minimax(
    x: Tensor, residual: Tensor, gamma: Tensor, q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor, freqs: Tensor,
    positions: Tensor, o: Tensor, gamma_o: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The chain in torch: the norms and rotations in float32, rounded at the end."""
    h = x.float() + residual.float()
    act, act_scale = _grouped(_norm(h, gamma))
    cos, sin = freqs[positions].unflatten(-1, (-1, 2)).unsqueeze(1).unbind(-1)
    q_out, k_out = (_turned(_norm(t, g), cos, sin).to(x.dtype) for t, g in ((q, gamma_q), (k, gamma_k)))
    return act, act_scale, q_out, k_out, *_before_experts(o, h.to(x.dtype), gamma_o)


def minimax_problem(batch: int, device: str) -> Problem:
    """One layer's inputs; q and k are slices of a packed projection."""
    nq, nk = Q_HEADS * HEAD, K_HEADS * HEAD
    sizes = ((batch, SMALL_HIDDEN), (batch, SMALL_HIDDEN), (SMALL_HIDDEN,), (batch, nq + 2 * nk), (nq,), (nk,))
    x, residual, gamma, packed, gamma_q, gamma_k = (
        torch.randn(*size, device=device, dtype=torch.bfloat16) for size in sizes
    )
    o, gamma_o = torch.randn_like(x), torch.randn_like(gamma)
    q, k = packed[:, :nq], packed[:, nq : nq + nk]
    freqs = mla_cache.angles(device)[:, :TURNED]
    positions = torch.randint(0, mla_cache.CACHED, (batch,), device=device)
    rope = onepass.Rope(freqs, positions, "half", TURNED, HEAD)

    def ours() -> tuple[Tensor, ...]:
        act, act_scale, h = onepass.rms_norm_fused_fp8(x, gamma, EPS, residual=residual, group_size=GROUP)
        q_out, k_out = onepass.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, rope=rope)
        codes, scale, more, normed = onepass.rms_norm_fused_fp8(
            o, gamma_o, EPS, residual=h, group_size=GROUP, return_norm=True
        )
        return act, act_scale, q_out, k_out, codes, scale, normed, more

    arguments = (x, residual, gamma, q, k, gamma_q, gamma_k, freqs, positions, o, gamma_o)
    return Problem(MINIMAX, {"onepass": ours}, minimax, arguments)


def minimax_bytes(batch: int) -> int:
    """Read: x, residual, o, q, k and gammas; written: two sums, a norm, codes and scales twice, q and k."""
    row, qk = SMALL_HIDDEN * 2, (Q_HEADS + K_HEADS) * HEAD * 2
    codes = SMALL_HIDDEN + SMALL_HIDDEN // GROUP * 4
    return batch * (3 * row + 3 * row + 2 * codes + 2 * qk) + 2 * row + qk


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[batch]."""
    if len(shape) != 1:
        return []
    (batch,) = shape
    if op == DEEPSEEK:
        make, size = partial(deepseek_problem, batch), deepseek_bytes(batch)
    else:
        make, size = partial(minimax_problem, batch), minimax_bytes(batch)
    stream: Any = "read" if op == DEEPSEEK else "copy"
    return [Workload(op, shape, size, make, stream, needs=NEEDS[op], cold=op == DEEPSEEK)]


FAMILY = Family("decode-step", (DEEPSEEK, MINIMAX), SHAPES, workloads)
