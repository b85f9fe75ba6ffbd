"""``keep_weights=False``: codes are the only weights, and state dicts, copies, conversions and undo are made of them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onepass

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_model

from tests.helpers.models import fresh, logits, small, tokens

PROMPT, STEP, LONG = tokens(2, 6), tokens(2, 1), tokens(3, 30)
KEPT: Any = {"decode": True, "weights": "fp8"}
FREED: Any = {**KEPT, "keep_weights": False}
FAMILIES = ["Qwen2", "Phi-3", "DeepSeek-V3"]


def pair(name: str, **options: Any) -> tuple[Any, Any, Any]:
    """Two equal models with the same codes: one that kept its weights, one that did not, and the latter's handle."""
    kept, freed = fresh(name), fresh(name)
    onepass.patch(kept, **KEPT, **options)
    return kept, freed, onepass.patch(freed, **FREED, **options)


def assert_same(kept: Any, freed: Any) -> None:
    for ids in (PROMPT, STEP, LONG):
        assert torch.equal(logits(freed, ids), logits(kept, ids))


def dequantized(name: str) -> Any:
    """A model whose fp8 projections have the values of their codes."""
    model = fresh(name)
    with onepass.patch(model, **KEPT) as handle:
        where = [f"{change.where}.{layer}" for change in handle.fp8 for layer in change.why.split(", ")]
    for path in where:
        linear = model.get_submodule(path)
        linear.weight.data = onepass.dequantize_weight(*onepass.quantize_weight(linear.weight, "fp8_row"))
    return model


@pytest.mark.parametrize("name", ["Qwen2", pytest.param("Phi-3", marks=pytest.mark.full), "DeepSeek-V3"])
def test_results_are_those_of_kept_weights(name: str) -> None:
    """For any number of tokens, fused and called one by one, and for copies. The old weights are gone."""
    model = fresh(name)
    old = [weakref.ref(p) for layer in model.model.layers for p in layer.parameters() if p.dim() == 2]
    handle = onepass.patch(model, **FREED)
    gc.collect()
    count = sum(len(change.why.split(", ")) for change in handle.fp8)
    assert sum(reference() is None for reference in old) == count > 0
    assert f", {count} projections fp8 without 16-bit copies" in repr(handle)
    kept = fresh(name)
    onepass.patch(kept, **KEPT)
    for made in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(kept, made)
    with model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: None):
        torch.testing.assert_close(logits(model, PROMPT), logits(kept, PROMPT))


@pytest.mark.parametrize("name", FAMILIES)
def test_state_dicts_and_undo_have_the_values_of_the_codes(name: str, tmp_path: Path) -> None:
    expected = dequantized(name)
    wanted = expected.state_dict()
    _, model, handle = pair(name)
    save_model(model, str(tmp_path / "model"))
    torch.save(model.state_dict(), tmp_path / "state")
    pytest.importorskip("accelerate").Accelerator(cpu=True).save_model(model, tmp_path)
    states = [load_file(tmp_path / file) for file in ("model", "model.safetensors")]
    for state in (*states, torch.load(tmp_path / "state"), model.state_dict()):
        assert state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)
    for folder, saved in (("freed", model), ("expected", expected)):
        saved.save_pretrained(tmp_path / folder)
    freed, own = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("freed", "expected"))
    assert freed == own
    handle.undo()
    assert torch.equal(logits(model, PROMPT), logits(expected, PROMPT))
    assert all(p.requires_grad for p in model.parameters())
    for module in model.modules():
        assert not {"forward", "_apply", "_save_to_state_dict", "_load_from_state_dict"} & module.__dict__.keys()


def test_what_reads_or_writes_the_weights_raises() -> None:
    """An adapter that is merged into a weight that is not there must not be lost silently."""
    _, model, _ = pair("Qwen2")
    linear: Any = model.model.layers[0].mlp.up_proj
    assert linear._parameters["weight"] is None and "model.layers.0.mlp.up_proj.weight" not in dict(
        model.named_parameters()
    )
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'data'"):
        linear.weight.data += 1


@pytest.mark.filterwarnings("error")
def test_loaded_weights_are_quantized() -> None:
    """By state dicts, copied or assigned, and as new parameters, over the old codes."""
    kept, freed, _ = pair("Qwen2")
    codes = freed.model.layers[0].mlp._onepass.gate_up.weight.data_ptr()
    source = small("Qwen2", torch.float32, seed=1).state_dict()
    for model in (kept, freed):
        model.load_state_dict(source)
    assert_same(kept, freed)
    for model in (kept, freed):
        model.load_state_dict({key: 2 * value for key, value in source.items()}, assign=True)
    assert_same(kept, freed)
    for model in (kept, freed):
        linear = model.model.layers[0].mlp.up_proj
        linear.weight = nn.Parameter(3 * source["model.layers.0.mlp.up_proj.weight"])
    assert_same(kept, freed)
    assert freed.model.layers[0].mlp.up_proj.weight is None
    assert freed.model.layers[0].mlp._onepass.gate_up.weight.data_ptr() == codes
    key = "model.layers.0.mlp.up_proj.weight"
    for wrong in (torch.zeros(2, 2), source[key].char()):
        with pytest.raises(
            RuntimeError, match=f"`{key}` must be bfloat16, float16 or float32 with shape .*, got torch."
        ):
            freed.load_state_dict({**source, key: wrong})
    del source[key]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
        freed.load_state_dict(source)
    assert freed.load_state_dict(source, strict=False).missing_keys == [key]
    freed.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(onepass.ContractError, match="a new weight must have the shape and device of the codes"):
        logits(freed, STEP)


@pytest.mark.full  # compiles kernels; test_decode_weights.py converts models that keep weights
def test_conversions_keep_the_codes() -> None:
    _, model, handle = pair("Qwen2")
    made = dequantized("Qwen2").bfloat16()
    codes = model.model.layers[0].mlp._onepass.gate_up.weight.clone()
    assert model.bfloat16().to("cpu") is model
    assert torch.equal(model.model.layers[0].mlp._onepass.gate_up.weight.float(), codes.float())
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())
    expected = logits(made, PROMPT).float()
    assert (logits(model, PROMPT).float() - expected).norm() < 0.03 * expected.norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert (logits(model, PROMPT).float() - expected).norm() < 0.03 * expected.norm()
    handle.undo()
    assert all(torch.equal(value, made.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.full  # compiles a model; steps that are called stay
def test_captured_decode_and_compiled_calls() -> None:
    kept, freed, _ = pair("Qwen2")
    options: Any = {"max_new_tokens": 5, "do_sample": False, "custom_generate": onepass.models.generate}
    assert torch.equal(freed.generate(PROMPT, **options), kept.generate(PROMPT, **options))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled: Any = torch.compile(freed, fullgraph=True, backend="eager")
        assert torch.equal(compiled(STEP, use_cache=False).logits, logits(kept, STEP))


def test_refused_calls_free_nothing() -> None:
    model = fresh("Qwen2")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.model.norm.weight = nn.Parameter(torch.ones(2, 32))  # a norm that is left
    with pytest.raises(onepass.ContractError, match="strict"):
        onepass.patch(model, **FREED, strict=True)
    before["model.norm.weight"] = model.model.norm.weight.data
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(onepass.ContractError, match="`keep_weights` must be True without weights='fp8', got False"):
        onepass.patch(model, decode=True, keep_weights=False)
