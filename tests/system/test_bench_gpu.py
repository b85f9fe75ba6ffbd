"""A benchmark run for a GPU without one: everything but the clock is real."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch as functorch
import torch._inductor.config
import torch._inductor.fx_passes.reinplace as reinplace
from torch._inductor.utils import run_and_get_code

from benchmarks.suite import (
    gemv_norm,
    gpu,
    host,
    lines,
    machine,
    mla_cache,
    peers,
    results,
    run,
    timing,
    words,
    workload,
)
from benchmarks.suite import qk_norm as qk
from benchmarks.suite import rms_norm as rows
from benchmarks.suite.document import document
from tools.bench.__main__ import summary

COUNT = {"chain": 0, "pairs": 0}


@pytest.fixture
def machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are on the CPU and times are invented: a call behind a kernel takes 3 us in total, the kernel alone 1."""
    COUNT.update(chain=0, pairs=0)

    def times(calls: Any, *, chain_us: float = timing.CHAIN_US, replays: int = timing.REPLAYS) -> list[float]:
        COUNT["chain" if chain_us == timing.CHAIN_US else "pairs"] += 1
        for call in calls[:2]:
            call()
        if chain_us == timing.CHAIN_US:
            return [2.0, 1.0]
        return [1.0, 1.1] if len(calls) == timing.ALONE else [3.0, 3.5]

    for module in (run, timing):
        monkeypatch.setattr(module, "graph_times", times)
    monkeypatch.setattr(timing.Behind.__init__, "__defaults__", ("cpu", 64))
    monkeypatch.setattr(gpu, "best_stream", lambda kind, size, sets: ([0.9, 0.8], gpu.TILES[1]))
    monkeypatch.setattr(
        gpu, "ceilings", lambda: {"copy 2 GiB TB/s": 4.2, "read 1 GiB TB/s": 4.5, "empty kernel us": 0.9}
    )
    monkeypatch.setattr(gpu, "clocks", dict)
    monkeypatch.setattr(run, "check", lambda op, device: [])
    monkeypatch.setattr(host, "times", lambda device, skip: {"rms_norm": [3.0, 3.1]})
    monkeypatch.setattr(run, "describe", lambda device: {**machine.describe("cpu"), "device": device, "triton": "3"})
    monkeypatch.setattr(run, "MOST_SETS", {"cuda": 2, "cpu": 2})


def plan(*ops: str, **more: Any) -> run.Plan:
    """Small workloads of each kind, made on the CPU although the plan is for cuda."""
    shapes = {"rms_norm": "4x64", "gemv_and_partial_norm": "2x48x64"}
    made = run.Plan("cuda", ops, ",".join(shapes[op] for op in ops), **more)

    def on_cpu(workload: workload.Workload) -> workload.Workload:
        return replace(workload, make=lambda device: workload.make("cpu"))

    object.__setattr__(made, "workloads", tuple(map(on_cpu, made.workloads)))
    return made


def use(monkeypatch: pytest.MonkeyPatch, **makers: Callable[[workload.Problem], workload.Call]) -> None:
    """Use only these peers: slow ones are measured last, lib_ ones are libraries, `none` does another op's work."""
    found = {}
    for name, make in makers.items():
        module = "torch" if name.startswith("lib_") else None
        ops = ("another op",) if name == "none" else ()
        found[name] = peers.Peer(name, make, module, None, ops, slow=name == "slow")
    monkeypatch.setattr(run, "chosen", lambda words: found)


def composed(p: workload.Problem) -> workload.Call:
    return lambda: p.composed(*p.arguments)


@pytest.mark.usefixtures("machine_with_a_gpu")
def test_every_contender_is_timed_in_a_chain_and_behind_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fair=composed, none=composed)
    report = run.run(plan("rms_norm", "gemv_and_partial_norm"))
    norm, product = report["rows"]
    assert norm["us"] == {"best copy": [0.9, 0.8], "onepass": [2.0, 1.0], "fair": [2.0, 1.0]}
    assert norm["behind_us"] == {"onepass": [2.0, 2.5], "fair": [2.0, 2.5]}  # less the kernel alone
    assert set(product["behind_us"]) == {"onepass", "norm, then onepass", "linear, then rms_norm", "fair"}
    assert norm["without"] == ["none"] and norm["tile"] == gpu.TILES[1]._asdict()
    found = results.of_report(report)
    assert [row.floor_us for row in found.rows] == [0.8, 0.8] and found.has_best
    assert found.rows[0].behind_kernel.ours == 2.0 and found.behind_kernel.rows[0].peers == {"fair": 2.0}
    assert "not measured behind" not in words.ahead_words(found)
    assert set(report["sessions"][0]["seconds"]) >= {"checks", "best copy", "onepass", "fair"}


@pytest.mark.parametrize("kind", ["copy", "halve", "read"])
def test_a_ceiling_moves_whole_vectors(kind: workload.Stream) -> None:
    """Other lengths would be loaded element by element. Less than one vector per tensor is lost."""
    moved = {"copy": 8, "halve": 3, "read": 4}[kind]
    for size in (1, 35844, 702592, 89012224):
        elements = gpu.length(kind, size)
        assert elements % 16 == 0 and elements > 0
        assert size - 16 * moved < elements * moved <= max(size, 16 * moved)


def test_differences_that_are_not_positive_are_dropped() -> None:
    report = {"device": "cuda", "ceilings": {"copy 2 GiB TB/s": 4.0, "read 1 GiB TB/s": 5.0}}
    row: dict[str, Any] = {"op": "rms_norm", "stream": "copy", "shape": [1, 8], "bytes": 40, "us": {"onepass": [1.0]}}
    pairs = {"onepass": [0.5, 0.4], "torch.compile": [0.1, -0.1], "Liger-Kernel": [0.0]}
    assert results.row_of({**row, "behind_us": pairs}, report).behind_us == {"onepass": (0.5, 0.4)}


def test_huge_rows_are_compared_with_a_large_copy_too() -> None:
    report = {"device": "cuda", "ceilings": {"copy 2 GiB TB/s": 4.0, "read 1 GiB TB/s": 5.0}}
    row = {
        "op": "rms_norm",
        "stream": "copy",
        "shape": [1, 8],
        "bytes": 400_000_000,
        "us": {"onepass": [101.0], "best copy": [104.0]},
    }
    assert results.row_of(row, report).floor_us == 100.0
    assert results.row_of({**row, "bytes": 4_000_000}, report).floor_us == 104.0
    assert results.row_of({**row, "us": {"onepass": [101.0]}}, report).floor_us == 100.0


@pytest.mark.usefixtures("machine_with_a_gpu")
def test_peers_that_fail_or_compute_something_else_are_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(p: workload.Problem) -> workload.Call:
        def call() -> None:
            if COUNT["pairs"] > 2:
                raise RuntimeError("not captured\nsecond line")

        return call

    def wrong(p: workload.Problem) -> workload.Call:
        return lambda: torch.zeros_like(p.arguments[0])

    def close(p: workload.Problem) -> workload.Call:
        return lambda: (p.composed(*p.arguments).float() * 1.001).to(torch.bfloat16)  # type: ignore[attr-defined]

    use(monkeypatch, lib_wrong=wrong, lib_close=close, broken=broken)
    report = run.run(plan("rms_norm"))
    (row,) = report["rows"]
    assert set(row["us"]) == {"best copy", "onepass", "lib_close"}
    assert report["peers"]["lib_wrong"] == "rms_norm 4x64: a result that is 100.00% off torch's"
    assert report["peers"]["broken"] == "rms_norm 4x64: RuntimeError: not captured"
    assert report["peers"]["lib_close"] == "" and "without" not in row


@pytest.mark.usefixtures("machine_with_a_gpu")
def test_a_run_that_is_cut_short_can_be_continued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit passes while the first slow peer is measured. Existing results stay, missing ones are added."""
    now = [0.0]
    monkeypatch.setattr("benchmarks.suite.run.time.perf_counter", lambda: now[0])

    def slow(p: workload.Problem) -> workload.Call:
        now[0] += 100.0
        return composed(p)

    use(monkeypatch, slow=slow, fair=composed)
    file = tmp_path / "bench.json"
    both = ("rms_norm", "gemv_and_partial_norm")
    first = run.run(plan(*both, limit=50.0), lines.Lines(file))
    assert [sorted(row["us"]) for row in first["rows"]] == [
        ["best copy", "fair", "onepass", "slow"],
        ["best copy", "fair", "linear, then rms_norm", "norm, then onepass", "onepass"],
    ]
    assert "its limit of 50 s" in first["sessions"][0]["stopped"] and "STOPPED" in summary(first)
    stored = document(file)
    assert stored["rows"] == json.loads(json.dumps(first["rows"]))
    before = dict(COUNT)
    second = run.run(plan(*both), lines.Lines(file), document(file))
    assert all("slow" in row["us"] and "slow" in row["behind_us"] for row in second["rows"])
    more = {name: COUNT[name] - before[name] for name in COUNT}
    assert more == {"chain": 1, "pairs": 2}  # slow once each way, and the kernel alone
    assert len(second["sessions"]) == 2 and "stopped" not in second["sessions"][1]
    out = capsys.readouterr().out
    assert "onepass 1.00 (behind a kernel 2.00)" in out and out.count("slow 1.00") == 2


@pytest.mark.usefixtures("machine_with_a_gpu")
def test_times_behind_a_kernel_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fair=composed)
    report = run.run(plan("rms_norm", behind=False))
    assert "behind_us" not in report["rows"][0] and COUNT["pairs"] == 0
    assert "not measured behind a kernel" in words.ahead_words(results.of_report(report))
    again = run.run(plan("rms_norm"), before=json.loads(json.dumps(report)))
    assert set(again["rows"][0]["behind_us"]) == {"onepass", "fair"} and COUNT["chain"] == 2


def test_the_best_stream_is_the_fastest_of_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that wins the trial by chance loses to the runner-up in the full measurement."""
    full = {gpu.TILES[0]: 5.0, gpu.TILES[3]: 3.0}
    seen: list[tuple[gpu.Tile, bool]] = []

    def times(calls: Any, *, chain_us: float = timing.CHAIN_US, replays: int = timing.REPLAYS) -> list[float]:
        (tile,) = calls
        seen.append((tile, chain_us == timing.CHAIN_US))
        if chain_us == timing.CHAIN_US:
            return [full[tile], full[tile] + 0.1]
        return [{gpu.TILES[0]: 1.0, gpu.TILES[3]: 2.0}.get(tile, 4.0)] * 2

    monkeypatch.setattr(gpu, "graph_times", times)
    monkeypatch.setattr(gpu, "pairs", lambda kind, size, sets: [])
    monkeypatch.setattr(gpu, "calls", lambda kind, tensors, tile: [tile])
    assert gpu.best_stream("copy", 1 << 20, 4) == ([3.0, 3.1], gpu.TILES[3])
    assert [tile for tile, whole in seen if not whole] == list(gpu.TILES)


# --- the in-place write of the MLA peer -----------------------------------------------------------------------------


def whole_cache_moved(function: Callable[..., object], *arguments: torch.Tensor) -> bool:
    """Whether Inductor's code has a buffer or a loop of the size of the cache."""
    torch._dynamo.reset()
    fresh = torch._inductor.config.patch(fx_graph_cache=False), functorch.config.patch(enable_autograd_cache=False)
    with torch.inference_mode(), fresh[0], fresh[1]:
        _, code = run_and_get_code(torch.compile(function, dynamic=False, fullgraph=True), *arguments)
    cache = arguments[0]
    text = "\n".join(code)
    return str(cache.numel()) in text or f"empty_strided_cpu(({cache.shape[0]}, {cache.shape[1]}" in text


@pytest.mark.sampled(5)  # one dtype stays
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_the_compiled_peer_writes_the_cache_in_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Inductor does not recognize views of its inputs, as in torch 2.11."""
    names = vars(reinplace)
    if "_get_view_base" in names:
        monkeypatch.setitem(names, "_get_view_base", lambda node: node)
    blocks = torch.zeros(77, 64, 576, dtype=dtype)
    slots, rows_ = torch.arange(8), torch.randn(8, 576)

    def outside(entries: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
        mla_cache.put(entries, slots, x)

    def inside(blocks: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
        mla_cache.put(mla_cache.entries(blocks), slots, x)

    assert not whole_cache_moved(outside, mla_cache.entries(blocks), slots, rows_)
    assert whole_cache_moved(inside, blocks, slots, rows_), "the check would not notice a copy"


def test_peers_get_the_cache_as_rows() -> None:
    p = mla_cache.problem(4, 2, mla_cache.CACHES["fp8"], mla_cache.angles("cpu"), "cpu")
    entries = mla_cache.arguments(p)[5]
    assert entries.dtype == torch.uint8 and entries.shape == (p.cache.blocks.shape[0] * mla_cache.PAGE, 576)
    assert entries.data_ptr() == p.cache.blocks.data_ptr()


# --- libraries as peers ---------------------------------------------------------------------------------------------


def test_libraries_agree_with_torch_where_they_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger and FlashInfer are replaced by stubs in torch."""
    import sys
    from types import ModuleType

    def norm(x: torch.Tensor, gamma: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        y = rows.norm(x, gamma, eps)
        return y if out is None else out.copy_(y)

    def add(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float) -> None:
        y, total = rows.added(x, gamma, eps, residual)
        x.copy_(y)
        residual.copy_(total)

    liger, functional, flash, its_norm = (ModuleType(name) for name in ("a", "b", "c", "d"))
    functional.liger_rms_norm = norm  # type: ignore[attr-defined]
    functional.liger_fused_add_rms_norm = lambda x, r, gamma, eps: rows.added(x, gamma, eps, r)  # type: ignore[attr-defined]
    liger.functional = functional  # type: ignore[attr-defined]
    its_norm.rmsnorm, its_norm.fused_add_rmsnorm = norm, add  # type: ignore[attr-defined]
    flash.norm = its_norm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    monkeypatch.setitem(sys.modules, "flashinfer", flash)
    vllm, its_ops = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    its_ops.rms_norm = lambda out, x, gamma, eps: (out.copy_(rows.norm(x, gamma, eps)), None)[1]  # type: ignore[attr-defined]
    its_ops.fused_add_rms_norm = add  # type: ignore[attr-defined]
    vllm._custom_ops = its_ops  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    problems = {
        "rms_norm": rows.problem("rms_norm", 4, 64, "cpu"),
        "rms_norm, residual": rows.problem("rms_norm", 4, 64, "cpu", more=True),
        "rms_norm_fused_fp8": rows.problem("rms_norm_fused_fp8", 4, 64, "cpu"),
        "qk_rms_norm": qk.problem("qk_rms_norm", 4, 64, 32, "cpu"),
        "gemv_and_partial_norm": gemv_norm.problem(2, 48, 64, 32, "cpu"),
    }
    done = {}
    for name in ("Liger-Kernel", "FlashInfer", "vLLM"):
        made = {op: peers.PEERS[name].calls([p]) for op, p in problems.items()}
        done[name] = [op for op, calls in made.items() if calls]
        for op, calls in made.items():
            arguments = problems[op].arguments
            before = [a.clone() for a in arguments if isinstance(a, torch.Tensor)]
            for call in calls:
                assert peers.disagreement(call(), problems[op].composed(*arguments)) == ""
            after = [a for a in arguments if isinstance(a, torch.Tensor)]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "a peer changed its inputs"
    assert done["Liger-Kernel"] == ["rms_norm", "rms_norm, residual", "qk_rms_norm"]
    assert done["FlashInfer"] == ["rms_norm", "rms_norm, residual", "qk_rms_norm", "gemv_and_partial_norm"]
    assert done["vLLM"] == ["rms_norm", "rms_norm, residual"]  # on a CPU


def test_disagreements_are_described() -> None:
    x = torch.randn(4, 64)
    assert peers.disagreement(x, x) == "" and peers.disagreement((x, x), (x, x * 1.001)) == ""
    assert "2 results instead of 1" in peers.disagreement((x, x), x)
    assert "shape [4, 32] instead of [4, 64]" in peers.disagreement(x[:, :32], x)
    assert "off torch's" in peers.disagreement(x.roll(1, 0), x) and "off torch's" in peers.disagreement(
        x * torch.nan, x
    )
    assert "shape [] instead of [4, 64]" in peers.disagreement(None, x)
