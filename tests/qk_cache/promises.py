"""Promises of the write of k and v that need no oracle: bytes depend on the token alone, in every layout and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.formats import E4M3FN
from onepass.ops.qk_cache.op import qk_norm_rope_cache
from onepass.ops.qk_norm.op import qk_rms_norm
from onepass.rope import Rope
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
HEADS = ((128, 128), (256, 64), (96, 96), (33, 16))
"""Columns of a head, and those that rotate."""


def promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise that can be tested on ``device``."""
    for dtype in (torch.bfloat16, torch.float32):  # float16 takes the same paths as bfloat16
        for head, dim in HEADS[1:3] if device == "cuda" and dtype == torch.float32 else HEADS:
            label = f"heads of {head}, {dim} rotated, {str(dtype).removeprefix('torch.')}"
            arguments = (device, head, dim, dtype)
            yield f"cache write, a token alone is the token in a batch: {label}", partial(_batch, *arguments)
            yield f"cache write, alignment and strides change no bit: {label}", partial(_layout, *arguments)
            yield f"cache write, the separate calls give the same bytes: {label}", partial(_separate, *arguments)
    yield "cache write, paged and dense caches hold the same bytes", partial(_paged_and_dense, device)
    yield "cache write, a thousand repeats change no bit", partial(_repeats, device)
    if device == "cpu":
        yield "cache write, threads change no bit", _threads
    else:
        yield "cache write, programs of any size give the same bytes", partial(_programs, device)
    if device == "cuda":
        yield "cache write, a captured step follows start and slots", _graph
        yield "cache write, more than 2**31 elements are addressed", _huge


@dataclass(frozen=True)
class Inputs:
    """Tokens, each with its own position."""

    q: Tensor
    k: Tensor
    v: Tensor
    gamma_q: Tensor
    gamma_k: Tensor
    freqs: Tensor
    positions: Tensor

    def part(self, begin: int, end: int) -> Inputs:
        """Some of the tokens."""
        return replace(self, **{name: getattr(self, name)[begin:end] for name in ("q", "k", "v", "positions")})


def _inputs(
    device: str,
    tokens: int,
    head: int,
    dim: int,
    dtype: torch.dtype,
    heads: tuple[int, int] = (6, 2),
    whole: bool = False,
) -> Inputs:
    q, k, v = (torch.randn(tokens, h, head, device=device).to(dtype) for h in (*heads, heads[1]))
    sizes = [h * head for h in heads] if whole else [head, head]
    gamma_q, gamma_k = (torch.randn(n, device=device).to(dtype) for n in sizes)
    angle = torch.rand(100, dim // 2, device=device) * 6.3
    freqs = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)
    return Inputs(q, k, v, gamma_q, gamma_k, freqs, torch.arange(tokens, device=device) * 7 % 100)


_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"rounding": "hf", "style": "interleaved", "weight_offset": 1.0},
    {"normed": False, "cache": E4M3FN.dtype, "layout": "HND"},
    {"norm_v": True, "rounding": "hf_rope"},
)


def _written(
    x: Inputs,
    *,
    style: Any = "half",
    normed: bool = True,
    cache: torch.dtype | None = None,
    layout: Any = "NHD",
    **options: Any,
) -> list[Tensor]:
    """q and the entries of k and v, in token order; slots run backwards."""
    tokens, device, heads = x.q.shape[0], x.q.device, x.k.shape[1]
    pages = -(-tokens // PAGE) + 1
    middle = (PAGE, heads) if layout == "NHD" else (heads, PAGE)
    made = [torch.zeros(pages, *middle, t.shape[-1], device=device).to(cache or t.dtype) for t in (x.k, x.v)]
    slots = torch.arange(tokens, device=device).flip(0) + 3
    if normed:
        options |= {"gamma_q": x.gamma_q, "gamma_k": x.gamma_k, "per_head": x.gamma_q.shape[0] == x.q.shape[-1]}
    rope = Rope(x.freqs, x.positions, style)
    q, _ = qk_norm_rope_cache(x.q, x.k, x.v, *made, rope=rope, slots=slots, layout=layout, **options)
    ordered = (t if layout == "NHD" else t.transpose(1, 2) for t in made)
    return [q, *(t.contiguous().view(torch.uint8).flatten(0, 1)[slots] for t in ordered)]


def _all(x: Inputs) -> list[Tensor]:
    return [result for way in _WAYS for result in _written(x, **way)]


def _part(x: Inputs, begin: int, end: int) -> list[Tensor]:
    return _all(x.part(begin, end))


def _batch(device: str, head: int, dim: int, dtype: torch.dtype) -> str | None:
    for whole in (False, True):
        x = _inputs(device, 300 if device == "cuda" else 40, head, dim, dtype, whole=whole)
        wrong = difference_of_parts(x, _all(x), _part, (1, 3, 17))
        if wrong is not None:
            return wrong
    return None


def _layout(device: str, head: int, dim: int, dtype: torch.dtype) -> str | None:
    x = _inputs(device, 9, head, dim, dtype)

    def changes(shift: int) -> dict[str, dict[str, Tensor]]:
        names = ("q", "k", "v", "gamma_q", "gamma_k", "freqs")
        made = {name: {name: moved(getattr(x, name), shift)} for name in names}
        return {**made, "heads": {name: moved_heads(getattr(x, name), shift) for name in "qkv"}}

    return difference_of_layouts(x, _all, changes, (1, 4, 8))


def _separate(device: str, head: int, dim: int, dtype: torch.dtype) -> str | None:
    """`qk_rms_norm`, then a copy."""
    for whole in (False, True):
        x = _inputs(device, 20, head + head % 2, dim, dtype, whole=whole)
        for style in ("half", "interleaved"):
            rope = Rope(x.freqs, x.positions, style, head_dim=x.q.shape[-1])
            options: dict[str, Any] = {"weight_offset": 0.5, "rope": rope, "per_head": not whole}
            q, k = qk_rms_norm(x.q.flatten(1), x.k.flatten(1), x.gamma_q, x.gamma_k, **options)
            got = _written(x, style=style, weight_offset=0.5)
            expected = [q.view(x.q.shape), *(t.view(x.k.shape).view(torch.uint8) for t in (k, x.v))]
            wrong = first_difference(got, expected)
            if wrong is not None:
                return f"result {wrong} differs ({'whole' if whole else 'heads'}, {style})"
    return None


def _paged_and_dense(device: str) -> str | None:
    x = _inputs(device, 24, 128, 128, torch.bfloat16)
    expected = _written(x)
    q, k, v, positions = (t.unflatten(0, (4, 6)) for t in (x.q, x.k, x.v, x.positions))
    caches = [torch.zeros(4, 2, 9, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    given: dict[str, Any] = {"gamma_q": x.gamma_q, "gamma_k": x.gamma_k, "rope": Rope(x.freqs, positions)}
    start = torch.tensor([2], device=device)
    made, _ = qk_norm_rope_cache(q, k, v, *caches, **given, layout="dense", start=start)
    stored = [t[:, :, 2:8].transpose(1, 2).contiguous().view(torch.uint8).flatten(0, 1) for t in caches]
    wrong = first_difference([made.flatten(0, 1), *stored], expected)
    return None if wrong is None else f"result {wrong} differs"


def _repeats(device: str) -> str | None:
    x = _inputs(device, 5, 128, 128, torch.bfloat16)
    first = _written(x)
    for repeat in range(1000 if device != "interpreter" else 3):
        if first_difference(_written(x), first) is not None:
            return f"repeat {repeat} differs"
    return None


def _threads() -> str | None:
    return difference_of_threads(partial(_all, _inputs("cpu", 200, 128, 128, torch.bfloat16)))


def _programs(device: str) -> str | None:
    from onepass.ops.qk_cache.gpu import columns_as

    for heads, head, dim, tokens in (((6, 2), 128, 128, 9), ((5, 3), 80, 40, 3)):
        x = _inputs(device, tokens, head, dim, torch.bfloat16, heads)
        expected = _all(x)
        for columns in (64, 256, 2048):
            with columns_as(columns):
                wrong = first_difference(_all(x), expected)
            if wrong is not None:
                return f"result {wrong} of {heads} heads of {head} differs with {columns} columns per program"
    return None


def _graph() -> str | None:
    """Eight steps of a graph that writes at ``start``, which counts up, and into slots, which change."""
    x = _inputs("cuda", 4, 128, 128, torch.bfloat16)
    q, k, v = (t.unsqueeze(1) for t in (x.q, x.k, x.v))
    dense = [torch.zeros(4, 2, 12, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    paged = [torch.zeros(4, PAGE, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    start, slots = torch.zeros(1, device="cuda", dtype=torch.int64), torch.arange(4, device="cuda")
    given: dict[str, Any] = {"gamma_q": x.gamma_q, "gamma_k": x.gamma_k}

    def step(to: list[Tensor], pages: list[Tensor], at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        table = Rope(x.freqs, x.positions.unsqueeze(1))
        first, _ = qk_norm_rope_cache(q, k, v, *to, **given, rope=table, layout="dense", start=at)
        second, _ = qk_norm_rope_cache(x.q, x.k, x.v, *pages, **given, rope=Rope(x.freqs, x.positions), slots=rows)
        return first, second

    step(dense, paged, start, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(dense, paged, start, slots)
        start.add_(1)
    for t in (*dense, *paged):
        t.zero_()
    start.zero_()
    eager, pages = [t.clone() for t in dense], [t.clone() for t in paged]
    for number in range(8):
        x.q.copy_(torch.randn_like(x.q))
        x.k.copy_(torch.randn_like(x.k))
        slots.copy_(torch.randperm(4 * PAGE, device="cuda")[:4])
        at = start.clone()
        graph.replay()
        expected = step(eager, pages, at, slots)
        pairs = zip((*results, *dense, *paged), (*expected, *eager, *pages), strict=True)
        if not all(same_bytes(a, b) for a, b in pairs):
            return f"step {number} differs from an eager call"
    return None


def _huge() -> str | None:
    """Entries and tokens beyond 2**31 elements of their tensors."""
    x = _inputs("cuda", 6, 128, 128, torch.bfloat16, (32, 8))
    entry = 8 * 128
    slots = torch.tensor([0, 2**31 // entry - 1, 2**31 // entry + 5, 2**32 // entry + 5, 4_400_000, -1], device="cuda")
    caches = [torch.zeros(4_400_016 // 16, 16, 8, 128, device="cuda", dtype=E4M3FN.dtype) for _ in range(2)]
    tokens = 2**31 // (32 * 128) + 100
    q, k, v = (torch.zeros(tokens, h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8))
    q[-6:], k[-6:], v[-6:] = x.q, x.k, x.v
    where, positions = torch.full((tokens,), -1, device="cuda"), torch.zeros(tokens, device="cuda", dtype=torch.int64)
    where[-6:], positions[-6:] = slots, x.positions
    given: dict[str, Any] = {"gamma_q": x.gamma_q, "gamma_k": x.gamma_k, "rope": Rope(x.freqs, positions)}
    out, _ = qk_norm_rope_cache(q, k, v, *caches, **given, slots=where)
    expected = _written(x, cache=E4M3FN.dtype)
    if not same_bytes(out[-6:], expected[0]):
        return "the last tokens' q differs"
    for name, cache, entries in (("k", caches[0], expected[1]), ("v", caches[1], expected[2])):
        stored = cache.view(torch.uint8).flatten(0, 1)
        if not same_bytes(stored[slots[:5]], entries[:5]):
            return f"an entry of {name} differs"
        if int((stored != 0).flatten(1).any(-1).sum()) != 5:
            return f"entries of {name} that belong to no token were written"
    return None
