"""`benchmarks.suite.invariance`: it finds rows that depend on their batch, in others and in none of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.suite import invariance
from benchmarks.suite.invariance import CONTENDERS, FP8, NORM, OURS, PRODUCT, Contender, Outcome
from tests.helpers.command import invoke
from tools.docs import invariance_page, invariance_picture

ROOT = Path(__file__).parents[2]
QUICK = tuple(c for c in CONTENDERS if "compile" not in c.name and not c.module)
ROWS = 40


def odd_one_out(x: Tensor) -> tuple[Tensor]:
    """Adds one bit to the first value of each row if the batch is small."""
    y = x.clone()
    if x.shape[0] == 16:
        y[:, 0] += 0.25
    return (y,)


def test_changed_rows_are_counted() -> None:
    changed, largest = invariance.compare(odd_one_out, torch.zeros(ROWS, 8), (1, 16, ROWS))
    assert changed == {1: 0, 16: 32, ROWS: 0}, "the last batch has 8 rows"
    assert largest == {1: 0.0, 16: 0.25, ROWS: 0.0}


def test_signs_of_zero_and_scales_are_bytes_too() -> None:
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        few = x.shape[0] == 1
        return -x if few else x, torch.full((x.shape[0], 1), 2.0 if few else 1.0)

    changed, largest = invariance.compare(call, torch.zeros(3, 2), (1, 3))
    assert changed == {1: 3, 3: 0} and largest == {1: 0.0, 3: 0.0}


def test_results_that_share_memory_are_kept() -> None:
    shared = torch.zeros(ROWS, 4)

    def call(x: Tensor) -> tuple[Tensor]:
        shared[: x.shape[0]] = x
        return (shared[: x.shape[0]],)

    assert invariance.compare(call, torch.randn(ROWS, 4), (1, 16))[0] == {1: 0, 16: 0}


def test_our_rows_do_not_change() -> None:
    outcomes = list(invariance.run("cpu", ROWS, QUICK))
    ours = [o for o in outcomes if o.name == OURS]
    assert [o.work for o in ours] == [NORM, FP8, PRODUCT]
    assert all(set(o.changed) == {1, 16, ROWS} and not any(o.changed.values()) for o in ours)
    assert {o.name for o in outcomes} >= {"torch eager", "F.rms_norm", "F.linear"}


def test_failures_of_others_are_reported() -> None:
    def broken(weight: Tensor) -> Any:
        raise RuntimeError("no such kernel\nmore")

    others = (
        Contender(NORM, "broken", broken),
        Contender(NORM, "absent", broken, "a_module_that_is_absent"),
        Contender(NORM, "elsewhere", broken, device="cuda"),
    )
    outcomes = list(invariance.run("cpu", ROWS, others))
    assert [o.failed for o in outcomes] == [
        "failed: RuntimeError: no such kernel",
        "not installed",
        "only for cuda",
    ]
    assert "no such kernel" in invariance.line(outcomes[0])
    left = invariance.document("cpu", [*outcomes, Outcome(NORM, OURS, {1: 0}, {1: 0.0})], ROWS)["left_out"]
    assert [name for _, name, _ in left] == ["broken", "absent"]
    with pytest.raises(RuntimeError, match="no such kernel"):
        list(invariance.run("cpu", ROWS, [Contender(NORM, OURS, broken)]))


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "run", partial(invariance.run, contenders=QUICK))
    path = tmp_path / "found.json"
    done = invoke(invariance.main, "--device", "cpu", "--rows", str(ROWS), "--json", str(path))
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["rows"] == ROWS and len(found["contenders"]) == len(QUICK)
    assert {"machine", "torch", "threads", "sizes"} <= found.keys()
    assert "F.rms_norm" in done.output and "linear layer" in done.output
    missing = invoke(invariance.main, "--device", "cpu", "--rows", "8", "--json", "/nowhere/x.json")
    assert missing.exit_code == 2 and "cannot write" in missing.output


def test_command_fails_if_our_rows_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(device: str, rows: int) -> list[Outcome]:
        return [Outcome(NORM, OURS, {1: 3}, {1: 0.5})]

    monkeypatch.setattr(invariance, "run", changed)
    assert invoke(invariance.main, "--device", "cpu", "--rows", "8").exit_code == 1


def test_module_needs_no_rich() -> None:
    """As on a GPU machine that has torch and Triton only."""
    program = "import sys; sys.modules['rich'] = None; import benchmarks.suite.invariance"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_page_states_that_no_row_of_ours_changes() -> None:
    documents = invariance_page.documents()
    assert documents
    for found in documents:
        ours = [entry for entry in found["contenders"] if entry["name"] == OURS]
        assert len(ours) == 3 and found["rows"] == 4096
        assert all(list(entry["changed"]) == ["1", "16", "255", "256", "4096"] for entry in ours)
        assert not any(sum(entry["changed"].values()) for entry in ours)
    picture = invariance_picture.render()
    assert picture.count("<rect") == 1 + len(documents[0]["contenders"])
