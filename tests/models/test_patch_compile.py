"""Patched models under torch.compile, torch.export, fake tensors and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass

pytest.importorskip("transformers")

from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.models import small, tokens

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.sampled(16)  # one model stays
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"), [("Llama", "eager"), ("Gemma 3", "eager"), ("OLMo-2", "eager"), ("Qwen3", "aot_eager")]
)
def test_one_graph_for_all_batch_sizes(name: str, backend: str) -> None:
    """fullgraph=True forbids graph breaks; one graph serves every number of rows."""
    model = small(name, torch.float32, layers=1)
    inputs = [tokens(rows, 8) for rows in (2, 3, 5)]
    with torch.no_grad():
        expected = [model(ids, use_cache=False).logits for ids in inputs]
        with onepass.patch(model):
            compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
            for ids, logits in zip(inputs, expected, strict=True):
                got = compiled(ids, use_cache=False).logits
                torch.testing.assert_close(got, logits, rtol=0, atol=5e-6 * float(logits.abs().max()))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_eager_calls_in_between_cause_no_second_graph() -> None:
    norm = torch.nn.Sequential(torch.nn.RMSNorm(64))
    with torch.no_grad(), onepass.patch(norm):
        compiled = torch.compile(norm, fullgraph=True, dynamic=True, backend="eager")
        for rows in (2, 3, 4):
            x = torch.randn(rows, 64)
            assert torch.equal(compiled(x), norm(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_export() -> None:
    model = small("Qwen3", torch.float32, layers=1)
    ids = tokens(2, 8)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Any:
            return self.model(ids, use_cache=False).logits

    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with onepass.patch(model):
            program = torch.export.export(Logits(), (ids,))
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert {"onepass.rms_norm.default", "onepass.qk_norm_rope_cache.default"} <= targets
        assert not any("rsqrt" in target for target in targets)  # no norm was decomposed
        got = program.module()(ids)
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-6 * float(expected.abs().max()))


def test_fake_tensors() -> None:
    model = small("Llama", torch.float32, layers=1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), onepass.patch(model):
        logits = model(torch.ones(2, 8, dtype=torch.int64), use_cache=False).logits
    assert logits.shape == (2, 8, 128) and type(logits).__name__ == "FakeTensor"


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma 3", "OLMo-2"])
def test_autocast(name: str) -> None:
    """float32 weights under autocast: norms accept float32 sums and bfloat16 projections, and return the input's dtype."""
    model = small(name, torch.float32)
    ids = tokens()
    with torch.inference_mode():
        exact = model(ids).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(ids).logits.float()
            with onepass.patch(model):
                got = model(ids).logits.float()
    scale = float(exact.abs().max())
    usual = float((expected - exact).abs().max())
    assert 0 < usual < 0.1 * scale
    assert float((got - exact).abs().max()) < 2 * usual
