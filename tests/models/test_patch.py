"""`onepass.patch` on small models of every family: logits, tokens, undo, state dict, and what the report says."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.integrations import FAMILIES, NothingPatchedWarning
from onepass.integrations.families import Layer, classes, fingerprint

pytest.importorskip("transformers")

from tests.helpers.models import CONFIGS, small, tokens

FAMILY = {family.name: family for family in FAMILIES}
NAMES = list(CONFIGS)


def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(ids, **options).logits
    return found


def test_every_family_has_a_model_here() -> None:
    assert set(NAMES) == set(FAMILY) - {"torch.nn"}


def test_rows_fit_the_installed_transformers() -> None:
    """Otherwise everything below would test models that were left alone."""
    for (path, name), (family, part) in classes().items():
        expected = family.fingerprint if part is None else part.fingerprint
        if expected:
            assert fingerprint(getattr(importlib.import_module(path), name).forward) == expected, name


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_the_models_own(name: str) -> None:
    """rounding="model" rounds where the model does: logits are equal to the byte.

    Only the order of a float32 sum differs, which can move one value in about 10^5 across a rounding boundary. How torch adds
    depends on the CPU, so which inputs are so unlucky does too; those are within what one such value can do. In a wrong place a
    rounding changes most logits of every input.
    """
    model = small(name, torch.bfloat16)
    equal = []
    for seed in range(3):
        ids = tokens(seed=seed)
        expected = logits(model, ids)
        with onepass.patch(model):
            got = logits(model, ids)
        assert expected.abs().max() > 1
        equal.append(torch.equal(got, expected))
        assert (got.float() - expected.float()).abs().max() <= 0.02 * expected.float().abs().max()
        assert torch.equal(logits(model, ids), expected), "undo must restore the very bytes"
    assert any(equal)


@pytest.mark.parametrize("name", NAMES)
def test_rounding_once_is_no_further_from_the_truth(name: str) -> None:
    """Against the same weights in float32, by token: at the median as near as the model's own bfloat16 logits, or nearly.

    The median, as a mixture of experts may choose another expert for a token whose two best are alike.
    """
    low = small(name, torch.bfloat16)
    high = copy.deepcopy(low).float()
    ids = tokens(4, 12)
    truth = logits(high, ids)
    with onepass.patch(low, rounding="once") as handle:
        got = logits(low, ids).float()
    own = logits(low, ids).float()
    error, usual = ((found - truth).norm(dim=-1).median() for found in (got, own))
    assert 0 < usual < 0.1 * truth.norm(dim=-1).median()
    assert error <= 1.2 * usual
    if FAMILY[name].rounding == "hf":
        assert not torch.equal(got, own), "the two roundings must differ, or this shows nothing"
    assert all("rounding hf" not in change.why for change in handle.replaced)


@pytest.mark.parametrize("rounding", ["model", "once"])
@pytest.mark.parametrize("name", NAMES)
def test_float32_generates_the_same_tokens(name: str, rounding: Any) -> None:
    model = small(name, torch.float32)
    ids = tokens(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected, expected_tokens = logits(model, ids), model.generate(ids, **options)
    with onepass.patch(model, rounding=rounding) as handle:
        assert list(model.state_dict()) == list(before)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        got = logits(model, ids)
        with torch.inference_mode():
            assert torch.equal(model.generate(ids, **options), expected_tokens)
    assert expected_tokens.shape == (2, 11)
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-6 * float(expected.abs().max()))
    assert torch.equal(logits(model, ids), expected)
    norms = sum(type(module).__name__ == FAMILY[name].norm for module in model.modules())
    assert sum(change.what == "norm" for change in handle.replaced) == norms > 4


def test_mla_projections_are_fused_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches a layer up to sixteen tokens, projections and norms beyond; both give the model's logits."""
    calls: list[int] = []

    def counted(act: Tensor, *rest: Any) -> Any:
        calls.append(act.shape[0])
        return onepass.gemv_and_partial_norm(act, *rest)

    monkeypatch.setattr("onepass.integrations.forwards.gemv_and_partial_norm", counted)
    model = small("DeepSeek-V3", torch.float32)
    for length, launches in ((4, 4), (16, 4), (17, 0)):
        calls.clear()
        ids = tokens(1, length)
        expected = logits(model, ids)
        with onepass.patch(model, rounding="once") as handle:
            torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-5)
        assert calls == [length] * launches
    assert sum(change.what == "projections down and their norms" for change in handle.replaced) == 2
    assert {c.what for c in handle.left} == {
        "norm of the latent, rotation and cache write, other caches",
        "addition after the MLP",
    }


@pytest.mark.parametrize("interleaved", [True, False])
def test_mla_entries_are_written_in_one_launch(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over an `MlaCache` the same tokens come out, patched (one launch a layer and step writes the entries) and unpatched."""
    from onepass.integrations import MlaCache

    calls: list[int] = []

    def counted(out: Any, q: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(q.shape[0])
        return onepass.fused_rope_rmsnorm_quantization(out, q, *rest, **options)

    monkeypatch.setattr("onepass.integrations.forwards.fused_rope_rmsnorm_quantization", counted)
    model = copy.deepcopy(small("DeepSeek-V3", torch.float32))
    model.config.rope_interleave = interleaved
    ids, options = tokens(2, 5), {"max_new_tokens": 6, "do_sample": False}
    with torch.inference_mode():
        expected = model.generate(ids, **options)
        plain = MlaCache(2, 16)
        assert torch.equal(model.generate(ids, past_key_values=plain, **options), expected) and not calls
        cache = MlaCache(2, 16)
        with onepass.patch(model, rounding="once"):
            assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    assert calls == [10, 10] + [2, 2] * 5  # the prompt of two sequences, then a token each
    for mine, theirs in zip(cache.layers, plain.layers, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length() == 10
        assert (
            mine.paged is not None
            and mine.paged.cache_lengths is not None
            and mine.paged.cache_lengths.tolist() == [10, 10]
        )
        got, other = cache_entries(mine), cache_entries(theirs)
        torch.testing.assert_close(got[..., :32], other[..., :32], rtol=0, atol=1e-5)
        # the model's code puts the halves of pairs apart, the cache write leaves pairs where they are
        turned = got[..., 32:].unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2) if interleaved else got[..., 32:]
        torch.testing.assert_close(turned, other[..., 32:], rtol=0, atol=1e-5)
        assert other.abs().max() > 1


def cache_entries(layer: Any) -> Tensor:
    entries: Tensor = layer.paged.blocks[:, : layer.length]
    return entries


def test_a_static_mla_cache_counts_on_the_device() -> None:
    """The same tokens as with the model's own cache; nothing but numbers on the device changes from step to step."""
    from onepass.integrations import MlaCache

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


def test_a_full_static_mla_cache_is_not_written_beyond() -> None:
    from onepass.integrations import MlaCache

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


def test_mla_cache_keeps_its_promises() -> None:
    from onepass.integrations import MlaCache

    model = small("DeepSeek-V3", torch.float32)
    cache: Any = MlaCache(2, 6)
    with torch.inference_mode(), onepass.patch(model, rounding="once"):
        first = model(tokens(2, 4), past_key_values=cache).logits
        with pytest.raises(
            onepass.ContractError, match="MlaCache: `max_length` must be at least 8 for these tokens, got 6"
        ):
            model(tokens(2, 4), past_key_values=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(model(tokens(2, 4), past_key_values=cache).logits, first)
        entries = cache_entries(cache.layers[0]).clone()
        cache.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(cache_entries(cache.layers[0]), entries.flip(0)) and not torch.equal(
            entries, entries.flip(0)
        )


# --- the handle -----------------------------------------------------------------------------------------------------


def test_report() -> None:
    model = small("Qwen3", torch.float32)
    with onepass.patch(model) as handle:
        text = str(handle)
        assert "Qwen3ForCausalLM: 13 replaced, 4 left" in text
        assert "replaced 9 x Qwen3RMSNorm norm: rms_norm, rounding hf" in text
        assert "replaced 2 x Qwen3Attention norms of q and k: qk_rms_norm, per head, rounding hf" in text
        assert "left 2 x Qwen3DecoderLayer addition after the MLP: the norm that follows" in text
        assert {change.where for change in handle.replaced if change.what == "norm"} >= {
            "model.norm",
            "model.layers.1.self_attn.q_norm",
        }
        assert json.loads(json.dumps(handle.to_json()))["model"] == "Qwen3ForCausalLM"
        with pytest.warns(NothingPatchedWarning, match="9 x Qwen3RMSNorm norm: patched already"):
            again = onepass.patch(model)
        assert not again.replaced and all(c.why == "patched already" for c in again.left if c.what == "norm")
        again.undo()
        assert "forward" in model.model.norm.__dict__
    handle.undo()  # a second time: nothing
    assert "forward" not in model.model.norm.__dict__ and "_onepass" not in model.model.norm.__dict__


def test_the_report_is_the_repr() -> None:
    model = small("Llama", torch.float32)
    handle = onepass.patch(model)
    assert repr(handle) == str(handle)
    assert repr(handle).startswith("LlamaForCausalLM: 7 replaced, 2 left\n  replaced 5 x LlamaRMSNorm norm:")
    handle.undo()
    assert repr(handle).startswith("LlamaForCausalLM: 7 replaced, 2 left, undone\n")


def unknown(name: str) -> Any:
    """Models in which nothing, or not all, is an RMSNorm that some row has."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    if name == "T5":
        return transformers.T5Model(
            transformers.T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4)
        )
    if name == "Cohere 2":
        return transformers.Cohere2Model(transformers.Cohere2Config(**sizes, **heads, pad_token_id=0))
    if name == "Llama 4":
        special: dict[str, Any] = {"intermediate_size_mlp": 96, "num_local_experts": 2, "pad_token_id": 0}
        return transformers.Llama4TextModel(transformers.Llama4TextConfig(**sizes, **heads, **special))
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("T5", {"T5LayerNorm": 7}),
        ("Cohere 2", {"Cohere2LayerNorm": 3}),
        ("Llama 4", {"Llama4TextL2Norm": 2, "Llama4TextRMSNorm": 5}),
        ("LayerNorm", {}),
    ],
)
def test_a_model_in_which_nothing_is_known(name: str, left: dict[str, int]) -> None:
    """It warns and lists its norms as left; strict=True raises. Neither touches the model."""
    model = unknown(name)
    words = [f"{count} x {cls} norm: no family has a row for this class" for cls, count in left.items()]
    told = words or ["it has no norm that could be replaced"]
    with pytest.warns(NothingPatchedWarning) as caught:
        handle = onepass.patch(model)
    message = str(caught[0].message)
    assert message.startswith(f"onepass.patch replaced nothing in {type(model).__name__}, which runs as before (")
    assert all(word in message for word in told)
    assert caught[0].filename == __file__ and issubclass(NothingPatchedWarning, UserWarning)
    assert not handle.replaced
    counts: dict[str, int] = {}
    for change in handle.left_norms():
        counts[change.cls] = counts.get(change.cls, 0) + 1
    assert counts == left
    assert all(f"left {word}" in repr(handle) for word in words)
    if name == "LayerNorm":
        assert "left 1 x LayerNorm norm: it is not an RMSNorm" in repr(handle)
        assert "left 1 x BatchNorm1d norm: it is not an RMSNorm" in repr(handle)
    with pytest.raises(onepass.ContractError, match=f"patch: `strict=True`, and .* {type(model).__name__}") as raised:
        onepass.patch(model, strict=True)
    assert all(word in str(raised.value) for word in told)
    assert not any("forward" in module.__dict__ or "_onepass" in module.__dict__ for module in model.modules())


def test_strict_takes_a_model_all_of_whose_rms_norms_are_replaced() -> None:
    """A norm of another kind is no objection; an RMSNorm that is left is, and then nothing stays patched."""
    model = nn.Sequential(nn.RMSNorm(8), nn.LayerNorm(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with onepass.patch(model, strict=True) as handle:
            assert len(handle.replaced) == 1
    for name in NAMES:
        with onepass.patch(small(name, torch.float32), strict=True) as handle:
            assert handle.replaced
    model.append(nn.RMSNorm(8, elementwise_affine=False))
    with pytest.raises(
        onepass.ContractError,
        match=r"patch: `strict=True`, and norms were left in Sequential, .*\(1 x RMSNorm norm: it has no weight",
    ):
        onepass.patch(model, strict=True)
    assert "forward" not in model[0].__dict__


def test_what_looks_like_a_norm() -> None:
    """By the name of the class; neither blocks that contain norms nor words that only begin like one."""

    class GatedRMSNormKernel(nn.Module):
        pass

    class rmsnorm(nn.Module):
        pass

    class Normalizer(nn.Module):
        pass

    class NormedLinear(nn.Linear):
        pass

    class PreNormBlock(nn.Sequential):
        pass

    model = nn.Sequential(
        GatedRMSNormKernel(), rmsnorm(), Normalizer(), NormedLinear(8, 8), PreNormBlock(nn.RMSNorm(8))
    )
    with onepass.patch(model) as handle:
        assert [change.where for change in handle.left] == ["0", "1"]
        assert [change.where for change in handle.replaced] == ["4.0"]


def test_sums_that_the_model_rounds_are_left() -> None:
    """Gemma and gpt-oss norm a rounded sum in one rounding: only rounding="once" fuses their additions."""
    for name in ("Gemma 3", "gpt-oss"):
        model = small(name, torch.float32)
        for rounding, fused in (("model", 0), ("once", 2)):
            with onepass.patch(model, rounding=rounding) as handle:  # type: ignore[arg-type]
                additions = [c for c in handle.replaced if c.what == "addition after the attention"]
                assert len(additions) == fused
                reasons = {c.why for c in handle.left if c.what == "addition after the attention"}
                assert any("the model rounds the sum" in why for why in reasons) == (not fused)


def test_norms_alone() -> None:
    model = small("Qwen3", torch.float32)
    with onepass.patch(model, fuse=False) as handle:
        assert {change.what for change in handle.replaced} == {"norm"} and not handle.left


def test_torch_norms_and_unknown_ones() -> None:
    class OtherRMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(
        nn.RMSNorm(64), OtherRMSNorm(), nn.RMSNorm(64, elementwise_affine=False), nn.LayerNorm(64), nn.Linear(64, 64)
    )
    x = torch.randn(3, 64)
    expected = model(x).detach()
    with onepass.patch(model) as handle, torch.inference_mode():
        torch.testing.assert_close(model(x), expected, rtol=2e-6, atol=1e-6)
    assert [change.where for change in handle.replaced] == ["0"]
    assert {change.where: change.why for change in handle.left} == {
        "1": "no family has a row for this class",
        "2": "it has no weight of one dimension",
        "3": "it is not an RMSNorm",
    }


def test_code_of_another_release_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder layer whose forward is another one than the row was written for keeps it; its norms are still replaced."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

    model = small("Llama", torch.float32)
    original = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda self, *a, **k: original(self, *a, **k))
    with onepass.patch(model) as handle:
        assert {change.what for change in handle.replaced} == {"norm"}
        assert [c.why for c in handle.left if "attention" in c.what] == [
            "its forward is not the one this was written for (transformers 5.17)"
        ] * 2
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: x)
    with pytest.warns(NothingPatchedWarning, match="its forward is not the one"), onepass.patch(model) as handle:
        assert not handle.replaced


def test_somebody_elses_forward_stays() -> None:
    model = copy.deepcopy(small("Llama", torch.float32))
    norm = model.model.norm
    norm.forward = lambda x: x * 2
    handle = onepass.patch(model)
    assert [c.where for c in handle.left if c.what == "norm"] == ["model.norm"]
    first = model.model.layers[0].input_layernorm
    first.forward = lambda x: x
    with pytest.raises(
        onepass.ContractError, match=r"undo: the forward of model\.layers\.0\.input_layernorm was replaced"
    ):
        handle.undo()
    assert "forward" not in model.model.layers[1].input_layernorm.__dict__ and "forward" in first.__dict__


def test_hidden_states_are_recorded() -> None:
    """transformers records them with hooks on layers and attentions: these cost no fusion."""
    model = copy.deepcopy(small("Qwen3", torch.float32))
    ids = tokens()
    expected = model(ids, output_hidden_states=True)
    with onepass.patch(model) as handle, torch.inference_mode():
        got = model(ids, output_hidden_states=True)
        assert model.model.layers[0].self_attn._forward_hooks and "unfused" not in repr(handle)
    assert len(got.hidden_states) == len(expected.hidden_states) == 3
    for mine, theirs in zip(got.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-5)


def test_copies_and_pickles() -> None:
    model = small("Qwen3", torch.float32)
    ids = tokens()
    with onepass.patch(model):
        expected = logits(model, ids)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other.model.norm.forward.args == (other.model.norm,)
            assert torch.equal(logits(other, ids), expected)


def test_positional_arguments_of_a_layer() -> None:
    model = small("Llama", torch.float32)
    layer, h = model.model.layers[0], torch.randn(1, 4, 64)
    angles = model.model.rotary_emb(h, torch.arange(4)[None])
    with torch.inference_mode():
        expected = layer(h, None, None, None, False, angles)
        with onepass.patch(model):
            torch.testing.assert_close(layer(h, None, None, None, False, angles), expected, rtol=0, atol=1e-5)


def test_refusals() -> None:
    model = small("Llama", torch.float32)
    with pytest.raises(onepass.ContractError, match=r"patch: `model` must be a torch\.nn\.Module, got list"):
        onepass.patch([])  # type: ignore[arg-type]
    with pytest.raises(onepass.ContractError, match="patch: `rounding` must be 'model' or 'once', got 'twice'"):
        onepass.patch(model, rounding="twice")  # type: ignore[arg-type]
    for name in ("fuse", "strict"):
        options: dict[str, Any] = {name: "no"}
        with pytest.raises(onepass.ContractError, match=f"patch: `{name}` must be a bool, got 'no'"):
            onepass.patch(model, **options)
    assert "forward" not in model.model.norm.__dict__


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "DeepSeek-V3"])
def test_gradients_are_refused_by_name(name: str) -> None:
    """Whichever patched module autograd reaches first says that it is patched, and what to do."""
    model = small(name, torch.float32)
    layer, h = model.model.layers[0], torch.randn(1, 4, 64)
    angles = model.model.rotary_emb(h, torch.arange(4)[None])
    ways = r"was patched by onepass\.patch.*torch\.inference_mode\(\) or torch\.no_grad\(\), or .* handle\.undo\(\)"
    calls: list[tuple[str, Any]] = [(FAMILY[name].norm, lambda: model(tokens()))]
    if name != "Llama":  # an attention with a launch of its own
        attention = layer.self_attn
        calls.append((type(attention).__name__, lambda: attention(h, position_embeddings=angles, attention_mask=None)))
    with onepass.patch(model, rounding="once"):
        for who, call in calls:
            with pytest.raises(onepass.ContractError, match=f"{who}: this module {ways}"):
                call()
        with torch.no_grad():
            model(tokens())
    assert model(tokens()).logits.requires_grad


def test_layer_rows_name_attributes_that_exist() -> None:
    for name in NAMES:
        layer = FAMILY[name].layer
        assert isinstance(layer, Layer)
        module = small(name, torch.float32).model.layers[0]
        assert type(module).__name__ == layer.cls
        for attribute in (layer.norm, layer.after_attention, layer.after_mlp):
            assert not attribute or isinstance(getattr(module, attribute), nn.Module)
