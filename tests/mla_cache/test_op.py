"""MLA's cache write on the CPU and under torch: results, and memory that it must not touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass import PagedKVCache, fused_rope_rmsnorm_quantization, gather_mla
from onepass.core.backend import launching_with
from onepass.errors import ContractError
from onepass.formats import E4M3FN, FP8_FORMATS
from onepass.ops.mla_cache.launch import MlaCall
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing.tensors import same_bytes
from tests.inputs import FP8
from tests.mla_cache import checks as mla_rope_norm
from tests.mla_cache import entries as mla_oracle
from tests.mla_cache.cases import CASES
from tests.mla_cache.checks import MlaCase
from tests.mla_cache.inputs import SLOTS, Call, positional, rotations
from tests.mla_cache.promises import promises
from tests.oracle.bounds import around

# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "promise"), [pytest.param(n, p, id=n) for n, p in promises("cpu")])
def test_promise(name: str, promise: Callable[[], str | None]) -> None:
    assert promise() is None


@pytest.mark.sampled(11)  # some cases stay
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.group in ("model", "scales", "reference", "ragged")], ids=lambda c: c.name
)
def test_zeros_in_the_written_entries_fail(case: Any) -> None:
    """all_ops/test_cases.py zeroes whole results; here everything else is correct."""
    arguments = mla_rope_norm.inputs(case, "cpu")
    q, blocks, *scales = mla_rope_norm.call(case, arguments)
    assert mla_rope_norm.verify(case, arguments, (q, blocks, *scales)) is None
    changed = (blocks.view(torch.uint8) != arguments["blocks"].view(torch.uint8)).any(-1)
    if changed.any():
        blocks.view(torch.uint8)[changed] = 0
        assert mla_rope_norm.verify(case, arguments, (q, blocks, *scales)) is not None


@pytest.mark.parametrize("cache", [torch.float32, *FP8_FORMATS])
def test_wrong_rounding_fails(cache: torch.dtype) -> None:
    """Each mode passes the check for itself and fails the other's."""
    for rounding, other in (("once", "reference"), ("reference", "once")):
        case = MlaCase("", ((0, 40),), latent=512, cache=cache, options={"rounding": rounding})
        arguments = mla_rope_norm.inputs(case, "cpu")
        results = mla_rope_norm.call(case, arguments)
        assert mla_rope_norm.verify(case, arguments, results) is None
        assert mla_rope_norm.verify(case, {**arguments, "rounding": other}, results) is not None


def test_reference_rounds_where_bfloat16_torch_does() -> None:
    """The latent as x.bfloat16() * gamma.bfloat16(), RoPE rounded to bfloat16, then cast: equal except for ties."""
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
    """Entries are within half a step of the format, and writing them again gives the same codes."""
    fmt = FP8_FORMATS.get(cache)
    if fmt is None and scale != "none":
        pytest.skip("scales are of fp8 caches")
    call = Call(cache=cache)
    stored = torch.zeros(8, 4)
    scales: dict[str, Any] = {
        "none": {},
        "tensor": {"kv_scale": torch.tensor(0.0123)},
        "token": {"per_token_scale": stored},
    }[scale]
    call(**scales)
    slots = call.cache.slot_mapping(call.offsets)
    call.cache.append(input_row_offsets=call.offsets)
    positions = torch.tensor([3, 4, 9, 10, 11])
    exact = mla_oracle.mla_rope_norm(call.q, call.kv, call.gamma, call.freqs, positions, 1e-6).entry
    read = [gather_mla(call.cache, request, torch.float32, **scales) for request in (0, 1)]
    assert [list(t.shape) for t in read] == [[5, 192], [12, 192]]
    assert same_bytes(gather_mla(call.cache, 1, torch.bfloat16, **scales), read[1].bfloat16())
    new = torch.cat([read[0][3:], read[1][9:]])
    if fmt is None:
        assert around(exact.y, 1e-6 * exact.size).stored(new.to(cache)) is None
        return
    step = {"none": torch.ones(5, 1), "tensor": torch.full((5, 1), 0.0123), "token": stored.flatten()[slots, None]}[
        scale
    ]
    held = (exact.y / step).clamp(-fmt.max, fmt.max) * step
    assert ((new - held).abs() <= held.abs() * 2.0**-4 * 1.001 + step * 2.0 ** (-3 - fmt.bias)).all()
    again = rms_norm_reference.encode((new / step).double(), fmt.bias, fmt.max, fmt.nan_code, fmt.has_negative_zero)
    assert torch.equal(again, call.cache.blocks.view(torch.uint8).flatten(0, 1)[slots])


def test_gather_rejects_bad_arguments() -> None:
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


def test_decode_loop_equals_prefill() -> None:
    """Token by token or all at once: the cache has the same bytes."""
    q, kv, freqs, gamma = (
        torch.randn(18, 2, 16).bfloat16(),
        torch.randn(18, 80).bfloat16(),
        rotations(9, 16),
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


def test_scale_may_be_stored_next_to_the_entry() -> None:
    """One page of bytes: 192 codes, then a float32, then bytes that are never written."""
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
    codes = call(out_dtype=FP8)
    assert codes.dtype == FP8 and (codes.float() - made.float()).abs().max() < 0.3
    assert call(call.q) is call.q and same_bytes(call.q, made)


def test_one_launch_and_its_arguments() -> None:
    call, seen = Call(), list[MlaCall]()
    with launching_with(lambda family: seen.append):
        call()
        call(slot_mapping=SLOTS)
        call(slot_mapping=SLOTS, positions=SLOTS, offsets=None)
        call(rope_dim=0, epsilon=0.0)
        call(q=call.q[:0], kv=call.kv[:0])
    assert len(seen) == 4
    # freqs, offsets, lengths, table, slots, positions
    present = [[t is not None for t in made.tensors[3:9]] for made in seen]
    assert present == [
        [True, True, True, True, False, False],
        [True, True, True, False, True, False],
        [True, False, False, False, True, True],
        [False, True, True, True, False, False],
    ]
    assert [made.rows.turned for made in seen] == [64, 64, 64, 0]
    assert [made.eps for made in seen] == [1e-6, 1e-6, 1e-6, 2.0**-126]
    assert seen[0].spec is not seen[1].spec and seen[0].rows.requests == 2 and seen[2].rows.requests == 0


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
    fused_rope_rmsnorm_quantization(q, q, kv, offsets, freqs, gamma, other, rope_style="half", out_dtype=q.dtype)
    cache.append(input_row_offsets=offsets)
    assert cache.cache_lengths is not None
    return made, q * 2, other.blocks, cache.blocks + 1, cache.cache_lengths * 1


@pytest.mark.full  # compile and opcheck of the other ops stay
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_whole_graph_dynamic(backend: str) -> None:
    torch._dynamo.reset()
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(
        everything, fullgraph=True, dynamic=True, backend=backend
    )
    freqs, gamma = rotations(30, 64), torch.randn(128).bfloat16()
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
        fake = call(**fakes, cache=PagedKVCache(*(mode.from_tensor(t) for t in tables)), out_dtype=torch.float16)
    with torch.inference_mode():
        real = call(out_dtype=torch.float16)
        assert real.is_inference()
    assert (real.shape, real.stride(), real.dtype, real.device) == (fake.shape, fake.stride(), fake.dtype, fake.device)


def test_nan_and_infinity_stay_in_their_token() -> None:
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
