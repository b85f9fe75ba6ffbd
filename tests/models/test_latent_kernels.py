"""Decode steps that attend to latents with onepass's kernels, which are replaced by their formulas: a CPU does not have them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core import backend
from onepass.models.forwards import latent
from onepass.ops.attention import op as attention
from onepass.ops.head_product.launch import HeadCall
from onepass.ops.latent_attention.launch import LatentCall

pytest.importorskip("transformers")

from torch._dynamo.utils import counters
from transformers import StaticCache

from tests.helpers.models import fresh, small, tokens
from tests.models.test_decode_latent import NAME, expansions, run

BF16 = torch.bfloat16
STEP = ["HeadCall", "LatentCall", "HeadCall"]
"""What a layer launches instead of torch's calls."""


class Calls:
    """The calls that were launched."""

    def __init__(self) -> None:
        self.made: list[LatentCall | HeadCall] = []

    def latents(self, call: LatentCall) -> None:
        """The attention, by its formula."""
        self.made.append(call)
        q, q_rot, latent, k_rot = (t.float() for t in (call.q, call.q_rot, call.latent, call.k_rot))
        scores = (q @ latent.mT + q_rot @ k_rot.mT) * (call.scale / attention.LOG2E)
        scores = scores if call.mask is None else scores + call.mask.float()
        call.out.copy_((scores.softmax(-1) @ latent).transpose(1, 2))

    def heads(self, call: HeadCall) -> None:
        """The product, by its formula."""
        self.made.append(call)
        call.out.copy_(torch.einsum("rhk,hkn->rhn", call.x.float(), call.weight.float()))

    def names(self) -> list[str]:
        """What was launched since this was asked, by kind."""
        found = [type(call).__name__ for call in self.made]
        self.made.clear()
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A CPU has these kernels, and no others of decode steps."""
    found = Calls()
    monkeypatch.setitem(backend._launches, ("latent_attention", "cpu"), found.latents)
    monkeypatch.setitem(backend._launches, ("head_product", "cpu"), found.heads)
    monkeypatch.setattr(latent, "has_kernels", lambda _: True)
    return found


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_steps_use_the_kernels(static: bool, invariant: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one token and of several do. More than 16 tokens get keys and values."""
    model = small(NAME, BF16)
    want = run(model, 2, (3, 1, 4, 18, 1), static)
    assert not calls.made
    with onepass.patch(model, decode=True, batch_invariant=invariant) as handle:
        assert "attention to latents" in repr(handle)
        found = expansions(model, monkeypatch)
        got = run(model, 2, (3, 1, 4, 18, 1), static)
    # transformers gives a prompt no mask, which is left to torch's causal attention
    assert calls.names() == 3 * 2 * STEP
    assert [shape[2] for shape in found] == ([30] * 4 if static else [3, 3, 26, 26])
    difference = (got - want).float().abs().max() / want.float().abs().max()
    assert difference < 0.05


@pytest.mark.usefixtures("calls")
def test_results_are_as_close_to_float32_as_the_models_own() -> None:
    model = fresh(NAME, BF16, 1)
    exact = run(fresh(NAME, BF16, 1).float(), 8, (9, 1, 1))
    own = run(model, 8, (9, 1, 1)).float() - exact
    with onepass.patch(model, decode=True):
        ours = run(model, 8, (9, 1, 1)).float() - exact
    steps = slice(9, None)
    assert own[:, steps].abs().max() > 0
    assert ours[:, steps].square().mean() < 1.2 * own[:, steps].square().mean()


def test_tensors_are_used_where_they_are(calls: Calls) -> None:
    """The cache, both halves of the projection, and the rotated part of queries. A mask is converted once per step."""
    model = small(NAME, BF16)
    cache = cast(Any, StaticCache)(config=model.config, max_cache_len=11)
    with onepass.patch(model, decode=True), torch.inference_mode():
        model(tokens(2, 5), past_key_values=cache)
        calls.made.clear()
        model(tokens(2, 1), past_key_values=cache)
    for layer in range(2):
        first, attended, last = cast(tuple[HeadCall, LatentCall, HeadCall], calls.made[3 * layer : 3 * layer + 3])
        weight = model.model.layers[layer].self_attn.kv_b_proj.weight
        assert attended.latent.data_ptr() == cache.layers[layer].keys.data_ptr()
        assert attended.k_rot.data_ptr() == cache.layers[layer].values.data_ptr()
        assert first.weight.data_ptr() == weight.data_ptr()
        assert last.weight.data_ptr() == weight.data_ptr() + 16 * 32 * 2
        assert attended.q_rot.data_ptr() == first.x.data_ptr() + 16 * 2
        assert attended.q.data_ptr() == first.out.data_ptr() and last.x.data_ptr() == attended.out.data_ptr()
        assert attended.mask is cast(LatentCall, calls.made[1]).mask and attended.mask is not None


def test_other_dtypes_keep_what_they_had(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(NAME, torch.float32)
    found = expansions(model, monkeypatch)
    with onepass.patch(model, decode=True):
        run(model, 2, (3, 1))
    assert not calls.made and [shape[2] for shape in found] == [3, 3]
    found.clear()
    with onepass.patch(model, decode=True, batch_invariant=True) as handle:
        assert "attention to latents" not in repr(handle)
        run(model, 2, (3, 1))
    assert not calls.made and [shape[2] for shape in found] == [3, 3, 4, 4]


def test_a_gpu_without_the_kernels_keeps_what_it_had(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "has_kernels", lambda _: False)
    model = small(NAME, BF16)
    found = expansions(model, monkeypatch)
    with onepass.patch(model, decode=True, batch_invariant=True):
        run(model, 2, (3, 1))
    assert not calls.made and [shape[2] for shape in found] == [3, 3, 4, 4]


@pytest.mark.parametrize("invariant", [False, True])
def test_a_hook_on_the_projection_is_called(invariant: bool, calls: Calls) -> None:
    """In one layer; the other one keeps its kernels."""
    model = fresh(NAME, BF16)
    seen: list[Tensor] = []
    with onepass.patch(model, decode=True, batch_invariant=invariant):
        run(model, 2, (3,))
        calls.made.clear()
        with model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *given: seen.append(given[2])):
            run(model, 2, (3, 1))
    assert calls.names() == STEP and len(seen) == 2


def test_the_choice_does_not_depend_on_the_batch(calls: Calls) -> None:
    model = small(NAME, BF16)
    with onepass.patch(model, decode=True, batch_invariant=True):
        for batch in (1, 2, 20):
            run(model, batch, (3, 1, 16))
            assert calls.names() == 2 * 2 * STEP


@pytest.mark.full  # test_attend_splits.py compiles a step with a kernel
@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph(calls: Calls) -> None:
    model, make = fresh(NAME, BF16, 1), cast(Any, StaticCache)
    found = []
    with onepass.patch(model, decode=True, batch_invariant=True), torch.no_grad():
        for compiled in (True, False):
            cache = make(config=model.config, max_cache_len=13)
            model(tokens(2, 6), past_key_values=cache)
            step: Any = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
            calls.made.clear()
            found.append(torch.cat([step(tokens(2, 1, seed=n), past_key_values=cache).logits for n in range(3)]))
            assert calls.names() == 3 * STEP
    assert torch.equal(*found)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
