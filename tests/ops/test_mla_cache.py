"""MLA's cache write on the CPU and as torch sees it: what it means, what it refuses, what it leaves alone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass import PagedKVCache, fused_rope_rmsnorm_quantization, gather_mla
from onepass.errors import ContractError
from onepass.formats import E4M3FN, FP8_FORMATS
from onepass.ops import mla_cache
from onepass.ops.dispatch import launching_with
from onepass.specs.mla_cache import MlaRows, MlaSpec
from onepass.testing import compare, oracle, oracle_mla
from onepass.testing import mla_cache as mla_rope_norm
from onepass.testing.case import same_bytes
from onepass.testing.mla_cache_inputs import CASES, MlaCase
from onepass.testing.samples import Mistake, mistakes, sample
from tools.promises.mla_cache import mla_promises

CONTRACT = mla_cache.FUSED_ROPE_RMSNORM_QUANTIZATION
FP8 = torch.float8_e4m3fn
SIZES = {"T": 5, "H": 3, "R": 8, "C": 40, "L": 32, "F": 6, "W": 8, "O": 3, "B": 2, "X": 4, "P": 8, "S": 4}
INDEX = dict.fromkeys(("input_row_offsets", "cache_lengths", "lookup_table"), torch.int32)


def positional(cache: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Any]:
    """Every argument of a good call by name, in the contract's order."""
    given = ["freqs_cis", "input_row_offsets", "cache_lengths", "lookup_table", "positions", "slot_mapping"]
    dtypes = {"q_rope": torch.bfloat16, "blocks": cache, **INDEX}
    tensors = sample(CONTRACT, SIZES, (), dtypes=dtypes, optional=given)
    tensors["slot_mapping"] = torch.tensor([3, -1, 0, 31, 9])
    values: dict[str, Any] = {name: tensors.get(name) for name in CONTRACT.args}
    values |= {name: option.default for name, option in CONTRACT.options.items()}
    return {**values, **changes}


def angles(positions: int, dim: int) -> Tensor:
    angle = torch.rand(positions, dim // 2) * 6.3
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


class Call:
    """A good call of two requests, and a cache for it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, cache: torch.dtype = FP8) -> None:
        self.q, self.kv = torch.randn(5, 4, 64).to(dtype), torch.randn(5, 192).to(dtype)
        self.offsets, self.freqs, self.gamma = torch.tensor([0, 2, 5]), angles(30, 64), torch.randn(128).to(dtype)
        self.cache = self.fresh(cache)

    def fresh(self, dtype: torch.dtype = FP8) -> PagedKVCache:
        return PagedKVCache(
            torch.zeros(8, 4, 192).to(dtype), torch.tensor([3, 9]), torch.tensor([[5, 1, 0], [2, 7, 6]])
        )

    def __call__(self, out: Tensor | None = None, **changes: Any) -> Tensor:
        names = ("q", "kv", "offsets", "freqs", "gamma", "cache")
        values = [changes.pop(name, getattr(self, name)) for name in names]
        return fused_rope_rmsnorm_quantization(out, *values, **changes)


# --- refusals -------------------------------------------------------------------------------------------------------

MISTAKES = list(mistakes(CONTRACT, positional()))


@pytest.mark.parametrize("mistake", [pytest.param(m, id=m.label) for m in MISTAKES])
def test_mistake_is_refused_by_name(mistake: Mistake) -> None:
    before = mistake.arguments["blocks"]
    kept = before.clone() if isinstance(before, Tensor) else None
    with torch.enable_grad(), pytest.raises(ContractError) as caught:
        mla_cache._write.call(*mistake.arguments.values(), None)
    assert str(caught.value).startswith(f"{CONTRACT.name}: `{mistake.argument}` must "), str(caught.value)
    assert kept is None or before.is_meta or same_bytes(before.detach(), kept.detach())


def test_there_are_many_mistakes_and_good_calls_pass() -> None:
    assert len(MISTAKES) > 90
    mla_cache._write.call(*positional().values(), None)
    mla_cache._write.call(*positional(FP8, kv_scale=torch.tensor(1.0)).values(), None)
    mla_cache._write.call(*positional(FP8, per_token_scale=torch.zeros(8, 4)).values(), None)


SLOTS = torch.tensor([0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": torch.ones(64).bfloat16()}, "`kv` must have gamma's and q_rope's columns"),
        ({"gamma": torch.ones(127).bfloat16()}, "`kv` must have gamma's and q_rope's columns"),
        ({"kv": torch.randn(4, 192).bfloat16()}, r"`kv` must have shape \[T, C\] with T=5, C=192, got \[4, 192\]"),
        ({"q": torch.randn(5, 257, 64).bfloat16()}, "`q_rope` must have 1 to 256 heads"),
        ({"q": torch.randn(5, 4, 258).bfloat16()}, "`q_rope` must have at most 256 columns"),
        ({"gamma": torch.ones(2049).bfloat16()}, "`gamma` must have 1 to 2048 elements"),
        ({"gamma": torch.ones(128).double()}, "`gamma` must have dtype bfloat16 or float16 or float32"),
        ({"freqs": None}, "`freqs_cis` must be given unless rope_dim is 0"),
        ({"freqs": angles(30, 64)[:0]}, "`freqs_cis` must have at least one row"),
        ({"freqs": angles(30, 66)}, "`rope_dim` must be even, at most q_rope's columns and freqs_cis' width"),
        ({"rope_dim": 7}, "`rope_dim` must be even"),
        ({"rope_dim": 66}, "`rope_dim` must be even, at most q_rope's columns and freqs_cis' width"),
        ({"rope_dim": -2}, "`rope_dim` must be an int and satisfy rope_dim >= 0"),
        ({"rope_style": "neox"}, "`rope_style` must be 'half' or 'interleaved'"),
        ({"rounding": "hf"}, "`rounding` must be 'once' or 'reference'"),
        ({"offsets": None}, "`input_row_offsets` must be given unless slot_mapping and, with a rotation, positions are"),
        ({"offsets": None, "slot_mapping": SLOTS}, "`input_row_offsets` must be given unless"),
        ({"offsets": torch.tensor([0, 5])}, "`input_row_offsets` must have one element more than cache_lengths"),
        ({"offsets": torch.tensor([0.0, 2.0, 5.0])}, "`input_row_offsets` must have dtype uint32 or int32 or int64"),
        ({"slot_mapping": SLOTS[:4]}, r"`slot_mapping` must have shape \[T\] with T=5"),
        ({"positions": SLOTS.float()}, "`positions` must have dtype int64 or int32"),
        ({"kv_scale": torch.ones(2)}, "`kv_scale` must have one element"),
        ({"kv_scale": torch.tensor(1.0), "per_token_scale": torch.ones(8, 4)}, "`per_token_scale` must be None with kv_scale"),
        ({"per_token_scale": torch.ones(4, 8)}, r"`per_token_scale` must have shape \[P, S\] with P=8, S=4"),
        ({"q_dtype": torch.int8}, "`q_dtype` must be bfloat16 or float16 or float32"),
        ({"out": torch.zeros(5, 4, 64, dtype=torch.int32)}, "`q_rope_output` must have dtype bfloat16, got int32"),
        ({"out": torch.zeros(5, 64, 4).bfloat16().transpose(1, 2)}, "`q_rope_output` must have a contiguous last dimension"),
        ({"cache": torch.zeros(8, 4, 192)}, "`k_cache` must be a PagedKVCache, got 'Tensor'"),
        ({"cache": PagedKVCache(torch.zeros(8, 4, 192))}, "`cache_lengths` must be given unless slot_mapping"),
        ({"cache": PagedKVCache(torch.zeros(8, 4, 192)), "slot_mapping": SLOTS}, "`cache_lengths` must be given unless slot_mapping"),
        ({"cache": PagedKVCache(torch.zeros(8, 4, 191))}, r"`blocks` must have shape \[P, S, C\] with .*C=192"),
    ],
)  # fmt: skip
def test_messages(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=f"{CONTRACT.name}: {message}"):
        Call()(**change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["kv_scale", "per_token_scale"])
def test_only_fp8_caches_have_scales(name: str, dtype: torch.dtype) -> None:
    scale = torch.ones(1) if name == "kv_scale" else torch.ones(8, 4)
    with pytest.raises(ContractError, match=f"`{name}` must be None unless the cache is fp8"):
        Call(cache=dtype)(**{name: scale})


def test_overlap_is_refused() -> None:
    call, pool = Call(), torch.zeros(6, 4, 64).bfloat16()
    with pytest.raises(ContractError, match="`q_rope_output` must not overlap `q_rope` unless it is that very tensor"):
        call(pool[1:], q=pool[:5])
    memory = torch.zeros(8 * 4 * 192, dtype=torch.uint8)
    blocks, kv = memory.view(FP8).view(8, 4, 192), memory.view(torch.bfloat16)[: 5 * 192].view(5, 192)
    with pytest.raises(ContractError, match="`blocks` must not overlap `kv`"):
        call(cache=PagedKVCache(blocks), kv=kv, slot_mapping=SLOTS, positions=SLOTS)
    with pytest.raises(ContractError, match="`blocks` must not overlap itself"):
        call(cache=PagedKVCache(torch.zeros(1, 4, 192).to(FP8).expand(8, 4, 192)), slot_mapping=SLOTS, positions=SLOTS)


# --- what the tables say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_lengths": torch.tensor([3, 13])}, "`lookup_table` must have pages for every token, got 3 of 4 entries for the 16"),
        ({"cache_lengths": torch.tensor([-1, 0])}, r"`cache_lengths` must be at least 0, got -1 for request 0"),
        ({"lookup_table": torch.tensor([[5, 8, 0], [2, 7, 6]])}, "`lookup_table` must hold pages from 0 to 7, got 8 for page 1"),
        ({"lookup_table": torch.tensor([[5, 1, 0], [-1, 7, 6]])}, "`lookup_table` must hold pages from 0 to 7, got -1 for page 0"),
        ({"offsets": torch.tensor([0, 3, 2])}, r"`input_row_offsets` must not fall, got 3 and then 2 for request 1"),
        ({"slot_mapping": torch.tensor([0, 1, 32, -5, 4])}, r"`slot_mapping` must be below 32, got 32 for token 2"),
        ({"positions": torch.tensor([0, 1, 30, 2, 4])}, r"`positions` must lie within the 30 rows of freqs_cis, got 0 to 30"),
        ({"freqs": angles(11, 64)}, r"`freqs_cis` must have a row for every position, got 11 for the 12 of request 1"),
    ],
)  # fmt: skip
def test_bad_tables_are_named_when_debugging(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it they are masked or held; the cases of "bad tables" compare every byte of that."""
    call = Call()
    for name in ("cache_lengths", "lookup_table"):
        if name in change:
            setattr(call.cache, name, change.pop(name))
    call(**change)
    monkeypatch.setenv("ONEPASS_DEBUG", "1")
    with pytest.raises(ContractError, match=f"{CONTRACT.name}: {message}"):
        call(**change)
    Call()()
    Call()(slot_mapping=torch.tensor([-1, -9, 3, 2, 1]))
    Call()(offsets=torch.tensor([1, 2, 9]))  # padding before; the last request has more tokens than came


# --- meaning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "promise"), [pytest.param(n, p, id=n) for n, p in mla_promises("cpu")])
def test_promise(name: str, promise: Callable[[], str | None]) -> None:
    assert promise() is None


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.group in ("model", "scales", "reference", "ragged")], ids=lambda c: c.name
)
def test_zeros_in_the_written_entries_alone_fail(case: Any) -> None:
    """test_ops zeroes whole results; here everything else is right."""
    arguments = mla_rope_norm.inputs(case, "cpu")
    q, blocks, *scales = mla_rope_norm.call(case, arguments)
    assert mla_rope_norm.verify(case, arguments, (q, blocks, *scales)) is None
    changed = (blocks.view(torch.uint8) != arguments["blocks"].view(torch.uint8)).any(-1)
    if changed.any():
        blocks.view(torch.uint8)[changed] = 0
        assert mla_rope_norm.verify(case, arguments, (q, blocks, *scales)) is not None


@pytest.mark.parametrize("cache", [torch.float32, *FP8_FORMATS])
def test_the_wrong_rounding_fails(cache: torch.dtype) -> None:
    """Each mode passes as itself and not as the other."""
    for rounding, other in (("once", "reference"), ("reference", "once")):
        case = MlaCase("", ((0, 40),), latent=512, cache=cache, options={"rounding": rounding})
        arguments = mla_rope_norm.inputs(case, "cpu")
        results = mla_rope_norm.call(case, arguments)
        assert mla_rope_norm.verify(case, arguments, results) is None
        assert mla_rope_norm.verify(case, {**arguments, "rounding": other}, results) is not None


def test_reference_rounds_where_bfloat16_torch_does() -> None:
    """The latent as x.bfloat16() * gamma.bfloat16(), RoPE rounded to bfloat16, then cast: byte for byte but for ties."""
    call = Call()
    call(rounding="reference")
    x, k = call.kv[:, :128].float(), call.kv[:, 128:].float()
    n = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    cos, sin = call.freqs[torch.tensor([3, 4, 9, 10, 11])].unflatten(-1, (-1, 2)).unbind(-1)
    a, b = k[:, 0::2], k[:, 1::2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).bfloat16()
    expected = torch.cat([n * call.gamma, turned], -1).float().to(FP8)
    slots = call.cache.slot_mapping(call.offsets)
    got = call.cache.blocks.view(torch.uint8).flatten(0, 1)[slots]
    assert (got == expected.view(torch.uint8)).double().mean() > 0.997


@pytest.mark.parametrize("cache", [FP8, torch.float8_e4m3fnuz, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", ["none", "tensor", "token"])
def test_gather_is_the_inverse(cache: torch.dtype, scale: str) -> None:
    """Within half a step of the format at the scale; and what was read, written again, is the same code."""
    fmt = FP8_FORMATS.get(cache)
    if fmt is None and scale != "none":
        pytest.skip("scales are of fp8 caches")
    call = Call(cache=cache)
    stored = torch.zeros(8, 4)
    scales: dict[str, Any] = {
        "none": {}, "tensor": {"kv_scale": torch.tensor(0.0123)}, "token": {"per_token_scale": stored},
    }[scale]  # fmt: skip
    call(**scales)
    slots = call.cache.slot_mapping(call.offsets)
    call.cache.append(input_row_offsets=call.offsets)
    positions = torch.tensor([3, 4, 9, 10, 11])
    exact = oracle_mla.mla_rope_norm(call.q, call.kv, call.gamma, call.freqs, positions, 1e-6).entry
    read = [gather_mla(call.cache, request, torch.float32, **scales) for request in (0, 1)]
    assert [list(t.shape) for t in read] == [[5, 192], [12, 192]]
    assert same_bytes(gather_mla(call.cache, 1, torch.bfloat16, **scales), read[1].bfloat16())
    new = torch.cat([read[0][3:], read[1][9:]])
    if fmt is None:
        assert compare.stored(new.to(cache), exact.y, 1e-6 * exact.size, None, share=None) is None
        return
    step = {"none": torch.ones(5, 1), "tensor": torch.full((5, 1), 0.0123), "token": stored.flatten()[slots, None]}[
        scale
    ]
    held = (exact.y / step).clamp(-fmt.max, fmt.max) * step
    assert ((new - held).abs() <= held.abs() * 2.0**-4 * 1.001 + step * 2.0 ** (-3 - fmt.bias)).all()
    again = oracle.encode((new / step).double(), fmt.bias, fmt.max, fmt.nan_code, fmt.has_negative_zero)
    assert torch.equal(again, call.cache.blocks.view(torch.uint8).flatten(0, 1)[slots])


def test_gather_refuses() -> None:
    call = Call()
    for change, message in (
        ({"request": 2}, "`request` must be an int from 0 to 1, got 2"),
        ({"request": "0"}, "`request` must be an int from 0 to 1, got '0'"),
        ({"cache": 3}, "`cache` must be a PagedKVCache"),
        ({"kv_scale": torch.ones(3)}, "`kv_scale` must have one element"),
        ({"per_token_scale": torch.ones(3)}, r"`per_token_scale` must have shape \[pages, page_size\]"),
        (
            {"kv_scale": torch.ones(1), "per_token_scale": torch.ones(8, 4)},
            "`kv_scale` must be None with per_token_scale",
        ),
    ):
        with pytest.raises(ContractError, match=f"gather_mla: {message}"):
            gather_mla(**{"cache": call.cache, "request": 0, "dtype": torch.float32, **change})  # type: ignore[arg-type]
    call.cache.lookup_table[1, 0] = 99  # type: ignore[index]
    with pytest.raises(
        ContractError, match="gather_mla: `lookup_table` must hold pages from 0 to 7, got 99 for page 0"
    ):
        gather_mla(call.cache, 1, torch.float32)


def test_a_decode_loop_is_a_prefill() -> None:
    """Token by token or all at once: the cache has the same bytes."""
    q, kv, freqs, gamma = (
        torch.randn(18, 2, 16).bfloat16(),
        torch.randn(18, 80).bfloat16(),
        angles(9, 16),
        torch.randn(64),
    )
    table = torch.randperm(6).view(2, 3)
    caches = [PagedKVCache(torch.zeros(6, 3, 80).to(FP8), torch.tensor([0, 0]), table) for _ in range(2)]
    whole = fused_rope_rmsnorm_quantization(None, q, kv, torch.tensor([0, 9, 18]), freqs, gamma, caches[0])
    for step in range(9):
        pick = torch.tensor([step, 9 + step])
        one = fused_rope_rmsnorm_quantization(None, q[pick], kv[pick], torch.arange(3), freqs, gamma, caches[1])
        assert same_bytes(one, whole[pick])
        caches[1].append()
    assert same_bytes(caches[0].blocks, caches[1].blocks)


def test_the_scale_may_lie_beside_the_entry() -> None:
    """One page of bytes: 192 codes, then a float32, then what nobody writes."""
    call = Call()
    memory = torch.full((8, 4, 208), 0x5A, dtype=torch.uint8)
    blocks, scale = memory[..., :192].view(FP8), memory[..., 192:196].view(torch.float32)[..., 0]
    call(cache=PagedKVCache(blocks, call.cache.cache_lengths, call.cache.lookup_table), per_token_scale=scale)
    apart = torch.zeros(8, 4)
    call(per_token_scale=apart)
    slots = call.cache.slot_mapping(call.offsets)
    assert same_bytes(scale.reshape(-1)[slots], apart.flatten()[slots]) and apart.flatten()[slots].gt(0).all()
    assert memory[..., 196:].eq(0x5A).all()
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[slots] = False
    assert memory.flatten(0, 1)[untouched].eq(0x5A).all()


def test_the_output_is_returned_and_may_be_the_input() -> None:
    call = Call()
    made = call()
    given = torch.empty_like(call.q)
    assert call(given) is given and same_bytes(made, given)
    wide = torch.zeros(5, 4, 576).bfloat16()
    assert same_bytes(call(wide[..., 512:]), made) and wide[..., :512].eq(0).all()
    codes = call(q_dtype=FP8)
    assert codes.dtype == FP8 and (codes.float() - made.float()).abs().max() < 0.3
    assert call(call.q) is call.q and same_bytes(call.q, made)


def test_one_launch_and_what_it_is_handed() -> None:
    call, seen = Call(), list[tuple[MlaSpec, MlaRows, tuple[Any, ...]]]()
    with launching_with(lambda family: lambda call: seen.append((call.spec, call.rows, tuple(call[1:16])))):
        call()
        call(slot_mapping=SLOTS)
        call(slot_mapping=SLOTS, positions=SLOTS, offsets=None)
        call(rope_dim=0, epsilon=0.0)
        call(q=call.q[:0], kv=call.kv[:0])
    assert len(seen) == 4
    present = [
        [t is not None for t in rest[3:9]] for _, _, rest in seen
    ]  # freqs, offsets, lengths, table, slots, positions
    assert present == [
        [True, True, True, True, False, False],
        [True, True, True, False, True, False],
        [True, False, False, False, True, True],
        [False, True, True, True, False, False],
    ]
    assert [rows.turned for _, rows, _ in seen] == [64, 64, 64, 0]
    assert [rest[-2] for _, _, rest in seen] == [1e-6, 1e-6, 1e-6, 2.0**-126]
    assert seen[0][0] is not seen[1][0] and seen[0][1].requests == 2 and seen[2][1].requests == 0


# --- torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, "kv_scale", "per_token_scale"])
def test_opcheck(scale: str | None) -> None:
    changes = {"kv_scale": torch.tensor(0.1), "per_token_scale": torch.zeros(8, 4)}
    arguments = positional(torch.bfloat16 if scale is None else FP8, **({scale: changes[scale]} if scale else {}))
    out = torch.empty(5, 3, 8, dtype=torch.bfloat16)
    tests = ["test_autograd_registration", "test_faketensor"]
    if scale is None:  # the others compare what is written, which torch cannot for fp8
        tests += ["test_schema", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(
        torch.ops.onepass.fused_rope_rmsnorm_quantization.default, (*arguments.values(), out), test_utils=tests
    )


def everything(
    cache: PagedKVCache, q: Tensor, a_side: Tensor, offsets: Tensor, freqs: Tensor, gamma: Tensor
) -> tuple[Tensor, ...]:
    kv = a_side[:, 96:]
    made = fused_rope_rmsnorm_quantization(None, q, kv, offsets, freqs, gamma, cache)
    other = PagedKVCache(cache.blocks * 0, cache.cache_lengths, cache.lookup_table)
    fused_rope_rmsnorm_quantization(q, q, kv, offsets, freqs, gamma, other, rope_style="half", q_dtype=q.dtype)
    cache.append(input_row_offsets=offsets)
    assert cache.cache_lengths is not None
    return made, q * 2, other.blocks, cache.blocks + 1, cache.cache_lengths * 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_whole_graph_dynamic(backend: str) -> None:
    torch._dynamo.reset()
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(
        everything, fullgraph=True, dynamic=True, backend=backend
    )
    freqs, gamma = angles(30, 64), torch.randn(128).bfloat16()
    table = torch.tensor([[5, 1, 0], [2, 7, 6]])
    with torch.no_grad():
        for tokens in (3, 5):
            offsets = torch.tensor([0, 1, tokens])
            q, a_side = torch.randn(tokens, 4, 64).bfloat16(), torch.randn(tokens, 96 + 192).bfloat16()
            results = []
            for function in (everything, compiled):
                cache = PagedKVCache(torch.zeros(8, 4, 192).bfloat16(), torch.tensor([3, 5]), table)
                results.append(
                    (*function(cache, q.clone(), a_side, offsets, freqs, gamma), cache.blocks, cache.cache_lengths)
                )
            assert all(same_bytes(a, b) for a, b in zip(*results, strict=True))


def test_fake_and_inference_tensors() -> None:
    call = Call()
    real_cache = call.cache
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(getattr(call, name)) for name in ("q", "kv", "offsets", "freqs", "gamma")}
        tables = [getattr(real_cache, name) for name in ("blocks", "cache_lengths", "lookup_table")]
        fake = call(**fakes, cache=PagedKVCache(*(mode.from_tensor(t) for t in tables)), q_dtype=torch.float16)
    with torch.inference_mode():
        real = call(q_dtype=torch.float16)
        assert real.is_inference()
    assert (real.shape, real.stride(), real.dtype, real.device) == (fake.shape, fake.stride(), fake.dtype, fake.device)


def test_nan_and_infinity_keep_to_their_token() -> None:
    call = Call()
    call(per_token_scale=torch.zeros(8, 4))
    clean = call.cache.blocks.view(torch.uint8).clone()
    slots = call.cache.slot_mapping(call.offsets)
    kv = call.kv.clone()
    kv[1, 7] = torch.nan
    kv[3, 150] = torch.inf
    scale = torch.zeros(8, 4)
    call.cache = call.fresh()
    call(kv=kv, per_token_scale=scale)
    now = call.cache.blocks.view(torch.uint8)
    for token in range(5):
        page, place = divmod(int(slots[token]), 4)
        if token in (1, 3):
            assert now[page, place].eq(E4M3FN.nan_code).all() and scale[page, place].isnan()
        else:
            assert torch.equal(now[page, place], clean[page, place])


def test_a_scale_of_zero_gives_zeros() -> None:
    call = Call()
    call(kv_scale=torch.tensor(0.0))
    assert call.cache.blocks.view(torch.uint8).eq(0).all()
    assert call(kv_scale=torch.tensor(1e-30)).isfinite().all()
    written = call.cache.blocks.float().flatten(0, 1)[call.cache.slot_mapping(call.offsets)]
    assert written.abs().eq(448).all()


def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "mla_decode.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = [float(found) for found in re.findall(r"24 tokens cached, latents within (.*)% of float64", done.stdout)]
    assert len(errors) == 4 and max(errors) < 4
