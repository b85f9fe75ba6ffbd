"""What `onepass.patch` replaces, what it leaves, and how its handle reports both."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.models import NothingPatchedWarning
from onepass.models.patching.forms import OTHER_CODE

pytest.importorskip("transformers")

from tests.helpers.models import CONFIGS, fresh, small


def test_report() -> None:
    model = small("Qwen3", torch.float32)
    with onepass.patch(model) as handle:
        text = str(handle)
        assert "Qwen3ForCausalLM: 13 replaced, 2 left" in text
        assert "replaced 9 x Qwen3RMSNorm norm: rms_norm, rounding hf" in text
        how = "norms of q and k: qk_norm_rope_cache with the rotation, per head, rounding hf"
        assert f"replaced 2 x Qwen3Attention {how}" in text
        assert "left 2 x Qwen3DecoderLayer addition after the MLP: the norm that follows" in text
        assert {change.where for change in handle.replaced if change.what == "norm"} >= {
            "model.norm",
            "model.layers.1.self_attn.q_norm",
        }
        assert json.loads(json.dumps(handle.to_json()))["model"] == "Qwen3ForCausalLM"
        with pytest.warns(NothingPatchedWarning, match="9 x Qwen3RMSNorm norm: already patched"):
            again = onepass.patch(model)
        assert not again.replaced and all(c.why == "already patched" for c in again.left if c.what == "norm")
        again.undo()
        assert "forward" in model.model.norm.__dict__
    handle.undo()  # a second call does nothing
    assert "forward" not in model.model.norm.__dict__ and "_onepass" not in model.model.norm.__dict__


def test_the_report_is_the_repr() -> None:
    model = small("Llama", torch.float32)
    handle = onepass.patch(model)
    assert repr(handle) == str(handle)
    assert repr(handle).startswith("LlamaForCausalLM: 7 replaced, 2 left\n  replaced 5 x LlamaRMSNorm norm:")
    handle.undo()
    assert repr(handle).startswith("LlamaForCausalLM: 7 replaced, 2 left, undone\n")


def unknown(name: str) -> Any:
    """A model in which no norm has a form that is supported."""
    if name == "xLSTM":
        from transformers.models.xlstm.modeling_xlstm import xLSTMRMSNorm

        return nn.Sequential(xLSTMRMSNorm(8), nn.Linear(8, 8), xLSTMRMSNorm(8))
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("xLSTM", {"xLSTMRMSNorm": 2}),
        ("LayerNorm", {}),
    ],
)
def test_unknown_models_warn_or_raise(name: str, left: dict[str, int]) -> None:
    """`patch` warns and lists the norms as left; strict=True raises. Neither changes the model."""
    model = unknown(name)
    words = [f"{count} x {cls} norm: {OTHER_CODE}" for cls, count in left.items()]
    reasons = words or ["it has no norm that could be replaced"]
    with pytest.warns(NothingPatchedWarning) as caught:
        handle = onepass.patch(model)
    message = str(caught[0].message)
    assert message.startswith(f"onepass.patch replaced nothing in {type(model).__name__}, which runs as before (")
    assert all(reason in message for reason in reasons)
    assert caught[0].filename == __file__ and issubclass(NothingPatchedWarning, UserWarning)
    assert not handle.replaced
    assert Counter(change.cls for change in handle.left_norms()) == left
    assert all(f"left {word}" in repr(handle) for word in words)
    if name == "LayerNorm":
        assert "left 1 x LayerNorm norm: it is not an RMSNorm" in repr(handle)
        assert "left 1 x BatchNorm1d norm: it is not an RMSNorm" in repr(handle)
    with pytest.raises(onepass.ContractError, match=f"patch: `strict=True`, but .* {type(model).__name__}") as raised:
        onepass.patch(model, strict=True)
    assert all(reason in str(raised.value) for reason in reasons)
    assert not any("forward" in module.__dict__ or "_onepass" in module.__dict__ for module in model.modules())


def test_strict_requires_that_all_rms_norms_are_replaced() -> None:
    """Norms of other kinds may be left. If an RMSNorm is left, it raises and nothing stays patched."""
    model = nn.Sequential(nn.RMSNorm(8), nn.LayerNorm(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with onepass.patch(model, strict=True) as handle:
            assert len(handle.replaced) == 1
    for name in CONFIGS:
        with onepass.patch(small(name, torch.float32), strict=True) as handle:
            assert handle.replaced
    model.append(nn.RMSNorm((2, 4), elementwise_affine=False))
    message = (
        r"patch: `strict=True`, but norms were left in Sequential, .*\(1 x RMSNorm norm: it norms several dimensions"
    )
    with pytest.raises(onepass.ContractError, match=message):
        onepass.patch(model, strict=True)
    assert "forward" not in model[0].__dict__


def test_unknown_norms_are_recognized_by_name() -> None:
    """Not blocks that contain norms, nor names that only begin like one."""

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


def test_rounded_sums_are_fused_with_rounding_once_only() -> None:
    """Gemma and gpt-oss round the sum and then norm with one rounding."""
    for name in ("Gemma 3", "gpt-oss"):
        model = small(name, torch.float32)
        for rounding, fused in (("hf", 0), ("once", 2)):
            with onepass.patch(model, rounding=rounding) as handle:  # type: ignore[arg-type]
                additions = [c for c in handle.replaced if c.what == "addition after the attention"]
                assert len(additions) == fused
                reasons = {c.why for c in handle.left if c.what == "addition after the attention"}
                assert any("the model rounds the sum" in why for why in reasons) == (not fused)
                joined = "post_attention_layernorm and addition after the attention"
                assert sum(c.what == joined for c in handle.replaced) == (2 if name == "Gemma 3" and not fused else 0)
                with_post = name == "Gemma 3" and fused == 2
                assert all(("on CPUs with post_attention_layernorm" in c.why) == with_post for c in additions)


def test_fuse_false_replaces_norms_only() -> None:
    model = small("Qwen3", torch.float32)
    with onepass.patch(model, fuse=False) as handle:
        assert {change.what for change in handle.replaced} == {"norm"} and not handle.left


def test_torch_norms_and_unknown_norms() -> None:
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
    assert [change.where for change in handle.replaced] == ["0", "2"]
    assert {change.where: change.why for change in handle.left} == {
        "1": OTHER_CODE,
        "3": "it is not an RMSNorm",
    }


def test_changed_code_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder layer whose code has no form keeps it; its norms are still replaced. Patching again sees changes."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    model = small("Llama", torch.float32)
    with onepass.patch(model) as handle:
        assert "addition after the attention" in {change.what for change in handle.replaced}
    original = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaDecoderLayer, "forward", changed)
    with onepass.patch(model) as handle:
        assert {change.what for change in handle.replaced} == {"norm"}
        assert [(c.cls, c.what, c.why) for c in handle.left] == [("LlamaDecoderLayer", "additions", OTHER_CODE)] * 2
    monkeypatch.setattr(LlamaRMSNorm, "forward", changed)
    with (
        pytest.warns(NothingPatchedWarning, match="its code is not one of the supported"),
        onepass.patch(model) as handle,
    ):
        assert not handle.replaced


def test_replaced_forwards_are_kept() -> None:
    model = fresh("Llama")
    norm = model.model.norm
    norm.forward = lambda x: x * 2
    handle = onepass.patch(model)
    assert [c.where for c in handle.left if c.what == "norm"] == ["model.norm"]
    first = model.model.layers[0].input_layernorm
    first.forward = lambda x: x
    message = r"undo: the forward of model\.layers\.0\.input_layernorm was replaced"
    with pytest.raises(onepass.ContractError, match=message):
        handle.undo()
    assert "forward" not in model.model.layers[1].input_layernorm.__dict__ and "forward" in first.__dict__
