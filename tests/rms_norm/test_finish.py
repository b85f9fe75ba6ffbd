"""Gated norms, biases, LayerNorm and output dtypes against the modules that models have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.errors import ContractError
from onepass.ops.rms_norm.launch import GATE_ACTIVATIONS
from onepass.ops.rms_norm.reference import activate
from onepass.testing.tensors import same_bytes

BF16, F32 = torch.bfloat16, torch.float32


def tensors(n: int = 256, rows: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return tuple(torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, n), (rows, n), (n,)))  # type: ignore[return-value]


def agrees(ours: Tensor, theirs: Tensor) -> None:
    """Equal but for values next to a rounding boundary, which differ in the last bit; a sum with a bias may cancel."""
    assert ours.dtype == theirs.dtype and ours.float().abs().max() > 0.1
    different = ours != theirs
    assert different.float().mean() < 0.01
    assert ((ours.float() - theirs.float()).abs() <= theirs.float().abs() * 2.0**-7 + 2.0**-20).all()


def test_gate_after_the_norm_is_qwen3_next() -> None:
    models = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, z, gamma = tensors()
    module = models.Qwen3NextRMSNormGated(256, eps=1e-5).to(BF16)
    module.weight.data = gamma
    with torch.no_grad():
        agrees(onepass.rms_norm(x, gamma, 1e-5, gate=z, rounding="hf"), module(x, z))


def test_gate_before_the_norm_is_mamba2() -> None:
    models = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x, z, gamma = tensors()
    module = models.MambaRMSNormGated(256, eps=1e-5).to(BF16)
    module.weight.data = gamma
    with torch.no_grad():
        agrees(onepass.rms_norm(x, gamma, 1e-5, gate=z, gate_order="before", rounding="hf"), module(x, z))


def test_sigmoid_gate_is_kimi_linear() -> None:
    models = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    x, z, gamma = tensors()
    module = models.KimiLinearRMSNormGated(256, eps=1e-5).to(BF16)
    module.weight.data = gamma
    with torch.no_grad():
        agrees(onepass.rms_norm(x, gamma, 1e-5, gate=z, gate_activation="sigmoid"), module(x, z))


def test_layer_norm_is_cohere() -> None:
    models = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    x, _, gamma = tensors()
    module = models.CohereLayerNorm(256, eps=1e-5).to(BF16)
    module.weight.data = gamma
    with torch.no_grad():
        agrees(onepass.layer_norm(x, gamma, eps=1e-5), module(x))


def test_layer_norm_is_torchs() -> None:
    x, _, gamma = tensors()
    bias = torch.linspace(-1, 1, 256).bfloat16()
    agrees(onepass.layer_norm(x, gamma, bias, 1e-5), F.layer_norm(x, (256,), gamma, bias, 1e-5))
    agrees(
        onepass.layer_norm(x, gamma, bias, 1e-5, out_dtype=F32).bfloat16(), F.layer_norm(x, (256,), gamma, bias, 1e-5)
    )


@pytest.mark.parametrize("activation", GATE_ACTIVATIONS)
@pytest.mark.parametrize("rounding", ["once", "hf"])
def test_steps_are_rounded_where_the_contract_says(rounding: Any, activation: Any) -> None:
    """The gated norm from the stored norm: "hf" rounds each step, "once" only the last."""
    x, z, gamma = tensors()
    bias = torch.linspace(-1, 1, 256)
    y = onepass.rms_norm(x, gamma, rounding=rounding, out_dtype=F32)
    expected = y + bias
    expected = expected.bfloat16().float() if rounding == "hf" else expected
    expected = (expected * activate(z.float(), activation)).bfloat16()
    got = onepass.rms_norm(x, gamma, gate=z, gate_activation=activation, bias=bias, rounding=rounding)
    assert (got != expected).float().mean() < 0.005
    alone = onepass.rms_norm(x, gamma, bias=bias, rounding=rounding)
    assert same_bytes(alone, (y + bias).bfloat16()) and not same_bytes(alone, got)


@pytest.mark.parametrize("activation", GATE_ACTIVATIONS)
def test_a_gate_before_the_norm_is_the_prologue(activation: Any) -> None:
    x, z, gamma = tensors()
    prologue = getattr(onepass.prologues, f"{activation}_and_mul")
    named = onepass.rms_norm_fused_fp8(x, gamma, prologue=prologue, prologue_args=[z], return_norm=True)
    gated: dict[str, Any] = {"gate": z, "gate_order": "before", "gate_activation": activation}
    before = onepass.rms_norm_fused_quant(x, gamma, **gated, return_norm=True)
    assert all(same_bytes(a, b) for a, b in zip(named, before, strict=True))
    assert same_bytes(named[2], onepass.rms_norm(x, gamma, **gated))


def test_extreme_gates() -> None:
    """Sigmoid of an infinite gate is 0 or 1. Silu multiplies it by the gate."""
    x, _, gamma = tensors(64)
    z = torch.zeros(6, 64)
    z[:, 0], z[:, 1], z[:, 2], z[:, 3] = torch.inf, -torch.inf, torch.nan, -200.0
    y = onepass.rms_norm(x, gamma, out_dtype=F32)
    found = onepass.rms_norm(x, gamma, out_dtype=F32, gate=z, gate_activation="sigmoid")
    assert torch.equal(found[:, 0], y[:, 0]) and torch.equal(found[:, 4:], y[:, 4:] / 2)
    assert (found[:, 1] == 0).all() and (found[:, 3].abs() < 1e-37).all()
    assert torch.equal(found.isnan(), z.isnan())
    assert torch.equal(
        onepass.rms_norm(x, gamma, gate=z).isnan()[:, :3], torch.tensor([False, True, True]).expand(6, 3)
    )


def test_quantized_results_are_those_of_the_norm() -> None:
    """With "stored" and division, codes are the quotient of what the plain call stores."""
    x, z, gamma = tensors()
    options: dict[str, Any] = {"rounding": "stored", "quantize": "divide", "return_norm": True}
    gates: list[dict[str, Any]] = [{"gate": z, "gate_activation": activation} for activation in GATE_ACTIVATIONS]
    for further, norm in (
        *((gated, onepass.rms_norm(x, gamma, **gated)) for gated in gates),
        ({"statistic": "layer", "bias": gamma}, onepass.layer_norm(x, gamma, gamma)),
    ):
        codes, scale, shown = onepass.rms_norm_fused_quant(x, gamma, **further, **options)
        assert same_bytes(shown, norm)
        assert same_bytes(scale, norm.float().abs().amax(-1, keepdim=True) / 448)
        assert same_bytes(codes, (norm.float() / scale).to(codes.dtype))


def test_special_rows() -> None:
    x, z, gamma = tensors()
    x[1], x[2, 5], x[3] = 0.0, torch.inf, 2.5
    bias = torch.ones(256)
    y = onepass.layer_norm(x, gamma, bias)
    assert (y[1] == 1).all() and (y[3] == 1).all(), "a constant row is the bias"
    assert y[2].isnan().all() and not y[[0, 1, 3, 4, 5]].isnan().any()
    gated = onepass.rms_norm(x, gamma, gate=z)
    assert (gated[1] == 0).all() and gated[2].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": torch.ones(6, 128).bfloat16()}, r"`gate` must have shape \[..., N\]"),
        ({"bias": torch.ones(6, 256)}, r"`bias` must have shape \[N\]"),
        ({"gate_order": "first"}, "`gate_order` must be 'after' or 'before'"),
        (
            {"gate_activation": "gelu"},
            f"`gate_activation` must be {' or '.join(map(repr, GATE_ACTIVATIONS))}, got 'gelu'",
        ),
        ({"out_dtype": torch.int8}, "`out_dtype` must be bfloat16 or float16 or float32"),
    ],
)
def test_wrong_calls_are_refused(change: dict[str, Any], message: str) -> None:
    x, _, gamma = tensors()
    with pytest.raises(ContractError, match=f"rms_norm: {message}"):
        onepass.rms_norm(x, gamma, **change)


def test_wrong_quantized_calls_are_refused() -> None:
    x, z, gamma = tensors()
    add = {"prologue": onepass.prologues.add, "prologue_args": [z]}
    for change, message in (
        ({"gate": z, "gate_order": "before", **add}, "`gate_order` must be 'after' with a prologue"),
        ({"statistic": "layer", "rounding": "hf"}, "`rounding` must be 'once' or 'stored' for LayerNorm"),
    ):
        with pytest.raises(ContractError, match=f"rms_norm_fused_quant: {message}"):
            onepass.rms_norm_fused_quant(x, gamma, **change)
