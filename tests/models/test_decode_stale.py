"""Codes of ``weights="fp8"`` follow the weights: whatever changes these, the next call uses new codes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.models import NothingPatchedWarning

pytest.importorskip("transformers")

import transformers

from tests.helpers.models import COMMON, fresh, logits, small, tokens

PROMPT, STEP = tokens(2, 6), tokens(2, 1)
OPTIONS: Any = {"decode": True, "weights": "fp8"}


def other() -> Any:
    return small("Qwen2", torch.float32, seed=1)


def load(model: Any) -> None:
    model.load_state_dict(other().state_dict())


def assign(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in other().state_dict().items()}, assign=True)


def multiply(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.mul_(1.5)


def copy_(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.weight.copy_(other().model.layers[1].self_attn.o_proj.weight)


def set_data(model: Any) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = 1.5 * weight.data


def new_parameter(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.down_proj.weight = nn.Parameter(1.5 * mlp.down_proj.weight)


def bias(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.bias.add_(1)


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.model.layers[0].mlp.gate_proj.weight.mul_(1.5)


def write_data(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)


def merge_adapters(model: Any) -> None:
    """What peft's ``merge_and_unload`` does: the product of two thin matrices is added to some weights in place."""
    torch.manual_seed(0)
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.mlp.down_proj):
            linear.weight.data += 0.1 * torch.randn(linear.out_features, 4) @ torch.randn(4, linear.in_features)


def convert(model: Any) -> None:
    """The weights become other values where they are, and the module is told."""
    model.model.layers.bfloat16().float()


TRACED = [load, assign, multiply, copy_, set_data, new_parameter, bias, in_inference_mode, convert]
UNTRACED = [write_data, merge_adapters]
"""What changes neither addresses nor versions."""


def with_new_codes(model: Any, ids: Tensor) -> Tensor:
    """The logits of another model with the same weights that is patched now."""
    made = fresh("Qwen2")
    made.load_state_dict(model.state_dict())
    with onepass.patch(made, **OPTIONS):
        return logits(made, ids)


@pytest.mark.parametrize("change", [*TRACED, *UNTRACED], ids=lambda change: change.__name__)
def test_changed_weights_are_quantized_again(change: Callable[[Any], None]) -> None:
    """At the next step, or if the change leaves no trace, at the next prompt."""
    model = fresh("Qwen2")
    with onepass.patch(model, **OPTIONS):
        before = logits(model, PROMPT)
        logits(model, STEP)
        with torch.no_grad():
            change(model)
        for ids in (STEP, PROMPT, STEP) if change in TRACED else (PROMPT, STEP):
            assert torch.equal(logits(model, ids), with_new_codes(model, ids))
        assert not torch.allclose(logits(model, PROMPT), before)


def test_codes_stay_where_they_are() -> None:
    """A recorded graph reads them there. Weights that did not change are not quantized again."""
    model = fresh("Qwen2")
    with onepass.patch(model, **OPTIONS):
        found = [p for layer in model.model.layers for p in layer.self_attn._onepass.step.parts.projections]
        before = [(p.weight.data_ptr(), p.scale.data_ptr(), p.weight.clone()) for p in found]
        logits(model, PROMPT)
        versions = [p.weight._version for p in found]
        for _ in range(2):
            logits(model, PROMPT), logits(model, STEP)
        assert [p.weight._version for p in found] == versions
        load(model)
        logits(model, STEP)
        for projection, (weight, scale, codes) in zip(found, before, strict=True):
            assert projection.weight.data_ptr() == weight and projection.scale.data_ptr() == scale
            assert not torch.equal(projection.weight.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("change", [load, write_data], ids=["load", "write_data"])
def test_copies_follow_their_own_weights(change: Callable[[Any], None]) -> None:
    model = fresh("Qwen2")
    with onepass.patch(model, **OPTIONS):
        before = logits(model, PROMPT)
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            change(made)
            assert torch.equal(logits(made, PROMPT), with_new_codes(made, PROMPT))
        assert torch.equal(logits(model, PROMPT), before)


def test_models_of_inference_mode_follow_too() -> None:
    """Their parameters have no versions, so a change in place is seen at the next prompt."""
    with torch.inference_mode():
        model = fresh("Qwen2")
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        made = copy.deepcopy(model)
        assert made.lm_head.weight.is_inference()
        with onepass.patch(made, **OPTIONS):
            logits(made, PROMPT)
            load(made)
            assert torch.equal(logits(made, PROMPT), with_new_codes(made, PROMPT))
            set_data(made)
            assert torch.equal(logits(made, STEP), with_new_codes(made, STEP))


@pytest.mark.full  # test_codes_stay_where_they_are, which compiled calls rely on, stays
def test_compiled_calls_use_what_refresh_writes() -> None:
    """A compiled call cannot look at versions, so somebody else has to: `refresh`, or any call that is not compiled."""
    model = fresh("Qwen2")
    torch._dynamo.reset()
    with onepass.patch(model, **OPTIONS) as handle, torch.no_grad():
        compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
        before = compiled(STEP, use_cache=False).logits
        multiply(model)
        assert torch.equal(compiled(STEP, use_cache=False).logits, before)
        handle.refresh()
        assert torch.equal(compiled(STEP, use_cache=False).logits, with_new_codes(model, STEP))
        write_data(model)
        logits(model, PROMPT)
        assert torch.equal(compiled(STEP, use_cache=False).logits, with_new_codes(model, STEP))


def test_captured_decode_follows_at_its_prompt() -> None:
    model = fresh("Qwen2")
    options: Any = {"max_new_tokens": 6, "do_sample": False, "custom_generate": onepass.models.generate}
    with onepass.patch(model, **OPTIONS), torch.no_grad():
        model.generate(PROMPT, **options)
        load(model)
        merge_adapters(model)
        got = model.generate(PROMPT, **options)
        made = fresh("Qwen2")
        made.load_state_dict(model.state_dict())
        with onepass.patch(made, **OPTIONS):
            assert torch.equal(got, made.generate(PROMPT, **options))


def test_the_report_says_what_is_fp8() -> None:
    model = fresh("Llama")
    with onepass.patch(model, **OPTIONS) as handle:
        lines = repr(handle).splitlines()
    assert ", 14 projections fp8" in lines[0]
    assert "  fp8 2 x LlamaAttention weights: q_proj, k_proj, v_proj, o_proj" in lines
    assert "  fp8 2 x LlamaMLP weights: gate_proj, up_proj, down_proj" in lines
    assert [change["where"] for change in handle.to_json()["fp8"]][:2] == [
        "model.layers.0.self_attn",
        "model.layers.0.mlp",
    ]
    with onepass.patch(model, decode=True) as handle:
        assert "fp8" not in repr(handle) and not handle.to_json()["fp8"]


@pytest.mark.parametrize("family", ["Jamba", "StableLm", "Starcoder2"])
def test_the_warning_says_that_nothing_is_fp8(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**COMMON, num_hidden_layers=1)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with pytest.warns(NothingPatchedWarning, match=r"No weight is fp8\."), onepass.patch(model, **OPTIONS) as handle:
        assert not handle.fp8
