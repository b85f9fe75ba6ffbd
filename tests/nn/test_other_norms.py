"""`onepass.nn.GatedRMSNorm`, `LayerNorm`, and norms without a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.nn import GatedRMSNorm, LayerNorm, RMSNorm, RMSNormFP8
from onepass.ops.rms_norm.launch import GATE_ACTIVATIONS
from onepass.ops.rms_norm.reference import activate
from onepass.testing.tensors import same_bytes

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def inference() -> Any:
    with torch.inference_mode():
        yield


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randomized(module: Any) -> Any:
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(1 + rows(*parameter.shape, seed=seed + 5) / 4)
    return module


@pytest.mark.parametrize("activation", GATE_ACTIVATIONS)
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("groups", [1, 4])
def test_gates_and_groups(order: Any, groups: int, activation: Any) -> None:
    norm = randomized(GatedRMSNorm(64, 1e-5, gate_order=order, gate_activation=activation, groups=groups))
    x, gate = rows(3, 5, 64), rows(3, 5, 64, seed=1)
    factor = activate(gate, activation)
    h = (x * factor if order == "before" else x).unflatten(-1, (groups, -1))
    y = (h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2) * norm.weight
    torch.testing.assert_close(norm(x, gate), y * factor if order == "after" else y, rtol=1e-5, atol=1e-6)
    assert same_bytes(norm(x), norm(x, None)) and not torch.equal(norm(x), norm(x, gate))
    assert list(norm.state_dict()) == ["weight"]
    assert f"gate_order='{order}'" in repr(norm) and ("groups=4" in repr(norm)) == (groups == 4)
    assert (f"gate_activation={activation!r}" in repr(norm)) == (activation != "silu")


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("shape", [64, (4, 16)], ids=str)
def test_layer_norm_is_torchs(options: dict[str, Any], shape: Any) -> None:
    theirs = randomized(nn.LayerNorm(shape, **options))
    ours = LayerNorm(shape, **options)
    assert "Parameter" not in repr(ours) and list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x, residual = rows(3, 4, 16), rows(3, 4, 16, seed=1)
    if shape == 64:
        x, residual = x.flatten(1), residual.flatten(1)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    y, h = ours(x, residual)
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(y, theirs(x + residual), rtol=1e-5, atol=1e-6)


def test_layer_norm_shares_another_modules_weights() -> None:
    theirs = randomized(nn.LayerNorm(32, eps=1e-3)).eval()
    ours = LayerNorm.from_module(theirs)
    assert ours.weight is theirs.weight and ours.bias is theirs.bias and ours.eps == 1e-3 and not ours.training
    torch.testing.assert_close(ours(rows(2, 32)), theirs(rows(2, 32)), rtol=1e-5, atol=1e-6)
    bare = LayerNorm.from_module(nn.LayerNorm(32, bias=False))
    assert bare.bias is None and list(bare.state_dict()) == ["weight"]


def test_layer_norm_of_heads_replaces_coheres() -> None:
    """Each head has its weight, and is normed alone."""
    models = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    theirs = randomized(models.CohereLayerNorm(hidden_size=(3, 16), eps=1e-4))
    ours = LayerNorm.from_module(theirs)
    assert ours.per_head and ours.weight is theirs.weight and "per_head=True" in repr(ours)
    assert LayerNorm.from_module(ours).per_head and not LayerNorm.from_module(nn.LayerNorm((3, 16))).per_head
    x, residual = rows(2, 5, 3, 16), rows(2, 5, 3, 16, seed=1)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    y, h = ours(x, residual)
    assert same_bytes(h, x + residual) and same_bytes(y, ours(h)) and not torch.equal(y, ours(x))
    plain = LayerNorm((3, 16), elementwise_affine=False, bias=False, per_head=True)
    torch.testing.assert_close(plain(x), torch.nn.functional.layer_norm(x, (16,)), rtol=1e-5, atol=1e-6)
    with pytest.raises(onepass.ContractError, match=r"LayerNorm: `x` must be \[..., 3, 16\], got \[2, 3, 5, 16\]"):
        ours(x.transpose(1, 2))


def test_gated_norm_replaces_hugging_faces() -> None:
    models = pytest.importorskip("transformers.models.zamba2.modeling_zamba2")
    theirs = randomized(models.Zamba2RMSNormGated(64, 16, eps=1e-4)).bfloat16()
    ours = GatedRMSNorm.from_module(theirs, gate_order="before", groups=4)
    assert ours.weight is theirs.weight and ours.eps == 1e-4
    x, gate = rows(5, 64).bfloat16(), rows(5, 64, seed=1).bfloat16()
    assert (ours(x, gate) != theirs(x, gate)).float().mean() < 0.02 and theirs(x, gate).abs().max() > 1


def test_norms_without_a_weight_load_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of ones is made, whatever the offset, and the results are those of ones."""
    x = rows(3, 64).bfloat16()
    expected = onepass.rms_norm(x, torch.ones(64), torch.finfo(torch.float32).eps)
    monkeypatch.setattr(torch, "full", None)
    for offset in (0.0, 1.0):
        assert same_bytes(RMSNorm(64, elementwise_affine=False, weight_offset=offset)(x), expected)
    codes = RMSNormFP8(64, elementwise_affine=False)(x)
    assert codes[0].float().abs().max() == 448


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GatedRMSNorm(64, gate_order="first"), "GatedRMSNorm: `gate_order` must be 'after' or 'before'"),  # type: ignore[arg-type]
        (
            lambda: GatedRMSNorm(64, gate_activation="tanh"),  # type: ignore[arg-type]
            f"GatedRMSNorm: `gate_activation` must be {' or '.join(map(repr, GATE_ACTIVATIONS))}, got 'tanh'",
        ),
        (
            lambda: LayerNorm(64, bias=False, per_head=True),
            r"LayerNorm: `normalized_shape` must be \(H, N\) with per_head",
        ),
        (lambda: LayerNorm((2, 64), per_head=True), "LayerNorm: `bias` must be False with per_head, got True"),
        (lambda: GatedRMSNorm(64, groups=5), "GatedRMSNorm: `groups` must divide size, 64, got 5"),
        (lambda: GatedRMSNorm(64, groups=0), "GatedRMSNorm: `groups` must be a positive int"),
        (
            lambda: GatedRMSNorm.from_module(nn.Linear(4, 4), gate_order="after"),
            "GatedRMSNorm: `norm` must have a weight of one dimension",
        ),
        (lambda: LayerNorm(0), "LayerNorm: `normalized_shape` must be a positive int"),
        (lambda: LayerNorm(8, bias=1), "LayerNorm: `bias` must be a bool, got 1"),  # type: ignore[arg-type]
        (lambda: LayerNorm(8, eps=-1.0), "LayerNorm: `eps` must be"),
        (lambda: LayerNorm.from_module(nn.Identity()), "LayerNorm: `norm` must have a weight"),
        (lambda: LayerNorm(8)(rows(2, 9)), "LayerNorm: `x` must have 8 columns, got 9"),
        (
            lambda: RMSNorm(8, elementwise_affine=False)(rows(2, 9)),
            "RMSNorm: `x` must have 8 columns, got 9",
        ),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(onepass.ContractError, match=message):
        make()
