"""`tools.bench.differences` on small models: it explains what the mean explains, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from onepass.models.forwards import layer
from onepass.models.forwards import norm as norms
from onepass.models.forwards.norm import NormRecord
from tools.bench import common, differences
from tools.bench.agreement import own_norm

KINDS = {
    "Qwen3 8B": {differences.NORM, differences.ADDED, differences.TURNED},
    "OLMo-2 7B": {differences.NORM, differences.HEADS},
}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "PROMPTS", ((2, 24),))
    monkeypatch.setattr(differences, "STEPS", (3,))


def tiny(name: str) -> Any:
    _, config, sizes = common.sized(name, 2)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    return common.build(config, {**common.tiny(sizes), **heads}, "cpu")


def report_of(name: str) -> dict[str, Any]:
    with torch.inference_mode():
        row = {"model": name, **differences.compared(tiny(name), "cpu")}
    return {"machine": "cpu", "torch": "", "roots": {"values": 1, "differ": 0}, "models": [row]}


@pytest.mark.parametrize("name", KINDS)
def test_the_mean_explains_every_difference(name: str, few: None) -> None:
    report = report_of(name)
    kinds = report["models"][0]["kinds"]
    assert set(kinds) == KINDS[name] and all(found["values"] > 10000 for found in kinds.values())
    assert differences.known(report)
    text = differences.markdown(report)
    assert f"| {name} | step of batch 3 |" in text and all(f"| {name} | {kind} |" in text for kind in kinds)
    assert vars(layer)["add_norm"] is norms.add_norm, "the functions are back"
    assert norms.add_norm.__module__ == norms.__name__


def test_other_causes_are_not_explained(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm whose result is one last place off in one value, and a sum that is."""
    own: Any = norms.add_norm

    def nudged(norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        made = own(norm, x, residual)
        for t in (made,) if residual is None else made:
            t.view(torch.int16).view(-1)[-1] += 1
        return made

    monkeypatch.setattr(norms, "add_norm", nudged)
    report = report_of("Qwen3 8B")
    kinds = report["models"][0]["kinds"]
    assert not differences.known(report)
    assert all(kinds[kind]["explained"] < kinds[kind]["rows_differ"] for kind in (differences.NORM, differences.ADDED))
    assert kinds[differences.ADDED]["sums_differ"] > 0
    assert kinds[differences.TURNED]["explained"] == kinds[differences.TURNED]["rows_differ"]
    logits = report["models"][0]["logits"].values()
    assert all(found["own_values"] == 1 and found["patched"] < 1 for found in logits), "values of the model's own code"


def test_rows_of_another_mean_are_found() -> None:
    """Rows that the model's code gives for a mean three last places up; not those for one far away."""
    generator = torch.Generator().manual_seed(0)
    x = (1.4 * torch.randn(64, 2048, generator=generator)).to(torch.bfloat16)  # not normed to itself
    weight = torch.randn(2048, generator=generator).to(torch.bfloat16)
    rows = differences.Rows(x, weight, NormRecord(1e-6, 0.0, "hf"))
    mean = x.float().pow(2).mean(-1, keepdim=True)

    def other(change: int) -> Tensor:
        return own_norm(x, weight, rows.record, (mean.view(torch.int32) + change).view(torch.float32))

    numbers = torch.arange(64)
    assert int(differences.explained(other(3), rows, numbers).max()) <= 3
    assert int(differences.explained(other(40000), rows, numbers).min()) > differences.ULPS


def test_roots_are_equal_on_a_cpu() -> None:
    assert differences.roots("cpu", 4096) == {"values": 4096, "differ": 0}
