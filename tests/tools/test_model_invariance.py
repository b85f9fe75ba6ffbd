"""`tools.model_invariance`: it measures a family in two processes, and notices logits that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import model_invariance

pytest.importorskip("transformers")
FEW = ("--family", "Llama", "--prompts", "2", "--longest", "9", "--new", "2", "--batches", "2", "--chunks", "4")


@pytest.mark.full  # two processes that import transformers
def test_a_family_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert model_invariance.main([*FEW, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["family"] == "Llama" and row["same_digest"] and len(row["patched"]) == 5
    assert all(logits == 2 for logits, _ in row["patched"].values())


@pytest.mark.parametrize(("logits", "digest", "status"), [(2, "a", 0), (1, "a", 1), (2, "b", 1)])
def test_differences_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logits: int, digest: str, status: int
) -> None:
    reports = [{"patched": {"in batches": [logits, 2]}, "prompts": 2, "digest": name} for name in ("a", digest)]
    monkeypatch.setattr(model_invariance, "counts", lambda *_: reports.pop(0))
    path = tmp_path / "rows.json"
    other: dict[str, Any] = {"family": "Qwen3"}
    path.write_text(json.dumps({"rows": [other, {"family": "Llama", "old": True}]}))
    assert model_invariance.main([*FEW, "--json", str(path)]) == status
    rows = json.loads(path.read_text())["rows"]
    assert [row["family"] for row in rows] == ["Llama", "Qwen3"] and "old" not in rows[0]
