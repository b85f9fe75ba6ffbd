"""Launches of the GEMV kernel without a GPU: grids, arguments, counters, alignment."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import onepass
from onepass.gpu import compile as compiler
from onepass.gpu import counters
from onepass.ops.gemv_norm import gpu as gemv_norm
from onepass.ops.gemv_norm.launch import GemvCall, gemv_spec
from tests.gemv_norm.test_gpu import BF16, F8, F32, build, plain_spec
from tests.gemv_norm.test_refusals import Gpu, pretend_gpu
from tests.gpu.launches import Recorder, record


class OnDevice(Tensor):
    """A tensor that reports the first GPU as its device."""

    def get_device(self) -> int:
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    record(monkeypatch, gemv_norm.KERNELS)
    return pretend_gpu(monkeypatch)


def launch(
    m: int = 1, n: int = 100, k: int = 640, widths: tuple[int, ...] = (60, 30), counter: Tensor | None = None, shift: int = 0
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Launch with tensors of these sizes; act starts ``shift`` elements into its memory."""
    act = torch.empty(m * k + 8, dtype=BF16)[shift : shift + m * k].view(m, k).as_subclass(OnDevice)
    weight = torch.empty(n, k, dtype=BF16)
    gammas = [torch.empty(w, dtype=BF16) for w in widths]
    normed = [torch.empty(m, w, dtype=BF16) for w in widths]
    y = torch.empty(m, 16 * n) if widths else None
    unnormed = torch.empty(m, n - sum(widths), dtype=BF16)
    spec = plain_spec(len(widths))
    gemv_norm.launch(
        GemvCall(spec, widths, act, weight, None, gammas, y, normed, None, unnormed, counter, None, None, 1e-6)
    )
    return Recorder.calls[-1]


def test_kernel_receives_every_argument(gpu: Gpu) -> None:
    m, n, k, widths = 16, 100, 640, (60, 30)
    spec = gemv_spec(BF16, F8, "row", (BF16, F32), F8, True)
    act = torch.empty(m, k + 16, dtype=BF16)[:, :k].as_subclass(OnDevice)
    weight = torch.empty(n, k + 32, dtype=torch.uint8)[:, :k].view(F8)
    weight_scale, gammas = torch.empty(n), [torch.empty(60, dtype=BF16), torch.empty(30)]
    normed = [torch.empty(m, 61, dtype=torch.uint8)[:, :60].view(F8), torch.empty(m, 33, dtype=BF16)[:, :30]]
    y, scale, unnormed = torch.empty(m, 96), torch.empty(m, 2)[:, :1], torch.empty(m, 15, dtype=BF16)[:, :10]
    counter, trace, units = (torch.zeros(448, dtype=t) for t in (torch.int32, torch.int64, torch.int32))
    gemv_norm.launch(
        GemvCall(
            spec, widths, act, weight, weight_scale, gammas, y, normed, scale, unnormed, counter, trace, units, 0.25
        )
    )
    ((grid, got),) = Recorder.calls
    assert grid == 4 + 2 + 1
    tensors = {
        "act": act, "weight": weight, "weight_scale": weight_scale, "y": y, "unnormed": unnormed, "scale": scale,
        "counter": counter, "trace": trace, "units": units, "gammas.0": gammas[0], "gammas.1": gammas[1],
        "normed.0": normed[0], "normed.1": normed[1],
    }  # fmt: skip
    assert {name: got[name] for name in tensors} == {name: t.data_ptr() for name, t in tensors.items()}
    assert all(got[f"{name}.{i}"] is None for name in ("gammas", "normed", "widths", "normed_strides") for i in (2, 3))
    numbers = {
        "m": 16, "k": 640, "tail": 10, "widths.0": 60, "widths.1": 30, "strides.act": 656, "strides.weight": 672,
        "strides.y": 96, "strides.tail": 15, "strides.scale": 2, "normed_strides.0": 61, "normed_strides.1": 33, "eps": 0.25,
    }  # fmt: skip
    assert {name: got[name] for name in numbers} == numbers
    constants = {
        "MATH.segments": 2,
        "TILE.columns": 16,
        "TILE.rows": 16,
        "MATH.scaled": "row",
        "MATH.weight": "fp8",
        "QUANT.max": 448.0,
        "MATH.traced": True,
    }
    assert {name: got[name] for name in constants} == constants
    assert not counters._streams, "the caller's counter is used"


def test_missing_tensors_are_passed_as_none(gpu: Gpu) -> None:
    grid, got = launch(widths=())
    assert grid == 25
    absent = (
        "weight_scale",
        "y",
        "scale",
        "counter",
        "trace",
        "units",
        "gammas.0",
        "normed.0",
        "strides.y",
        "strides.scale",
    )
    assert all(got[name] is None for name in absent)
    assert (got["tail"], got["MATH.segments"], got["MATH.traced"]) == (100, 0, False)
    assert not counters._streams


def test_grid_equals_gemv_trace_blocks(gpu: Gpu) -> None:
    for m, n, widths in itertools.product((1, 2, 3, 8, 9, 16), (100, 3000), ((60,), (60, 30))):
        act, weight = torch.empty(m, 640, dtype=BF16, device="meta"), torch.empty(n, 640, dtype=BF16, device="meta")
        gamma, *more = (torch.empty(w, dtype=BF16, device="meta") for w in widths)
        for shift in (0, 1):
            grid, _ = launch(m, n, 640, widths, shift=shift)
            assert grid == onepass.gemv_trace_blocks(act, weight, gamma, more)


def test_streams_do_not_share_counters(gpu: Gpu) -> None:
    seen = []
    for gpu.stream in (1, 2, 1, 3, 2):
        seen.append(launch()[1]["counter"])
    assert seen[0] == seen[2] and seen[1] == seen[4] and len(set(seen)) == 3
    gpu.capturing = True
    captured = [launch()[1]["counter"] for _ in range(3)]
    assert len({*seen, *captured}) == 6
    mine = torch.zeros(2, dtype=torch.int32)
    assert launch(counter=mine)[1]["counter"] == mine.data_ptr()


def test_failed_launch_discards_its_counter(gpu: Gpu) -> None:
    gpu.stream = 1
    other = launch()[1]["counter"]
    gpu.stream = 2
    launch()
    before = counters._streams[0, 2]
    Recorder.broken = True
    for counter in (torch.zeros(2, dtype=torch.int32), None):
        with pytest.raises(RuntimeError, match="out of resources"):
            launch(counter=counter)
        assert ((0, 2) in counters._streams) == (counter is not None)
    Recorder.broken = False
    assert launch()[1]["counter"] != before.data_ptr()
    gpu.stream = 1
    assert launch()[1]["counter"] == other


def test_kernel_is_loaded_once(gpu: Gpu) -> None:
    for m, n, k in ((9, 100, 640), (16, 100, 640), (12, 300, 1008), (9, 100, 640)):
        launch(m, n, k)
    assert len(Recorder.made) == 1 and len(Recorder.calls) == 4
    launch(9, 100, 640, shift=1)
    launch(1)
    launch(1, widths=(64, 32))
    assert len(Recorder.made) == len(set(Recorder.made)) == 4


def test_misaligned_calls_use_another_kernel(gpu: Gpu) -> None:
    """Builds for aligned rows assume 16-byte aligned rows of act and weight, and k divisible by a load."""
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"shift": 1}, False),
        ({"k": 641}, False),
        ({"k": 648}, False),
        ({"shift": 8}, True),
    ]
    for sizes, aligned in cases:
        Recorder.made.clear()
        gemv_norm.KERNELS.plans.clear()
        compiler._loaded.clear()
        launch(**sizes)
        assert re.search("/v8/" if aligned else "/v8u/", Recorder.made[0].name)
    divisible = dict(build(plain_spec(), 1, 96, 1024, (64,)).divisible)
    assert {divisible[name] for name in ("act", "weight")} == {16} and divisible["k"] == 8
    assert not {"act", "weight", "k"} & dict(build(plain_spec(), 1, 96, 1001, (64,), aligned=False).divisible).keys()
