"""Attention to the keys that a query sees: the formula, what is refused, and bytes that depend on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.cpu import compile as compiler
from onepass.ops.attention import reference
from onepass.ops.sequence_attention import cpu
from onepass.ops.sequence_attention.launch import SPLIT, sequence_spec
from onepass.ops.sequence_attention.op import WIDENED, attend_sequence, attends_sequence
from tests.cpu.reference import kernel_for

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-20}
SCALE = 0.2


def states(
    heads: tuple[int, int], tokens: int, context: int, columns: tuple[int, int], dtype: torch.dtype, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries as a projection returns them, and keys and values that are parts of longer caches."""
    generator = torch.Generator().manual_seed(context)
    q = torch.randn(batch, tokens, heads[0], columns[0], generator=generator).to(dtype).transpose(1, 2)
    k, v = (torch.randn(batch, heads[1], context + 5, size, generator=generator).to(dtype) for size in columns)
    return q, k[:, :, :context], v[:, :, :context]


def masked(*shape: int) -> Tensor:
    """A boolean mask, different in all rows, whose last query sees nothing."""
    allowed = torch.rand(*shape, generator=torch.Generator().manual_seed(shape[-1])) > 0.4
    allowed[-1, :, -1] = False
    return allowed


def additive(mask: Tensor) -> Tensor:
    """The mask as what is added to scores."""
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


SHAPES = [
    ((4, 2), 1, 7, (64, 64)),
    ((8, 1), 3, SPLIT + 44, (128, 128)),
    ((3, 3), WIDENED, 70, (72, 40)),
    ((4, 2), 20, 2 * SPLIT + 1, (192, 128)),
    ((2, 2), 5, 33, (256, 256)),
    ((6, 2), 2, 1, (16, 8)),
]


@pytest.mark.parametrize("kind", ["none", "bool", "float", "of the dtype", "one for all"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_is_that_of_the_formula(shape: Any, dtype: torch.dtype, kind: str) -> None:
    heads, tokens, context, columns = shape
    q, k, v = states(heads, tokens, context, columns, dtype)
    mask: Tensor | None = masked(1 if kind == "one for all" else 2, 1, tokens, context)
    if kind == "none":
        context = max(context, tokens)
        q, k, v = states(heads, tokens, context, columns, dtype)
        own = torch.ones(1, 1, tokens, context).tril().bool() if tokens > 1 else torch.ones(1, 1, 1, context).bool()
        want = reference.attend(q, k, v, additive(own), SCALE)
        mask = None
    else:
        assert mask is not None
        added = additive(mask)
        if kind == "float":
            mask = added = added + torch.randn(added.shape, generator=torch.Generator().manual_seed(3))
        elif kind == "of the dtype":
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        want = reference.attend(q, k, v, added, SCALE)
    assert attends_sequence(q, k, v, mask)
    got = attend_sequence(q, k, v, mask, SCALE)
    assert got.dtype is dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=3e-6)
    if mask is not None:
        assert not got[-1, -1].any(), "no key is seen"


def test_soft_capped_scores() -> None:
    q, k, v = states((4, 2), 6, 40, (64, 64), F32)
    mask = masked(2, 1, 6, 40)
    mask[-1, :, -1, 3] = True
    scores = torch.tanh(reference.scores(q, k, SCALE) / 1.5) * 1.5 + additive(mask)
    want = (scores.softmax(-1) @ v.double().repeat_interleave(2, 1)).transpose(1, 2)
    got = attend_sequence(q, k, v, mask, SCALE, 1.5)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6)
    assert not torch.allclose(got, attend_sequence(q, k, v, mask, SCALE))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_bytes_depend_on_what_is_seen(dtype: torch.dtype) -> None:
    """Not on other sequences, queries and heads, on hidden keys, which may be NaN, nor on how keys are hidden."""
    q, k, v = states((4, 2), 40, 600, (64, 64), dtype)
    mask = masked(2, 1, 40, 600)
    mask[..., 17:40] = mask[..., -9:] = False
    whole = attend_sequence(q, k, v, mask, SCALE)
    hidden = ~mask.any(2).squeeze(1)[:, None, :, None]
    spoiled = (q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf))
    assert torch.equal(attend_sequence(*spoiled, mask, SCALE), whole)
    assert torch.equal(attend_sequence(q, k, v, additive(mask), SCALE), whole)
    for batch, token in ((0, 0), (1, 11), (1, 39)):
        seen = mask[batch, 0, token].nonzero().squeeze(1)
        parts = q[batch, :, token][None, :, None], k[batch][None, :, seen], v[batch][None, :, seen]
        if len(seen):
            assert torch.equal(attend_sequence(*parts, None, SCALE)[0, 0], whole[batch, token])
    group = attend_sequence(q[:, :2], k[:, :1], v[:, :1], mask, SCALE)
    assert torch.equal(group, whole[:, :, :2])


def test_a_prompt_is_its_tokens() -> None:
    """Without a mask, and one that is longer than a split."""
    q, k, v = states((4, 2), 400, 400, (64, 64), BF16)
    whole = attend_sequence(q, k, v, None, SCALE)
    for token in (0, 15, 255, 256, 399):
        own = attend_sequence(q[:, :, token : token + 1], k[:, :, : token + 1], v[:, :, : token + 1], None, SCALE)
        assert torch.equal(own[:, 0], whole[:, token])


def test_bytes_do_not_depend_on_threads() -> None:
    q, k, v = states((8, 2), 64, 300, (64, 64), BF16)
    mask, before = masked(2, 1, 64, 300), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(attend_sequence(q, k, v, mask, SCALE))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.skipif("+avx2" not in compiler.host()[1], reason="runs code for an x86 CPU with AVX2")
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_other_instruction_sets_give_the_same_bytes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = states((4, 2), 3, 300, (200, 200), dtype)
    mask, spec = masked(2, 1, 3, 300), sequence_spec(dtype, dtype, "allowed", False)
    here = attend_sequence(q, k, v, mask, SCALE)
    monkeypatch.setitem(cpu.KERNELS.loaded, spec, kernel_for(cpu.KERNELS, spec, "haswell"))
    assert torch.equal(attend_sequence(q, k, v, mask, SCALE), here)


def test_nan_and_infinity() -> None:
    """In what is seen they reach the queries that see it, and no others."""
    q, k, v = states((2, 1), 3, 20, (16, 16), F32)
    k[0, 0, 5] = torch.nan
    got = attend_sequence(q, k, v, torch.ones(1, 1, 3, 20).tril(4).bool(), SCALE)
    assert got[1].isfinite().all() and got[0, 0].isfinite().all() and got[0, 1:].isnan().all()


def test_what_is_refused() -> None:
    q, k, v = states((4, 2), 3, 9, (16, 16), F32)
    mask = masked(2, 1, 3, 9)
    assert attends_sequence(q, k, v, mask) and attends_sequence(q, k, v, None)
    assert not attends_sequence(q.double(), k.double(), v.double(), mask)
    assert not attends_sequence(q, k.bfloat16(), v.bfloat16(), mask)
    assert not attends_sequence(q, k[:1], v[:1], mask) and not attends_sequence(q, k, v[:, :, :8], mask)
    assert not attends_sequence(q[:, :3], k, v, mask) and not attends_sequence(q[..., :8], k, v, mask)
    assert not attends_sequence(q, k, v, mask.expand(2, 4, 3, 9)) and not attends_sequence(q, k, v, mask[..., :8])
    assert not attends_sequence(q, k[:, :, :2], v[:, :, :2], None)
    assert not attends_sequence(q.to("meta"), k.to("meta"), v.to("meta"), None)


def test_nothing_to_do() -> None:
    q, k, v = states((4, 2), 3, 9, (16, 16), F32)
    assert attend_sequence(q[:0], k[:0], v[:0], None, SCALE).shape == (0, 3, 4, 16)
    assert attend_sequence(q[:, :, :0], k, v, None, SCALE).shape == (2, 0, 4, 16)


def test_the_op_of_a_compiler() -> None:
    q, k, v = states((4, 2), 3, 9, (16, 24), F32)
    torch.library.opcheck(torch.ops.onepass.attend_sequence.default, (q, k, v, masked(2, 1, 3, 9), SCALE, 0.0))
