"""The layer for Hugging Face kernels, without that package. `test_kernels.py` runs it with the package."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from onepass import ContractError, Unsupported, linear
from onepass.core.backend import can_launch
from onepass.engines import fused, kernels, layers
from onepass.testing.tensors import same_bytes
from tests.helpers.models import fresh


def norms(family: str) -> list[Any]:
    """The norms of a small model; their gammas are not all ones."""
    found = [m for m in fresh(family, torch.bfloat16).modules() if type(m).__name__.endswith("RMSNorm")]
    assert found and all(not torch.equal(m.weight, torch.ones_like(m.weight)) for m in found)
    return found


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "OLMo-2", "gpt-oss"])
def test_layer_has_the_bytes_of_the_module(family: str) -> None:
    """Bound to the module, as `kernelize` does it."""
    for norm in norms(family)[:2]:
        x = torch.randn(50, norm.weight.shape[0], generator=torch.Generator().manual_seed(1)).bfloat16()
        with torch.inference_mode():
            expected = norm(x)
            norm.forward = MethodType(layers.RMSNorm.forward, norm)
            got = norm(x)
        assert (got == expected).float().mean() > 0.995 and got.abs().max() > 0.5
        assert got.dtype == expected.dtype and layers.form_of(type(norm)) is not None


def test_module_runs_its_own_forward_where_the_layer_cannot() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states + self.weight

    module: Any = Shifted()
    x = torch.randn(3, 8)
    assert layers.form_of(Shifted) is None
    assert same_bytes(layers.RMSNorm.forward(module, x).detach(), (x + 1))
    (norm, *_) = norms("Llama")
    norm.float()
    half = torch.randn(3, norm.weight.shape[0]).bfloat16()
    assert layers.RMSNorm.forward(norm, half).dtype == torch.float32, "as transformers multiplies by a float32 weight"
    norm.requires_grad_(True)
    layers.RMSNorm.forward(norm, half.float()).sum().backward()
    assert norm.weight.grad is not None


@pytest.mark.parametrize("layer", [layers.RMSNorm, fused.RMSNormMLP])
def test_layer_has_no_state(layer: Any) -> None:
    """What `kernels` requires of a layer: no constructor, and no members but two flags."""
    assert layer.__init__ is nn.Module.__init__
    assert set(dir(layer)) - set(dir(nn.Module)) == {"can_torch_compile", "has_backward"}
    assert layer.can_torch_compile and not layer.has_backward


def test_own_forward_runs_on_devices_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    (norm, *_) = norms("Llama")
    x = torch.randn(3, norm.weight.shape[0]).bfloat16()
    monkeypatch.setattr(layers, "rms_norm", None)
    monkeypatch.setattr(layers, "can_launch", lambda op, device: False)
    with torch.inference_mode():
        assert same_bytes(layers.RMSNorm.forward(norm, x), norm(x))
    monkeypatch.undo()
    assert not can_launch("rms_norm", "mps") and can_launch("rms_norm", "cpu")
    assert not can_launch("attention", "cpu"), "attention has GPU kernels alone"


def norm_and_mlp(family: str) -> tuple[Any, Any]:
    (layer, *_) = [m for m in fresh(family, torch.bfloat16).modules() if hasattr(m, "post_attention_layernorm")]
    return layer.post_attention_layernorm, layer.mlp


def layout_of(norm: Any, mlp: Any) -> Any:
    """With the weights, which transformers loads."""
    layout = fused.RMSNormMLPLayout(norm, mlp)
    layout.gate_up_proj.weight = nn.Parameter(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    return layout.requires_grad_(False)


def test_norm_and_mlp_are_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """For few tokens. More are computed by the modules themselves, bit for bit."""
    norm, mlp = norm_and_mlp("Llama")
    layout = layout_of(norm, mlp)
    op = Mock(wraps=linear)
    monkeypatch.setattr(fused, "linear", op)
    with torch.inference_mode():
        for tokens, launches in ((1, 2), (16, 2), (17, 0)):
            x = torch.randn(1, tokens, norm.weight.shape[0], generator=torch.Generator().manual_seed(1)).bfloat16()
            op.reset_mock()
            expected, got = mlp(norm(x)), fused.RMSNormMLP.forward(layout, x)
            assert op.call_count == launches
            assert (got - expected).abs().max() <= (2**-6 * expected.abs().max() if launches else 0)
            assert same_bytes(layout(x), expected)
    x = torch.randn(2, norm.weight.shape[0], requires_grad=True).bfloat16()
    fused.RMSNormMLP.forward(layout, x).sum().backward()


def test_layout_refuses_what_the_fused_layer_does_not_compute() -> None:
    norm, mlp = norm_and_mlp("Llama")
    with pytest.raises(Unsupported, match="RMSNormMLP: Identity must round twice"):
        fused.RMSNormMLPLayout(nn.Identity(), mlp)
    with pytest.raises(Unsupported, match="RMSNormMLP: Identity must be Llama's MLP"):
        fused.RMSNormMLPLayout(norm, nn.Identity())
    mlp.act_fn = nn.GELU()
    with pytest.raises(Unsupported, match="without biases and with SiLU"):
        fused.RMSNormMLPLayout(norm, mlp)


def test_mapping_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(Unsupported, match="mapping: the package kernels is needed"):
        kernels.mapping()
    with pytest.raises(ContractError, match="mapping: `devices` must be some of cpu, cuda, got 'npu'"):
        kernels.mapping(["npu"])
