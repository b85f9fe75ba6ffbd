"""PagedKVCache: validation, slots and tables, and counting tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onepass import PagedKVCache
from onepass.errors import ContractError
from onepass.testing.tensors import same_bytes

GOOD = (torch.zeros(4, 2, 8), torch.tensor([3, 0]), torch.tensor([[2, 0], [1, 9]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3.0, *GOOD[1:]), "`blocks` must be a tensor, got 3.0"),
        ((torch.zeros(4, 16), *GOOD[1:]), r"`blocks` must have shape \[pages, page_size, columns\], got \[4, 16\]"),
        ((torch.zeros(4, 2, 8).double(), *GOOD[1:]), "`blocks` must have dtype float8_e4m3fn or .* got float64"),
        ((torch.zeros(4, 0, 8), *GOOD[1:]), "`blocks` must have at least one entry per page"),
        ((torch.zeros(4, 8, 2).mT, *GOOD[1:]), "`blocks` must have a contiguous last dimension"),
        ((GOOD[0], GOOD[1].float(), GOOD[2]), "`cache_lengths` must have dtype uint32 or int32 or int64, got float32"),
        ((GOOD[0], GOOD[1][:1], GOOD[2]), "`lookup_table` must have a row for each of 1 requests, got 2"),
        ((GOOD[0], GOOD[1], GOOD[2].to("meta")), "`lookup_table` must be on cpu, got meta"),
        ((GOOD[0], GOOD[1], None), "`lookup_table` must be given with the other table, got None"),
        (
            (GOOD[0], GOOD[1] + 2, GOOD[2]),
            "`lookup_table` must have pages for every token, got 2 pages of 2 for request 0's 5 tokens",
        ),
        (
            (GOOD[0], torch.tensor([3, 3]), GOOD[2]),
            "`lookup_table` must hold pages from 0 to 3, got 9 for page 1 of request 1",
        ),
        ((GOOD[0], torch.tensor([-3, 3]), GOOD[2]), "`cache_lengths` must be at least 0, got -3 for request 0"),
    ],
)
def test_constructor_validates_its_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ContractError, match=f"PagedKVCache: {message}"):
        PagedKVCache(*arguments)


def test_page_size_is_that_of_the_blocks() -> None:
    assert PagedKVCache(*GOOD, page_size=2).page_size == 2
    with pytest.raises(ContractError, match="`page_size` must be the page size of blocks, 2, got 3"):
        PagedKVCache(*GOOD, page_size=3)
    assert "[4, 2, 8] float32 on cpu, 2 requests" in repr(PagedKVCache(*GOOD))
    assert "no table" in repr(PagedKVCache(GOOD[0]))


@pytest.mark.parametrize("dtype", [torch.uint32, torch.int32, torch.int64])
def test_append_updates_lengths_in_place(dtype: torch.dtype) -> None:
    lengths = torch.tensor([3, 0]).to(dtype)
    cache = PagedKVCache(torch.zeros(9, 2, 8), lengths, torch.arange(8).view(2, 4))
    cache.append()
    cache.append(torch.tensor([0, 2]).to(dtype))
    cache.append(input_row_offsets=torch.tensor([0, 1, 3]).to(dtype))
    assert lengths.long().tolist() == [5, 5] and cache.cache_lengths is lengths
    cache.check(3)
    with pytest.raises(ContractError, match="got 4 pages of 2 for request 0's 9 tokens"):
        cache.check(torch.tensor([4, 0]))
    for bad in (True, 1.5, torch.tensor([1]), torch.tensor([1.0, 2.0])):
        with pytest.raises(ContractError, match="`new_tokens` must be an int or 2 integers"):
            cache.append(bad)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="`cache_lengths` must be given for append"):
        PagedKVCache(torch.zeros(9, 2, 8)).append()


@pytest.mark.parametrize("size", [1, 3, 8])
def test_slots_and_tables_are_equivalent(size: int) -> None:
    counts = torch.tensor([7, 0, 8, 1])
    offsets = torch.cat([torch.tensor([0]), counts.cumsum(0)])
    table = torch.randperm(40).view(4, 10).int()
    cache = PagedKVCache(torch.zeros(40, size, 8), torch.zeros(4, dtype=torch.int32), table)
    slots = cache.slot_mapping(offsets)
    assert slots.unique().numel() == 16 and slots.min() >= 0
    assert same_bytes(slots, cache.slot_mapping(offsets, 16))
    back = PagedKVCache.from_slots(cache.blocks, slots, offsets, table_width=10)
    assert back.cache_lengths is not None and back.lookup_table is not None
    assert back.cache_lengths.tolist() == counts.tolist()
    used = torch.arange(10) < (-(-counts // size)).unsqueeze(1)
    assert torch.equal(back.lookup_table, torch.where(used, table, -1))
    assert cache.slot_mapping(offsets + 2, 20).tolist() == [-1, -1, *slots.tolist(), -1, -1]
    cache.lookup_table = torch.full_like(table, 40)
    assert cache.slot_mapping(offsets).eq(-1).all()


@pytest.mark.parametrize(
    ("slots", "offsets", "message"),
    [
        (
            [0, 1, 3],
            [0, 3],
            "`slots` must lie in the blocks and be consecutive within pages of 2, got 3 for token 2 of request 0",
        ),
        ([1, 2], [0, 2], "got 1 for token 0 of request 0"),
        ([0, 8], [0, 1, 2], "got 8 for token 0 of request 1"),
        ([-2], [0, 1], "got -2 for token 0 of request 0"),
        ([0, 1], [0, 1], "`input_row_offsets` must rise from 0 to the number of slots, 2"),
        ([0, 1], [0, 2, 1], "`input_row_offsets` must rise from 0"),
    ],
)
def test_slots_that_form_no_pages_are_rejected(slots: list[int], offsets: list[int], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        PagedKVCache.from_slots(torch.zeros(4, 2, 8), torch.tensor(slots), torch.tensor(offsets))
