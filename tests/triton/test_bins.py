"""The order of a row's sum is one of columns: every tile that a row may get adds it up to the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from onepass.testing import rms_norm
from onepass.testing.batch_regime import CROWDS, assuming, others
from onepass.testing.case import Case
from onepass.triton import config

HERE = Path(__file__).parent


@pytest.mark.slow
def test_every_tile_adds_a_row_up_as_defined() -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(HERE / "places_worker.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    *wrong, tried = done.stdout.splitlines()
    assert not wrong
    assert int(tried.split()[0]) > 400


def test_what_is_few_and_what_a_flood() -> None:
    assert [config.crowd_of(rows, 256) for rows in (1, 256, 257, 655360)] == ["few", "few", "many", "flood"]
    assert [config.crowd_of(rows, 32768) for rows in (257, 1024, 1025, 5120)] == ["few", "few", "many", "flood"]
    assert others(5, 256) == ["many"] and others(300, 256) == ["few"]
    assert others(5, 2 * 7168) == ["many", "flood"]
    for crowd in CROWDS:
        with assuming(crowd):
            assert config.crowd_of(1, 256) == config.crowd_of(1 << 20, 32768) == crowd
    assert config.crowd_of(1, 256) == "few"


def test_a_tile_that_changes_results_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("rms_norm", "short", (3,), 64)
    assert rms_norm.run(case, "cpu") is None
    honest = rms_norm.call

    def call(case: Case, arguments: dict[str, object]) -> tuple[torch.Tensor, ...]:
        (y,) = honest(case, arguments)
        if config.assumed == ["many"]:
            y[1, 5] = torch.nextafter(y[1, 5], y.new_tensor(torch.inf))
        return (y,)

    monkeypatch.setattr(rms_norm, "call", call)
    assert rms_norm.run(case, "cpu") == "results differ with the tile of many rows"
