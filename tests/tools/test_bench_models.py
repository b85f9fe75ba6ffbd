"""`tools.bench.models` and `tools.bench.agreement` on the CPU with small models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import onepass
from onepass.integrations import forwards
from tools.bench import agreement, common, models

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


def tiny(name: str, **more: Any) -> Any:
    _, config, sizes = common.sized(name, 2)
    return common.build(config, {**sizes, **models._TINY, **more}, "cpu")


def test_sizes() -> None:
    for name in common.MODELS:
        title, _, sizes = common.sized(name, 4)
        layers = sizes["num_hidden_layers"]
        assert layers == (3 if name == "DeepSeek-V3" else 4) and f", {layers} " in title
        assert len(sizes.get("layer_types", [0] * layers)) == layers


def test_decode_step_with_a_static_cache() -> None:
    """The step that a CUDA graph captures, run eagerly; the comparison detects a wrong step."""
    with torch.no_grad():
        model = tiny("Qwen3 8B", **HEADS)
        row = models.measure(model, 2, "cpu", replays=1)
        step = models.Step(model, 2, "cpu")
        one, moved = step(), int(step.cache.layers[0].cumulative_length)
        step.reset()
        assert moved == int(step.cache.layers[0].cumulative_length) + 1
        assert torch.equal(step(), one)
    assert set(row["us"]) == {"unpatched", "patched", "patched, once"} and not row["failed"]
    assert row["agreement"]["unpatched"]["equal"] == 1 and row["agreement"]["patched"]["equal"] > 0.5
    assert all(a["same_token"] and a["largest_logit"] > 0.5 for a in row["agreement"].values())
    assert "qk_rms_norm" in str(row["replaced"]["patched"])
    assert models.agrees(row)
    row["agreement"]["patched"]["max_difference"] = row["agreement"]["patched"]["largest_logit"]
    assert not models.agrees(row)


def test_compiled_steps_are_compiled_with_and_without_onepass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph each; only the patched one contains onepass's ops."""
    graphs: list[int] = []
    lookup = torch._dynamo.lookup_backend

    def counting(name: str) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(sum("onepass" in str(node.target) for node in graph.graph.nodes))
            return lookup(name)(graph, inputs)

        return backend

    monkeypatch.setattr(torch._dynamo, "lookup_backend", counting)
    with torch.no_grad():
        row = models.measure(tiny("Llama 3 8B", **HEADS), 1, "cpu", 1, (*models.EAGER, *models.COMPILED))
    torch._dynamo.reset()
    assert not row["failed"] and models.agrees(row)
    assert list(row["us"]) == [way.name for way in (*models.EAGER, *models.COMPILED)]
    assert graphs == [0, 5]  # two layers with two norms each, one of them with its addition, and the last norm
    assert [row["compiled"][way.name]["graphs"] for way in models.COMPILED] == [1, 1]
    assert row["agreement"]["torch.compile"]["same_token"]


def test_failures_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of its error is stored and the other ways continue; a failure of ours is a disagreement."""

    def broken(self: Any, mode: str) -> None:
        raise RuntimeError("no compiler here\nand a long trace")

    def refused(*_: Any, **__: Any) -> Any:
        raise onepass.Unsupported("rms_norm: not here")

    monkeypatch.setattr(models.Step, "compile", broken)
    with torch.no_grad():
        model = tiny("Llama 3 8B", **HEADS)
        row = models.measure(model, 1, "cpu", 1, (*models.EAGER, *models.COMPILED))
        assert row["failed"] == dict.fromkeys((w.name for w in models.COMPILED), "RuntimeError: no compiler here")
        assert set(row["us"]) == {"unpatched", "patched", "patched, once"} and models.agrees(row)
        monkeypatch.setattr(forwards, "rms_norm", refused)
        row = models.measure(model, 1, "cpu", 1)
    assert row["failed"] == dict.fromkeys(("patched", "patched, once"), "Unsupported: rms_norm: not here")
    assert list(row["us"]) == ["unpatched"] and not models.agrees(row)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_generating() -> None:
    with torch.no_grad():
        row = models.generating(tiny("Llama 3 8B", **HEADS), 2, "cpu", repeats=1, new_tokens=3)
    assert set(row["us_per_token"]) == {"unpatched", "patched"}
    assert row["same_tokens"] == 1 and row["new_tokens"] == 3


def test_results_are_written_after_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is interrupted keeps its results."""
    file = tmp_path / "models.json"
    measured: list[int] = []

    def measure(model: Any, batch: int, *_: Any) -> dict[str, Any]:
        if measured:
            assert [row["batch"] for row in json.loads(file.read_text())["rows"]] == measured
        measured.append(batch)
        if batch == 5:
            raise KeyboardInterrupt
        return {"batch": batch, "agreement": {}, "us": {}, "failed": {}, "compiled": {}}

    monkeypatch.setattr(models, "measure", measure)
    monkeypatch.setattr(common, "build", lambda *_: None)
    line = ["models", "--device", "cpu", "--models", "Qwen3,OLMo", "--batches", "1,3,5", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(KeyboardInterrupt):
        models.main()
    report = json.loads(file.read_text())
    assert [row["model"] for row in report["rows"]] == ["Qwen3 8B, 2 layers"] * 2
    assert "not compiled, in a CUDA graph" in report["baseline"]


@pytest.mark.parametrize("name", ["Llama 3 8B", "Gemma 3 12B"])
def test_agreement_counts_identical_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm with another mean of squares agrees less often, and the comparison of single norms shows why."""
    with torch.inference_mode():
        model = tiny(name, **HEADS)
        row = agreement.agreement(model, 8, 2, "cpu")
        assert row["equal_logits"] > 0.3 and row["equal_argmax"] > 0.9 and row["prompts"] == 2
        norms = agreement.causes(model, 8, 2, "cpu")
        assert norms["own_code_differs"] == 0 and norms["differ_given_the_mean"] == 0
        assert norms["differ"] < 1e-3 * norms["values"] and norms["rows"] > 50
        right = onepass.rms_norm

        def off(x: Any, gamma: Any, eps: float, **options: Any) -> Any:
            return right(x * 1.01, gamma, eps + 0.01, **options)

        monkeypatch.setattr(onepass, "rms_norm", off)
        monkeypatch.setattr(forwards, "rms_norm", off)
        wrong = agreement.agreement(model, 8, 2, "cpu")
        assert wrong["equal_prompts"] == 0 and wrong["equal_logits"] < 0.3
        assert agreement.causes(model, 8, 2, "cpu")["differ"] > 0.01 * norms["values"]


def test_zeros_of_different_sign_differ() -> None:
    zeros = torch.zeros(2, dtype=torch.bfloat16)
    assert agreement.same_bytes(zeros, torch.tensor([0.0, -0.0], dtype=torch.bfloat16)).tolist() == [True, False]
