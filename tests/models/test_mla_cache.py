"""Patched DeepSeek-V3 models: fused down projections, and generation with an `MlaCache`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass

pytest.importorskip("transformers")

from transformers import DynamicCache

from onepass.models import MlaCache
from tests.helpers.models import close, fresh, logits, small, tokens


def test_mla_projections_are_fused_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches per layer for up to sixteen tokens, separate projections and norms for more; the same logits."""
    calls: list[int] = []

    def counted(act: Tensor, *rest: Any) -> Any:
        calls.append(act.shape[0])
        return onepass.gemv_and_partial_norm(act, *rest)

    monkeypatch.setattr("onepass.models.forwards.latent.gemv_and_partial_norm", counted)
    model = small("DeepSeek-V3", torch.float32)
    for length, launches in ((4, 4), (16, 4), (17, 0)):
        calls.clear()
        ids = tokens(1, length)
        expected = logits(model, ids)
        with onepass.patch(model, rounding="once") as handle:
            torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-5)
        assert calls == [length] * launches
    assert sum(change.what == "down projections and their norms" for change in handle.replaced) == 2
    assert {c.what for c in handle.left} == {
        "norm of the latent, rotation and cache write, other caches",
        "addition after the MLP",
    }


def cache_entries(layer: Any) -> Tensor:
    entries: Tensor = layer.paged.blocks[:, : layer.length]
    return entries


@pytest.mark.parametrize("interleaved", [True, False])
def test_mla_entries_are_written_in_one_launch(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an `MlaCache`, patched (one launch per layer and step writes the entries) and unpatched models agree."""
    calls: list[int] = []

    def counted(out: Any, q: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(q.shape[0])
        return onepass.fused_rope_rmsnorm_quantization(out, q, *rest, **options)

    monkeypatch.setattr("onepass.models.forwards.latent.fused_rope_rmsnorm_quantization", counted)
    model = fresh("DeepSeek-V3")
    model.config.rope_interleave = interleaved
    ids, options = tokens(2, 5), {"max_new_tokens": 6, "do_sample": False}
    with torch.inference_mode():
        expected = model.generate(ids, **options)
        plain = MlaCache(2, 16)
        assert torch.equal(model.generate(ids, past_key_values=plain, **options), expected) and not calls
        cache = MlaCache(2, 16)
        with onepass.patch(model, rounding="once"):
            assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    assert calls == [10, 10] + [2, 2] * 5  # the prompts of two sequences, then one token each
    for mine, theirs in zip(cache.layers, plain.layers, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length() == 10
        assert mine.paged is not None and mine.paged.cache_lengths is not None
        assert mine.paged.cache_lengths.tolist() == [10, 10]
        got, other = cache_entries(mine), cache_entries(theirs)
        torch.testing.assert_close(got[..., :32], other[..., :32], rtol=0, atol=1e-5)
        # the model's code separates the columns of a pair, the cache write does not
        k = got[..., 32:].unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2) if interleaved else got[..., 32:]
        torch.testing.assert_close(k, other[..., 32:], rtol=0, atol=1e-5)
        assert other.abs().max() > 1


def test_a_static_mla_cache_counts_on_the_device() -> None:
    """The same tokens as with the model's own cache; from step to step only data on the device changes."""
    model = small("DeepSeek-V3", torch.float32)
    ids, options = tokens(2, 5), {"max_new_tokens": 6, "do_sample": False}
    with torch.inference_mode():
        expected = model.generate(ids, **options)
        plain: Any = MlaCache(2, 16, static=True)
        assert torch.equal(model.generate(ids, past_key_values=plain, **options), expected)
        with onepass.patch(model, rounding="once"):
            cache: Any = MlaCache(2, 16, static=True)
            assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    for layer in (*plain.layers, *cache.layers):
        assert layer.length == 0 and layer.get_mask_sizes(1) == (16, 0)
        assert int(layer.get_seq_length()) == 10 and layer.paged.cache_lengths.tolist() == [10, 10]
        assert not layer.paged.blocks[:, 10:].any() and layer.paged.blocks[:, :10].any(-1).all()
    with torch.inference_mode():
        cache.reset()
    assert int(cache.get_seq_length()) == 0


def test_a_static_mla_cache_is_not_written_beyond_its_end() -> None:

    model = small("DeepSeek-V3", torch.float32)
    cache: Any = MlaCache(2, 6, static=True)
    with torch.inference_mode(), onepass.patch(model, rounding="once"):
        model(tokens(2, 6), past_key_values=cache)
        full = [layer.paged.blocks.clone() for layer in cache.layers]
        model(tokens(2, 1), past_key_values=cache)
    assert all(
        torch.equal(layer.paged.blocks, then) and then.any() for layer, then in zip(cache.layers, full, strict=True)
    )
    layer = cache.layers[0]
    with torch.inference_mode(), pytest.raises(IndexError):
        layer.update(layer.keys[:, :, :1], layer.values[:, :, :1])


def test_mla_cache_limits_resets_and_reorders() -> None:

    model = small("DeepSeek-V3", torch.float32)
    cache: Any = MlaCache(2, 6)
    with torch.inference_mode(), onepass.patch(model, rounding="once"):
        first = model(tokens(2, 4), past_key_values=cache).logits
        with pytest.raises(onepass.ContractError, match=r"MlaCache: `max_length` must be at least 8 .*, got 6"):
            model(tokens(2, 4), past_key_values=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(model(tokens(2, 4), past_key_values=cache).logits, first)
        entries = cache_entries(cache.layers[0]).clone()
        cache.reorder_cache(torch.tensor([1, 0]))
        assert not torch.equal(entries, entries.flip(0))
        assert torch.equal(cache_entries(cache.layers[0]), entries.flip(0))


@pytest.mark.parametrize("interleaved", [True, False])
def test_hooks_may_change_between_the_steps_of_a_generation(interleaved: bool) -> None:
    """One launch or the model's own code writes the entries of an `MlaCache`, depending on the hooks of the step."""
    model = fresh("DeepSeek-V3")
    model.config.rope_interleave = interleaved
    ids = tokens(2, 9)

    def generate(cache: Any, prepare: Callable[[int], None] = lambda _: None) -> Tensor:
        found = []
        with torch.inference_mode():
            for step in range(5):
                prepare(step)
                part = ids[:, :5] if step == 0 else ids[:, 4 + step : 5 + step]
                found.append(model(part, past_key_values=cache, use_cache=True).logits[:, -1])
        return torch.stack(found)

    expected = generate(DynamicCache(config=model.config))
    for first in (0, 1):  # hooked in every other step, beginning with the prompt or with the first token
        hooks: list[Any] = []
        calls: list[int] = []

        def prepare(step: int, first: int = first, hooks: list[Any] = hooks, calls: list[int] = calls) -> None:
            while hooks:
                hooks.pop().remove()
            if step % 2 == first:
                norm = model.model.layers[1].self_attn.kv_a_layernorm
                hooks.append(norm.register_forward_hook(lambda *_: calls.append(step)))

        with onepass.patch(model, rounding="once"):
            close(generate(MlaCache(2, 16), prepare), expected)
        assert calls == [step for step in range(5) if step % 2 == first]
        while hooks:
            hooks.pop().remove()
    with onepass.patch(model, rounding="once") as handle:  # undone during a generation
        close(generate(MlaCache(2, 16), lambda step: handle.undo() if step == 2 else None), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2", 16), "MlaCache: `layers` must be an int of at least 1, got '2'"),
        ((2, 0), "MlaCache: `max_length` must be an int of at least 1, got 0"),
        ((2, 16, 1), "MlaCache: `static` must be a bool, got 1"),
    ],
)
def test_bad_sizes_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(onepass.ContractError, match=f"^{message}$"):
        MlaCache(*arguments)
