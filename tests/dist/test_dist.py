"""Sharded norms on real ranks: processes of a Gloo group on this machine, each with a deadline."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist import workers as dist_workers
from tools.dist import __main__ as checks
from tools.dist.cases import CHECKS, UNIT, agreement, depth
from tools.dist.compiled import COMPILED
from tools.dist.ranks import launch

ROOT = Path(__file__).parents[2]
SIZES = (1, 2, 3, 4)

Found = Callable[[int | str], list[dict[str, Any]]]

PATIENT: dict[str, Any] = {"seconds": 900, "collective_seconds": 300}
"""Time limits that only a hanging rank reaches, however busy the machine is."""


@pytest.fixture(scope="session")
def found(run_folder: Path) -> Found:
    """The results of `dist_workers.everything` on a number of ranks, by rank, or those of "compiled" on two.

    Parallel tests share one run.
    """

    def run(size: int | str) -> list[dict[str, Any]]:
        known = run_folder / f"ranks-{size}.json"
        with open(known.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not known.exists():
                if isinstance(size, str):
                    names = [*COMPILED]
                    reports = launch(dist_workers.compiled, 2, names, **PATIENT)
                else:
                    names = [*CHECKS]
                    reports = launch(dist_workers.everything, size, names, **PATIENT)
                # a rank without a report failed everything
                failed = [{"checks": dict.fromkeys(names, r.error), "work": {}, "error": r.error} for r in reports]
                known.write_text(json.dumps([r.value or no for r, no in zip(reports, failed, strict=True)]))
        read: list[dict[str, Any]] = json.loads(known.read_text())
        return read

    return run


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("size", [pytest.param(size, marks=[pytest.mark.full] if size != 2 else []) for size in SIZES])
def test_check(found: Found, size: int, name: str) -> None:
    assert [of_rank["checks"][name] for of_rank in found(size)] == [""] * size


@pytest.mark.full  # qk_norm/test_op.py compiles the op without ranks
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(found: Found, name: str) -> None:
    assert [of_rank["checks"][name] for of_rank in found("compiled")] == ["", ""]


def values(ranks: list[dict[str, Any]], work: Callable[..., Any]) -> list[Any]:
    """What ``work`` returned on each rank."""
    outcomes = [of_rank["work"].get(work.__name__, of_rank) for of_rank in ranks]
    assert [outcome["error"] for outcome in outcomes] == [""] * len(ranks)
    return [outcome["value"] for outcome in outcomes]


def test_bad_calls_raise_on_every_rank(found: Found) -> None:
    expected = {
        "no group": "dist.qk_rms_norm: `group` must be a ProcessGroup .*, got None",
        "group": "dist.qk_rms_norm: `group` must be a ProcessGroup .*, got 'tp'",
        "mesh": "`group` must be .* a 1-D DeviceMesh .*, got a mesh of 2 dimensions",
        "plan": r"`plan` must be for the widths \(32, 32\), got one for \(64, 32\)",
        "both": "`counts` must be left out with `plan`, got both",
        "replicas": "`kv_replicas` must divide the group's 2 ranks, got 3",
        "counts": r"`counts` must hold 2 column counts, each at least this rank's \(64, 32\), got \(10, 64\)",
        "too wide": r"`q` must have at most 2\*\*24 columns in total, got 16777217",
        "gamma": r"`gamma_q` must have shape .*, got \[5\]",
        "out": r"`out` must be \(q_out, k_out\), got a tensor \[2, 64\]",
        "codes": "`q_scale` must be given for fp8 results, got None",
        "out dtype": "`out_dtype` must be that of `out`, or None, got bfloat16",
        "ranks' replicas": "dist.plan: `kv_replicas` must be the same on all ranks .*, got 2 on rank 1 and 1 on rank 0",
        "copies": "`k` must have the same number of columns on ranks that hold copies of it, got 9 on rank 1 and 8 on rank 0",
        "tensors": "all ranks of the group must norm the same number of tensors, got 2 on rank 1 and 1 on rank 0",
        "placement": "`q` must be a DTensor sharded on its last dimension, got placements",
        "mixture": "`k` must be a DTensor if and only if `q` is, got a Tensor",
        "other mixture": "`k` must be a DTensor if and only if `q` is, got a DTensor",
        "per head": "`per_head` must be left out with DTensors, got True",
        "no gamma": r"dist.rms_norm: `gamma` must be a tensor \[columns\], got None",
    }
    for of_rank in values(found(2), dist_workers.refused):
        assert set(of_rank) == set(expected)
        for name, seen in of_rank.items():
            assert seen["type"] == "ContractError", name
            assert re.search(expected[name], seen["message"]), seen["message"]


def test_debug_names_the_rank_that_differs(found: Found) -> None:
    for of_rank in values(found(2), dist_workers.debugged):
        assert of_rank["good"]
        assert of_rank["shape"]["type"] == of_rank["mixed"]["type"] == "ContractError"
        assert "must be the same on all ranks of the group, got [5] on rank 1 and [6]" in of_rank["shape"]["message"]
        assert "`reproducible` must be the same" in of_rank["mixed"]["message"]


@pytest.mark.parametrize("gather", [False, pytest.param(True, marks=pytest.mark.full)])
def test_killed_rank(gather: bool) -> None:
    left, gone = launch(dist_workers.killed, 2, gather, **PATIENT)
    assert gone.exit_code == -9 and gone.value is None
    assert left.value["type"] == "RuntimeError" and left.value["cause"] == "RuntimeError"
    assert "onepass.dist.qk_rms_norm: the collective over group '0' (gloo, ranks 0, 1) failed" in left.value["message"]
    assert left.value["untouched"] and "Timed out" not in left.value["message"]


def test_time_out(tmp_path: Path) -> None:
    waiting, _ = launch(dist_workers.late, 2, str(tmp_path / "signal"), **PATIENT)
    assert waiting.value["type"] == "RuntimeError" and waiting.value["untouched"]
    assert "onepass.dist.qk_rms_norm" in waiting.value["message"] and "Timed out" in waiting.value["message"]
    assert waiting.value["seconds"] > 0.9


@pytest.mark.full  # the ranks of the other tests end
def test_deadline_ends_ranks_that_hang() -> None:
    """A rank that was not killed would sleep, return, and have exit code 0."""
    reports = launch(dist_workers.hung, 2, seconds=4)
    assert reports[1].exit_code is None and reports[1].error == "it left no report"


@pytest.mark.full  # compiles on two ranks, as test_compiled
def test_compiling_never_exchanges(found: Found) -> None:
    for of_rank in values(found("compiled"), dist_workers.compiled_without_plan):
        assert "`group` must have a plan for these widths before it is compiled" in of_rank["message"]


@pytest.mark.full  # test_check makes the same calls
def test_gathering_by_adding_gives_the_same_bytes(found: Found) -> None:
    assert values(found(3), dist_workers.gathered_by_adding) == [[["all_reduce"], True]] * 3


def test_options_reach_the_op(found: Found) -> None:
    assert values(found(2), dist_workers.passed_on) == [[], []]


@pytest.mark.full  # needs four ranks, test_check has two
def test_agreement_is_within_the_bound_and_not_far_below(found: Found) -> None:
    """The bound of docs/scaling.md holds, and is not so wide that it would hide a mistake."""
    parts = [part for of_rank in values(found(4), dist_workers.agreement_of_sizes) for part in of_rank]
    assert 0.01 < max(parts) < 1


def test_the_bound_is_documented() -> None:
    text = (ROOT / "docs/scaling.md").read_text()
    assert "d(N) = 39 + ceil(N / 1024)" in text and depth(6144) == 45 and depth(1) == 40
    assert agreement(6144, 8) == ((45 + 7) / 2 + 7) * UNIT
    assert f"{agreement(6144, 1, 8):.1e}" in text


def estimate(ranks: int, hosts: int, rows: int) -> tuple[float, float, float]:
    """The formulas of docs/notebook/scaling.md in microseconds: all-reduce, reproducible, gathering q and k."""
    speed = 450e3 if hosts == 1 else 50e3
    slower = 1.8 if hosts > 1 else 1.0
    ring = 3.6 + 2 * (ranks - hosts) * 0.47 * slower + 2 * (hosts - 1) * 2.7
    tree = 4.4 + 2 * ((ranks // hosts - 1) * 0.52 * slower + math.log2(hosts) * 5.0)
    gather = 3.6 + (ranks - hosts) * 0.47 * slower + (hosts - 1) * 2.7
    reduced = min(ring, tree) + 2 * (ranks - 1) / ranks * 8 * rows / (speed / 4)
    reproducible = gather + (ranks - 1) * 8 * rows / (speed / 4)
    return reduced, reproducible, gather + (ranks - 1) / ranks * 14336 * rows / speed


def test_the_cost_table_follows_from_its_formulas() -> None:
    text = (ROOT / "docs/notebook/scaling.md").read_text()
    body = text[text.index("| ranks | hosts |") : text.index("## What it costs: measured")]
    lines = [line for line in body.splitlines() if line.startswith("| ")][1:]
    assert len(lines) == 12
    for line in ([cell.strip() for cell in row.split("|")[1:-1]] for row in lines):
        one, many = (estimate(int(line[0]), int(line[1]), rows) for rows in (1, 8192))
        expected = [f"{us:.1f}" for us in (one[0], one[1], many[0], many[1])] + [f"{many[2]:.0f}"]
        assert line[2:] == expected


def test_the_measured_table_matches_the_record() -> None:
    text = (ROOT / "docs/notebook/scaling.md").read_text()
    record = json.loads((ROOT / "benchmarks/cpu/dist.json").read_text())
    assert record["passed"] and record["ranks"] == 2 and record["date"] in text
    for line in record["times_us"]:
        assert "| " + " | ".join(str(round(value)) for value in line.values()) + " |" in text


@pytest.mark.full  # test_check has the same norms
def test_olmo2_attention_of_transformers(found: Found) -> None:
    for of_rank in values(found("compiled"), dist_workers.olmo2):
        for name, seen in of_rank.items():
            assert seen["apart"] < 2e-6 * seen["scale"], name
        assert of_rank["two norms"]["collectives"] == ["all_reduce"] * 3  # q_norm, k_norm, o_proj
        assert of_rank["one collective"]["collectives"] == ["all_reduce"] * 2
        assert of_rank["reproducible"]["collectives"] == ["all_gather_into_tensor", "all_reduce"]
        for name in ("two norms", "one collective", "reproducible"):
            assert of_rank[name]["weight"] == [64]
            assert of_rank[name]["steady"] and of_rank[name]["alone"] is None


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.full  # starts torchrun twice
def test_two_hosts_under_torchrun() -> None:
    """Two torchruns that connect over the network, as on two hosts, with one rank each."""
    port = free_port()
    run = "torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id onepass"
    rendezvous = f"--rdzv-endpoint 127.0.0.1:{port} --rdzv-conf timeout=600,join_timeout=600 --local-addr 127.0.0.1"
    work = "-m tools.dist.__main__ --no-times --match un"  # equals_unsharded and unequal_shards
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", *f"{run} {rendezvous} --node-rank {node} {work}".split()],
            **pipes,
            env=environment(),
            cwd=ROOT,
        )
        for node in range(2)
    ]
    try:
        outputs = [host.communicate(timeout=900)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait(600)
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert "PASS: 2 of 2 checks on 2 ranks (gloo, cpu)" in "".join(outputs)


@pytest.mark.full  # test_check makes the same calls
def test_command(tmp_path: Path) -> None:
    result = tmp_path / "dist.json"
    command = [sys.executable, "-m", "tools.dist.__main__", "--ranks", "2", "--no-times", "--json", str(result)]
    done = subprocess.run(
        [*command, "--match", "special"], capture_output=True, text=True, env=environment(), timeout=900, check=False
    )
    assert done.returncode == 0 and "PASS: 1 of 1 checks on 2 ranks" in done.stdout, done.stdout + done.stderr
    assert '"passed": true' in result.read_text()


def test_a_failing_check_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(device="cpu", json=None)
    ranks = [{"checks": {"a": "", "b": ""}, "times": []}, {"checks": {"a": "", "b": "wrong by 1"}, "times": []}]
    assert checks._tell(options, "gloo", ranks) == 1
    output = capsys.readouterr().out
    assert all(line in output for line in ("pass a", "FAIL b", "rank 1: wrong by 1", "FAIL: 1 of 2"))
    assert checks._tell(options, "gloo", ranks[:1], {"rank 1": "it left no report"}, 2) == 1
    assert checks._tell(options, "gloo", [{"checks": {}, "times": []}]) == 1
    assert "FAIL: 0 of 0" in capsys.readouterr().out


@pytest.mark.full  # test_check makes the same calls
def test_times_are_measured(found: Found) -> None:
    rows = values(found("compiled"), dist_workers.time_one_row)
    assert set(rows[0][0]) == {"rows", "local", "all_reduce", "call", "reproducible", "gather_projections"}
    assert all(us > 0 for us in rows[0][0].values()) and rows[0] == rows[1]
