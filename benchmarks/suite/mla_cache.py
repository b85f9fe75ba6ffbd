"""The MLA cache write: bfloat16 queries and latents into an fp8 or bfloat16 cache."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass.formats import E4M3FN
from onepass.ops.mla_cache.launch import MAX_HEADS

from .workload import EPS, Family, Workload, metas, moved_bytes, normed, randoms
from .workload import Problem as Contest

OP = "fused_rope_rmsnorm_quantization"
SHAPES = {
    (OP, "cuda"): tuple((tokens, heads) for heads in (128, 16) for tokens in (1, 64, 2048, 8192)),
    (OP, "cpu"): tuple((tokens, 128) for tokens in (1, 64, 2048)),
}
"""Tokens and heads: DeepSeek-V3, whole and on eight ranks."""
CACHES = {"fp8": E4M3FN.dtype, "bf16": torch.bfloat16}
LATENT, ROPE, PAGE = 512, 64, 64
DECODED, PREFILLED = 64, 1024
"""A call with up to DECODED tokens has one per request; a larger one has PREFILLED per request, the last fewer."""
CACHED = 1000
"""The most tokens of a request that are already in the cache."""


class Problem(NamedTuple):
    """One set of inputs. ``positions`` and ``slots`` repeat for the peers what offsets and cache specify."""

    q: Tensor
    out: Tensor
    kv: Tensor
    offsets: Tensor
    freqs: Tensor
    gamma: Tensor
    cache: onepass.PagedKVCache
    positions: Tensor
    slots: Tensor


def problem(tokens: int, heads: int, dtype: torch.dtype, freqs: Tensor, device: str = "cuda") -> Problem:
    """Random inputs: bfloat16, as in the models, requests of different lengths, pages in any order."""
    new = 1 if tokens <= DECODED else PREFILLED
    requests = -(-tokens // new)
    q, kv, gamma = randoms(device, (tokens, heads, ROPE), (tokens, LATENT + ROPE), (LATENT,))
    lengths = torch.randint(0, CACHED, (requests,), dtype=torch.int32, device=device)
    width = -(-(CACHED + new) // PAGE)
    table = torch.randperm(requests * width, device=device).view(requests, width).int()
    blocks = torch.zeros(requests * width, PAGE, LATENT + ROPE, dtype=dtype, device=device)
    paged = onepass.PagedKVCache(blocks, lengths, table)
    offsets = (torch.arange(requests + 1, device=device) * new).clamp(max=tokens).to(torch.uint32)
    positions = lengths.repeat_interleave(new)[:tokens].long() + torch.arange(tokens, device=device) % new
    return Problem(q, torch.empty_like(q), kv, offsets, freqs, gamma, paged, positions, paged.slot_mapping(offsets))


@cache
def angles(device: str = "cuda") -> Tensor:
    """Cosines and sines of every position, in one table as in a model."""
    turns = torch.rand(CACHED + PREFILLED, ROPE // 2, device=device) * 6.3
    return torch.stack((turns.cos(), turns.sin()), -1).flatten(-2)


def ours(p: Problem) -> Tensor:
    """Call the op with outputs allocated beforehand."""
    return onepass.fused_rope_rmsnorm_quantization(p.out, p.q, p.kv, p.offsets, p.freqs, p.gamma, p.cache, EPS)


def composed(
    q: Tensor, out: Tensor, kv: Tensor, freqs: Tensor, gamma: Tensor, entries: Tensor, positions: Tensor, slots: Tensor
) -> None:
    """The op as a user would write it in torch, with given positions, slots and cache `entries`."""
    cos, sin = freqs[positions].unflatten(-1, (-1, 2)).unbind(-1)

    def rotated(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    out.copy_(rotated(q, cos.unsqueeze(1), sin.unsqueeze(1)))
    put(entries, slots, torch.cat((normed(kv[:, :LATENT], gamma), rotated(kv[:, LATENT:], cos, sin)), -1))


def put(entries: Tensor, slots: Tensor, entry: Tensor) -> None:
    """Write float32 rows into slots of a cache, in the format of the cache."""
    if entries.dtype == torch.uint8:
        entries[slots] = entry.clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype).view(torch.uint8)
    else:
        entries[slots] = entry.to(entries.dtype)


def entries(blocks: Tensor) -> Tensor:
    """The cache as rows, one per slot; fp8 as bytes, which torch can index and assign.

    The view is made here, outside of what is compiled. torch 2.11's Inductor writes in place into a tensor it was given, but not
    into a view of one: with the view inside, it copied the whole cache and copied it back, 150 MB at 64 requests of 1000 tokens.
    """
    return (blocks.view(torch.uint8) if blocks.dtype == E4M3FN.dtype else blocks).flatten(0, 1)


def arguments(p: Problem) -> tuple[Any, ...]:
    """The arguments of `composed`."""
    return p.q, p.out, p.kv, p.freqs, p.gamma, entries(p.cache.blocks), p.positions, p.slots


def moved(tokens: int, heads: int, dtype: torch.dtype) -> int:
    """Bytes that an ideal kernel moves; angles and tables are not counted."""
    q, kv, gamma = metas((tokens, heads, ROPE), (tokens, LATENT + ROPE), (LATENT,))
    return moved_bytes([q, q, kv, torch.empty_like(kv, dtype=dtype), gamma])


def contest(tokens: int, heads: int, dtype: torch.dtype, device: str) -> Contest:
    """A set of inputs, our call and the arguments of the peers."""
    p = problem(tokens, heads, dtype, angles(device), device)
    return Contest(OP, {"onepass": partial(ours, p)}, composed, arguments(p))


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[tokens, heads], once per kind of cache."""
    if len(shape) != 2 or shape[1] > MAX_HEADS:
        return []
    found = []
    for name, dtype in CACHES.items():
        about = {"latent": LATENT, "cache": name}
        make = partial(contest, *shape, dtype)
        found.append(Workload(OP, (*shape, ROPE), moved(*shape, dtype), make, about=about))
    return found


FAMILY = Family("mla", (OP,), SHAPES, workloads, f"TOKENSxHEADS, up to {MAX_HEADS} heads")
