"""Promises of MLA's cache write that need no oracle: bytes depend on the token alone, and graphs follow tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.formats import E4M3FN
from onepass.kvcache import DS_MLA_BYTES, DS_MLA_COLUMNS, PagedKVCache
from onepass.ops.mla_cache.op import fused_rope_rmsnorm_quantization
from onepass.testing.tensors import same_bytes
from tools.promises.tokens import (
    difference_of_layouts,
    difference_of_parts,
    difference_of_threads,
    first_difference,
    moved,
    moved_heads,
)

Promise = Callable[[], str | None]
PAGE = 16
WIDTHS = ((512, 64), (128, 32), (577, 18), (2048, 256), (31, 6), (96, 1024))
FEW = WIDTHS[:1] + WIDTHS[2:3]
"""Widths for which a GPU, where each dtype is compiled, takes float32 too."""


def promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise that can be tested on ``device``."""
    for dtype in (torch.bfloat16, torch.float32):  # float16 takes the same paths as bfloat16
        for latent, rope in FEW if device == "cuda" and dtype == torch.float32 else WIDTHS:
            label = f"{latent} + {rope} columns of {str(dtype).removeprefix('torch.')}"
            arguments = (device, latent, rope, dtype)
            yield f"MLA, a token alone is the token in a batch: {label}", partial(_batch, *arguments)
            yield f"MLA, alignment and strides change no bit: {label}", partial(_layout, *arguments)
    yield "MLA, tables and slots lead to the same bytes", partial(_slots, device)
    yield "MLA, caches of bytes hold the same entries", partial(_as_bytes, device)
    yield "MLA, packed and plain entries share their last columns", partial(_last_columns, device)
    yield "MLA, a thousand repeats change no bit", partial(_repeats, device)
    if device == "cpu":
        yield "MLA, threads change no bit", _threads
    else:
        yield "MLA, sizes and numbers of blocks change no bit", partial(_cuts, device)
    if device == "cuda":
        yield "MLA, a captured decode step follows lengths and tables", _graph
        yield "MLA, more than 2**31 elements are addressed", _huge


@dataclass(frozen=True)
class Inputs:
    """Tokens that belong to no request, each with its own position."""

    q: Tensor
    kv: Tensor
    gamma: Tensor
    freqs: Tensor
    positions: Tensor

    def part(self, begin: int, end: int) -> Inputs:
        """Some of the tokens."""
        return replace(self, q=self.q[begin:end], kv=self.kv[begin:end], positions=self.positions[begin:end])


def _inputs(device: str, tokens: int, heads: int, latent: int, rope: int, dtype: torch.dtype) -> Inputs:
    q = torch.randn(tokens, heads, rope, device=device).to(dtype)
    kv = torch.randn(tokens, latent + rope, device=device).to(dtype)
    gamma, angle = torch.randn(latent, device=device).to(dtype), torch.randn(100, rope // 2, device=device)
    freqs = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)
    return Inputs(q, kv, gamma, freqs, torch.arange(tokens, device=device) * 7 % 100)


_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"rope_style": "half", "scaled": True, "weight_offset": 1.0},
    {"rounding": "reference", "cache": torch.bfloat16, "rope_style": "half"},
)


def _packed(x: Inputs) -> list[Tensor]:
    """q and entries of 656 bytes in token order."""
    tokens, device = x.q.shape[0], x.q.device
    blocks = torch.zeros(-(-tokens // PAGE) + 1, PAGE, DS_MLA_BYTES, dtype=torch.uint8, device=device)
    slots = torch.arange(tokens, device=device).flip(0) + 3
    cache = PagedKVCache(blocks, entry_format="fp8_ds_mla")
    options: dict[str, Any] = {"slot_mapping": slots, "positions": x.positions}
    q = fused_rope_rmsnorm_quantization(None, x.q, x.kv, None, x.freqs, x.gamma, cache, **options)
    return [q, blocks.flatten(0, 1)[slots]]


def _written(x: Inputs, *, scaled: bool = False, cache: torch.dtype = E4M3FN.dtype, **options: Any) -> list[Tensor]:
    """q, entries and scales in token order; slots run backwards."""
    tokens, device = x.q.shape[0], x.q.device
    pages = -(-tokens // PAGE) + 1
    blocks = torch.zeros(pages, PAGE, x.kv.shape[1], device=device).to(cache)
    slots = torch.arange(tokens, device=device).flip(0) + 3
    scale = torch.zeros(pages, PAGE, device=device) if scaled else None
    options |= {"per_token_scale": scale, "slot_mapping": slots, "positions": x.positions}
    q = fused_rope_rmsnorm_quantization(None, x.q, x.kv, None, x.freqs, x.gamma, PagedKVCache(blocks), **options)
    results = [q, blocks.view(torch.uint8).flatten(0, 1)[slots]]
    return results if scale is None else [*results, scale.flatten()[slots]]


def _all(x: Inputs) -> list[Tensor]:
    found = [result for way in _WAYS for result in _written(x, **way)]
    packed = (x.gamma.shape[0], x.q.shape[2]) == DS_MLA_COLUMNS
    return [*found, *_packed(x)] if packed else found


def _part(x: Inputs, begin: int, end: int) -> list[Tensor]:
    return _all(x.part(begin, end))


def _batch(device: str, latent: int, rope: int, dtype: torch.dtype) -> str | None:
    x = _inputs(device, 300 if device == "cuda" else 70, 5, latent, rope, dtype)
    whole = _all(x)
    wrong = difference_of_parts(x, whole, _part, (1, 3, 17, 64))
    if wrong is not None:
        return wrong
    heads = [t[:, 2:3] if i in (0, 2, 5, 7) else t for i, t in enumerate(whole)]
    number = first_difference(_all(replace(x, q=x.q[:, 2:3])), heads)
    return None if number is None else f"result {number} depends on the number of heads"


def _layout(device: str, latent: int, rope: int, dtype: torch.dtype) -> str | None:
    x = _inputs(device, 9, 3, latent, rope, dtype)

    def changes(shift: int) -> dict[str, dict[str, Tensor]]:
        made = {name: {name: moved(getattr(x, name), shift)} for name in ("q", "kv", "freqs", "gamma")}
        return {**made, "heads": {"q": moved_heads(x.q, shift)}}

    return difference_of_layouts(x, _all, changes, (1, 2, 4, 8))


def _paged(device: str, tokens: int = 24, heads: int = 16) -> tuple[Inputs, PagedKVCache, Tensor]:
    """Three requests with shuffled pages, and the row offsets of their next tokens."""
    x = _inputs(device, tokens, heads, 512, 64, torch.bfloat16)
    table = torch.randperm(12, device=device).view(3, 4).int()
    blocks = torch.zeros(12, PAGE, 576, device=device).to(E4M3FN.dtype)
    lengths = torch.tensor([5, 0, 40], device=device, dtype=torch.int32)
    offsets = torch.tensor([0, tokens // 2, tokens // 2, tokens], device=device, dtype=torch.int32)
    return x, PagedKVCache(blocks, lengths, table), offsets


def _step(x: Inputs, cache: PagedKVCache, offsets: Tensor, **options: Any) -> Tensor:
    return fused_rope_rmsnorm_quantization(None, x.q, x.kv, offsets, x.freqs, x.gamma, cache, **options)


def _slots(device: str) -> str | None:
    x, cache, offsets = _paged(device)
    q = _step(x, cache, offsets)
    other = PagedKVCache(torch.zeros_like(cache.blocks), cache.cache_lengths, cache.lookup_table)
    again = _step(x, other, offsets, slot_mapping=cache.slot_mapping(offsets, x.q.shape[0]))
    if not same_bytes(q, again):
        return "q differs"
    return None if same_bytes(cache.blocks, other.blocks) else "the entries differ"


def _as_bytes(device: str) -> str | None:
    """Blocks of uint8 and a dtype, as engines allocate them."""
    for dtype in (E4M3FN.dtype, torch.bfloat16):
        x, cache, offsets = _paged(device)
        plain = PagedKVCache(
            torch.zeros(12, PAGE, 576, device=device).to(dtype), cache.cache_lengths, cache.lookup_table
        )
        memory = torch.zeros(12, PAGE, 576 * dtype.itemsize, dtype=torch.uint8, device=device)
        view = PagedKVCache(memory, cache.cache_lengths, cache.lookup_table, blocks_dtype=dtype)
        if not same_bytes(_step(x, plain, offsets), _step(x, view, offsets)):
            return f"q differs with {dtype}"
        if not bool(memory.any()) or not same_bytes(memory, plain.blocks.view(torch.uint8)):
            return f"the entries differ with {dtype}"
    return None


def _last_columns(device: str) -> str | None:
    """A packed entry ends with the bfloat16 columns that a plain one ends with; q does not depend on the cache."""
    x = _inputs(device, 40, 5, *DS_MLA_COLUMNS, torch.bfloat16)
    packed, plain = _packed(x), _written(x, cache=torch.bfloat16)
    last = 2 * DS_MLA_COLUMNS[1]
    if not same_bytes(packed[0], plain[0]):
        return "q differs"
    if not bool(packed[1][:, :-last].any()):
        return "no code was written"
    return None if same_bytes(packed[1][:, -last:], plain[1][:, -last:]) else "the last columns differ"


def _repeats(device: str) -> str | None:
    x, cache, offsets = _paged(device)
    first = [_step(x, cache, offsets), cache.blocks.clone()]
    for repeat in range(1000):
        if first_difference([_step(x, cache, offsets), cache.blocks], first) is not None:
            return f"repeat {repeat} differs"
    return None


def _threads() -> str | None:
    return difference_of_threads(partial(_all, _inputs("cpu", 300, 8, 512, 64, torch.bfloat16)))


def _cuts(device: str) -> str | None:
    from onepass.ops.mla_cache.gpu import MlaCut, cut_as

    for latent, rope, heads, tokens in ((512, 64, 16, 24), (577, 18, 3, 5), (31, 6, 1, 1)):
        x = _inputs(device, tokens, heads, latent, rope, torch.bfloat16)
        expected = _written(x, scaled=True)
        for cut in (MlaCut(32, 64, 512), MlaCut(64, 4096, 4096), MlaCut(128, 1024, 128), MlaCut(256, 256, 1 << 16)):
            with cut_as(cut):
                wrong = first_difference(_written(x, scaled=True), expected)
            if wrong is not None:
                return f"result {wrong} of {tokens} x {heads} x {rope} differs with {cut}"
    return None


def _graph() -> str | None:
    """Ten decode steps of a graph that writes and counts, while tokens arrive and a request moves to other pages."""
    x, cache, _ = _paged("cuda", tokens=3)
    offsets = torch.arange(4, device="cuda", dtype=torch.int32)
    assert cache.cache_lengths is not None and cache.lookup_table is not None
    _step(x, cache, offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = _step(x, cache, offsets)
        cache.append()
    cache.blocks.view(torch.uint8).zero_()
    eager = PagedKVCache(cache.blocks.clone(), cache.cache_lengths.clone(), cache.lookup_table.clone())
    assert eager.cache_lengths is not None and eager.lookup_table is not None
    for step in range(10):
        x.q.copy_(torch.randn_like(x.q))
        x.kv.copy_(torch.randn_like(x.kv))
        if step == 5:
            for tables in (cache.lookup_table, eager.lookup_table):
                tables.copy_(tables.flip(0))
            cache.cache_lengths.sub_(2)
            eager.cache_lengths.sub_(2)
        graph.replay()
        expected = _step(x, eager, offsets)
        eager.append()
        pairs = ((q, expected), (cache.blocks, eager.blocks), (cache.cache_lengths, eager.cache_lengths))
        if not all(same_bytes(a, b) for a, b in pairs):
            return f"step {step} differs from an eager call"
    return None


def _huge() -> str | None:
    """Entries, tokens and heads beyond 2**31 elements of their tensors."""
    x = _inputs("cuda", 6, 128, 512, 64, torch.bfloat16)
    slots = torch.tensor([0, 2**31 // 576 - 1, 2**31 // 576 + 5, 2**32 // 576 + 5, 7_900_000, -1], device="cuda")
    blocks = torch.zeros(7_900_008 // 8, 8, 576, device="cuda", dtype=E4M3FN.dtype)
    tokens = 2**31 // (128 * 64) + 100
    q = torch.zeros(tokens, 128, 64, device="cuda", dtype=torch.bfloat16)
    kv = torch.zeros(tokens, 576, device="cuda", dtype=torch.bfloat16)
    q[-6:], kv[-6:] = x.q, x.kv
    where = torch.full((tokens,), -1, device="cuda")
    where[-6:] = slots
    positions = torch.zeros(tokens, device="cuda", dtype=torch.int64)
    positions[-6:] = x.positions
    options: dict[str, Any] = {"slot_mapping": where, "positions": positions}
    out = fused_rope_rmsnorm_quantization(None, q, kv, None, x.freqs, x.gamma, PagedKVCache(blocks), **options)
    expected, entries = _written(x)
    if not same_bytes(out[-6:], expected):
        return "the last tokens' q differs"
    if not same_bytes(blocks.view(torch.uint8).flatten(0, 1)[slots[:5]], entries[:5]):
        return "an entry differs"
    return None if int((blocks.view(torch.uint8) != 0).any(-1).sum()) == 5 else "entries of no token were written"
