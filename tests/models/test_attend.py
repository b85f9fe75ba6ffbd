"""The attention of a decode step on a CPU: groups of query heads as rows of one head of keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

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
