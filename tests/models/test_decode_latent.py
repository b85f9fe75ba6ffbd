"""Latent attentions of ``onepass.patch(model, decode=True)``: steps that attend to latents instead of keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from tests.helpers.models import close, fresh, small, tokens

NAME = "DeepSeek-V3"


def expansions(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of all latents that a patched model makes keys and values from, from now on."""
    found: list[torch.Size] = []
    attention = type(model.model.layers[0].self_attn)
    own = attention.expand_kv

    def expand_kv(self: Any, latent: Tensor, k_rot: Tensor) -> Any:
        found.append(latent.shape)
        return own(self, latent, k_rot)

    monkeypatch.setattr(attention, "expand_kv", expand_kv)
    return found


def run(model: Any, batch: int, lengths: tuple[int, ...], static: bool = False) -> Tensor:
    """The logits of pieces of tokens, one after the other."""
    kind: Any = StaticCache if static else DynamicCache
    cache = kind(config=model.config, **({"max_cache_len": sum(lengths) + 3} if static else {}))
    with torch.inference_mode():
        return torch.cat([model(tokens(batch, n, seed=n), past_key_values=cache).logits for n in lengths], dim=1)


@pytest.mark.parametrize("static", [False, True])
def test_a_step_makes_no_keys_and_values(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(NAME, torch.float32)
    expected = run(model, 2, (5, 1, 3), static)
    with onepass.patch(model, decode=True):
        found = expansions(model, monkeypatch)
        close(run(model, 2, (5, 1, 3), static), expected)
    assert len(found) == 2, "a prompt without a mask is left to torch's causal attention; no step after it"


def test_keys_and_values_are_made_for_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(NAME, torch.float32)
    with onepass.patch(model, decode=True, batch_invariant=True) as handle:
        assert "attention to latents" not in repr(handle)
        found = expansions(model, monkeypatch)
        run(model, 2, (5, 1))
    assert [shape[2] for shape in found] == [5, 5, 6, 6]


def test_the_choice_depends_on_the_tokens_of_a_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(NAME, torch.float32)
    with onepass.patch(model, decode=True, weights="fp8"):
        found = expansions(model, monkeypatch)
        run(model, 20, (3, 1, 2))
        assert [shape[2] for shape in found] == [3, 3], "the prompt; not the steps of a batch of 20"
        found.clear()
        run(model, 1, (3, 1, 17))
    assert [shape[2] for shape in found] == [3, 3, 21, 21]


def test_16_bit_results_are_as_close_to_float32_as_the_models_own() -> None:
    """Rounding moves from keys and values to queries and sums. One dense layer: experts would be chosen differently."""
    model = fresh(NAME, torch.bfloat16, 1)
    exact = run(fresh(NAME, torch.bfloat16, 1).float(), 8, (9, 1, 1))
    own = run(model, 8, (9, 1, 1)).float() - exact
    with onepass.patch(model, decode=True) as handle:
        assert "attention to latents" in repr(handle)
        ours = run(model, 8, (9, 1, 1)).float() - exact
    steps = slice(9, None)  # the first piece has more than 16 tokens
    assert own[:, steps].abs().max() > 0
    assert ours[:, steps].square().mean() < 1.2 * own[:, steps].square().mean()


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_tokens_that_attend_to_nothing_do_not_spread(cache: dict[str, Any]) -> None:
    """Padding before a short prompt attends to nothing at all."""
    model = small(NAME, torch.float32)
    ids = tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True, "attention_mask": mask}
    asked |= {**cache, "return_dict_in_generate": True, "output_logits": True}
    with torch.inference_mode():
        expected = model.generate(ids, **asked)
        with onepass.patch(model, decode=True):
            got = model.generate(ids, **asked)
    assert torch.equal(got.sequences, expected.sequences)
    for mine, theirs in zip(got.logits, expected.logits, strict=True):
        close(mine, theirs)


def test_hooks_and_adapters_of_the_projection_are_called() -> None:
    model = fresh(NAME)
    seen: list[torch.Size] = []
    projection = model.model.layers[0].self_attn.kv_b_proj

    def double(_: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
        seen.append(args[0].shape)
        return 2 * output

    class Doubled(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = 2 * projection(x)
            return made

    with projection.register_forward_hook(double):
        expected = run(model, 2, (5, 1))
    with onepass.patch(model, decode=True):
        plain = run(model, 2, (5, 1))
        seen.clear()
        with projection.register_forward_hook(double):
            close(run(model, 2, (5, 1)), expected)
        assert [shape[-2] for shape in seen] == [5, 6]
        model.model.layers[0].self_attn.kv_b_proj = Doubled()
        close(run(model, 2, (5, 1)), expected)
    assert (plain - expected).abs().max() > 1e-3 * expected.abs().max()
