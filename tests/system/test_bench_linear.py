"""The benchmark of linear: all contenders do the same work, weights are cold and shared, refusals are recorded."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.suite import gpu, linear, machine, peers, results, run, timing, workload
from tools.bench.__main__ import summary

SMALL = {linear.OP: (3, 320, 256), linear.FP8: (3, 320, 256), linear.FUSED: (3, 320, 256), linear.BATCH: (20, 320, 256)}
PRODUCTS = [work for op, shape in SMALL.items() for work in linear.workloads(op, shape)]


@pytest.fixture(autouse=True)
def other_weights() -> None:
    linear.weights.cache_clear()


@pytest.mark.parametrize("work", PRODUCTS, ids=lambda work: work.where)
def test_contenders_do_the_same_work(work: workload.Workload) -> None:
    """Torch's own sum differs in the order and, where something is fused, in the number of roundings."""
    torch.manual_seed(0)
    (p,) = work.problems("cpu", 1)
    expected = p.composed(*p.arguments)
    assert float(expected.float().norm()) > 0  # type: ignore[attr-defined]
    for name, call in p.ours.items():
        assert peers.disagreement(call(), expected) == "", name
    assert (linear.THEN in p.ours) == ("norm" in work.where)
    found = {name: peer.calls([p]) for name, peer in peers.PEERS.items() if name in ("cuBLAS", "torch._scaled_mm")}
    plain = work.op in (linear.OP, linear.BATCH) or work.where.endswith(", add")
    assert bool(found["cuBLAS"]) == plain and bool(found["torch._scaled_mm"]) == (work.op == linear.FP8)
    for call in found["cuBLAS"]:
        assert peers.disagreement(call(), expected) == ""


def test_scaled_mm_multiplies_the_same_weights() -> None:
    """Its rows are fp8, so it is off by a few per cent; wrong scales would be off by far more."""
    torch.manual_seed(0)
    rows, _ = linear.workloads(linear.FP8, (4, 320, 256))
    (p,) = rows.problems("cpu", 1)
    (call,) = peers.PEERS["torch._scaled_mm"].calls([p])
    exact: Any = p.composed(*p.arguments)
    got: Any = call()
    assert 0.001 < float((got.float() - exact.float()).norm() / exact.float().norm()) < 0.06


@pytest.mark.parametrize("size", [(128, 128), (2112 // 8, 320), (130, 129)])
def test_fp8_weights_are_close_to_what_they_are_made_from(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(*size) * torch.logspace(-3, 3, size[0])[:, None]
    codes, scale = linear.blocks(weight.bfloat16())
    assert scale is not None and codes.shape == size
    assert scale.shape == (-(-size[0] // 128), -(-size[1] // 128)) and codes.float().abs().amax() == 448.0
    block = weight[:128, :128]
    off = linear.dequantized(codes, scale)[:128, :128].float() - block
    assert off.norm() < 0.03 * block.norm()


# --- what is measured -----------------------------------------------------------------------------------------------


def test_every_size_and_number_of_rows_is_planned() -> None:
    planned = run.Plan("cuda", ("linear",)).workloads
    shapes = {op: {w.shape for w in planned if w.op == op} for op in linear.FAMILY.ops}
    assert (
        shapes[linear.OP] == {(m, n, k) for n, k in linear.SIZES for m in (1, 2, 4, 8, 16)} and len(linear.SIZES) == 9
    )
    assert shapes[linear.FP8] == {(m, n, k) for n, k in linear.SIZES for m in (1, 4, 8, 16)}
    assert {m for m, *_ in shapes[linear.BATCH]} == {32, 64, 128, 256, 512, 2048, 8192}
    fused = {(*w.shape, w.about["with"]) for w in planned if w.op == linear.FUSED}
    assert {(1, 6144, 4096, "norm"), (16, 2112, 7168, "norm, fp8 blocks"), (8, 24576, 4096, "silu_mul")} <= fused
    assert {(w.shape[0], w.shape[1:]) for w in run.Plan("cpu", ("linear",)).workloads if w.op != linear.FUSED} == {
        (m, size) for m in (1, 4, 16, 64) for size in ((2112, 7168), (4096, 4096))
    }


def test_weights_are_cold() -> None:
    """Up to 16 rows, all weights of a row together exceed 400 MB; larger batches use one set."""
    for work in run.Plan("cuda", ("linear",)).workloads:
        sets = run.sets_of(work, "cuda")
        if work.op == linear.BATCH:
            assert sets == 1
        else:
            assert sets * work.reads > 400_000_000 and sets >= run.LEAST_COLD_SETS


def test_weights_are_made_once_per_size() -> None:
    one, four = (linear.workloads(linear.OP, (m, 64, 128))[0].problems("cpu", 3) for m in (1, 4))
    addresses = [[p.arguments[1].data_ptr() for p in found] for found in (one, four)]
    assert addresses[0] == addresses[1] and len(set(addresses[0])) == 3
    assert one[0].arguments[0].shape == (1, 128) and four[0].arguments[0].shape == (4, 128)


def test_bytes_are_those_of_inputs_and_outputs() -> None:
    for work in PRODUCTS:
        (p,) = work.problems("cpu", 1)
        tensors = [*p.arguments, p.ours["onepass"]()]
        assert work.bytes == sum(t.numel() * t.element_size() for t in tensors), work.where
        weights = [p.arguments[1], *(t for t in p.arguments[2:] if t.dtype == torch.float32)]
        assert work.reads == sum(t.numel() * t.element_size() for t in weights), work.where


def test_shapes_that_do_not_fit_are_left_out() -> None:
    assert not linear.workloads(linear.OP, (1, 64)) and not linear.workloads(linear.OP, (17, 64, 64))
    assert not linear.workloads(linear.BATCH, (16, 64, 64))
    odd = [w.about["with"] for w in linear.workloads(linear.FUSED, (1, 33, 64))]
    assert "silu_mul" not in odd and "norm" in odd


def test_a_plan_is_restricted_by_an_expression() -> None:
    one = run.Plan("cuda", ("linear",), match="^linear 1x")
    assert {w.shape[0] for w in one.workloads} == {1} and len(one.workloads) == 9
    assert {w.about.get("with") for w in run.Plan("cuda", match="fp8 blocks$").workloads} == {
        "fp8 blocks",
        "norm, fp8 blocks",
    }
    with pytest.raises(ValueError, match="and matches 'nothing'"):
        run.Plan("cuda", ("linear",), match="nothing")
    for wrong in ({"match": "("}, {"slow": "("}):
        with pytest.raises(ValueError, match="is not a regular expression"):
            run.Plan("cuda", **wrong)  # type: ignore[arg-type]


def test_slow_peers_are_measured_at_some_sizes() -> None:
    def where(plan: run.Plan) -> list[str]:
        return [w.where for w in plan.workloads if "torch.compile max" in plan.peers_of(w, peers.PEERS)]

    usual = where(run.Plan("cuda", ("linear",)))
    assert 0 < len(usual) < 30 and "linear 1x4096x4096" in usual
    assert where(run.Plan("cuda", ("linear",), slow="^linear 2x2112x")) == ["linear 2x2112x7168"]
    assert where(run.Plan("cuda", ("linear",), slow="^$")) == []
    norms = run.Plan("cuda", ("rms_norm",))
    assert where(norms) == [w.where for w in norms.workloads]


# --- a run for a GPU, without one -----------------------------------------------------------------------------------


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inputs are on the CPU and times are invented; the sizes of measured streams are returned."""
    sizes: list[int] = []

    def times(calls: Any, **_: Any) -> list[float]:
        calls[0]()
        return [2.0, 1.0]

    def stream(kind: str, size: int, sets: int) -> tuple[list[float], gpu.Tile]:
        sizes.append(size)
        return [0.9, 0.8], gpu.TILES[1]

    for module in (run, timing):
        monkeypatch.setattr(module, "graph_times", times)
    monkeypatch.setattr(gpu, "best_stream", stream)
    ceilings = {"copy 2 GiB TB/s": 4.2, "read 1 GiB TB/s": 4.5, "empty kernel us": 0.9}
    monkeypatch.setattr(gpu, "ceilings", lambda: ceilings)
    monkeypatch.setattr(gpu, "clocks", dict)
    monkeypatch.setattr(run, "check", lambda op, device: [])
    monkeypatch.setattr(run, "describe", lambda device: {**machine.describe("cpu"), "device": device, "triton": "3"})
    monkeypatch.setattr(run, "MOST_SETS", {"cuda": 2, "cpu": 2})
    monkeypatch.setattr(run, "LEAST_COLD_SETS", 2)
    monkeypatch.setattr(peers.Peer, "why_not", lambda self, device: "")
    return sizes


def on_cpu(work: workload.Workload) -> workload.Workload:
    made = work.many
    assert made is not None
    return replace(work, many=lambda device, sets: made("cpu", sets))


def measured(shapes: str, **more: Any) -> dict[str, Any]:
    plan = run.Plan("cuda", ("linear",), shapes, "cublas,scaled", behind=False, **more)
    object.__setattr__(plan, "workloads", tuple(map(on_cpu, plan.workloads)))
    return run.run(plan)


@pytest.mark.full  # six timed rows
def test_a_peer_that_refuses_a_row_is_recorded_in_it(streams: list[int]) -> None:
    """torch._scaled_mm has no scales per block on a CPU. It refuses each such row, and its other rows have times."""
    report = measured("1x320x256,4x320x256", match="fp8 (rows|blocks)$|^linear ")
    rows = {(row["op"], row.get("with"), row["shape"][0]): row for row in report["rows"]}
    for m in (1, 4):
        assert set(rows[linear.OP, None, m]["us"]) == {"best copy", "onepass", "cuBLAS"}
        assert "torch._scaled_mm" in rows[linear.FP8, "fp8 rows", m]["us"]
        refused = rows[linear.FP8, "fp8 blocks", m]
        assert "torch._scaled_mm" not in refused["us"]
        assert refused["refused"]["torch._scaled_mm"].startswith("ValueError: Invalid scaling configuration")
        assert "refused" not in rows[linear.OP, None, m] and "refused" not in rows[linear.FP8, "fp8 rows", m]
    assert "torch._scaled_mm: linear, fp8 4x320x256, fp8 blocks: ValueError" in summary(report)
    (found,) = (row for row in results.of_report(report).rows if row.words == "1 x 320 x 256, fp8 blocks")
    assert found.refused.keys() == {"torch._scaled_mm"} and found.kind == "fp8 blocks" and found.shape == (1, 320, 256)


@pytest.mark.full  # three timed rows
def test_rows_with_the_same_weights_share_the_time_of_their_read(streams: list[int]) -> None:
    report = measured("1x320x256,4x320x256,16x320x256", match="^linear |fp8 rows")
    assert len(report["rows"]) == 6 and streams == [320 * 256 * 2, 320 * 256 + 320 * 4]
    assert all(row["us"]["best copy"] == [0.9, 0.8] for row in report["rows"])


def test_results_name_only_peers_that_could_do_the_work(streams: list[int]) -> None:
    found = results.of_report(measured("1x320x256", match="^linear "))
    assert found.measured == ["cuBLAS"]
    assert set(found.absent) == {"torch.compile", "torch.compile max", "torch eager", "torch._scaled_mm"}
    assert re.fullmatch(r"1 x 320 x 256", found.rows[0].words)
