"""`onepass.patch` on norms that nothing is fused with: gated, in groups, without a weight, and Cohere's LayerNorm."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.models import OtherNorm
from onepass.models.forwards.norm import OtherNormRecord
from onepass.ops.rms_norm.launch import GATE_ACTIVATIONS
from onepass.testing.tensors import same_bytes

pytest.importorskip("transformers")

N = 64
NORMS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "Qwen3-Next": ("qwen3_next", "Qwen3NextRMSNormGated", {}, "rms_norm, gate after, rounding hf"),
    "Qwen3.5": ("qwen3_5", "Qwen3_5RMSNormGated", {}, "rms_norm, gate after, rounding hf"),
    "Qwen4, sigmoid": (
        "qwen4_exp",
        "Qwen4ExpTextRMSNormGated",
        {"activation": "sigmoid"},
        "rms_norm, sigmoid gate after, rounding hf",
    ),
    "Kimi Linear": ("kimi_linear", "KimiLinearRMSNormGated", {}, "rms_norm, sigmoid gate after, rounding once"),
    "GLM-5-Next": ("glm5_next", "Glm5NextTextRMSNormGated", {}, "rms_norm, sigmoid gate after, rounding once"),
    "Mamba-2": ("mamba2", "MambaRMSNormGated", {}, "rms_norm, gate before, rounding hf"),
    "Zamba2": ("zamba2", "Zamba2RMSNormGated", {"group_size": 16}, "rms_norm, gate before, 4 groups, rounding hf"),
    "Zamba2, one group": ("zamba2", "Zamba2RMSNormGated", {"group_size": N}, "rms_norm, gate before, rounding hf"),
    "Falcon-H1": (
        "falcon_h1",
        "FalconH1RMSNormGated",
        {"n_groups": 2, "norm_before_gate": False},
        "rms_norm, gate before, 2 groups, rounding once",
    ),
    "Falcon-H1, gate after": (
        "falcon_h1",
        "FalconH1RMSNormGated",
        {"n_groups": 2},
        "rms_norm, gate after, 2 groups, rounding once",
    ),
    "Qwen4": ("qwen4_exp", "Qwen4ExpTextRMSNorm", {}, "rms_norm, rounding once"),
    "Qwen4, groups": ("qwen4_exp", "Qwen4ExpTextRMSNorm", {"group_size": 16}, "rms_norm, 4 groups, rounding once"),
    "T5": ("t5", "T5LayerNorm", {}, "rms_norm, rounding hf"),
    "FalconMamba": ("falcon_mamba", "FalconMambaWeightlessRMSNorm", {}, "rms_norm, no weight, rounding once"),
    "Cohere": ("cohere", "CohereLayerNorm", {}, "layer_norm, rounding once"),
}
GATED = [name for name, row in NORMS.items() if "gate" in row[3]]


def module(name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model, named, options, _ = NORMS[name]
    cls = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), named)
    asked = inspect.signature(cls).parameters.get("group_size")
    if asked is not None and asked.default is asked.empty:  # Mamba-2 has groups since transformers 5.23
        options = {"group_size": N, **options}
    made = cls(N, eps=1e-5, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(1 + rows(N, seed=9) / 4)
    found: nn.Module = made.to(dtype)
    return found


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [rows(*shape, seed=seed).to(dtype) for seed in range(1 + (name in GATED))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", NORMS)
def test_results_are_the_models_own(name: str, dtype: torch.dtype) -> None:
    """In bfloat16 but for values next to a rounding boundary, also of single tokens and without a gate."""
    norm = module(name, dtype)
    shapes = [(2, 5, N), (6, N), (3, 1, N)] if not name.startswith("Falcon-H1, gate") else [(2, 5, N), (6, N)]
    with onepass.patch(nn.Sequential(norm)) as handle, torch.inference_mode():
        assert [change.why for change in handle.replaced] == [NORMS[name][3]] and not handle.left
        for shape in shapes:
            given = arguments(name, *shape, dtype=dtype)
            for inputs in (given,) if name.startswith(("Qwen", "Kimi", "GLM")) else (given, given[:1]):
                found, expected = norm(*inputs), type(norm).forward(norm, *inputs)
                assert found.shape == expected.shape and found.dtype == expected.dtype
                assert expected.float().abs().max() > 1
                error = (found.float() - expected.float()).abs()
                limit = 2.0**-7 if dtype == torch.bfloat16 else 2e-6
                assert (error <= expected.float().abs() * limit + 1e-6).all()
                assert (error > 0).float().mean() < 0.01 or dtype == torch.float32


@pytest.mark.parametrize("name", GATED)
def test_arguments_by_name_and_in_any_layout(name: str) -> None:
    norm = module(name)
    x, gate = arguments(name, 2, 5, N)
    with onepass.patch(nn.Sequential(norm)), torch.inference_mode():
        expected = norm(x, gate)
        assert same_bytes(norm(x, gate=gate), expected)
        assert same_bytes(norm(gate=gate, hidden_states=x), expected)
        apart = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (x, gate)]
        assert same_bytes(norm(*apart), expected)


def test_what_an_op_cannot_compute_runs_the_models_code() -> None:
    """A gate that is broadcast, and a token whose gate the model broadcasts by mistake."""
    norm = module("Mamba-2")
    x, gate = rows(4, N).bfloat16(), rows(1, N, seed=1).bfloat16()
    after = module("Falcon-H1, gate after")
    token = rows(2, 1, N).bfloat16()
    with onepass.patch(nn.Sequential(norm, after)), torch.inference_mode():
        assert same_bytes(norm(x, gate), type(norm).forward(norm, x, gate))
        assert same_bytes(after(token, token), type(after).forward(after, token, token))


def test_other_gates_and_groups_are_left() -> None:
    tanh, uneven, per_head = module("Qwen3-Next"), module("Falcon-H1"), module("Cohere")
    tanh.activation = "tanh"  # type: ignore[assignment]
    uneven.n_groups = 5  # type: ignore[assignment]
    per_head.weight = nn.Parameter(torch.ones(2, 2, N))
    with onepass.patch(nn.Sequential(tanh, uneven, per_head, nn.RMSNorm(N))) as handle:
        reasons = [change.why for change in handle.left]
    assert reasons == [
        f"its gate is neither {' nor '.join(GATE_ACTIVATIONS)}",
        "its groups do not divide its columns",
        "it has no 1-D or 2-D weight",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_coheres_norm_of_heads(dtype: torch.dtype) -> None:
    """Each head has its weight. Rows that the weight is broadcast over run the model's code."""
    models = import_module("transformers.models.cohere.modeling_cohere")
    norm = models.CohereLayerNorm(hidden_size=(4, N), eps=1e-5).to(dtype)
    norm.weight.data = (1 + rows(4, N, seed=3) / 4).to(dtype)
    x = rows(2, 5, 4, N).to(dtype)
    with onepass.patch(nn.Sequential(norm)) as handle, torch.inference_mode():
        assert [change.why for change in handle.replaced] == ["layer_norm, weight per head, rounding once"]
        found, expected = norm(x), type(norm).forward(norm, x)
        assert same_bytes(found, onepass.layer_norm(x, norm.weight.detach(), eps=1e-5))
        assert (found - expected).abs().max() <= expected.abs().max() * (2.0**-7 if dtype == torch.bfloat16 else 2e-6)
        assert (found != expected).float().mean() < 0.01 or dtype == torch.float32
        strided = x.transpose(1, 2).contiguous().transpose(1, 2)
        assert same_bytes(norm(strided), found)
        wider = x[:, :, :1]
        assert same_bytes(norm(wider), type(norm).forward(norm, wider)) and norm(wider).shape == (2, 5, 4, N)


def test_t5_computes_the_same() -> None:
    """A whole encoder and decoder."""
    transformers = import_module("transformers")
    config = transformers.T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4)
    model = transformers.T5Model(config).eval()
    tokens = {"input_ids": torch.arange(12).view(2, 6), "decoder_input_ids": torch.arange(8).view(2, 4)}
    with torch.inference_mode():
        expected = model(**tokens).last_hidden_state
        with onepass.patch(model) as handle:
            assert [change.cls for change in handle.replaced] == ["T5LayerNorm"] * 7
            found = model(**tokens).last_hidden_state
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_t5s_norm_of_another_dtype_runs_the_models_code() -> None:
    """The weight's dtype then decides that of the result."""
    norm = module("T5")
    x = rows(3, N)
    with onepass.patch(nn.Sequential(norm)), torch.inference_mode():
        found = norm(x)
        assert found.dtype is torch.bfloat16 and same_bytes(found, type(norm).forward(norm, x))


def test_torchs_norm_without_a_weight() -> None:
    norm, wide = nn.RMSNorm(N, elementwise_affine=False), nn.RMSNorm((2, N), elementwise_affine=False)
    x = rows(3, N)
    expected = norm(x)
    with onepass.patch(nn.Sequential(norm, wide)) as handle, torch.inference_mode():
        assert [change.why for change in handle.replaced] == ["rms_norm, no weight, rounding once"]
        assert [change.why for change in handle.left] == ["it norms several dimensions"]
        torch.testing.assert_close(norm(x), expected, rtol=2e-6, atol=1e-6)
    assert "forward" not in norm.__dict__


def test_gradients_are_refused_and_one_rounding_can_be_had() -> None:
    norm = module("Mamba-2")
    x, gate = arguments("Mamba-2", 2, N)
    with onepass.patch(nn.Sequential(norm), rounding="once"):
        record = norm._onepass
        assert isinstance(record, OtherNormRecord) and record.rounding == "once"
        with pytest.raises(onepass.ContractError, match="MambaRMSNormGated: this module was patched by"):
            norm(x, gate)
        with torch.no_grad():
            found = norm(x, gate)
    assert same_bytes(found, onepass.rms_norm(x, norm.weight.detach(), 1e-5, gate=gate, gate_order="before"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "first"}, "OtherNorm: `gate` must be '' or 'after' or 'before', got 'first'"),
        ({"statistic": "max"}, "OtherNorm: `statistic` must be 'rms' or 'layer', got 'max'"),
        ({"statistic": "layer", "gate": "after"}, "OtherNorm: `statistic` must be 'rms' with a gate"),
        ({"groups": "n", "weighted": False}, "OtherNorm: `weighted` must be True with groups"),
        ({"rounding": "twice"}, "OtherNorm: `rounding` must be"),
        ({"groups": 2}, "OtherNorm: `groups` must be a str, got 2"),
        ({"weight_offset": 1.0, "weighted": False}, "OtherNorm: `weight_offset` must be 0 without a weight"),
        ({"weight_offset": "1"}, "OtherNorm: `weight_offset` must be"),
        ({"same_dtype": 1}, "OtherNorm: `same_dtype` must be a bool, got 1"),
    ],
)
def test_wrong_forms_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(onepass.ContractError, match=message):
        OtherNorm(**options)
