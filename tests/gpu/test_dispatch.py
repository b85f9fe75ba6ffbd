"""The GPU launch path without a GPU: which arguments a kernel gets, and how often it is loaded."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from onepass.core.layout import Geometry
from onepass.formats import E4M3FN, ScaleRule
from onepass.gpu import compile as compiler
from onepass.gpu import counters
from onepass.gpu.chip import Chip, tuning
from onepass.gpu.prologue import generated_sources
from onepass.gpu.tuning import h200
from onepass.ops.rms_norm import gpu as backend
from onepass.ops.rms_norm.gpu_tile import row_config
from onepass.ops.rms_norm.launch import RowCall, RowSpec, row_spec
from onepass.prologues import Operand, silu_and_mul
from tests.gpu.launches import Recorder, record
from tools.evidence import records

BF16 = torch.bfloat16


@dataclass
class OnDevice:
    """The part of a CUDA tensor that a launch uses."""

    address: int
    last: int = 1

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dim: int) -> int:
        assert dim == -1
        return self.last


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, backend.KERNELS)


def launch(spec: RowSpec, geom: Geometry, strides: list[Any], n: int, *tensors: Any) -> tuple[int, dict[str, Any]]:
    x, gamma, *rest = tensors
    call = RowCall(spec, x, gamma, 1e-5, 0.5, *rest)._replace(n=n, geom=geom, strides=strides)
    backend.launch(call if len(rest) > 7 else call._replace(scale_ub=3.0))
    return Recorder.calls[-1]


def full_spec() -> RowSpec:
    rule = ScaleRule("group", torch.float32, 64)
    operands = (Operand("full", BF16),)
    return row_spec(BF16, BF16, BF16, BF16, "once", silu_and_mul.key, operands, E4M3FN.dtype, E4M3FN.max, rule)


def test_kernel_receives_every_argument() -> None:
    x, gamma, residual, gate, norm, codes, scale, new = (OnDevice(0x1000 * i) for i in range(1, 9))
    scale.last = 7
    strides = [(10 * i, 10 * i + 1, 10 * i + 2) for i in range(1, 8)]
    tensors = (x, gamma, residual, [gate], None, norm, codes, scale, new)
    grid, got = launch(full_spec(), Geometry(30, 3, 2), strides, 4097 * 64, *tensors)
    assert grid == 30
    expected = {
        "x": x,
        "gamma": gamma,
        "residual": residual,
        "norm": norm,
        "codes": codes,
        "scale": scale,
        "new_residual": new,
    }
    found = {name: got[name if name == "gamma" else f"{name}.at"] for name in expected}
    assert found == {name: t.address for name, t in expected.items()}
    assert got["operands.0.at"] == gate.address and got["operands.1.at"] is None and got["static_scale"] is None
    order = ("x", "residual", "norm", "codes", "scale", "new_residual", "operands.0")
    for name, triple in zip(order, strides, strict=True):
        assert tuple(got[f"{name}.s{level}"] for level in range(3)) == triple
    shape = tuple(got[f"shape.{name}"] for name in ("rows", "n", "n1", "n2"))
    assert (*shape, got["scale_group"]) == (30, 4097 * 64, 3, 2, 7)
    assert (got["eps"], got["weight_offset"], got["bound"]) == (1e-5, 0.5, 3.0)


def plain(x: OnDevice, rows: int = 1000, n: int = 512, step: int = 512) -> tuple[int, dict[str, Any]]:
    spec = row_spec(BF16, BF16, None, BF16, "once")
    tensors = (x, OnDevice(4096), None, (), None, OnDevice(8192), None, None, None)
    return launch(spec, Geometry(rows, 1, 1), [(step, 0, 0)] * 6, n, *tensors)


def test_rows_share_programs_at_any_alignment() -> None:
    assert plain(OnDevice(16))[0] == plain(OnDevice(18))[0] == plain(OnDevice(16), step=513)[0] == 250
    assert plain(OnDevice(16), rows=1, step=513)[0] == 1
    assert plain(OnDevice(16), rows=200)[0] == 200, "in a small batch each row has a program"
    sums = [call["TILE.size"] for _, call in Recorder.calls]
    assert sums == [32, 256, 256, 64, 64], "the second and third load single columns"


def test_kernel_is_loaded_once() -> None:
    for n in (304, 400, 512, 304):
        plain(OnDevice(16), n=n, step=n)
    assert len(Recorder.made) == 1
    plain(OnDevice(16), n=1024, step=1024)
    assert len(Recorder.made) == 2


def test_threads_load_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """First launches of one kernel from eight threads, each on its own tensor."""

    class Slow(Recorder):
        def __init__(self, build: compiler.Build, device: int) -> None:
            time.sleep(0.05)
            super().__init__(build, device)

    monkeypatch.setattr(compiler, "Launcher", Slow)
    start = threading.Barrier(8, timeout=600)

    def work(me: int) -> None:
        start.wait()
        plain(OnDevice(16 * (me + 1)), rows=me + 1)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len(Recorder.made) == 1
    assert {(call["x.at"], call["shape.rows"]) for _, call in Recorder.calls} == {
        (16 * (me + 1), me + 1) for me in range(8)
    }


def test_pool_of_counters_that_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.ones(1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **options: made)
    prepared = torch.ones(6)
    monkeypatch.setattr(counters, "_pools", {0: prepared})
    taken, key = counters.take(0, 4)
    assert taken.data_ptr() == prepared.data_ptr() and len(taken) == 4 and key is None
    assert counters.take(0, 4)[0] is made, "two are left"
    assert counters.take(1, 4)[0] is made, "nothing was prepared on that device"


def test_static_scale_is_passed_by_address() -> None:
    spec = row_spec(
        BF16, BF16, None, None, "once", "", (), E4M3FN.dtype, E4M3FN.max, ScaleRule("static", torch.float32)
    )
    tensors = (OnDevice(16), OnDevice(32), None, (), OnDevice(77), None, OnDevice(48), None, None)
    _, got = launch(spec, Geometry(3, 1, 1), [(512, 0, 0)] * 6, 512, *tensors)
    assert got["static_scale"] == 77 and got["scale.at"] is None


def test_bound_and_smallest_scale_are_passed() -> None:
    rule = ScaleRule("row", torch.float32, has_least=True, bound_in_memory=True)
    spec = row_spec(BF16, BF16, None, None, "once", "", (), E4M3FN.dtype, E4M3FN.max, rule)
    tensors = (OnDevice(16), OnDevice(32), None, (), None, None, OnDevice(48), OnDevice(64), None)
    bounds = (3.0, OnDevice(77), 0.25)
    _, got = launch(spec, Geometry(3, 1, 1), [(512, 0, 0)] * 6, 512, *tensors, *bounds)
    assert got["scale_ub"] == 77 and got["least"] == 0.25
    x, gamma, residual, gate, norm, codes, scale, new = (OnDevice(16 * i) for i in range(1, 9))
    every = (x, gamma, residual, [gate], None, norm, codes, scale, new)
    _, got = launch(full_spec(), Geometry(3, 1, 1), [(64, 0, 0)] * 7, 64, *every)
    assert got["scale_ub"] is None and got["least"] is None


def test_too_many_rows_are_rejected() -> None:
    from onepass.errors import Unsupported

    with pytest.raises(Unsupported, match=r"at most 2\*\*31 - 1 rows"):
        plain(OnDevice(16), rows=2**31)


@pytest.mark.parametrize("contracts", [True, False])
def test_fusion_of_products_and_sums_is_always_specified(contracts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's default changes with 3.10, and results with it."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("triton.compile", lambda source, target, options: asked.append(options))
    config = row_config(512, 2, records.H200, "norm", "large")
    build = backend.build_for(row_spec(BF16, BF16, None, BF16, "once"), config, 1, True, records.H200)
    compiler.compile_build(replace(build, contracts=contracts), records.H200)
    assert [options["enable_fp_fusion"] for options in asked] == [contracts]


def test_source_of_a_prologue_is_visible() -> None:
    tensors = [OnDevice(16 * i) for i in range(1, 9)]
    x, gamma, residual, gate, *outs = tensors
    launch(full_spec(), Geometry(3, 1, 1), [(64, 0, 0)] * 7, 64, x, gamma, residual, [gate], None, *outs)
    sources = [text for name, text in generated_sources().items() if name.startswith(silu_and_mul.key)]
    assert sources and all(text.startswith("def fused(h, operands, starts, columns, mask):") for text in sources)


def test_chips_without_a_table_use_the_default() -> None:
    assert tuning(Chip("hip", "gfx942", 64)) is tuning(records.H200) is h200.TUNING
