"""`tools.batch_invariance` on the CPU with a small model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.helpers.models import fresh, small, tokens
from tools import batch_invariance
from tools.batch_invariance import WAYS, Way, attention, decoded, digests, measure
from tools.bench import common


def prompts(count: int = 5) -> Tensor:
    return torch.randint(2, 120, (count, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("way", ["invariant", "invariant-rows", "unpatched-rows"])
def test_all_prompts_are_counted(way: str) -> None:
    """Also those of the last batch, which is filled."""
    with torch.inference_mode():
        row = measure(fresh("Qwen3", torch.bfloat16), prompts(), WAYS[way], (2, 4), 3)
    assert "failed" not in row and row["distinct_tokens"] > 3
    assert row["equal_tokens"].keys() == {"2", "4"} and row["prompts"] == 5
    if "invariant" in way:
        assert row["equal"] == row["equal_tokens"] == {"2": 5, "4": 5}


def dependent() -> Any:
    """A model that changes the last bit of one value of one prompt's logits, in batches of two only."""
    model = fresh("Llama", torch.bfloat16)

    def last_bit(module: Any, inputs: Any, output: Tensor) -> Tensor:
        if len(output) == 2:
            output = output.clone()
            output.view(torch.int16)[1, -1, 3] ^= 1
        return output

    model.lm_head.register_forward_hook(last_bit)
    return model


def test_a_model_that_depends_on_its_batch_is_noticed() -> None:
    model = dependent()
    with torch.inference_mode():
        row = measure(model, prompts(4), Way("hooked", {"decode": True, "batch_invariant": True}), (2, 4), 2)
    assert row["equal"] == {"2": 2, "4": 4} and row["equal_tokens"]["4"] == 4


def test_digests_depend_on_every_byte() -> None:
    logits = torch.randn(3, 2, 50).bfloat16()
    before = digests(logits)
    assert len(before.unique()) == 3
    for place in (0, 49, 99):
        for bit in range(16):
            changed = logits.clone()
            changed.view(torch.int16).flatten(1)[1, place] ^= (1 << bit) - (1 << 16) * (bit == 15)
            assert (digests(changed) == before).tolist() == [True, False, True]
    swapped = logits.clone()
    swapped[0, 0, :2] = logits[0, 0, :2].flip(0)
    assert digests(swapped)[0] != before[0]


@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
def test_attention_per_sequence_is_the_models_own(family: str) -> None:
    model = small(family, torch.float32)
    ids = tokens()
    with torch.inference_mode():
        expected = decoded(model, ids, 3)
        with attention(model, rows=True):
            assert model.config._attn_implementation == batch_invariance.ROWS
            got = decoded(model, ids, 3)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-4)


def test_a_failure_is_recorded_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        row = measure(fresh("Llama"), prompts(2), Way("bad", {"nonsense": True}), (2,), 1)
    assert row["failed"].startswith("TypeError") and not row["equal"]
    other = {**row, "model": "One", "way": "good", "equal": {"2": 1}, "equal_tokens": {"2": 2}}
    del other["failed"]
    text = batch_invariance.markdown({"machine": "cpu", "torch": "2", "rows": [{"model": "One", **row}, other]})
    assert "| One | 6 | bad | failed |" in text and "| One | 6 | good | 1 (2) |" in text


def test_the_program_writes_and_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, page = tmp_path / "found.json", tmp_path / "found.md"
    model: Any = fresh("Llama", torch.bfloat16)
    monkeypatch.setattr(common, "build", lambda *_: model)
    line = [
        "x",
        "--device",
        "cpu",
        "--prompts",
        "3",
        "--tokens",
        "2",
        "--context",
        "4",
        "--batch",
        "2",
        "--json",
        str(file),
    ]
    for way, status in (("unpatched", 0), ("invariant", 0), ("invariant", 1), ("invariant-rows", 0)):
        model = dependent() if status else fresh("Llama", torch.bfloat16)
        monkeypatch.setattr(sys, "argv", [*line, "--way", way, "--markdown", str(page)])
        with pytest.raises(SystemExit) as ended:
            batch_invariance.main()
        assert ended.value.code == status
    rows = json.loads(file.read_text())["rows"]
    assert [row["way"] for row in rows] == [WAYS[way].title for way in ("unpatched", "invariant", "invariant-rows")]
    assert [row["equal"]["2"] for row in rows[1:]] == [2, 3], "a row is replaced by the same way's last one"
    assert page.read_text().count("| 3 (3) |") >= 1
