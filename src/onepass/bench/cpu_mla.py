"""MLA's cache write on a CPU, taking turns with a copy of as many bytes and with torch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

import onepass

from ..contract import moved_bytes
from ..cpu import _compile, _function, _parallel, _vec
from .timing import interleaved_times

TOKENS = (1, 64, 2048)
HEADS, LATENT, ROPE, PAGE = 128, 512, 64, 64
_CHUNK = 65536
_STEP = 4 * _vec.LANES
"""Bytes in a vector of the copy."""


@cache
def _copier() -> Any:
    """A kernel that copies bytes, on as many threads as join in."""
    module = ir.Module(name="copier")
    f = _function.Function(module, "copy", 1)
    builder = f.builder
    block = f.parameters[0]
    chunk, total, source, target = (_vec.Int(builder, f.load(block + 8 * i, _vec.I64, lanes=0)) for i in range(1, 5))
    take, work, done = (builder.append_basic_block() for _ in range(3))
    builder.branch(take)
    builder.position_at_end(take)
    first = _vec.Int(builder, builder.atomic_rmw("add", f.pointer(block), chunk.ir, "monotonic"))
    builder.cbranch((first < total).ir, work, done)
    builder.position_at_end(work)
    with f.loop(first, (first + chunk).min(total), 2 * _STEP) as at:
        for half in (0, _STEP):
            f.store(f.load(source + at + half, _vec.I32), target + at + half)
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
    return _compile.link(_compile.compile_ir(str(module), *_compile.host()), "copy")


def copy(source: Tensor, target: Tensor) -> None:
    """Copy bytes (a multiple of 256) as fast as memory allows."""
    block = struct.pack("=5q", 0, _CHUNK, source.numel(), source.data_ptr(), target.data_ptr())
    _parallel.run(_copier()["copy"], block, torch.get_num_threads())


def composed(
    q: Tensor, kv: Tensor, freqs: Tensor, gamma: Tensor, positions: Tensor, slots: Tensor, out: Tensor, blocks: Tensor
) -> None:
    """The same in plain torch, with positions and slots as given; what is rotated is so in float32."""
    cos, sin = freqs[positions].unflatten(-1, (-1, 2)).unbind(-1)

    def rotated(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    out.copy_(rotated(q, cos.unsqueeze(1), sin.unsqueeze(1)))
    latent = kv[:, :LATENT].float()
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + 1e-6) * gamma.float()
    entry = torch.cat((latent, rotated(kv[:, LATENT:], cos, sin)), -1).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    blocks.view(torch.uint8).flatten(0, 1)[slots] = entry.view(torch.uint8)


def rows(peers: bool = True) -> Iterator[dict[str, Any]]:
    """bfloat16 queries and latents into an fp8 cache: microseconds of onepass, the copy and torch, in turns."""
    compiled = torch.compile(composed, dynamic=False)
    for tokens in TOKENS:
        requests = min(tokens, 64)
        q, kv = torch.randn(tokens, HEADS, ROPE).bfloat16(), torch.randn(tokens, LATENT + ROPE).bfloat16()
        out, gamma = torch.empty_like(q), torch.randn(LATENT).bfloat16()
        angle = torch.rand(4096, ROPE // 2) * 6.3
        freqs = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)
        lengths = torch.randint(0, 1000, (requests,), dtype=torch.int32)
        width = -(-(1000 + tokens // requests) // PAGE)
        table = torch.randperm(requests * width).view(requests, width).int()
        blocks = torch.zeros(requests * width, PAGE, LATENT + ROPE, dtype=torch.float8_e4m3fn)
        cache_ = onepass.PagedKVCache(blocks, lengths, table)
        offsets = (torch.arange(requests + 1) * (tokens // requests)).to(torch.uint32)
        positions = lengths.repeat_interleave(tokens // requests) + torch.arange(tokens) % (tokens // requests)
        slots = cache_.slot_mapping(offsets)
        entries = torch.empty(tokens, LATENT + ROPE, dtype=torch.float8_e4m3fn)
        moved = moved_bytes([q, kv, gamma, out, entries])
        source = torch.zeros(moved // 2 & -256, dtype=torch.uint8)
        calls: dict[str, Callable[[], object]] = {
            "copy": partial(copy, source, torch.empty_like(source)),
            "onepass": partial(onepass.fused_rope_rmsnorm_quantization, out, q, kv, offsets, freqs, gamma, cache_),
        }
        # tensors of its own for each contender: none finds in the caches what another has just touched
        tensors = (q, kv, freqs, gamma, positions.long(), slots, out, blocks)
        arguments = [t.clone() for t in tensors]
        rounds = 40 if tokens > 64 else 400
        if peers:
            calls["torch.compile"] = partial(compiled, *arguments)
        times = interleaved_times(calls, rounds=rounds)
        if peers:  # by itself: it walks through so much memory that whoever comes next finds the caches empty
            times |= interleaved_times({"torch eager": partial(composed, *arguments)}, rounds=rounds // 4)
        yield {
            "op": "fused_rope_rmsnorm_quantization",
            "shape": [tokens, HEADS, ROPE],
            "latent": LATENT,
            "cache": "fp8",
            "dtype": "bfloat16",
            "bytes": moved,
            "us": times,
        }
