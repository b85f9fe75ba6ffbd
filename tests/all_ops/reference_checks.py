"""Checks that the rows of docs/reference.md name: gemv_partial_norm and fused_rope_rmsnorm_quantization_kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.backend import launching_with
from onepass.testing.tensors import same_bytes

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E4M3UZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
I32 = torch.int32

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a function as a check, under its name."""
    CHECKS[function.__name__] = function
    return function


def near(found: Tensor, exact: Tensor) -> bool:
    """Within one unit in the last place of the exact value, or about ten for float32."""
    eps = 1e-6 if found.dtype == F32 else torch.finfo(found.dtype).eps
    return bool(exact.abs().amax() > 0.5) and torch.allclose(found.to(F64), exact, rtol=eps, atol=eps * 0.05)


def launches(call: Callable[[], Any]) -> int:
    """The number of launches of a call, which computes nothing."""
    seen: list[str] = []
    with launching_with(lambda family: lambda *_: seen.append(family)):
        call()
    return len(seen)


def rms(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    x = x.to(F64)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma.to(F64)


# --- gemv_partial_norm -------------------------------------------------------------------------------------------------


def gemv(m: int = 1, n: int = 70, k: int = 128, width: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(m, k), torch.randn(n, k), torch.randn(width)


@check
def gemv_formula() -> None:
    act, weight, gamma = gemv()
    y = act.to(F64) @ weight.to(F64).T
    normed, unnormed = onepass.gemv_and_partial_norm(act, weight, gamma, 1e-5)
    assert near(normed, rms(y[:, :48], gamma, 1e-5)) and torch.allclose(
        unnormed.to(F64), y[:, 48:], rtol=1e-5, atol=1e-4
    )
    assert (normed.shape, unnormed.shape) == ((1, 48), (1, 22))


@check
def gemv_scratch() -> None:
    act, weight, gamma = (t.bfloat16() for t in gemv(3))
    normed, unnormed, counter = torch.zeros(3, 48).bfloat16(), torch.zeros(3, 22).bfloat16(), torch.zeros(1, dtype=I32)
    expected = onepass.gemv_and_partial_norm(act, weight, gamma)
    for _ in range(2):  # the counter is ready again
        onepass.gemv_and_partial_norm_with_scratch(normed, unnormed, act, weight, gamma, 1e-6, counter)
        assert same_bytes(normed, expected[0]) and same_bytes(unnormed, expected[1]) and int(counter) == 0
    assert near(normed, rms(act.to(F64) @ weight.to(F64)[:48].T, gamma, 1e-6))


@check
def gemv_unfused() -> None:
    act, weight, gamma = (t.bfloat16() for t in gemv(5))
    normed, y = torch.zeros(5, 48).bfloat16(), torch.zeros(5, 70).bfloat16()
    onepass.gemv_and_partial_norm_unfused_with_scratch(normed, act, weight, gamma, 1e-6, y)
    assert same_bytes(y, act @ weight.T) and near(normed, rms(y[:, :48], gamma, 1e-6))
    other, tail = onepass.gemv_and_partial_norm(act, weight, gamma, fused=False)
    assert same_bytes(other, normed) and same_bytes(tail, y[:, 48:]) and tail.stride(0) == 70


@check
def gemv_one_launch() -> None:
    act, weight, gamma = gemv()
    outs = torch.zeros(1, 48), torch.zeros(1, 22)
    assert launches(lambda: onepass.gemv_and_partial_norm(act, weight, gamma)) == 1
    counter = torch.zeros(1, dtype=I32)
    assert launches(lambda: onepass.gemv_and_partial_norm_with_scratch(*outs, act, weight, gamma, 1e-6, counter)) == 1


@check
def gemv_rows() -> None:
    for m, refused in ((1, False), (16, False), (17, True)):
        act, weight, gamma = gemv(m)
        if refused:
            with pytest.raises(onepass.ContractError, match="`act` must have at most 16 rows"):
                onepass.gemv_and_partial_norm(act, weight, gamma)
        else:
            assert onepass.gemv_and_partial_norm(act, weight, gamma)[0].shape == (m, 48)
        assert onepass.gemv_and_partial_norm(act, weight, gamma, fused=False)[0].shape == (m, 48)


@check
def gemv_widths() -> None:
    """Widths need not divide anything, and all of y may be normed."""
    act, weight, _ = gemv(n=71, k=33)
    y = act.to(F64) @ weight.to(F64).T
    for width in (1, 7, 37, 71):
        gamma = torch.ones(width)
        assert near(onepass.gemv_and_partial_norm(act, weight, gamma)[0], rms(y[:, :width], gamma, 1e-6))
    first, second, tail = onepass.gemv_and_partial_norm(act, weight, torch.ones(30), segments=[torch.ones(31)])
    assert near(first, rms(y[:, :30], torch.ones(30), 1e-6)) and near(second, rms(y[:, 30:61], torch.ones(31), 1e-6))
    assert tail.shape == (1, 10)


@check
def trace_slots() -> None:
    assert onepass.GEMV_TRACE_EVENTS_PER_BLOCK == 16
    assert [event.value for event in onepass.GemvEvent] == list(range(10))


def traced(trace: onepass.TraceBuf) -> int:
    """The blocks of a launch that stored timestamps."""
    act, weight, gamma = gemv()
    outs = torch.zeros(1, 48), torch.zeros(1, 22)
    onepass.gemv_and_partial_norm_with_scratch(*outs, act, weight, gamma, 1e-6, torch.zeros(1, dtype=I32), trace)
    return onepass.gemv_trace_blocks(act, weight, gamma)


@check
def trace_host() -> None:
    stamps: dict[int, int] = {}

    class Mine(onepass.TraceBuf):
        def store(self, offset: int, ts: int) -> None:
            stamps[offset] = ts

    blocks = traced(Mine())
    assert {offset // 16 for offset in stamps} == set(range(blocks)) and {offset % 16 for offset in stamps} == set(
        range(10)
    )
    assert list(stamps) == sorted(stamps) and all(ts > 0 for ts in stamps.values())


@check
def trace_memory() -> None:
    for dtype in (torch.int64, torch.uint64):
        trace = onepass.GmemTrace(torch.zeros(16 * 64, dtype=dtype))
        trace.store(3, 17)
        assert int(trace.buffer[3]) == 17
        trace.clear()
        blocks = traced(trace)
        assert (trace.events()[:blocks, 0] > 0).all() and not trace.events()[blocks:].any()


@check
def trace_null() -> None:
    trace = onepass.NullTrace()
    trace.store(0, 1)
    assert vars(trace) == {} and trace.tensors() == (None, None) and traced(trace) > 0


# --- fused_rope_rmsnorm_quantization_kernel ------------------------------------------------------------------------------


class Mla:
    """A ragged batch: 3 tokens after 2 cached ones, none, 2 after 5; pages of 4; 24 normed and 8 rotated columns."""

    def __init__(self, dtype: torch.dtype = F32, cache: torch.dtype = E4M3, **dtypes: torch.dtype) -> None:
        self.q, self.kv = torch.randn(5, 2, 8).to(dtype), (2 * torch.randn(5, 32)).to(dtypes.get("kv", dtype))
        self.gamma = torch.randn(24).to(dtypes.get("gamma", dtype))
        angle = torch.rand(16, 4) * 6
        self.freqs = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2).to(dtypes.get("freqs", F32))
        self.offsets = torch.tensor([0, 3, 3, 5], dtype=torch.uint32)
        self.lengths = torch.tensor([2, 1, 5], dtype=I32)
        self.table = torch.tensor([[4, 1], [0, 0], [2, 3]], dtype=I32)
        self.cache = onepass.PagedKVCache(torch.zeros(5, 4, 32).to(cache), self.lengths, self.table)
        self.positions, self.requests = torch.tensor([2, 3, 4, 5, 6]), torch.tensor([0, 0, 0, 2, 2])

    def call(self, out: Tensor | None = None, **options: Any) -> Tensor:
        given = {"input_row_offsets": self.offsets, **options}
        return onepass.fused_rope_rmsnorm_quantization(
            out, self.q, self.kv, freqs_cis=self.freqs, gamma=self.gamma, k_cache=self.cache, **given
        )

    def turned(self, x: Tensor) -> Tensor:
        """Pairs of neighbours as complex numbers."""
        by = torch.view_as_complex(self.freqs.to(F64)[self.positions].unflatten(-1, (4, 2)))
        pairs = torch.view_as_complex(x.to(F64).unflatten(-1, (4, 2)))
        return torch.view_as_real(pairs * (by if x.dim() == 2 else by[:, None])).flatten(-2)

    def entries(self) -> Tensor:
        """The tokens' cache entries, located by the definition."""
        pages = self.table[self.requests, self.positions // 4].long()
        raw = self.cache.blocks.view(torch.uint8)[pages, self.positions % 4]
        return raw.view(self.cache.blocks.dtype)

    def exact(self) -> Tensor:
        return torch.cat((rms(self.kv[:, :24], self.gamma, 1e-6), self.turned(self.kv[:, 24:])), -1)


@check
def mla_formula() -> None:
    for cache in (F32, E4M3):
        p = Mla(cache=cache)
        out = torch.zeros(5, 2, 8)
        assert p.call(out) is out and near(out, p.turned(p.q))
        entries, exact = p.entries(), p.exact()
        if cache == F32:
            assert near(entries, exact)
        else:  # the reference's quantization: a saturating cast
            wrong = entries.float() != exact.float().clamp(-448, 448).to(E4M3).float()
            assert entries.float().any() and wrong.float().mean() < 0.01
        assert p.cache.cache_lengths is p.lengths and p.lengths.tolist() == [2, 1, 5]
        touched = p.cache.blocks.float().ne(0).any(-1).sum()
        assert int(touched) == 5, "entries of other places stay"


@check
def mla_one_launch() -> None:
    p = Mla()
    assert launches(lambda: p.call()) == 1


@check
def mla_dtypes() -> None:
    for dtype in (BF16, F16, F32):
        for other in (BF16, F16, F32):
            p = Mla(dtype, F32, kv=other, gamma=dtype, freqs=other)
            q = p.call()
            assert q.dtype == dtype and near(q, p.turned(p.q)) and near(p.entries(), p.exact())
    for cache in (BF16, F16, F32, E4M3, E4M3UZ):
        p = Mla(BF16, cache)
        assert p.call(out_dtype=cache).dtype == cache and p.entries().float().any()


@check
def mla_strides() -> None:
    p = Mla(BF16)
    expected, entries = p.call(), p.entries().clone()
    p.cache.blocks.view(torch.uint8).zero_()
    p.q = torch.cat((torch.zeros(5, 2, 6).bfloat16(), p.q), -1)[..., 6:]
    p.kv = torch.cat((torch.zeros(5, 10).bfloat16(), p.kv), -1)[:, 10:]
    p.freqs = torch.cat((p.freqs, torch.zeros(16, 3)), -1)[:, :8]
    out = torch.zeros(5, 2, 20).bfloat16()[..., 4:12]
    p.call(out)
    assert not out.is_contiguous() and same_bytes(out, expected) and same_bytes(p.entries(), entries)


@check
def mla_offsets() -> None:
    results = []
    for dtype in (torch.uint32, I32, torch.int64):
        torch.manual_seed(1)
        p = Mla(BF16)
        p.call(input_row_offsets=p.offsets.to(dtype))
        results.append(p.entries())
        other = Mla(BF16)
        other.kv, other.gamma, other.freqs, other.q = p.kv, p.gamma, p.freqs, p.q
        slots = p.table[p.requests, p.positions // 4].long() * 4 + p.positions % 4
        other.call(input_row_offsets=None, slot_mapping=slots, positions=p.positions)
        assert p.entries().float().any() and same_bytes(other.entries(), p.entries())
    assert all(same_bytes(found, results[0]) for found in results)


@check
def mla_part() -> None:
    p = Mla(cache=F32)
    p.gamma = p.gamma[:20]
    with pytest.raises(onepass.ContractError, match="`kv` must have gamma's and q_rope's columns"):
        p.call()
    p.call(kv_norm_dim=20)
    parts = rms(p.kv[:, :20], p.gamma, 1e-6), p.kv[:, 20:24].to(F64), p.turned(p.kv[:, 24:])
    assert near(p.entries(), torch.cat(parts, -1))


@check
def mla_in_place() -> None:
    p = Mla(BF16)
    expected = p.call()
    assert p.call(p.q) is p.q and same_bytes(p.q, expected)


@check
def mla_rounding() -> None:
    p = Mla(BF16, F32)
    p.call(rounding="reference")
    normed = (
        p.kv[:, :24].float() * (rms(p.kv[:, :24], torch.ones(24), 1e-6) / p.kv[:, :24].to(F64)).float()
    ).bfloat16()
    exact = torch.cat(((normed.float() * p.gamma.float()).bfloat16(), p.turned(p.kv[:, 24:]).bfloat16()), -1)
    assert (p.entries() == exact.float()).float().mean() > 0.97
    p.call()
    assert (p.entries() == exact.float()).float().mean() < 0.5 and near(p.entries(), p.exact())
