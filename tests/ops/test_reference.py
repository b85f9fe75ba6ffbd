"""docs/reference.md says where every name of the reference is: each row is checked, and no name is missing.

The checks restate the reference's formulas in float64, without onepass' own oracle.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import onepass
from onepass.ops.dispatch import launching_with
from onepass.testing.case import same_bytes

ROOT = Path(__file__).resolve().parents[2]
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E4M3UZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
I32 = torch.int32

NAMES = {
    "gemv_partial_norm": """gemv_and_partial_norm gemv_and_partial_norm_with_scratch gemv_and_partial_norm_unfused_with_scratch
        gemv_partial_norm_kernel GEMV_TRACE_EVENTS_PER_BLOCK TraceBuf store GmemTrace ptr NullTrace x W transpose_b gamma eps N_normed
        normed_output unnormed finish_counter y_scratch""",
    "fused_rope_rmsnorm_quantization_kernel": """fused_rope_rmsnorm_quantization_kernel dtype freq_dtype gamma_dtype
        QRopeOutputLayoutType QRopeLayoutType KVLayoutType InputRowOffsetsLayoutType FreqsCisLayoutType GammaLayoutType cache_t
        block_size n_rope_blocks n_rms_blocks q_rope_output q_rope kv input_row_offsets freqs_cis gamma k_cache epsilon kv_norm_dim
        cache_head_dim""",
    "apply_qk_rms_norm": """apply_qk_rms_norm in_dtype out_dtype target q_out k_out gamma_q gamma_k qk_var q k epsilon rows q_cols
        k_cols ctx""",
    "rms_norm_fused_fp8": """rms_norm_fused_fp8 in_dtype out_dtype scales_dtype rank input_fn target shape output gamma epsilon
        weight_offset ctx scale_ub scale_output""",
}
"""What the reference's pages name, by page; constraints come besides."""


class Row(NamedTuple):
    """One row of a table."""

    page: str
    name: str
    places: str
    why: str
    checks: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    for section in (ROOT / "docs/reference.md").read_text().split("\n## ")[1:]:
        page, *lines = section.splitlines()
        for line in lines:
            if line.startswith("|") and not line.startswith(("| reference", "|---")):
                name, places, why, checks = (cell.strip() for cell in line.strip("|").split("|"))
                found.append(Row(page, name, places, why, tuple(re.findall("`([^`]+)`", checks))))
    return found


ROWS = rows()


def missing(place: str) -> str | None:
    """None, or why a place such as ``onepass.f(parameter)`` is not there."""
    path, _, parameter = place.removesuffix(")").partition("(")
    module, *names = path.split(".")
    found: Any = import_module(module)
    for i, name in enumerate(names):
        if not hasattr(found, name):
            try:
                import_module(".".join((module, *names[: i + 1])))
            except ImportError:
                return f"{path} does not exist"
        found = getattr(found, name)
    if parameter and parameter not in inspect.signature(found).parameters:
        return f"{path} has no parameter {parameter}"
    return None


# --- the document ---------------------------------------------------------------------------------------------------


def test_every_name_of_the_reference_has_a_row() -> None:
    for page, names in NAMES.items():
        named = [row.name[1:-1] for row in ROWS if row.page == page and re.fullmatch("`[A-Za-z_0-9]+`", row.name)]
        assert sorted(named) == sorted(names.split()), page
    assert {row.page for row in ROWS} == set(NAMES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page}-{row.name.strip('`')}")
def test_places_exist_or_do_not_as_stated(row: Row) -> None:
    if "triton" in row.places:
        pytest.importorskip("triton")
    places = re.findall("(not )?`([^`]+)`", row.places)
    assert places and row.why.endswith(".") and row.checks, row
    for absent, place in places:
        fault = missing(place)
        assert ("no parameter" in (fault or "")) if absent else fault is None, f"{place}: {fault}"


def test_a_place_that_is_not_there_is_found() -> None:
    assert missing("onepass.rms_norm") is None and missing("onepass.rms_norm(eps)") is None
    assert missing("onepass.dist.qk_rms_norm(group)") is None
    assert missing("onepass.no_norm") == "onepass.no_norm does not exist"
    assert missing("onepass.TraceBuf.load") == "onepass.TraceBuf.load does not exist"
    assert missing("onepass.rms_norm(epsilon)") == "onepass.rms_norm has no parameter epsilon"


@pytest.mark.parametrize("check", sorted({check for row in ROWS for check in row.checks}))
def test_check(check: str) -> None:
    """A check of this file is run; a test elsewhere has to be there, and runs there."""
    path, _, name = check.partition("::")
    if name:
        assert re.search(rf"^(    )?def {name}\(", (ROOT / path).read_text(), re.M), check
    else:
        torch.manual_seed(0)
        CHECKS[check]()


def test_every_check_belongs_to_a_row() -> None:
    assert set(CHECKS) == {check for row in ROWS for check in row.checks if "::" not in check}


CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Put a function among the checks, under its name."""
    CHECKS[function.__name__] = function
    return function


def near(found: Tensor, exact: Tensor) -> bool:
    """Within a unit in the last place of the exact value, of a float32 about ten."""
    eps = 1e-6 if found.dtype == F32 else torch.finfo(found.dtype).eps
    return bool(exact.abs().amax() > 0.5) and torch.allclose(found.to(F64), exact, rtol=eps, atol=eps * 0.05)


def launches(call: Callable[[], Any]) -> int:
    """Launches of a call, which computes nothing meanwhile."""
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
    """No width has to divide anything, and up to all of y is normed."""
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
    """Blocks of a launch that leaves its timestamps there."""
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
    """A ragged batch: 3 tokens behind 2 cached ones, none, 2 behind 5; pages of 4; 24 columns normed and 8 that turn."""

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
        )  # fmt: skip

    def turned(self, x: Tensor) -> Tensor:
        """Pairs of neighbours as complex numbers."""
        by = torch.view_as_complex(self.freqs.to(F64)[self.positions].unflatten(-1, (4, 2)))
        pairs = torch.view_as_complex(x.to(F64).unflatten(-1, (4, 2)))
        return torch.view_as_real(pairs * (by if x.dim() == 2 else by[:, None])).flatten(-2)

    def entries(self) -> Tensor:
        """What the tokens have in the cache, found by the definition."""
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
        assert p.call(q_dtype=cache).dtype == cache and p.entries().float().any()


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


# --- apply_qk_rms_norm -----------------------------------------------------------------------------------------------


def qk(dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gamma_q, gamma_k, statistics that are not those of q and k, q and k."""
    return (
        torch.randn(48),
        torch.randn(16),
        torch.rand(6, 2) + 0.1,
        torch.randn(6, 48).to(dtype),
        torch.randn(6, 16).to(dtype),
    )


def applied(x: Tensor, gamma: Tensor, mean: Tensor, eps: float) -> Tensor:
    return x.to(F64) / (mean.to(F64)[:, None] + eps).sqrt() * gamma.to(F64)


@check
def apply_formula() -> None:
    gamma_q, gamma_k, var, q, k = qk()
    out = torch.zeros(6, 48), torch.zeros(6, 16)
    onepass.apply_qk_rms_norm(*out, gamma_q, gamma_k, var, q, k, 1e-3)
    assert near(out[0], applied(q, gamma_q, var[:, 0], 1e-3)) and near(out[1], applied(k, gamma_k, var[:, 1], 1e-3))


@check
def apply_dtypes() -> None:
    for dtype in (BF16, F16, F32):
        for other in (BF16, F16, F32):
            gamma_q, gamma_k, var, q, k = qk(dtype)
            out = torch.zeros(6, 48).to(other), torch.zeros(6, 16).to(other)
            onepass.apply_qk_rms_norm(*out, gamma_q.to(other), gamma_k, var, q, k, 1e-6)
            assert near(out[0], applied(q, gamma_q.to(other), var[:, 0], 1e-6))
            assert near(out[1], applied(k, gamma_k, var[:, 1], 1e-6))


@check
def apply_in_place() -> None:
    gamma_q, gamma_k, var, q, k = qk(BF16)
    out = torch.zeros_like(q), torch.zeros_like(k)
    onepass.apply_qk_rms_norm(*out, gamma_q, gamma_k, var, q, k, 1e-6)
    onepass.apply_qk_rms_norm(q, k, gamma_q, gamma_k, var, q, k, 1e-6)
    assert out[0].any() and same_bytes(q, out[0]) and same_bytes(k, out[1])


@check
def apply_statistics() -> None:
    """Sums of columns that two ranks hold, added and divided, are the statistics of whole rows."""
    gamma_q, gamma_k, _, q, k = qk()
    means = onepass.row_mean_of_squares_qk(q, k)
    assert near(means, torch.stack([t.to(F64).square().mean(-1) for t in (q, k)], -1))
    sums = onepass.row_sum_of_squares_qk(q[:, :20], k[:, :3]) + onepass.row_sum_of_squares_qk(q[:, 20:], k[:, 3:])
    out = torch.zeros_like(q), torch.zeros_like(k)
    onepass.apply_qk_rms_norm(*out, gamma_q, gamma_k, sums / torch.tensor([48.0, 16.0]), q, k, 1e-6)
    assert near(out[0], rms(q, gamma_q, 1e-6)) and near(out[1], rms(k, gamma_k, 1e-6))


@check
def apply_sizes() -> None:
    gamma_q, gamma_k, var, q, k = qk()
    good: dict[str, Any] = {"gamma_q": gamma_q, "gamma_k": gamma_k, "qk_var": var, "q": q, "k": k}
    for name, bad in (("k", k[:5]), ("qk_var", var[:5]), ("gamma_q", gamma_q[:47]), ("gamma_k", gamma_k[:15])):
        with pytest.raises(onepass.ContractError, match=f"^apply_qk_rms_norm: `{name}` must have shape"):
            onepass.apply_qk_rms_norm(torch.zeros_like(q), torch.zeros_like(k), **{**good, name: bad}, epsilon=1e-6)


@check
def apply_grouping() -> None:
    """``(x * rs) * gamma``, where the other grouping has other bits."""
    gamma_q, gamma_k, _, q, k = qk()
    var = torch.full((6, 2), 0.25)
    out = torch.zeros_like(q), torch.zeros_like(k)
    onepass.apply_qk_rms_norm(*out, gamma_q, gamma_k, var, q, k, 0.0)
    assert same_bytes(out[0], (q * 2.0) * gamma_q)
    var = torch.full((6, 2), 3.0)
    rs = 1 / var[:, :1].sqrt()
    onepass.apply_qk_rms_norm(*out, gamma_q, gamma_k, var, q, k, 0.0)
    assert same_bytes(out[0], (q * rs) * gamma_q) and not same_bytes(out[0], q * (rs * gamma_q))


@check
def apply_one_launch() -> None:
    gamma_q, gamma_k, var, q, k = qk()
    assert launches(lambda: onepass.apply_qk_rms_norm(q, k, gamma_q, gamma_k, var, q, k, 1e-6)) == 1


# --- rms_norm_fused_fp8 ----------------------------------------------------------------------------------------------


def coded(codes: Tensor, y: Tensor, scale: Tensor) -> bool:
    """Whether the codes are those of ``y / scale``, but for some that lie at a tie."""
    limit = torch.finfo(codes.dtype).max
    expected = (y / scale.to(F64)).clamp(-limit, limit).float().to(codes.dtype)
    return bool(codes.float().any()) and float((codes.float() != expected.float()).float().mean()) < 0.01


@check
def fp8_formula() -> None:
    x, gamma = torch.randn(4, 64), torch.randn(64)
    y = rms(x, gamma, 1e-5)
    codes, scale, norm = onepass.rms_norm_fused_fp8(x, gamma, 1e-5, return_norm=True)
    assert near(scale * 448, y.abs().amax(-1, keepdim=True)) and coded(codes, y, scale) and near(norm, y)


@check
def fp8_dtypes() -> None:
    for dtype in (BF16, F16, F32):
        for out_dtype in (E4M3, E4M3UZ):
            for scales in (BF16, F16, F32):
                x, gamma = torch.randn(4, 64).to(dtype), torch.randn(64).to(dtype)
                codes, scale = onepass.rms_norm_fused_fp8(x, gamma, out_dtype=out_dtype, scales_dtype=scales)
                assert (codes.dtype, scale.dtype) == (out_dtype, scales)
                y = rms(x, gamma, 1e-6)
                assert near(scale * torch.finfo(out_dtype).max, y.abs().amax(-1, keepdim=True)) and coded(
                    codes, y, scale
                )


@check
def fp8_ranks() -> None:
    x, gamma = torch.randn(24, 16), torch.randn(16)
    codes, scale = onepass.rms_norm_fused_fp8(x, gamma)
    for lead in ((24,), (4, 6), (2, 3, 4), (2, 3, 2, 2), (1, 2, 3, 2, 2)):
        found = onepass.rms_norm_fused_fp8(x.view(*lead, 16), gamma)
        assert found[1].shape == (*lead, 1)
        assert same_bytes(found[0].view(24, 16), codes) and same_bytes(found[1].view(24, 1), scale)
    one = onepass.rms_norm_fused_fp8(x[3], gamma)
    assert same_bytes(one[0], codes[3]) and one[1].shape == (1,)


@onepass.prologue
def halved(x, bias):  # type: ignore[no-untyped-def]
    """An input function."""
    return 0.5 * x + bias


@check
def fp8_input_fn() -> None:
    x, gamma, bias = torch.randn(4, 64), torch.randn(64), torch.randn(64)
    codes, scale = onepass.rms_norm_fused_fp8(x, gamma, prologue=halved, prologue_args=[bias])
    y = rms(0.5 * x.to(F64) + bias.to(F64), gamma, 1e-6)
    assert near(scale * 448, y.abs().amax(-1, keepdim=True)) and coded(codes, y, scale)


@check
def fp8_outputs() -> None:
    x, gamma = torch.randn(4, 64), torch.randn(64)
    expected = onepass.rms_norm_fused_fp8(x, gamma)
    out, scale = torch.zeros(4, 64).to(E4M3), torch.zeros(4, 1)
    found = onepass.rms_norm_fused_fp8(x, gamma, out=out, scale_output=scale)
    assert found[0] is out and found[1] is scale and same_bytes(out, expected[0]) and same_bytes(scale, expected[1])
    with pytest.raises(onepass.ContractError, match="`scale_output` must have shape"):
        onepass.rms_norm_fused_fp8(x, gamma, scale_output=torch.zeros(4))


@check
def fp8_offset() -> None:
    x, gamma = torch.randn(4, 64), 0.01 * torch.randn(64)
    _, scale = onepass.rms_norm_fused_fp8(x, gamma, weight_offset=1.0)
    assert near(scale * 448, rms(x, gamma.to(F64) + 1, 1e-6).abs().amax(-1, keepdim=True))


@check
def fp8_bound() -> None:
    x, gamma = torch.randn(4, 64), torch.ones(64)
    codes, scale = onepass.rms_norm_fused_fp8(x, gamma, scale_ub=1.5)
    assert torch.equal(scale, torch.full((4, 1), 1.5) / 448) and coded(codes, rms(x, gamma, 1e-6), scale)
    assert codes.float().abs().amax() == 448


@check
def fp8_one_launch() -> None:
    x, gamma = torch.randn(4, 64), torch.ones(64)
    assert launches(lambda: onepass.rms_norm_fused_fp8(x, gamma)) == 1
