"""The benchmarks measure what they say, and the README shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass.bench import cpu, mla, qk, report, timing
from onepass.bench.peers import PEERS, Problem
from onepass.checks.case import same_bytes
from onepass.ops.rms_norm import rms_norm, rms_norm_fused_fp8

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "h200" / "speed.json"
TABLES = [RESULTS, *(RESULTS.with_name(f"speed-{family}.json") for family in ("gemv", "qk", "mla"))]


def test_stream_reads_and_writes_everything() -> None:
    source = torch.randint(0, 2**15, (37, 64), dtype=torch.int16)
    target = torch.full((37, 64), 0xAB, dtype=torch.uint8)
    cpu.stream(source.view(torch.bfloat16), target)
    assert torch.equal(target, source.to(torch.uint8))


@pytest.mark.parametrize("fp8", [False, True])
def test_peers_do_the_same_work(fp8: bool) -> None:
    problem = Problem(torch.randn(8, 256).bfloat16(), torch.randn(256).bfloat16(), 1e-6, fp8)
    ours = rms_norm_fused_fp8(problem.x, problem.gamma) if fp8 else (rms_norm(problem.x, problem.gamma),)
    found = 0
    for name in ("torch eager", "F.rms_norm"):
        call = PEERS[name](problem)
        if call is not None:
            result = call()
            theirs = result if isinstance(result, tuple) else (result,)
            assert (ours[0].float() == theirs[0].float()).double().mean() > 0.97
            for a, b in zip(ours[1:], theirs[1:], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
            found += 1
    assert found == (1 if fp8 else 2)


@pytest.mark.parametrize("op", qk.SHAPES)
def test_qk_peers_do_the_same_work(op: str) -> None:
    p = qk.problem(8, 256, 64, "cpu")
    theirs: Any = qk.COMPOSED[op](p)
    for call in qk.ours(op, p).values():
        result: Any = call()
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (result, theirs)), strict=True):
            half = a.dtype == torch.bfloat16
            assert not half or (a == b).double().mean() > 0.97
            torch.testing.assert_close(a, b, rtol=0.01 if half else 1e-6, atol=0)
    assert qk.moved(op, p) == {"row_mean_of_squares_qk": 5120 + 64, "apply_qk_rms_norm": 2 * 5120 + 1280 + 64}.get(
        op, 11520
    )


@pytest.mark.parametrize("name", mla.CACHES)
def test_mla_peers_do_the_same_work(name: str) -> None:
    p = mla.problem(8, 4, mla.CACHES[name], mla.angles("cpu"), "cpu")
    ours, entries = mla.ours(p).clone(), p.cache.blocks.clone()
    assert entries.float().abs().sum(-1).count_nonzero() == 8
    p.out.zero_()
    p.cache.blocks.zero_()
    mla.peer(mla.composed, p)()
    assert (ours == p.out).double().mean() > 0.99
    assert (entries.float() == p.cache.blocks.float()).double().mean() > 0.999
    assert mla.moved(p) == 8 * (4 * 64 * 4 + 576 * (2 + p.cache.blocks.element_size())) + 1024


def test_shapes_in_words() -> None:
    assert report.shape_words({"shape": [64, 128, 64], "latent": 512, "cache": "fp8"}) == "64 x 128 heads, fp8"
    assert report.shape_words({"shape": [16, 7168]}) == "16 x 7168"
    assert report.shape_words({"shape": [16, 6144, 1024]}) == "16 x (6144 + 1024)"
    gemv = {"shape": [1, 2112, 7168], "normed": 1536}
    assert report.shape_words(gemv) == "1 x 2112 x 7168, 1536 normed"


def test_contenders_take_turns() -> None:
    order: list[str] = []
    times = timing.interleaved_times(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, inner=2
    )
    assert order == ["a", "b", *["a", "a", "b", "b"] * 3]
    assert set(times) == {"a", "b"} and all(t > 0 for t in times.values())


def test_unlaunched_calls_launch_nothing() -> None:
    x, gamma = torch.randn(2, 64), torch.ones(64)
    expected = rms_norm(x, gamma)
    out = torch.full_like(x, 7.0)
    cpu._unlaunched(lambda: rms_norm(x, gamma, out=out))
    assert out.eq(7).all()
    assert same_bytes(rms_norm(x, gamma), expected)


@pytest.fixture
def results() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RESULTS.read_text())
    return loaded


def test_readme_shows_the_committed_results() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = readme.split(report.BEGIN)[1].split(report.END)[0].strip()
    tables = "\n\n".join(report.markdown(json.loads(path.read_text())) for path in TABLES)
    files = " ".join(str(path.relative_to(ROOT)) for path in TABLES)
    assert shown == tables, f"run: python -m onepass.bench.report README.md {files}"


def test_results_are_complete(results: dict[str, Any]) -> None:
    assert {row["op"] for row in results["rows"]} >= {"rms_norm", "rms_norm_fused_fp8"}
    for row in results["rows"]:
        assert {"onepass", "torch eager", "torch.compile"} <= set(row["us"])
        assert all(len(times) == 2 for times in row["us"].values())
        m, *columns = row["shape"]
        an_element = {"rms_norm_fused_fp8": 3, "row_mean_of_squares_qk": 2}.get(row["op"], 4)
        assert row["bytes"] >= m * sum(columns) * an_element


@pytest.mark.parametrize(("family", "ops"), [("gemv", 1), ("qk", 3)])
def test_further_results_name_their_machine_and_ceilings(family: str, ops: int) -> None:
    found = json.loads(RESULTS.with_name(f"speed-{family}.json").read_text())
    assert len({row["op"] for row in found["rows"]}) == ops and found["ceilings"]["copy 2 GiB TB/s"] > 1
    assert all(
        min(row["us"]["onepass"]) * found["ceilings"]["read 1 GiB TB/s"] * 1e6 > 0.4 * row["bytes"]
        for row in found["rows"]
    )


def test_promises_were_kept_on_the_gpu() -> None:
    kept = json.loads((ROOT / "benchmarks" / "h200" / "promises.json").read_text())
    assert len(kept) > 60 and all(result["passed"] and result["device"] == "cuda" for result in kept)


def test_write_into_replaces_only_the_table(tmp_path: Path, results: dict[str, Any]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_into(page, [RESULTS])
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n") and text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text and report.markdown(results) in text
