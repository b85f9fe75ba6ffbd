"""Calls of MLA's cache write that are rejected, always or in debug mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onepass import PagedKVCache
from onepass.errors import ContractError
from onepass.ops.mla_cache import op as mla_cache
from onepass.testing.tensors import same_bytes
from tests.helpers.mistakes import Mistake, mistakes
from tests.inputs import FP8
from tests.mla_cache.inputs import CONTRACT, SLOTS, Call, positional, rotations

PACKED = PagedKVCache(torch.zeros(8, 4, 656, dtype=torch.uint8), entry_format="fp8_ds_mla")
MISTAKES = list(mistakes(CONTRACT, positional()))


@pytest.mark.parametrize("mistake", [pytest.param(m, id=m.label) for m in MISTAKES])
def test_bad_argument_is_named(mistake: Mistake) -> None:
    before = mistake.arguments["blocks"]
    kept = before.clone() if isinstance(before, Tensor) else None
    with torch.enable_grad(), pytest.raises(ContractError) as caught:
        mla_cache._write(*mistake.arguments.values(), None)
    assert str(caught.value).startswith(f"{CONTRACT.name}: `{mistake.argument}` must "), str(caught.value)
    assert kept is None or before.is_meta or same_bytes(before.detach(), kept.detach())


def test_there_are_many_bad_arguments_and_good_calls_pass() -> None:
    assert len(MISTAKES) > 90
    mla_cache._write(*positional().values(), None)
    mla_cache._write(*positional(FP8, kv_scale=torch.tensor(1.0)).values(), None)
    mla_cache._write(*positional(FP8, per_token_scale=torch.zeros(8, 4)).values(), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": torch.ones(64).bfloat16()}, "`kv` must have gamma's and q_rope's columns"),
        ({"gamma": torch.ones(127).bfloat16()}, "`kv` must have gamma's and q_rope's columns"),
        ({"kv": torch.randn(4, 192).bfloat16()}, r"`kv` must have shape \[T, C\] with T=5, C=192, got \[4, 192\]"),
        ({"q": torch.randn(5, 257, 64).bfloat16()}, "`q_rope` must have 1 to 256 heads"),
        ({"q": torch.randn(5, 4, 1026).bfloat16()}, "`q_rope` must have at most 1024 columns"),
        ({"gamma": torch.ones(2049).bfloat16()}, "`gamma` must have 1 to 2048 elements"),
        ({"gamma": torch.ones(128).double()}, "`gamma` must have dtype bfloat16 or float16 or float32"),
        ({"freqs": None}, "`freqs_cis` must be given unless rope_dim is 0"),
        ({"freqs": rotations(30, 64)[:0]}, "`freqs_cis` must have at least one row"),
        ({"freqs": rotations(30, 66)}, "`rope_dim` must be even, at most q_rope's columns and freqs_cis' width"),
        ({"rope_dim": 7}, "`rope_dim` must be even"),
        ({"rope_dim": 66}, "`rope_dim` must be even, at most q_rope's columns and freqs_cis' width"),
        ({"rope_dim": -2}, "`rope_dim` must be an int and satisfy rope_dim >= 0"),
        ({"rope_style": "neox"}, "`rope_style` must be 'half' or 'interleaved'"),
        ({"rounding": "hf"}, "`rounding` must be 'once' or 'reference'"),
        ({"offsets": None}, "`input_row_offsets` must be given unless slot_mapping is"),
        ({"offsets": None, "slot_mapping": SLOTS}, "`input_row_offsets` must be given unless"),
        ({"offsets": torch.tensor([0, 5])}, "`input_row_offsets` must have one element more than cache_lengths"),
        ({"offsets": torch.tensor([0.0, 2.0, 5.0])}, "`input_row_offsets` must have dtype uint32 or int32 or int64"),
        ({"slot_mapping": SLOTS[:4]}, r"`slot_mapping` must have shape \[T\] with T=5"),
        ({"positions": SLOTS.float()}, "`positions` must have dtype int64 or int32"),
        ({"kv_scale": torch.ones(2)}, "`kv_scale` must have one element"),
        ({"kv_scale": torch.tensor(1.0), "per_token_scale": torch.ones(8, 4)}, "`per_token_scale` must be None with kv_scale"),
        ({"per_token_scale": torch.ones(4, 8)}, r"`per_token_scale` must have shape \[P, S\] with P=8, S=4"),
        ({"out_dtype": torch.int8}, "`out_dtype` must be bfloat16 or float16 or float32"),
        ({"out": torch.zeros(5, 4, 64, dtype=torch.int32)}, "`q_rope_output` must have dtype bfloat16, got int32"),
        ({"out": torch.zeros(5, 64, 4).bfloat16().transpose(1, 2)}, "`q_rope_output` must have a contiguous last dimension"),
        ({"cache": torch.zeros(8, 4, 192)}, "`k_cache` must be a PagedKVCache, got 'Tensor'"),
        ({"cache": PagedKVCache(torch.zeros(8, 4, 192))}, "`cache_lengths` must be given unless slot_mapping"),
        ({"cache": PagedKVCache(torch.zeros(8, 4, 192)), "slot_mapping": SLOTS}, "`cache_lengths` must be given unless slot_mapping"),
        ({"cache": PagedKVCache(torch.zeros(8, 4, 191))}, "`blocks` must have kv's columns, C=192"),
        ({"cache": PACKED}, "`kv` must have 512 columns and then q_rope's 64 with fp8_ds_mla"),
    ],
)  # fmt: skip
def test_error_messages(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=f"{CONTRACT.name}: {message}"):
        Call()(**change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["kv_scale", "per_token_scale"])
def test_only_fp8_caches_have_scales(name: str, dtype: torch.dtype) -> None:
    scale = torch.ones(1) if name == "kv_scale" else torch.ones(8, 4)
    with pytest.raises(ContractError, match=f"`{name}` must be None unless the cache is fp8"):
        Call(cache=dtype)(**{name: scale})


def test_overlap_is_rejected() -> None:
    call, pool = Call(), torch.zeros(6, 4, 64).bfloat16()
    with pytest.raises(ContractError, match="`q_rope_output` must not overlap `q_rope` unless it is the same tensor"):
        call(pool[1:], q=pool[:5])
    memory = torch.zeros(8 * 4 * 192, dtype=torch.uint8)
    blocks, kv = memory.view(FP8).view(8, 4, 192), memory.view(torch.bfloat16)[: 5 * 192].view(5, 192)
    with pytest.raises(ContractError, match="`blocks` must not overlap `kv`"):
        call(cache=PagedKVCache(blocks), kv=kv, slot_mapping=SLOTS, positions=SLOTS)
    with pytest.raises(ContractError, match="`blocks` must not overlap itself"):
        call(cache=PagedKVCache(torch.zeros(1, 4, 192).to(FP8).expand(8, 4, 192)), slot_mapping=SLOTS, positions=SLOTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_lengths": torch.tensor([3, 13])}, "`lookup_table` must have pages for every token, got 3 pages of 4 for request 1's 16"),
        ({"cache_lengths": torch.tensor([-1, 0])}, r"`cache_lengths` must be at least 0, got -1 for request 0"),
        ({"lookup_table": torch.tensor([[5, 8, 0], [2, 7, 6]])}, "`lookup_table` must hold pages from 0 to 7, got 8 for page 1"),
        ({"lookup_table": torch.tensor([[5, 1, 0], [-1, 7, 6]])}, "`lookup_table` must hold pages from 0 to 7, got -1 for page 0"),
        ({"offsets": torch.tensor([0, 3, 2])}, r"`input_row_offsets` must not decrease, got 3 and then 2 for request 1"),
        ({"slot_mapping": torch.tensor([0, 1, 32, -5, 4])}, r"`slot_mapping` must be below 32, got 32 for token 2"),
        ({"positions": torch.tensor([0, 1, 30, 2, 4])}, r"`positions` must lie within the 30 rows of freqs_cis, got 0 to 30"),
        ({"freqs": rotations(11, 64)}, r"`freqs_cis` must have a row for every position, got 11 for request 1's 12 tokens"),
    ],
)  # fmt: skip
def test_bad_tables_raise_in_debug_mode(change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they are masked or clamped; the cases "bad tables" compare every byte of that."""
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
