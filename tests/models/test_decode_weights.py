"""Weights of ``onepass.patch(model, decode=True)``: merged, quantized, copied, converted, replaced, saved, restored."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.nn import MergedLinear

pytest.importorskip("transformers")

import transformers

from onepass.models.forwards.linear import projections_of
from tests.helpers.models import COMMON, close, fresh, logits, small, tokens

IDS = tokens(2, 4)


def merged(model: Any, layer: int = 0) -> Any:
    """The merged projection of q, k and v."""
    return model.model.layers[layer].self_attn._onepass.step.qkv


def assert_shared(model: Any) -> None:
    """The parameters of q, k and v, gate and up are the rows of one tensor."""
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            projection = projections_of(module)[0]
            start = 0
            for linear in projection.linears:
                rows = projection.weight[start : start + len(linear.weight)]
                assert linear.weight.data_ptr() == rows.data_ptr() and torch.equal(linear.weight, rows)
                start += len(linear.weight)


def owned(parameter: Tensor) -> bool:
    """Whether torch allocated this memory for the parameter alone: what lies in a merged tensor has a fixed size."""
    storage = parameter.untyped_storage()
    return storage.resizable() and storage.nbytes() == parameter.numel() * parameter.element_size()


def test_parameters_lie_in_merged_memory_and_own_theirs_after_undo() -> None:
    model = fresh("Qwen2")
    before = dict(model.named_parameters())
    q = model.model.layers[0].self_attn.q_proj
    handle = onepass.patch(model, decode=True)
    assert_shared(model)
    assert not owned(q.weight) and not owned(q.bias)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not any("merged" in name or "_onepass" in name for name in model.state_dict())
    handle.undo()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(owned(parameter) for parameter in model.parameters())
    for module in model.modules():
        assert not {"forward", "_apply", "_onepass"} & module.__dict__.keys()


def test_loading_into_the_model_reaches_the_merged_weight() -> None:
    model, other = fresh("Llama"), small("Llama", torch.float32, seed=1)
    expected = logits(other, IDS)
    with onepass.patch(model, decode=True):
        model.load_state_dict(other.state_dict())
        assert_shared(model)
        close(logits(model, IDS), expected)


def test_replaced_parameters_are_merged_again() -> None:
    model, other = fresh("Llama"), small("Llama", torch.float32, seed=1)
    expected = logits(other, IDS)
    with onepass.patch(model, decode=True) as handle:
        model.load_state_dict({key: value.clone() for key, value in other.state_dict().items()}, assign=True)
        close(logits(model, IDS), expected)
        assert_shared(model)
        weight = model.model.layers[0].self_attn.k_proj.weight
        weight.data = weight.data * 2
        other = copy.deepcopy(other)
        other.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
        close(logits(model, IDS), logits(other, IDS))
        assert_shared(model)
        assert "unfused" not in repr(handle)


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"weights": "fp8"}], ids=str)
@pytest.mark.parametrize("name", ["Llama", "Phi-3", "DeepSeek-V3"])
def test_copies_and_pickles_are_patched(name: str, options: dict[str, Any]) -> None:
    model = fresh(name)
    with onepass.patch(model, decode=True, **options):
        expected = logits(model, IDS)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(logits(other, IDS), expected)
            attention, mine = model.model.layers[0].self_attn, other.model.layers[0].self_attn
            projections = zip(projections_of(attention), projections_of(mine), strict=True)
            for theirs, copied in projections:
                assert all(any(linear is module for module in mine.children()) for linear in copied.linears)
                assert copied.weight.data_ptr() != theirs.weight.data_ptr()
            if name == "Llama" and "weights" not in options:
                assert_shared(other)
    assert torch.equal(logits(other, IDS), expected), "undo of the original must not change a copy"


def test_conversions_merge_again() -> None:
    model = fresh("Llama")
    own = copy.deepcopy(model)
    with onepass.patch(model, decode=True) as handle:
        for dtype in (torch.bfloat16, torch.float32):
            expected = logits(own.to(dtype), IDS).float()
            got = logits(model.to(dtype), IDS)
            assert got.dtype is model.lm_head.weight.dtype
            assert (got.float() - expected).abs().max() < 0.03 * expected.abs().max()
            assert_shared(model)
        assert "unfused" not in repr(handle)
    assert all(owned(parameter) for parameter in model.parameters())


def test_saved_checkpoints_are_those_of_the_model(tmp_path: Path) -> None:
    model = fresh("Qwen3")
    model.save_pretrained(tmp_path / "own")
    with onepass.patch(model, decode=True):
        model.save_pretrained(tmp_path / "patched")
    own, patched = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("own", "patched"))
    assert own == patched
    again: Any = transformers.AutoModelForCausalLM
    assert torch.equal(logits(again.from_pretrained(tmp_path / "patched"), IDS), logits(model, IDS))


def test_tied_embeddings_stay_tied() -> None:
    config = transformers.LlamaConfig(**COMMON, num_hidden_layers=1, tie_word_embeddings=True)
    torch.manual_seed(0)
    make: Any = transformers.LlamaForCausalLM
    model = make(config).eval()
    expected = logits(model, IDS)
    with onepass.patch(model, decode=True, batch_invariant=True):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        close(logits(model, IDS), expected)
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        close(logits(model, IDS), expected)


def test_memory_that_others_use_is_not_moved() -> None:
    model = fresh("Llama")
    one, two = (layer.self_attn.q_proj for layer in model.model.layers)
    two.weight = nn.Parameter(one.weight.data)
    expected = logits(model, IDS)
    with onepass.patch(model, decode=True) as handle:
        close(logits(model, IDS), expected)
        assert one.weight.data_ptr() == two.weight.data_ptr()
    assert "left 2 x LlamaAttention decode: a projection shares memory with another parameter" in repr(handle)


def test_memory_of_another_merged_layer_is_not_moved() -> None:
    """Each parameter has a storage of its own there too, so overlaps count, not storages."""
    model = fresh("Llama")
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
    attention.qkv = MergedLinear.from_linears([attention.q_proj, attention.k_proj, attention.v_proj])
    mlp.rest = MergedLinear.from_linears([mlp.down_proj, nn.Linear(mlp.down_proj.in_features, 8, bias=False)])
    expected = logits(model, IDS)
    with onepass.patch(model, decode=True) as handle:
        close(logits(model, IDS), expected)
        assert attention.k_proj.weight.data_ptr() == attention.qkv.weight[attention.q_proj.out_features :].data_ptr()
        assert mlp.down_proj.weight.data_ptr() == mlp.rest.weight.data_ptr()
    assert "left 1 x LlamaAttention decode: a projection shares memory with another parameter" in repr(handle)


def test_inference_mode_makes_no_difference() -> None:
    """Patched, loaded and undone under inference mode, parameters are as before."""
    model = fresh("Qwen2")
    before = copy.deepcopy(model.state_dict())
    expected = logits(model, IDS)
    with torch.inference_mode():
        with onepass.patch(model, decode=True):
            close(logits(model, IDS), expected)
            model.load_state_dict({key: value.clone() for key, value in before.items()}, assign=True)
            close(logits(model, IDS), expected)
            assert_shared(model)
        made = copy.deepcopy(model)
        with onepass.patch(made, decode=True):
            close(logits(made, IDS), expected)
    assert torch.equal(logits(model, IDS), expected)
    assert all(owned(parameter) for parameter in (*model.parameters(), *made.parameters()))


def test_fp8_quantizes_rows_and_keeps_the_weights() -> None:
    """A step has the bytes of the quantized weights, for few and for many tokens."""
    model = fresh("Llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rounded = copy.deepcopy(model)
    for layer in rounded.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for linear in module.children():
                if isinstance(linear, nn.Linear):
                    linear.weight.data = onepass.dequantize_weight(*onepass.quantize_weight(linear.weight, "fp8_row"))
    for ids in (IDS, tokens(3, 9)):
        expected, original = logits(rounded, ids), logits(model, ids)
        with onepass.patch(model, decode=True, weights="fp8") as handle:
            got = logits(model, ids)
            assert merged(model).weight.dtype is torch.float8_e4m3fn
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            hook = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
            close(logits(model, ids), expected)  # called one by one, with the same codes
            hook.remove()
            assert "unfused" not in repr(handle)
        close(got, expected)
        assert 0.001 < (got - original).norm() / original.norm() < 0.1
        assert torch.equal(logits(model, ids), original)


def blocks_of_fp8(model: Any) -> None:
    """Make the projections of a model transformers' FP8Linear, as in DeepSeek's checkpoints."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    for module in list(model.model.layers.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                made = fp8.FP8Linear(linear.in_features, linear.out_features, (128, 128))
                codes, scale = onepass.quantize_weight(linear.weight, "fp8_block")
                made.weight = nn.Parameter(codes, requires_grad=False)
                made.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
                setattr(module, name, made)
                linear.weight.data = onepass.dequantize_weight(codes, scale)


@pytest.mark.full  # test_linear_modules.py has such checkpoints
def test_block_scaled_checkpoints_are_used_as_they_are() -> None:
    sizes = {**COMMON, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    torch.manual_seed(0)
    make: Any = transformers.LlamaForCausalLM
    rounded = make(transformers.LlamaConfig(**sizes)).eval()
    model = copy.deepcopy(rounded)
    blocks_of_fp8(model)
    for mine, theirs in zip(model.model.layers.modules(), rounded.model.layers.modules(), strict=True):
        if type(theirs) is nn.Linear:
            theirs.weight.data = onepass.dequantize_weight(mine.weight, mine.weight_scale_inv)
    keys = list(model.state_dict())
    with onepass.patch(model, decode=True) as handle:
        for ids in (IDS, tokens(3, 9)):
            close(logits(model, ids), logits(rounded, ids))
        attention = model.model.layers[0].self_attn
        projection = attention._onepass.step.qkv
        assert projection.scale.shape == (4, 2) and projection.weight.dtype is torch.float8_e4m3fn
        assert attention.k_proj.weight_scale_inv.data_ptr() == projection.scale[2:].data_ptr()
        assert list(model.state_dict()) == keys
        close(logits(copy.deepcopy(model), IDS), logits(rounded, IDS))
    assert "for any number of tokens" in repr(handle)
    assert all(owned(parameter) for parameter in attention.parameters())
