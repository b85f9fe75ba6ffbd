"""MLA's cache write on a GPU beside torch eager, torch.compile and a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

import onepass

from ..contract import moved_bytes
from ..formats import E4M3FN
from .gpu import COLD_BYTES, _copy_kernel
from .timing import graph_times

SHAPES = tuple((tokens, heads) for heads in (128, 16) for tokens in (1, 64, 2048, 8192))
"""Tokens and heads: DeepSeek-V3, whole and of eight ranks."""
CACHES = {"fp8": E4M3FN.dtype, "bf16": torch.bfloat16}
LATENT, ROPE, PAGE = 512, 64, 64
DECODED, PREFILLED = 64, 1024
"""Up to DECODED tokens a call has one for each request; otherwise PREFILLED."""
CACHED = 1000
"""Tokens of a request that are in the cache, at most."""
EPS = 1e-6


class Problem(NamedTuple):
    """One set of inputs. ``positions`` and ``slots`` say once more what offsets and cache do, for the peers."""

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
    """Random inputs: bfloat16, as the models have them, requests of different lengths, pages in any order."""
    new = 1 if tokens <= DECODED else PREFILLED
    requests = tokens // new
    q = torch.randn(tokens, heads, ROPE, device=device, dtype=torch.bfloat16)
    kv = torch.randn(tokens, LATENT + ROPE, device=device, dtype=torch.bfloat16)
    gamma = torch.randn(LATENT, device=device, dtype=torch.bfloat16)
    lengths = torch.randint(0, CACHED, (requests,), dtype=torch.int32, device=device)
    width = -(-(CACHED + new) // PAGE)
    table = torch.randperm(requests * width, device=device).view(requests, width).int()
    blocks = torch.zeros(requests * width, PAGE, LATENT + ROPE, dtype=dtype, device=device)
    cache = onepass.PagedKVCache(blocks, lengths, table)
    offsets = (torch.arange(requests + 1, device=device) * new).to(torch.uint32)
    positions = lengths.repeat_interleave(new).long() + torch.arange(tokens, device=device) % new
    return Problem(q, torch.empty_like(q), kv, offsets, freqs, gamma, cache, positions, cache.slot_mapping(offsets))


def angles(device: str = "cuda") -> Tensor:
    """Cosines and sines of every position there is."""
    turns = torch.rand(CACHED + PREFILLED, ROPE // 2, device=device) * 6.3
    return torch.stack((turns.cos(), turns.sin()), -1).flatten(-2)


def ours(p: Problem) -> Tensor:
    """The op into tensors made beforehand."""
    return onepass.fused_rope_rmsnorm_quantization(p.out, p.q, p.kv, p.offsets, p.freqs, p.gamma, p.cache, EPS)


def composed(
    q: Tensor, out: Tensor, kv: Tensor, freqs: Tensor, gamma: Tensor, blocks: Tensor, positions: Tensor, slots: Tensor
) -> None:
    """The same as a user would write it in torch, with positions and slots as given."""
    cos, sin = freqs[positions].unflatten(-1, (-1, 2)).unbind(-1)

    def rotated(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    out.copy_(rotated(q, cos.unsqueeze(1), sin.unsqueeze(1)))
    latent = kv[:, :LATENT].float()
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + EPS) * gamma.float()
    entry = torch.cat((latent, rotated(kv[:, LATENT:], cos, sin)), -1)
    if blocks.dtype == E4M3FN.dtype:
        codes = entry.clamp(-E4M3FN.max, E4M3FN.max).to(blocks.dtype)
        blocks.view(torch.uint8).flatten(0, 1)[slots] = codes.view(torch.uint8)
    else:
        blocks.flatten(0, 1)[slots] = entry.to(blocks.dtype)


def peer(function: Callable[..., None], p: Problem) -> Callable[[], None]:
    """A contender's call."""
    return partial(function, p.q, p.out, p.kv, p.freqs, p.gamma, p.cache.blocks, p.positions, p.slots)


def moved(p: Problem) -> int:
    """Bytes an ideal kernel moves; angles and tables are not counted."""
    entries = torch.empty_like(p.kv, dtype=p.cache.blocks.dtype, device="meta")
    return moved_bytes([p.q, p.kv, p.gamma, p.out, entries])


def rows(peers: bool = True) -> Iterator[dict[str, Any]]:
    """One result a shape and cache: bytes moved, times (two medians each) of onepass, the copy and every peer."""
    contenders: dict[str, Callable[..., None]] = {}
    if peers:
        torch._dynamo.config.recompile_limit = 64
        contenders = {
            "torch eager": composed,
            "torch.compile": torch.compile(composed, dynamic=False, fullgraph=True),
        }
    freqs = angles()
    for tokens, heads in SHAPES:
        for name, dtype in CACHES.items():
            problems = [problem(tokens, heads, dtype, freqs)]
            size = moved(problems[0])
            sets = max(2, min(32, -(-COLD_BYTES // size)))
            problems += [problem(tokens, heads, dtype, freqs) for _ in range(sets - 1)]
            pairs = [torch.randint(0, 100, (2, size // 8), dtype=torch.int32, device="cuda") for _ in range(sets)]
            times = {
                "onepass": graph_times([partial(ours, p) for p in problems]),
                "copy of as many bytes": graph_times([partial(_copied, pair) for pair in pairs]),
            }
            for contender, function in contenders.items():
                times[contender] = graph_times([peer(function, p) for p in problems])
            yield {
                "op": "fused_rope_rmsnorm_quantization",
                "shape": [tokens, heads, ROPE],
                "latent": LATENT,
                "cache": name,
                "dtype": "bfloat16",
                "bytes": size,
                "sets": sets,
                "us": times,
            }


def _copied(pair: Tensor) -> None:
    n = pair.shape[1]
    _copy_kernel[(triton.cdiv(n, 2048),)](pair[0], pair[1], n, 2048, num_warps=4)
