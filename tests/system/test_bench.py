"""The benchmarks: all contenders do the same work, in turns, twice, and no op is measured that fails a check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suite import (
    command,
    decode_step,
    gemv_norm,
    gpu,
    host,
    mla_cache,
    peers,
    results,
    rms_norm_quant,
    run,
    workload,
)
from benchmarks.suite import qk_norm as qk
from benchmarks.suite import rms_norm as rows
from onepass.core.backend import launching_with
from onepass.testing import runner
from tests.helpers.command import Result, invoke

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")


def bench(*arguments: str) -> Result:
    return invoke(command.main, "--device", "cpu", *arguments)


# --- all contenders do the same work --------------------------------------------------------------------------------


def outputs(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def close(ours: Any, theirs: Any, equal: float = 0.97) -> None:
    """Most 16- and 8-bit values are equal, float32 values are within a few ulp."""
    for a, b in zip(outputs(ours), outputs(theirs), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=0)
        else:
            assert (a.float() == b.float()).double().mean() >= equal


SMALL = {
    **dict.fromkeys(rows.FAMILY.ops, (8, 256)),
    gemv_norm.OP: (4, 48, 64, 32),
    **dict.fromkeys(qk.FAMILY.ops, (8, 256, 64)),
}


@pytest.mark.parametrize("op", SMALL)
def test_peers_do_the_same_work(op: str) -> None:
    """Eager torch, and the installed peers that need no compiler."""
    (family,) = (family for family in run.FAMILIES if op in family.ops)
    (work,) = family.workloads(op, SMALL[op])
    torch.manual_seed(0)
    problem = work.make("cpu")
    ours = problem.ours["onepass"]()
    found = 0
    for name in ("torch eager", "F.rms_norm", "transformers"):
        for call in peers.PEERS[name].calls([problem]):
            # transformers rounds twice and has gamma in q's dtype; a matmul rounds before the norm
            close(ours, call(), 0.3 if name == "transformers" else 0.6 if op == gemv_norm.OP else 0.94)
            found += 1
    assert found == {"rms_norm": 3, "qk_rms_norm": 2}.get(op, 1)


def test_other_ways_to_use_onepass_give_the_same_results() -> None:
    torch.manual_seed(0)
    p = qk.problem(qk.FUSED, 8, 256, 64, "cpu")
    whole = [t.clone() for t in outputs(p.ours["onepass"]())]
    for a, b in zip(whole, outputs(p.ours["statistics, then application"]()), strict=True):
        assert torch.equal(a, b)
    act = (p := gemv_norm.problem(2, 48, 64, 32, "cpu")).arguments[0]
    before = act.clone()
    p.ours["norm, then onepass"]()
    assert not torch.equal(act, before)


@pytest.mark.parametrize("name", mla_cache.CACHES)
@pytest.mark.parametrize("tokens", [8, 1500])
def test_mla_peers_do_the_same_work(name: str, tokens: int) -> None:
    p = mla_cache.problem(tokens, 4, mla_cache.CACHES[name], mla_cache.angles("cpu"), "cpu")
    ours, entries = mla_cache.ours(p).clone(), p.cache.blocks.clone()
    assert entries.float().abs().sum(-1).count_nonzero() == tokens
    p.out.zero_()
    p.cache.blocks.zero_()
    mla_cache.composed(*mla_cache.arguments(p))
    assert (ours == p.out).double().mean() > 0.99
    assert (entries.float() == p.cache.blocks.float()).double().mean() > 0.999


@pytest.mark.parametrize("name", rms_norm_quant.FORMATS)
def test_formats_in_torch_do_the_same_work(name: str) -> None:
    p = rms_norm_quant.problem(8, 256, name, "cpu")
    codes, scale = outputs(p.ours["onepass"]())
    theirs, *their_scales = outputs(p.composed(*p.arguments))
    given = name == rms_norm_quant.STATIC
    assert codes.dtype == theirs.dtype and codes.shape == theirs.shape and len(their_scales) == (not given)
    assert (codes.view(torch.uint8) == theirs.view(torch.uint8)).double().mean() > 0.99
    assert codes.view(torch.uint8).count_nonzero() > 200
    if "scale_layout" not in rms_norm_quant.FORMATS[name] and not given:
        torch.testing.assert_close(scale.float(), their_scales[0].float(), rtol=2e-6, atol=0.0)


def test_the_gated_norm_in_torch_does_the_same_work() -> None:
    p = rms_norm_quant.gated_problem(8, 256, "cpu")
    close(p.ours["onepass"](), p.composed(*p.arguments), 0.94)


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("make", [decode_step.deepseek_problem, decode_step.minimax_problem])
def test_decode_steps_do_the_same_work(make: Any, batch: int) -> None:
    """Fused and, beyond 16 rows, unfused. The matmul rounds elsewhere, so results are compared within a tolerance."""
    torch.manual_seed(0)
    with torch.inference_mode():
        p = make(batch, "cpu")
        ours = [t.clone() for t in outputs(p.ours["onepass"]())]
        theirs = outputs(p.composed(*p.arguments))
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert (a.float() - b.float()).norm() < 0.01 * b.float().norm()


def test_bytes_are_those_of_inputs_and_outputs() -> None:
    (norm,), (fp8,) = (rows.workloads(op, (16, 64)) for op in ("rms_norm", "rms_norm_fused_fp8"))
    assert (norm.bytes, fp8.bytes) == (16 * 64 * 4 + 128, 16 * 64 * 3 + 128 + 64)
    assert gemv_norm.workloads(gemv_norm.OP, (2, 48, 64, 32))[0].bytes == (48 * 64 + 2 * 64 + 2 * 48 + 32) * 2
    assert [qk.moved(op, 8, 256, 64) for op in (qk.MEANS, qk.APPLY, qk.FUSED)] == [5184, 11584, 11520]
    assert mla_cache.moved(8, 4, mla_cache.CACHES["fp8"]) == 8 * (4 * 64 * 4 + 576 * 3) + 1024
    p = decode_step.minimax_problem(2, "cpu")
    x, residual, o, gammas, q, k, *_ = p.arguments
    moved = [x, residual, o, *gammas, q, k, *outputs(p.ours["onepass"]()), x]
    assert decode_step.minimax_bytes(2) == sum(t.numel() * t.element_size() for t in moved)


def test_shapes_that_do_not_fit_an_op_are_left_out() -> None:
    assert not rows.workloads("rms_norm", (1, 2, 3)) and not qk.workloads(qk.FUSED, (1, 2))
    assert not mla_cache.workloads(mla_cache.OP, (4, 4096)) and len(mla_cache.workloads(mla_cache.OP, (4, 16))) == 2
    assert not gemv_norm.workloads(gemv_norm.OP, (17, 64, 64)) and not gemv_norm.workloads(
        gemv_norm.OP, (1, 64, 64, 65)
    )
    assert gemv_norm.workloads(gemv_norm.OP, (1, 64, 32))[0].about == {"normed": 64}


def test_shapes_are_parsed() -> None:
    assert workload.parse_shapes("64x4096, 1X2112x7168") == [(64, 4096), (1, 2112, 7168)]
    assert [workload.parse_shapes(word) for word in ("decode", "prefill", "all")] == [None] * 3
    for wrong in ("big", "64", "64x", "0x5", "64x4096,"):
        with pytest.raises(ValueError, match="nor a shape like"):
            workload.parse_shapes(wrong)
    assert workload.wanted("decode", 128) and not workload.wanted("decode", 129)
    assert workload.wanted("prefill", 129) and workload.wanted("all", 7)


def test_clocks_of_a_gpu_are_read() -> None:
    assert gpu.parse_clocks("1980, 3201, 40, [N/A]\n") == {
        "SM MHz": 1980.0,
        "memory MHz": 3201.0,
        "temperature C": 40.0,
    }
    assert gpu.parse_clocks("") == {}


# --- peers ----------------------------------------------------------------------------------------------------------


def test_peers_are_chosen_by_parts_of_their_names() -> None:
    assert list(peers.chosen("compile,LIGER")) == ["torch.compile", "torch.compile max", "Liger-Kernel"]
    assert peers.chosen("none") == {} and peers.chosen("all") == peers.PEERS
    with pytest.raises(
        ValueError, match=r"no peer 'nonsense'; choose from torch\.compile, torch\.compile max, Liger-Kernel"
    ):
        peers.chosen("nonsense")


def test_missing_peers_are_explained() -> None:
    missing = peers.Peer("x", peers.eager, "no_such_module_anywhere")
    assert missing.why_not("cpu") == "not installed"
    assert peers.Peer("x", peers.eager, device="cuda").why_not("cpu") == "for cuda only"
    assert peers.PEERS["torch eager"].why_not("cpu") == ""


def test_a_peer_that_raises_is_reported_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(p: workload.Problem) -> workload.Call:
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setitem(peers.PEERS, "vLLM", peers.Peer("vLLM", broken))
    report = run.run(run.Plan("cpu", ("rms_norm",), "2x64", "vllm", seconds=0.02))
    assert report["peers"] == {"vLLM": "rms_norm 2x64: RuntimeError: no such kernel"}
    assert "vLLM" not in report["rows"][0]["us"]


# --- a run ----------------------------------------------------------------------------------------------------------


def test_a_plan_has_every_op_once_and_by_name() -> None:
    everything = run.Plan("cuda")
    assert everything.host and {w.op for w in everything.workloads} == {op for f in run.FAMILIES for op in f.ops}
    assert set(runner.OPS) <= {w.op for w in everything.workloads}
    keys = [(w.op, w.shape, tuple(w.about.items())) for w in everything.workloads]
    assert len(set(keys)) == len(keys)
    decode, prefill = run.Plan("cuda", shapes="decode"), run.Plan("cuda", shapes="prefill")
    assert len(decode.workloads) + len(prefill.workloads) == len(everything.workloads)
    assert max(w.shape[0] for w in decode.workloads) <= 128 < min(w.shape[0] for w in prefill.workloads)
    only = run.Plan("cpu", ("qk", "host"))
    assert only.host and {w.op for w in only.workloads} == set(qk.FAMILY.ops)
    with pytest.raises(
        ValueError,
        match=f"no op 'nonsense'; choose from {', '.join(family.name for family in run.FAMILIES)}, host, rms_norm",
    ):
        run.Plan("cpu", ("nonsense",))
    with pytest.raises(
        ValueError, match="supports the shape 4x4x4x4x4; supported: rms_norm, layer_norm: MxN; qk: MxNqxNk"
    ):
        run.Plan("cpu", ("layer_norm", "qk", "rms_norm"), "4x4x4x4x4")
    with pytest.raises(ValueError) as refused:
        run.Plan("cpu", shapes="4x4x4x4x4")
    assert all(f"{family.name}: {family.form}" in str(refused.value) for family in run.FAMILIES)


def test_a_run_continues_an_earlier_one() -> None:
    """Existing rows stay, new ones are added; results of another machine are rejected."""
    first = run.run(run.Plan("cpu", ("rms_norm",), "4x64", "none", seconds=0.02))
    kept = json.loads(json.dumps(first))
    plan = run.Plan("cpu", ("rms_norm", qk.MEANS), "4x64,8x64,4x64x32", "eager", seconds=0.02)
    second = run.run(plan, before=json.loads(json.dumps(first)))
    assert [(row["op"], row["shape"]) for row in second["rows"]] == [
        ("rms_norm", [4, 64]),
        ("rms_norm", [8, 64]),
        (qk.MEANS, [4, 64, 32]),
    ]
    assert second["rows"][0] == kept["rows"][0] and set(second["checks"]) == {"rms_norm", qk.MEANS}
    assert "torch eager" in second["rows"][1]["us"] and len(plan.workloads) == 3
    with pytest.raises(ValueError, match="have a different machine: Z80"):
        run.run(plan, before={**kept, "machine": "Z80"})


def test_rows_of_several_sessions_are_distinguished_and_ordered() -> None:
    """A residual or groups make a different row of the same shape."""
    planned = [run._about(w) for w in run.Plan("cuda").workloads]
    assert len({run._key(row) for row in planned}) == len(planned)
    report: dict[str, Any] = {"device": "cuda", "rows": [{**row, "us": {}} for row in reversed(planned)]}
    run.in_order(report)
    assert [run._key(row) for row in report["rows"]] == [run._key(row) for row in planned]


def test_checks_before_speed_cover_every_op_and_group() -> None:
    for op in runner.OPS:
        cases = run.cases(op)
        assert len(cases) >= 6 and all(case.op == op for case in cases)
        assert len({case.group for case in cases}) == len(cases)


@pytest.mark.full  # test_bench_compares_with_a_baseline runs the command too
def test_bench_command(tmp_path: Path) -> None:
    """Two ops at one shape: one row each with two medians, the table, the file and the page."""
    file, html = tmp_path / "bench.json", tmp_path / "bench.html"
    arguments = ("--op", "rms_norm", "--op", gemv_norm.OP, "--shapes", "4x256,2x64x128", "--peers", "eager,f.rms,liger")
    result = bench(*arguments, "--json", str(file), "--html", str(html))
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["device"] == "cpu" and report["threads"] and report["torch"] == torch.__version__
    assert report["peers"] == {"torch eager": "", "F.rms_norm": "", "Liger-Kernel": "for cuda only"}
    assert report["refused"] == {} and min(report["checks"].values()) >= 6 and "host_us" not in report
    assert [(row["op"], row["shape"]) for row in report["rows"]] == [
        ("rms_norm", [4, 256]),
        (gemv_norm.OP, [2, 64, 128]),
    ]
    norm, product = (row["us"] for row in report["rows"])
    assert set(norm) == {"memory stream", "onepass", "torch eager", "F.rms_norm"}
    assert set(product) == {"memory stream", "onepass", "norm, then onepass", "linear, then rms_norm", "torch eager"}
    assert all(len(us) == 2 and min(us) > 0 for row in report["rows"] for us in row["us"].values())
    assert "4 x 256" in result.output and "left out: Liger-Kernel (for cuda only)" in result.output
    assert f"{min(norm['onepass']):.2f}" in result.output and html.read_text().startswith("<!DOCTYPE html>")


def test_bench_compares_with_a_baseline(tmp_path: Path) -> None:
    """A baseline of eleven days per call: any machine is faster."""
    report = run.run(run.Plan("cpu", ("rms_norm",), "4x256", "none", seconds=0.02))
    report["rows"][0]["us"]["onepass"] = [1e12, 1.001e12]
    del report["rows"][0]["us"]["memory stream"]
    results.write(report, tmp_path / "old.json")
    result = bench("--op", "rms_norm", "--shapes", "4x256", "--peers", "none", "--baseline", str(tmp_path / "old.json"))
    assert result.exit_code == 0, result.output
    assert "faster" in result.output and "0 of 1 rows are the same" in result.output


@pytest.fixture
def wrong_norms() -> Iterator[None]:
    """Row kernels that write zeros; other families are unchanged."""
    from importlib import import_module

    def zeros(call: Any) -> None:
        for tensor in (call.norm, call.codes, call.scale, call.new_residual):
            if tensor is not None:
                tensor.view(torch.uint8).zero_()

    def choose(family: str) -> Any:
        return zeros if family == "rms_norm" else import_module(f"onepass.ops.{family}.cpu").launch

    with launching_with(choose):
        yield


def test_an_op_that_fails_a_check_is_not_measured(wrong_norms: None, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = bench(
        "--op", "rms_norm", "--op", qk.MEANS, "--shapes", "4x256,4x64x32", "--peers", "none", "--json", str(file)
    )
    assert result.exit_code == 1
    assert "refused rms_norm: short: 5x" in result.output
    report = json.loads(file.read_text())
    assert list(report["refused"]) == ["rms_norm"] and "out of bounds" in report["refused"]["rms_norm"]
    assert [row["op"] for row in report["rows"]] == [qk.MEANS]


def test_a_decode_step_is_refused_with_any_of_its_ops(wrong_norms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(decode_step.NEEDS[decode_step.DEEPSEEK]) == {
        "rms_norm",
        "rms_norm_fused_fp8",
        gemv_norm.OP,
        mla_cache.OP,
    }
    report = run.run(run.Plan("cpu", (decode_step.MINIMAX,), peers="none", seconds=0.02))
    assert report["rows"] == [] and set(report["refused"]) == {"rms_norm_fused_fp8"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "nonsense"), "no op 'nonsense'"),
        (("--peers", "nonsense"), "no peer 'nonsense'"),
        (("--shapes", "big"), "'big' is neither decode"),
        (("--op", "rms_norm", "--shapes", "1x2x3"), "supports the shape 1x2x3; supported: rms_norm: MxN"),
        (("--json", "/nonexistent/file"), "there is no directory"),
        (("--baseline", "/nonexistent/file"), "No such file"),
        (("--baseline", str(ROOT / "Makefile")), "is not a result file"),
        (("--device", "tpu"), "neither cpu nor cuda"),
    ],
)
def test_bench_usage_errors_are_friendly(arguments: tuple[str, ...], message: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output


BARE = """
import sys
sys.modules["rich"] = None
sys.argv = ["bench", "--device", "cpu", "--only", "rms_norm", "--shapes", "2x64", "--peers", "none", "--json", sys.argv[1]]
import runpy
runpy.run_module("tools.bench", run_name="__main__")
"""


def test_tools_bench_runs_without_rich(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", BARE, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 x 64" in done.stdout and json.loads(file.read_text())["rows"][0]["shape"] == [2, 64]


# --- host time ------------------------------------------------------------------------------------------------------


def test_host_times_cover_every_op_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ROUNDS", 4)
    monkeypatch.setattr(host, "INNER", 2)
    with torch.inference_mode():
        found = host.times("cpu", lambda op: op == "qk_rms_norm")
    ours = set(runner.OPS) - {"qk_rms_norm", qk.SUMS} | set(host.forms("cpu", 64))
    ours |= {f"{name}, 64 columns" for name in ours if name.startswith("rms_norm, ")}
    assert set(found) == {*host.TORCH, *ours, *(f"{op}, no kernel" for op in ours)}
    assert all(len(us) == 2 and min(us) > 0 for us in found.values())


def test_moved_bytes() -> None:
    assert workload.moved_bytes([torch.empty(3, 8, dtype=torch.bfloat16), None, torch.empty(8)]) == 48 + 32
