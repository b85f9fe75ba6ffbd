"""`Linear` and `MergedLinear` in a Llama of transformers."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.nn import Linear, MergedLinear, RMSNorm
from onepass.weights import SCHEMES, Scheme
from tests.helpers.models import COMMON, logits, small, tokens

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs/modules.md"


def llama_layer(dtype: torch.dtype) -> Any:
    """A decoder layer whose gate and up have whole blocks."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    torch.manual_seed(0)
    config: Any = LlamaConfig(**{**COMMON, "intermediate_size": 256, "hidden_size": 128})
    layer = LlamaDecoderLayer(config, 0).to(dtype).eval()
    with torch.no_grad():
        layer.post_attention_layernorm.weight.add_(0.2 * torch.randn(128))
    return layer


def second_half(layer: Any, x: Tensor, residual: Tensor) -> Tensor:
    """What the layer computes after its attention."""
    h = x + residual
    result: Tensor = h + layer.mlp(layer.post_attention_layernorm(h))
    return result


def decoded(layer: nn.Module, scheme: Scheme) -> Any:
    """A copy with the weights that the codes stand for."""
    copied = copy.deepcopy(layer)
    for module in copied.modules():
        if isinstance(module, nn.Linear):
            codes, scale = onepass.quantize_weight(module.weight, scheme)
            module.weight = nn.Parameter(onepass.dequantize_weight(codes, scale))
    return copied


def near(got: Tensor, expected: Tensor, relative: float) -> None:
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < relative, float(error)  # zeros have an error of 1


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])
@torch.inference_mode()
def test_a_norm_and_its_mlp_in_two_launches(dtype: torch.dtype, relative: float) -> None:
    """transformers' roundings, up to the order of the sums."""
    layer = llama_layer(dtype)
    norm = RMSNorm.from_module(layer.post_attention_layernorm, rounding="hf")
    mlp = [layer.mlp.gate_proj, layer.mlp.up_proj]
    gate_up = MergedLinear.from_linears(mlp, activation="silu_mul", rounding="hf")
    down = Linear.from_linear(layer.mlp.down_proj, rounding="hf")
    x, residual = torch.randn(2, 5, 128, dtype=dtype), torch.randn(2, 5, 128, dtype=dtype)
    gated, h = gate_up(x, residual, norm=norm)
    y = down(gated, add=h)
    expected = second_half(layer, x, residual)  # its weights are views now
    assert torch.equal(h, x + residual) and not torch.equal(y, h)
    near(y, expected, relative)
    near(y - h, expected - h, 10 * relative)
    if dtype is torch.bfloat16:
        assert (y == expected).float().mean() > 0.98


def test_the_example_of_the_page() -> None:
    (example,) = re.findall(r"```python\n(attention, mlp, norm = .*?)```", PAGE.read_text(), re.DOTALL)
    layer = llama_layer(torch.float32)
    names: dict[str, Any] = {"onepass": onepass, "torch": torch, "layer": layer}
    names |= {"x": torch.randn(3, 128), "residual": torch.randn(3, 128)}
    exec(example, names)
    with torch.inference_mode():
        expected = second_half(decoded(layer, "fp8_block"), names["x"], names["residual"])
        near(names["h"], expected, 1e-6)
        assert 1e-4 < (names["h"] - second_half(layer, names["x"], names["residual"])).norm() / expected.norm() < 0.05
        for name in "qkv":
            near(names[name], getattr(layer.self_attn, f"{name}_proj")(names["h"]), 1e-6)


def replaced(model: nn.Module, scheme: Scheme | None) -> nn.Module:
    """The model with new layers of ours in the place of torch's."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                sizes = child.in_features, child.out_features, child.bias is not None
                setattr(parent, name, Linear(*sizes, scheme=scheme))
    return model


@pytest.mark.sampled(13)  # each compiles kernels
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_checkpoints_of_a_whole_model(scheme: Scheme | None) -> None:
    """A float checkpoint loads strictly, and logits are those of the decoded weights."""
    theirs, ids = small("Qwen2", torch.float32), tokens()
    ours = replaced(copy.deepcopy(theirs), scheme)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    found = [module for module in ours.modules() if isinstance(module, Linear)]
    assert len(found) == 15 and {module.scheme for module in found} == {scheme}
    near(logits(ours, ids), logits(theirs if scheme is None else decoded(theirs, scheme), ids), 1e-5)
    again = replaced(copy.deepcopy(theirs), scheme)
    again.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(logits(again, ids), logits(ours, ids))
