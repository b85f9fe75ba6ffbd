"""Norms of q and k, RoPE, and the write of k and v into a paged cache: bfloat16 slices of one projection."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass.formats import E4M3FN
from onepass.ops.qk_cache.launch import MAX_HEAD, MAX_HEADS

from .mla_cache import entries, put
from .workload import EPS, Family, Workload, metas, moved_bytes, normed, randoms
from .workload import Problem as Contest

OP: Final = "qk_norm_rope_cache"
_QWEN: Final = (32, 8, 128)
SHAPES = {
    (OP, "cuda"): (*((tokens, *_QWEN) for tokens in (1, 16, 64, 2048, 8192)), (1, 16, 8, 256), (64, 16, 8, 256)),
    (OP, "cpu"): tuple((tokens, *_QWEN) for tokens in (1, 64, 2048)),
}
"""Tokens, heads of q and of k, and columns per head: Qwen3-8B, and Gemma-3-12B."""
CACHES: Final = {"bf16": torch.bfloat16, "fp8": E4M3FN.dtype}
SEPARATE: Final = "qk_rms_norm, then two writes"
PAGE: Final = 16
POSITIONS: Final = 4096


class Problem(NamedTuple):
    """One set of inputs: slices of one projection, both caches, and where tokens are."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    gamma_q: Tensor
    gamma_k: Tensor
    freqs: Tensor
    k_cache: Tensor
    v_cache: Tensor
    positions: Tensor
    slots: Tensor


def problem(tokens: int, q_heads: int, k_heads: int, head: int, dtype: torch.dtype, device: str = "cuda") -> Problem:
    """Random inputs; slots in any order, in a cache with room for twice as many tokens."""
    packed, gamma_q, gamma_k = randoms(device, (tokens, q_heads + 2 * k_heads, head), (head,), (head,))
    q, k, v = packed.split((q_heads, k_heads, k_heads), 1)
    pages = -(-2 * tokens // PAGE)
    k_cache, v_cache = (torch.zeros(pages, PAGE, k_heads, head, dtype=dtype, device=device) for _ in range(2))
    slots = torch.randperm(pages * PAGE, device=device)[:tokens]
    positions = torch.randint(0, POSITIONS, (tokens,), device=device)
    out = torch.empty(tokens, q_heads, head, dtype=packed.dtype, device=device)
    return Problem(q, k, v, out, gamma_q, gamma_k, angles(head, device), k_cache, v_cache, positions, slots)


@cache
def angles(head: int, device: str = "cuda") -> Tensor:
    """Cosines and sines of every position, in one table as in a model."""
    turns = torch.rand(POSITIONS, head // 2, device=device) * 6.3
    return torch.stack((turns.cos(), turns.sin()), -1).flatten(-2)


def ours(p: Problem) -> Tensor:
    """Call the op with outputs allocated beforehand."""
    rope = onepass.Rope(p.freqs, p.positions)
    norms: dict[str, Any] = {"gamma_q": p.gamma_q, "gamma_k": p.gamma_k, "eps": EPS}
    caches = p.k_cache, p.v_cache
    return onepass.qk_norm_rope_cache(p.q, p.k, p.v, *caches, **norms, rope=rope, slots=p.slots, out=p.out)[0]


def separate(p: Problem) -> Tensor:
    """The same with `onepass.qk_rms_norm`, and torch's indexed writes for the caches."""
    rope = onepass.Rope(p.freqs, p.positions)
    q, k = onepass.qk_rms_norm(p.q, p.k, p.gamma_q, p.gamma_k, EPS, rope=rope, per_head=True)
    put(entries(p.k_cache), p.slots, k)
    put(entries(p.v_cache), p.slots, p.v)
    return q


def composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    gamma_q: Tensor,
    gamma_k: Tensor,
    freqs: Tensor,
    k_entries: Tensor,
    v_entries: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """The op as a user would write it in torch."""
    cos, sin = (t.unsqueeze(1) for t in freqs[positions].unflatten(-1, (-1, 2)).unbind(-1))

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    out.copy_(rotated(normed(q, gamma_q)))
    put(k_entries, slots, rotated(normed(k, gamma_k)))
    put(v_entries, slots, v)


def arguments(p: Problem) -> tuple[Any, ...]:
    """The arguments of `composed`."""
    return *p[:7], entries(p.k_cache), entries(p.v_cache), p.positions, p.slots


def moved(tokens: int, q_heads: int, k_heads: int, head: int, dtype: torch.dtype) -> int:
    """Bytes that an ideal kernel moves; angles and indices are not counted."""
    q, kv, gamma = metas((tokens, q_heads, head), (tokens, 2 * k_heads, head), (2, head))
    return moved_bytes([q, q, kv, torch.empty_like(kv, dtype=dtype), gamma])


def contest(tokens: int, q_heads: int, k_heads: int, head: int, dtype: torch.dtype, device: str) -> Contest:
    """A set of inputs, our calls and the arguments of the peers."""
    p = problem(tokens, q_heads, k_heads, head, dtype, device)
    calls = {"onepass": partial(ours, p), SEPARATE: partial(separate, p)}
    return Contest(OP, calls, composed, arguments(p))


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[tokens, heads of q, heads of k, columns], once per kind of cache."""
    if len(shape) != 4 or max(shape[1:3]) > MAX_HEADS or shape[3] > MAX_HEAD or shape[3] % 2:
        return []
    found = []
    for name, dtype in CACHES.items():
        make = partial(contest, *shape, dtype)
        found.append(Workload(OP, shape, moved(*shape, dtype), make, about={"cache": name}))
    return found


FAMILY = Family(
    "qk_cache",
    (OP,),
    SHAPES,
    workloads,
    f"TOKENSxHEADSxKV_HEADSxCOLUMNS, up to {MAX_HEADS} heads of up to {MAX_HEAD} columns, an even number",
)
