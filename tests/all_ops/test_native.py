"""Every form that engines use is repeated in C on a CPU: counted, not timed. And it is what Python does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from benchmarks.suite import host
from onepass.core import build, native
from onepass.core import op as registration
from onepass.testing.tensors import same_bytes
from tools.fuzz import cases
from tools.fuzz.cases import OPS, numbered
from tools.fuzz.paths import compared

pytest.importorskip("llvmlite")

ROOT = Path(__file__).parents[2]
built = pytest.mark.skipif(native.describe() != "on", reason=f"the extension: {native.describe()}")


def counts() -> dict[str, int]:
    """Hits, misses and refusals of all ops."""
    found = {"hits": 0, "misses": 0, "refused": 0}
    for op in registration.ops:
        if op.table is not None:
            found = {name: count + op.table.counts()[name] for name, count in found.items()}
    return found


def missed(call: Callable[[], Any], times: int = 5) -> int:
    """How many of several calls were not repeated in C, after two by which it learns them."""
    call()
    call()
    before = counts()
    for _ in range(times):
        call()
    after = counts()
    assert after["hits"] - before["hits"] <= times, "one launch per call"
    return times - (after["hits"] - before["hits"])


def one_row(n: int) -> Tensor:
    return torch.randn(1, n).bfloat16()


FORMS = [name for name in host.contenders("cpu") if name not in host.TORCH]


@built
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad mode"])
def test_every_form_of_the_bench(grad: bool) -> None:
    calls = host.contenders("cpu")
    with torch.inference_mode(not grad):
        assert {name: missed(calls[name]) for name in FORMS} == dict.fromkeys(FORMS, 0)


def _layers() -> dict[str, Callable[[], Any]]:
    """Forms of other ops and modules, with tensors that are made anew at every call."""
    weight, gamma = torch.randn(96, 64).bfloat16(), torch.randn(64).bfloat16()
    scale = torch.rand(96, 1)
    codes = (torch.randn(96, 64) * 8).to(torch.float8_e4m3fn)
    linear = onepass.nn.Linear(64, 96, dtype=torch.bfloat16).requires_grad_(False)
    norm = onepass.nn.RMSNorm(64, dtype=torch.bfloat16).requires_grad_(False)
    packed = torch.randn(4, 3 * 64).bfloat16()
    levels = torch.randn(2, 3, 4, 5, 64).bfloat16().permute(3, 1, 0, 2, 4)
    return {
        "rows of a wider tensor": lambda: onepass.rms_norm(packed[:, 64:128], gamma),
        "rows of no single stride": lambda: onepass.rms_norm(levels, gamma),
        "one dimension": lambda: onepass.rms_norm(torch.randn(64).bfloat16(), gamma),
        "in place, a slice": lambda: onepass.rms_norm(packed[:, :64], gamma, out=packed[:, :64]),
        "fp8, static scale": lambda: onepass.rms_norm_fused_fp8(one_row(64), gamma, static_scale=torch.ones(1)),
        "fp8, groups": lambda: onepass.rms_norm_fused_fp8(one_row(64), gamma, group_size=64, scale_layout="column"),
        "linear": lambda: onepass.linear(one_row(64), weight),
        "linear, 3 dimensions": lambda: onepass.linear(one_row(64).view(1, 1, 64), weight),
        "linear, all": lambda: onepass.linear(
            one_row(64), weight, gamma=gamma, residual=one_row(64), activation="silu_mul", add=one_row(48)
        ),
        "linear, scale per row": lambda: onepass.linear(one_row(64), codes, weight_scale=scale),
        "linear, many rows": lambda: onepass.linear(torch.randn(40, 64).bfloat16(), weight),
        "nn.Linear": lambda: linear(one_row(64)),
        "nn.Linear with a norm": lambda: linear(one_row(64), norm=norm),
        "q and k of a packed projection": lambda: onepass.qk_rms_norm(packed[:, :64], packed[:, 64:128], gamma, gamma),
    }


@built
def test_other_forms() -> None:
    with torch.inference_mode():
        calls = _layers()
        assert {name: missed(call) for name, call in calls.items()} == dict.fromkeys(calls, 0)


@built
def test_threads_are_part_of_a_call() -> None:
    """A call with many rows is shared by torch's threads; another number of them is another call."""
    x, gamma = torch.randn(128, 4096), torch.ones(4096)
    expected = onepass.rms_norm(x, gamma)
    before = torch.get_num_threads()
    try:
        for number in (2, 1, 3):
            torch.set_num_threads(number)
            assert missed(lambda: onepass.rms_norm(x, gamma)) == 0
            assert same_bytes(onepass.rms_norm(x, gamma), expected)
    finally:
        torch.set_num_threads(before)


@built
@pytest.mark.parametrize(("calls", "configurations"), [(80, 1), pytest.param(220, 2, marks=pytest.mark.full)])
def test_paths_agree_over_the_fuzzers_calls(calls: int, configurations: int) -> None:
    with compared() as tally:
        for index in range(calls):
            case = numbered(31, index, tuple(OPS), configurations, False)
            assert case is not None and cases.run(case, "cpu") is None, case
            assert not tally.wrong, case
    valid = tally.calls.total() - tally.errors
    ops = set(OPS) - {"rms_norm_fused_fp8"}  # an alias
    assert set(tally.calls) >= ops and tally.repeated.total() > 0.75 * valid and tally.errors > 0.25 * valid


@built
def test_paths_agree_on_errors() -> None:
    """After a call is known, calls that are invalid raise as they do in Python."""
    x, gamma = torch.randn(2, 64), torch.ones(64)
    bad: list[Callable[[], Any]] = [
        lambda: onepass.rms_norm(x, gamma[:63]),
        lambda: onepass.rms_norm(x, gamma.double()),
        lambda: onepass.rms_norm(x.t(), gamma),
        lambda: onepass.rms_norm(x, gamma, -1.0),
        lambda: onepass.rms_norm(x, gamma, rounding="twice"),  # type: ignore[call-overload]
        lambda: onepass.rms_norm(x, gamma, out=x[:, :63]),
        lambda: onepass.rms_norm(x, gamma, out=torch.empty(2 * 64 + 1)[1:].view(2, 64).expand(2, 64)[:1]),
        lambda: onepass.rms_norm(x, gamma, out=x.view(-1).as_strided((2, 64), (32, 1))),
        lambda: onepass.rms_norm(x.clone().requires_grad_(), gamma),
        lambda: onepass.rms_norm(x, torch.ones(64, device="meta")),
        lambda: onepass.rms_norm(x.numpy(), gamma),  # type: ignore[call-overload]
    ]
    with compared() as tally:
        for call in bad:
            onepass.rms_norm(x, gamma)
            with pytest.raises((onepass.ContractError, onepass.Unsupported)):
                call()
    assert not tally.wrong and tally.errors >= len(bad) - 2 and tally.repeated["rms_norm"] >= len(bad)


@built
def test_threads_at_once() -> None:
    """Threads repeat the same calls at the same time, with scratch memory of their own."""
    gamma = torch.randn(512)
    inputs = [torch.randn(4, 512) for _ in range(4)]
    expected = [onepass.rms_norm(x, gamma, residual=x) for x in inputs]
    wrong: list[int] = []
    start = threading.Barrier(4, timeout=600)

    def work(me: int) -> None:
        start.wait()
        for _ in range(300):
            results = onepass.rms_norm(inputs[me], gamma, residual=inputs[me])
            if not all(torch.equal(a, b) for a, b in zip(results, expected[me], strict=True)):
                wrong.append(me)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not wrong


_FORK = """
import os, sys, torch, onepass
torch.set_num_threads(2)
x, gamma = torch.randn(128, 4096), torch.ones(4096)
small = x[:1].clone()
for _ in range(4):
    expected, one = onepass.rms_norm(x, gamma), onepass.rms_norm(small, gamma)
def same(a, b):
    return bytes(a.numpy()) == bytes(b.numpy())  # torch itself would wait for the team in a child
child = os.fork()
if not child:
    many = all(same(onepass.rms_norm(x, gamma), expected) for _ in range(4))
    os._exit(0 if many and all(same(onepass.rms_norm(small, gamma), one) for _ in range(4)) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not same(onepass.rms_norm(x, gamma), expected))
"""

_GROWTH = """
import json, resource, torch, onepass
from onepass.core import op as registration
weights = [torch.ones(n) for n in range(1, 65)]
memory = torch.randn(2048 * 64)
def calls(count):
    for i in range(count):
        n = 1 + i % 64
        onepass.rms_norm(memory[: (1 + i // 64 % 2000) * n].view(-1, n), weights[n - 1])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
calls(10_000)
before = peak()
calls(COUNT)
entries = max(op.table.counts()["entries"] for op in registration.ops if op.table is not None)
print(json.dumps({"grown": peak() - before, "entries": entries}))
"""


def run(code: str, **environment: str) -> str:
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@built
def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    run(_FORK)


@built
def test_changing_shapes_do_not_grow_memory() -> None:
    found = json.loads(run(_GROWTH.replace("COUNT", "20_000")))
    assert found["entries"] <= 4096 and found["grown"] < 16 * 1024, found


@pytest.mark.full  # 250,000 calls; 20,000 stay
@built
def test_many_calls_with_changing_shapes_do_not_grow_memory() -> None:
    """A leak of 17 bytes per call would fail this."""
    found = json.loads(run(_GROWTH.replace("COUNT", "250_000")))
    assert found["entries"] <= 4096 and found["grown"] < 4 * 1024, found


def test_python_does_without_the_extension() -> None:
    code = """
import torch, onepass
from onepass.core import native
x, gamma = torch.tensor([[3.0, 4.0]]), torch.ones(2)
for _ in range(4):
    y = onepass.rms_norm(x, gamma, eps=0.0)
print(native.describe(), torch.equal(y, torch.tensor([[3.0, 4.0]]) / 12.5**0.5))
"""
    assert run(code, ONEPASS_NATIVE="0") == "off (ONEPASS_NATIVE=0) True\n"
    blocked = "import sys; sys.modules['onepass.core._native'] = None\n" + code
    told = run(blocked)
    assert told.startswith("not built") and told.endswith("True\n")


_STALE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("onepass.core._native", PATH)
module = sys.modules["onepass.core._native"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import torch, onepass
from onepass.__main__ import main
y = onepass.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
print(module.SOURCES, torch.equal(y, torch.tensor([[3.0, 4.0]]) / 12.5**0.5))
main(["env"])
"""


def test_it_is_built_and_builds(tmp_path: Path) -> None:
    """Where a compiler and Python's headers are, the extension is built, and its sources have no warnings.

    One that was built from other sources is not used.
    """
    target = tmp_path / build.NAME
    try:
        build.build(target, "-Werror", "-O0", "-USOURCES_DIGEST", '-DSOURCES_DIGEST="older"')
    except FileNotFoundError as error:
        pytest.skip(f"nothing to build with: {error}")
    assert target.exists()
    if os.environ.get("ONEPASS_NATIVE") != "0":
        assert native.describe() == "on", "run `make native`"
        told = " ".join(run(_STALE.replace("PATH", repr(str(target))), COLUMNS="200").split())
        assert told.startswith("older True") and "compiled fast path: not used: it was built from other sources" in told


@pytest.mark.parametrize("module", [SimpleNamespace(), SimpleNamespace(SOURCES="older"), SimpleNamespace(SOURCES="")])
def test_an_extension_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Nothing of it is called, so that a difference of its functions raises nothing."""
    monkeypatch.delenv("ONEPASS_NATIVE", raising=False)
    monkeypatch.setattr(native, "_native", module)
    found, why = native._load.__wrapped__()
    assert found is None and why.startswith("not used: it was built from other sources")


def test_in_place_rows_may_have_other_strides_of_single_rows() -> None:
    """They are the same memory, so both paths accept them. With two rows they are not."""
    gamma = torch.randn(64)
    for rows in (1, 2):
        for _ in range(4):
            wide = torch.randn(rows, 192)
            x, out = wide[:, :64], wide.view(-1).as_strided((rows, 64), (64, 1))
            expected = onepass.rms_norm(x.clone(), gamma)
            if rows == 1:
                assert onepass.rms_norm(x, gamma, out=out) is out and torch.equal(out, expected)
            else:
                with pytest.raises(onepass.ContractError, match="`out` must not overlap `x`"):
                    onepass.rms_norm(x, gamma, out=out)
