"""`onepass.patch` on small models of every family: logits, tokens, undo, state dict, gradients."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import onepass
from onepass.models.patching.forms import FORMS, Attention, Layer, Mla, Norm, match

pytest.importorskip("transformers")

from tests.helpers.families import FAMILIES
from tests.helpers.models import CONFIGS, fresh, logits, small, tokens

FAMILY = {family.name: family for family in FAMILIES}
NAMES = list(CONFIGS)


def test_every_family_has_a_model_here() -> None:
    assert set(NAMES) == set(FAMILY) - {"torch.nn"}


@pytest.mark.parametrize("name", NAMES)
def test_rows_match_the_installed_transformers(name: str) -> None:
    """The code of each family's modules has the forms of its row. Otherwise the tests below would run unpatched."""
    family = FAMILY[name]
    norm: Any = getattr(importlib.import_module(family.path), family.norm)
    found = match(norm, Norm)
    assert found.form == family.form and found.code is not None
    layer = small(name, torch.float32).model.layers[0]
    assert match(type(layer), Layer).form == family.layer
    for kind, form in ((Attention, family.attention), (Mla, family.mla)):
        assert match(type(layer.self_attn), kind).form == form
    assert isinstance(family.layer, Layer)
    for attribute in (family.layer.norm, family.layer.before, family.layer.after_attention, family.layer.after_mlp):
        assert not attribute or isinstance(getattr(layer, attribute), nn.Module)


def test_every_fingerprint_has_one_form() -> None:
    assert len({(type(form), fingerprint) for fingerprint, form in FORMS}) == len(FORMS)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_logits_are_the_models_own(name: str) -> None:
    """rounding="hf" rounds where the model does, so logits have the same bytes.

    Only the order of a float32 sum differs, which can move about one value in 10^5 across a rounding boundary.
    Which inputs that affects depends on how torch adds on this CPU; their logits are within what one such value
    can change. Rounding in a wrong place would change most logits of every input.
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
        assert torch.equal(logits(model, ids), expected), "undo must restore the bytes"
    assert any(equal)


@pytest.mark.parametrize("name", NAMES)
def test_rounding_once_is_as_accurate_as_the_model(name: str) -> None:
    """Compared per token with the same weights in float32, the median error is about that of the model in bfloat16.

    The median, because a mixture of experts may choose another expert for a token whose best two are nearly equal.
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
    if FAMILY[name].form.rounding == "hf":
        assert not torch.equal(got, own), "the two roundings must differ, or this proves nothing"
    assert all("rounding hf" not in change.why for change in handle.replaced)


@pytest.mark.sampled(5)  # some models stay
@pytest.mark.parametrize("rounding", ["hf", "once"])
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


def test_hidden_states_are_recorded() -> None:
    """transformers records them with hooks on layers and attentions, which prevent no fusion."""
    model = fresh("Qwen3")
    ids = tokens()
    expected = model(ids, output_hidden_states=True)
    with onepass.patch(model) as handle, torch.inference_mode():
        got = model(ids, output_hidden_states=True)
        assert model.model.layers[0].self_attn._forward_hooks and "unfused" not in repr(handle)
    assert len(got.hidden_states) == len(expected.hidden_states) == 3
    for mine, theirs in zip(got.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-5)


def test_copies_and_pickles_are_patched() -> None:
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


def test_bad_arguments_are_rejected() -> None:
    model = small("Llama", torch.float32)
    with pytest.raises(onepass.ContractError, match=r"patch: `model` must be a torch\.nn\.Module, got list"):
        onepass.patch([])  # type: ignore[arg-type]
    with pytest.raises(onepass.ContractError, match="patch: `rounding` must be 'hf' or 'once', got 'twice'"):
        onepass.patch(model, rounding="twice")  # type: ignore[arg-type]
    for name in ("fuse", "strict"):
        options: dict[str, Any] = {name: "no"}
        with pytest.raises(onepass.ContractError, match=f"patch: `{name}` must be a bool, got 'no'"):
            onepass.patch(model, **options)
    assert "forward" not in model.model.norm.__dict__


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "DeepSeek-V3"])
def test_gradients_are_rejected(name: str) -> None:
    """The first patched module that autograd reaches raises an error that says what to do."""
    model = small(name, torch.float32)
    layer, h = model.model.layers[0], torch.randn(1, 4, 64)
    angles = model.model.rotary_emb(h, torch.arange(4)[None])
    ways = r"was patched by onepass\.patch.*torch\.inference_mode\(\) or torch\.no_grad\(\), or .* handle\.undo\(\)"
    calls: list[tuple[str, Any]] = [(FAMILY[name].norm, lambda: model(tokens()))]
    if name != "Llama":  # an attention with its own launch
        attention = layer.self_attn
        calls.append((type(attention).__name__, lambda: attention(h, position_embeddings=angles, attention_mask=None)))
    with onepass.patch(model, rounding="once"):
        for who, call in calls:
            with pytest.raises(onepass.ContractError, match=f"{who}: this module {ways}"):
                call()
        with torch.no_grad():
            model(tokens())
    assert model(tokens()).logits.requires_grad
