"""Decode steps with onepass's attention kernel, which is replaced by its formula: a CPU does not have it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core import backend
from onepass.models.forwards import attend
from onepass.models.forwards.attend import biases
from onepass.ops.attention import op as attention
from onepass.ops.attention.launch import AttentionCall

pytest.importorskip("transformers")

from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

from tests.helpers.models import fresh, small, tokens

BF16 = torch.bfloat16


class Calls:
    """The calls that were launched."""

    def __init__(self) -> None:
        self.made: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> None:
        self.made.append(call)
        k, v = (t.float().repeat_interleave(call.rows.groups, 1) for t in (call.k, call.v))
        scores = call.q.float() @ k.mT * (call.scale / attention.LOG2E)
        scores = scores if call.mask is None else scores + call.mask.float()
        call.out.copy_((scores.softmax(-1) @ v).transpose(1, 2))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A CPU has the kernel."""
    found = Calls()
    monkeypatch.setitem(backend._launches, ("attention", "cpu"), found)
    monkeypatch.setattr(attend, "has_kernels", lambda _: True)
    return found


def run(model: Any, static: bool, lengths: tuple[int, ...], calls: Calls) -> tuple[Tensor, list[int]]:
    """The logits of a prompt and of steps after it, and how many calls each had."""
    kind: Any = StaticCache if static else DynamicCache
    cache = kind(config=model.config, **({"max_cache_len": sum(lengths) + 3} if static else {}))
    found, counts = [], []
    with torch.inference_mode():
        for length in lengths:
            calls.made.clear()
            found.append(model(tokens(2, length, seed=length), past_key_values=cache).logits)
            counts.append(len(calls.made))
    return torch.cat(found, dim=1), counts


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma 3"])
def test_short_contexts_use_the_kernel(name: str, static: bool, calls: Calls) -> None:
    """Steps of one token and of several do. A prompt without a mask and more than 16 tokens do not."""
    model = small(name, BF16)
    want, none = run(model, static, (5, 1, 3, 18, 1), calls)
    assert not any(none)
    with onepass.patch(model, decode=True):
        got, counts = run(model, static, (5, 1, 3, 18, 1), calls)
    masked = static or name == "Gemma 3"
    assert counts[1:] == [2, 2, 0, 2] and (masked or counts[0] == 0)
    difference = (got - want).float().abs().max() / want.float().abs().max()
    assert difference < 0.05


def test_long_contexts_use_it_if_bytes_must_not_depend_on_the_batch(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "SHORT", 0)
    model = small("Qwen3", BF16)
    with onepass.patch(model, decode=True):
        assert run(model, True, (5, 1), calls)[1] == [0, 0]
    with onepass.patch(model, decode=True, batch_invariant=True):
        assert run(model, True, (5, 1), calls)[1] == [0, 2]
        assert calls.made[0].mask is not None and calls.made[0].mask is calls.made[1].mask, (
            "a mask is converted once per step"
        )


@pytest.mark.usefixtures("fresh_compiler", "calls")
def test_one_graph() -> None:
    model, make = fresh("Qwen3", layers=1).to(BF16), cast(Any, StaticCache)
    found = []
    with onepass.patch(model, decode=True), torch.no_grad():
        for compiled in (True, False):
            cache = make(config=model.config, max_cache_len=13)
            model(tokens(2, 6), past_key_values=cache)
            step: Any = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
            found.append(torch.cat([step(tokens(2, 1, seed=n), past_key_values=cache).logits for n in range(3)]))
    assert torch.equal(*found)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `patch`, or by the first step; a compiled step then looks it up."""
    asked = []

    def since_ampere(device: int) -> bool:
        asked.append(device)
        return True

    monkeypatch.setattr(attend, "_chips", {})
    monkeypatch.setattr(attend, "_since_ampere", since_ampere)
    queries: Any = SimpleNamespace(is_cuda=True, get_device=lambda: 3)
    assert attend.has_kernels(queries) and attend.has_kernels(queries) and asked == [3]
    assert not attend.has_kernels(torch.zeros(1)) and asked == [3]


def test_masks_that_are_added_are_converted_once_per_step() -> None:
    mask = torch.tensor([0.0, -1.5, -torch.inf])
    made = [biases.of(mask, BF16, layer) for layer in (0, 1)]
    assert made[0] is made[1] and torch.equal(made[0], mask.to(BF16))
    assert biases.of(made[0], BF16, 2) is made[0]
    mask[0] = 2.0
    assert biases.of(mask, BF16, 0)[0] == 2.0, "another step"
