"""The attention of a decode step on a CPU: groups of query heads as rows of one head of keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from onepass.models.forwards import attend as attending
from onepass.models.forwards.attend import attend

SCALING = 0.2
MODULE: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"), scaling=SCALING, layer_idx=0)


def states(batch: int, heads: tuple[int, int], length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """One query per sequence, as it comes out of a projection, and keys and values that differ from slot to slot."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(batch, 1, heads[0], 64, generator=generator).transpose(1, 2)
    k, v = (torch.randn(batch, heads[1], length, 64, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def masked(batch: int, length: int) -> Tensor:
    """A mask that is True where attention is allowed, different for every sequence."""
    allowed = torch.rand(batch, 1, 1, length, generator=torch.Generator().manual_seed(batch)) > 0.3
    allowed[..., -1] = True
    return allowed


@pytest.mark.parametrize("heads", [(8, 2), (6, 6), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_the_result_is_that_of_the_formula(heads: tuple[int, int], dtype: torch.dtype, kind: str) -> None:
    q, k, v = states(3, heads, 37, dtype)
    mask = None if kind == "none" else masked(3, 37)
    given = torch.log(mask).to(dtype) if mask is not None and kind == "float" else mask
    got = attend(MODULE, "", (q, k, v), given, {})[0]
    assert got.shape == (3, 1, heads[0] * 64) and got.dtype is dtype
    k, v = (t.double().repeat_interleave(heads[0] // heads[1], 1) for t in (k, v))
    scores = q.double() @ k.mT * SCALING
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2).reshape(3, 1, -1)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=bound * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("heads", "dtype"), [((8, 2), torch.float32), ((8, 2), torch.bfloat16), ((6, 6), torch.bfloat16)], ids=str
)
def test_a_sequence_has_the_same_bytes_alone_and_in_a_batch(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Float32 without groups is torch's own attention, whose bytes are not promised."""
    for length in (5, 128, 600):
        q, k, v = states(5, heads, length, dtype)
        mask = masked(5, length)
        together = attend(MODULE, "", (q, k, v), mask, {})[0]
        for row in range(5):
            one = slice(row, row + 1)
            alone = attend(MODULE, "", (q[one], k[one], v[one]), mask[one].clone(), {})[0]
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("heads", [(8, 2), (6, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_behind_the_last_entry_that_counts_are_not_read(
    heads: tuple[int, int], dtype: torch.dtype, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of all entries: for boolean and added masks, and where the capacity is no multiple of a block."""
    for used in (160, 700):
        q, k, v = states(2, heads, 1500, dtype)
        mask = masked(2, 1500)
        mask[:, ..., used:] = False
        mask[1, ..., 90:] = False
        hidden = (-torch.inf, torch.finfo(dtype).min)
        for kind in (mask, *(torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, value) for value in hidden)):
            with monkeypatch.context() as patch:
                patch.setattr(attending, "BLOCK", 1500)
                whole = attend(MODULE, "", (q, k, v), kind, {}, invariant)[0]
            end = (used // attending.BLOCK + 1) * attending.BLOCK
            poisoned = (torch.cat((t[:, :, :end], torch.full_like(t[:, :, end:], torch.nan)), 2) for t in (k, v))
            assert torch.equal(attend(MODULE, "", (q, next(poisoned), next(poisoned)), kind, {}, invariant)[0], whole)


def test_all_entries_are_read_where_a_query_sees_none() -> None:
    """With the smallest number instead of -inf, torch's result is then the mean of all values."""
    q, k, v = states(2, (8, 2), 1500, torch.float32)
    mask = torch.full((2, 1, 1, 1500), torch.finfo(torch.float32).min)
    mask[0, ..., :100] = 0.0
    got = attend(MODULE, "", (q, k, v), mask, {})[0].view(2, 2, 4, 64)
    torch.testing.assert_close(got[1], v[1].mean(1).unsqueeze(1).expand(2, 4, 64))


def test_masks_per_head_and_several_tokens_are_left_to_torch() -> None:
    q, k, v = states(2, (4, 2), 9, torch.float32)
    bias = torch.randn(2, 4, 1, 9, generator=torch.Generator().manual_seed(1))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=SCALING, enable_gqa=True)
    assert torch.equal(attend(MODULE, "", (q, k, v), bias, {})[0], expected.transpose(1, 2).reshape(2, 1, -1))
    q = q.repeat(1, 1, 3, 1)
    mask = masked(2, 9).expand(2, 1, 3, 9)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALING, enable_gqa=True)
    got = attend(MODULE, "", (q, k, v), mask, {})[0]
    torch.testing.assert_close(got, expected.transpose(1, 2).reshape(2, 3, -1), rtol=0, atol=1e-5)
