"""Entries of the format "fp8_ds_mla", byte caches, and heads of more than 256 columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import PagedKVCache, gather_mla
from onepass.errors import ContractError
from onepass.testing.tensors import same_bytes
from tests.mla_cache.inputs import rotations

BF16, U8, FP8 = torch.bfloat16, torch.uint8, torch.float8_e4m3fn
SLOTS = torch.tensor([2, 0, 5])


def write(cache: PagedKVCache, kv: Tensor, gamma: Tensor, **options: Any) -> Tensor:
    q = torch.ones(kv.shape[0], 2, 64, dtype=kv.dtype)
    given = {"slot_mapping": SLOTS, "positions": torch.tensor([0, 3, 7]), **options}
    return onepass.fused_rope_rmsnorm_quantization(None, q, kv, None, rotations(9, 64), gamma, cache, **given)


@pytest.mark.parametrize(("rounding", "dtype"), [("once", torch.float32), ("reference", BF16)])
def test_entry_is_codes_scales_and_bfloat16(rounding: str, dtype: torch.dtype) -> None:
    """An independent decoder: each part at its place, from a plain cache of the same call; "reference" rounds values first."""
    torch.manual_seed(0)
    kv, gamma = torch.randn(3, 576).bfloat16(), torch.randn(512).to(dtype)
    kv[1, :512] = 0.0
    blocks = torch.full((2, 4, 656), 0x5A, dtype=U8)
    plain = PagedKVCache(torch.zeros(2, 4, 576, dtype=dtype))
    for cache in (PagedKVCache(blocks, entry_format="fp8_ds_mla"), plain):
        torch.manual_seed(1)
        write(cache, kv, gamma, rounding=rounding)
    assert (blocks.flatten(0, 1)[[1, 3, 4, 6, 7]] == 0x5A).all()
    for slot in SLOTS.tolist():
        entry, exact = blocks.flatten(0, 1)[slot], plain.blocks.flatten(0, 1)[slot].float()
        tiles, scale = exact[:512].view(4, 128), entry[512:528].view(torch.float32)
        assert torch.equal(scale, (tiles.abs().amax(-1) / 448).clamp(min=2.0**-126))
        assert same_bytes(entry[:512], (tiles / scale.unsqueeze(-1)).to(FP8).flatten().view(U8))
        assert same_bytes(entry[528:].view(BF16), exact[512:].bfloat16())


def test_gather_reads_packed_entries_back() -> None:
    torch.manual_seed(0)
    kv, gamma = torch.randn(3, 576).bfloat16(), torch.ones(512)
    tables = torch.tensor([3]), torch.tensor([[0]])
    packed = PagedKVCache(torch.zeros(1, 4, 656, dtype=U8), *tables, entry_format="fp8_ds_mla")
    plain = PagedKVCache(torch.zeros(1, 4, 576), *tables)
    for cache in (packed, plain):
        torch.manual_seed(1)
        write(cache, kv, gamma, slot_mapping=torch.arange(3))
    got, exact = (gather_mla(cache, 0, torch.float32) for cache in (packed, plain))
    assert (got - exact).abs().max() < exact.abs().max() / 16 and not same_bytes(got, exact)
    assert same_bytes(got[:, 512:], exact[:, 512:].bfloat16().float())
    with pytest.raises(ContractError, match="gather_mla: `kv_scale` must be None with fp8_ds_mla"):
        gather_mla(packed, 0, torch.float32, kv_scale=torch.ones(()))


def test_byte_caches_are_views() -> None:
    torch.manual_seed(0)
    kv, gamma, bytes_ = torch.randn(3, 576).bfloat16(), torch.ones(512), torch.zeros(2, 4, 576, dtype=U8)
    cache = PagedKVCache(bytes_, blocks_dtype=FP8)
    assert cache.blocks.dtype == FP8 and cache.blocks.data_ptr() == bytes_.data_ptr()
    same = PagedKVCache(torch.zeros(2, 4, 576).to(FP8))
    for one in (cache, same):
        torch.manual_seed(1)
        write(one, kv, gamma)
    assert same_bytes(bytes_, same.blocks.view(U8)) and bytes_.any()
    assert PagedKVCache(torch.zeros(2, 4, 8, dtype=U8), blocks_dtype=BF16).blocks.shape == (2, 4, 4)


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        (torch.zeros(2, 4, 576, dtype=U8), {}, "`blocks` must have dtype float8_e4m3fn or"),
        (torch.zeros(2, 4, 576, dtype=U8), {"blocks_dtype": torch.int8}, "`blocks_dtype` must be float8_e4m3fn or"),
        (torch.zeros(2, 4, 577, dtype=U8), {"blocks_dtype": BF16}, "`blocks` must have entries of whole, aligned"),
        (torch.zeros(2, 4, 576), {"entry_format": "fp8_ds_mla"}, "`blocks` must have dtype uint8"),
        (torch.zeros(2, 4, 655, dtype=U8), {"entry_format": "fp8_ds_mla"}, "`blocks` must have 656 bytes per entry"),
        (torch.zeros(2, 4, 656, dtype=U8), {"entry_format": "nvfp4"}, "`entry_format` must be 'plain' or 'fp8_ds_mla'"),
        (
            torch.zeros(2, 4, 656, dtype=U8),
            {"entry_format": "fp8_ds_mla", "blocks_dtype": FP8},
            "`blocks_dtype` must be None with fp8_ds_mla",
        ),
    ],
)
def test_wrong_caches_are_refused(blocks: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=f"PagedKVCache: {message}"):
        PagedKVCache(blocks, **options)


def test_packed_entries_begin_on_four_bytes() -> None:
    blocks = torch.zeros(2 * 4 * 657 + 1, dtype=U8)[: 2 * 4 * 657].view(2, 4, 657)[..., :656]
    cache = PagedKVCache(blocks, entry_format="fp8_ds_mla")
    with pytest.raises(ContractError, match="`blocks` must have entries that begin on 4 bytes"):
        write(cache, torch.randn(3, 576).bfloat16(), torch.ones(512))
