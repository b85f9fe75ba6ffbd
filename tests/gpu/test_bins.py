"""A row's order of summation depends only on its columns, so every tile gives the same bits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from onepass.ops.rms_norm import gpu_tile as config
from tests.helpers.interpreting import interpret
from tests.oracle import runner
from tests.oracle.batch_regime import REGIMES, assuming, others
from tests.oracle.case import Case
from tests.rms_norm import checks as rms_norm


@pytest.mark.full  # interprets 400 tiles
@pytest.mark.slow
def test_every_tile_sums_a_row_as_defined() -> None:
    *wrong, tried = interpret("tests/gpu/bins_worker.py").splitlines()
    assert not wrong
    assert int(tried.split()[0]) > 400


def test_batch_regimes() -> None:
    assert [config.batch_regime(rows, 256) for rows in (1, 256, 257, 655360)] == [
        "small",
        "small",
        "large",
        "streaming",
    ]
    assert [config.batch_regime(rows, 32768) for rows in (257, 1024, 1025, 5120)] == [
        "small",
        "small",
        "large",
        "streaming",
    ]
    assert others(5, 256) == ["large"] and others(300, 256) == ["small"]
    assert others(5, 2 * 7168) == ["large", "streaming"]
    for regime in REGIMES:
        with assuming(regime):
            assert config.batch_regime(1, 256) == config.batch_regime(1 << 20, 32768) == regime
    assert config.batch_regime(1, 256) == "small"


def test_tile_that_changes_results_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("rms_norm", "short", (3,), 64)
    assert runner.run(case, "cpu") is None
    honest = rms_norm.call

    def call(case: Case, arguments: dict[str, object]) -> tuple[torch.Tensor, ...]:
        (y,) = honest(case, arguments)
        if config.assumed == ["large"]:
            y[1, 5] = torch.nextafter(y[1, 5], y.new_tensor(torch.inf))
        return (y,)

    monkeypatch.setattr(rms_norm, "call", call)
    assert runner.run(case, "cpu") == "result 0 differs with the tile of a large batch"
