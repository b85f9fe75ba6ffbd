"""A small soak test: it reports nothing if nothing is wrong, and every kind of injected fault."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.core import op as registration
from onepass.core.op import MAX_REMEMBERED
from onepass.models.forwards import attention, latent, norm
from tools.soak import __main__ as soak
from tools.soak import layer as ops
from tools.soak import watch
from tools.soak.batch import Churn
from tools.soak.layer import Layer
from tools.soak.watch import GROWTH, Reading, Watch

pytest.importorskip("transformers")

from tools.soak.models import CLOSE, FAMILIES, Model

WRITE = "fused_rope_rmsnorm_quantization"
QUIET = Reading(10**9, 10**6, 6, 2, 0, 0, 5, 300)


@pytest.fixture(autouse=True)
def alone() -> Any:
    """One thread, as in a run: steps are too small to split."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def rounds(count: int) -> Callable[[], float]:
    """Progress by rounds, not by time."""
    done = iter(range(count))
    return lambda: next(done, count) / count


def warmed(engine: soak.Engine, steps: int = 3) -> soak.Engine:
    """An engine that has found nothing wrong so far."""
    for _ in range(steps):
        assert engine.step(True) == []
    return engine


# --- nothing is wrong -----------------------------------------------------------------------------------------------


def test_a_short_run() -> None:
    running = soak.engines(1, "cpu")
    run = soak.Soak(running, "cpu", 1, Watch("cpu", lambda device: QUIET))
    lines: list[str] = []
    run.run(rounds(30), every=0, say=lines.append)
    report = run.report()
    assert report["faults"] == [] and len(lines) == 30
    assert set(report["steps"]) == {"ops", "Llama", "Qwen3", "OLMo-2", "DeepSeek-V3"}
    assert all(steps == 30 for steps in report["steps"].values()) and min(report["compared"].values()) > 2
    assert report["requests"]["served"] > 20 and report["requests"]["cancelled"] > 0
    assert report["steps_at_fixed_addresses"] > 0 and report["tokens"] > 800
    for name, worst in report["largest_difference_of_logits"].items():
        assert 0 < worst < CLOSE / 4, name
    assert all(len(medians) == 4 for medians in report["median_step_us_by_quarter"].values())
    assert "0 faults" in soak._table(report)


def test_a_seed_determines_the_run() -> None:
    first, second, other = (Layer(seed, "cpu") for seed in (3, 3, 4))
    for engine in (first, second, other):
        assert [engine.step(turn % 8 == 0) for turn in range(25)] == [[]] * 25
    for name, pool in first.pools.items():
        assert torch.equal(pool.memory, second.pools[name].memory)
        assert not torch.equal(pool.memory, other.pools[name].memory)
    assert first.replayed == second.replayed > 0


def test_pages_have_one_owner() -> None:
    churn = Churn("0", 10, 40)
    owners: dict[int, set[int]] = {}
    for _ in range(600):
        churn.release(churn.leaving())
        for request, new in churn.plan():
            request.length += new
            assert len(request.pages) * 4 >= request.length > (len(request.pages) - 1) * 4
            for page in request.pages:
                owners.setdefault(page, set()).add(request.number)
        assert sorted(churn.free + [p for r in churn.active for p in r.pages]) == list(range(40))
    assert churn.served > 100 and churn.cancelled > 10 and churn.evicted > 10
    assert all(len(owner) > 10 for owner in owners.values()) and len(owners) == 40


# --- faults that must be noticed ------------------------------------------------------------------------------------


def test_a_changed_byte_of_an_unused_page_is_detected() -> None:
    engine = Layer(0, "cpu")
    warmed(engine)
    pool = engine.pools["bf16"]
    pool.memory[engine.churn.free.pop(), 2, 17] ^= 1
    found = [fault for _ in range(3) for fault in engine.step(True)]
    assert len(found) == 1 and found[0].startswith("bf16: 1 bytes changed in entries that must not be written")


def test_a_byte_written_behind_an_entry_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by the op, behind the entries that it may write."""
    engine = Layer(0, "cpu")
    warmed(engine)
    write = getattr(ops, WRITE)

    def spilling(*arguments: Any, **options: Any) -> Any:
        offsets, cache = arguments[3], arguments[6]
        if cache.blocks.dtype == torch.bfloat16:
            engine.pools["bf16"].memory.view(-1, 352)[int(cache.slot_mapping(offsets)[0]), 330] ^= 8
        return write(*arguments, **options)

    monkeypatch.setattr(ops, WRITE, spilling)
    assert engine.step(True) == ["bf16: 1 bytes changed between entries"]


def spoil(value: Any) -> Any:
    """The result with its first value a hundredth off, or one code on."""
    first, *rest = value if isinstance(value, tuple) else (value,)
    if first.element_size() == 1:
        first.view(torch.uint8).view(-1)[0] ^= 2
    else:
        first.view(-1)[0] = first.view(-1)[0] * 1.01 + 0.01
    return (first, *rest) if rest else first


@pytest.mark.parametrize(
    ("op", "named"),
    [
        ("rms_norm", "rms_norm: 1 of"),
        ("gemv_and_partial_norm", "gemv, normed: 1 of"),
        ("fused_rope_rmsnorm_quantization", "cache write, fp8, a scale each: q: 1 of"),
        ("qk_rms_norm", "qk_rms_norm, q: 1 of"),
        ("rms_norm_fused_fp8", "rms_norm_fused_fp8: 1 of"),
    ],
)
def test_one_wrong_value_of_an_op_is_detected(op: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Layer(2, "cpu")
    warmed(engine)
    right = getattr(ops, op)
    monkeypatch.setattr(ops, op, lambda *a, **k: spoil(right(*a, **k)))
    found = [fault for _ in range(4) for fault in engine.step(True)]  # a step of many tokens has no GEMV
    assert any(fault.startswith(named) for fault in found), found


def test_a_wrong_entry_is_found_when_its_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if no step is checked: one latent of one token differs from the recorded input."""
    engine = Layer(0, "cpu")
    write, calls = getattr(ops, WRITE), 0

    def wrong(out: Any, q: Tensor, kv: Tensor, *a: Any, **k: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first step's second pool
            kv = kv.clone()
            kv[:, 5] += 1
        return write(out, q, kv, *a, **k)

    monkeypatch.setattr(ops, WRITE, wrong)
    found = [fault for _ in range(60) for fault in engine.step(False)]
    assert found and all("as it ends, fp8, one scale: entries" in fault for fault in found)


def test_a_wrong_gather_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Layer(0, "cpu")
    right: Any = vars(ops)["gather_mla"]
    monkeypatch.setattr(ops, "gather_mla", lambda *a, **k: spoil(right(*a, **k)))
    found = [fault for _ in range(40) for fault in engine.step(False)]
    assert found and all("gather_mla" in fault and "not what its pages hold" in fault for fault in found)


NORMS = {
    "Llama": (norm, "rms_norm"),
    "Qwen3": (attention, "qk_norm_rope_cache"),
    "OLMo-2": (attention, "qk_rms_norm"),
    "DeepSeek-V3": (latent, "fused_rope_rmsnorm_quantization"),
}


@pytest.mark.parametrize("family", NORMS)
def test_one_wrong_value_in_a_model_is_detected(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(NORMS) == set(FAMILIES)
    engine = Model(family, 0, "cpu")
    warmed(engine, 4)
    right = getattr(*NORMS[family])

    def wrong(*arguments: Any, **options: Any) -> Any:
        result = right(*arguments, **options)
        first = result[0] if isinstance(result, tuple) else result
        first[..., -1, :1] *= 1.01  # of each sequence's last token or head
        return result

    monkeypatch.setattr(*NORMS[family], wrong)
    found = [fault for _ in range(2) for fault in engine.step(True)]
    assert found and all("logits" in fault for fault in found)


def test_a_changed_byte_of_a_models_pages_is_detected() -> None:
    engine = Model("DeepSeek-V3", 0, "cpu")
    warmed(engine, 4)
    engine.pool.view(torch.uint8)[1, engine.churn.free.pop(), 3, 11] ^= 64
    found = [fault for _ in range(2) for fault in engine.step(True)]
    assert len(found) == 1 and found[0].startswith("DeepSeek-V3, layer 1: 1 bytes changed")


# --- what a run watches ---------------------------------------------------------------------------------------------


def watched(readings: list[Reading]) -> list[str]:
    left = iter([QUIET, *readings])
    seen = Watch("cpu", lambda device: next(left))
    for quarter, _ in enumerate(readings):
        seen.look(quarter)
    return seen.faults()


def test_growth_is_detected() -> None:
    assert watched([QUIET] * 4) == []
    assert watched([QUIET] * 3) == ["no readings in the first and the last quarter: the run was too short"]
    for name, (what, bounds) in GROWTH.items():
        most = bounds["cpu"]
        last = [QUIET._replace(**{name: getattr(QUIET, name) + most + more}) for more in (0, 1)]
        assert watched([QUIET, QUIET, QUIET, last[0]]) == []
        assert watched([QUIET, QUIET, QUIET, last[1]]) == [f"{what} grew by {most + 1}, at most {most} is allowed"]
    assert "file descriptors was 6 to 7" in watched([QUIET, QUIET._replace(descriptors=7), QUIET, QUIET])[0]
    assert "threads was 2 to 3" in watched([QUIET, QUIET, QUIET._replace(threads=3), QUIET])[0]
    assert watched([QUIET, QUIET._replace(options=MAX_REMEMBERED), QUIET, QUIET]) == []
    beyond = QUIET._replace(options=MAX_REMEMBERED + 1)
    assert "are remembered, at most 4096" in watched([QUIET, beyond, QUIET, QUIET])[0]


def test_readings_measure_what_they_name(tmp_path: Path) -> None:
    for op in registration.ops:  # forget calls of other tests: the watch reports the maximum over ops
        op.specs.clear()
    engine = warmed(Layer(77, "cpu"), 2)  # another seed, so the epsilons are new
    before = watch.read("cpu")
    held = [object() for _ in range(20_000)]
    memory = mmap.mmap(-1, 40 * 2**20)  # from the system, since an allocator might reuse freed memory
    memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)
    with open(tmp_path / "file", "w"):
        for _ in range(3):
            engine.step(False)
        after = watch.read("cpu")
    assert after.descriptors == before.descriptors + 1 and after.threads == before.threads
    assert after.blocks >= before.blocks + 0.9 * len(held)
    assert after.resident >= before.resident + len(memory) // 2
    assert after.options == before.options + 3 and after.entries == before.entries > 0


def test_the_watch_itself_does_not_grow() -> None:
    seen = Watch("cpu", lambda device: QUIET)
    seen.time("step", 0, 0.5)
    before = sys.getallocatedblocks()
    for quarter in range(4):
        for turn in range(2 * watch.KEPT):
            seen.time("step", quarter, 1.0 / (turn + 1))
    assert sys.getallocatedblocks() - before < 500
    assert all(len(kept) == watch.KEPT for kept in seen.times["step"])


def test_slowdowns_and_errors_are_reported() -> None:
    run = soak.Soak([], "cpu", 0, Watch("cpu", lambda device: QUIET))
    for quarter in range(4):
        for _ in range(soak.MIN_STEPS):
            run.watch.time("steady", quarter, 1.0)
            run.watch.time("slower", quarter, 1.0 + 0.2 * quarter)
    assert run._slower() == ["slower: steps took 1.60 times as long in the last quarter"]

    class Failing:
        name, churn, tokens, compared = "failing", Churn("0", 1, 1), 0, 0

        def step(self, check: bool) -> list[str]:
            raise ValueError("no")

    run = soak.Soak([Failing()], "cpu", 0, Watch("cpu", lambda device: QUIET))
    run.run(rounds(5))
    assert run.faults == ["failing, step 0: ValueError: no (step)"]


def test_the_command_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the ops run, as it reports; a fault makes the exit status 1."""
    file = tmp_path / "soak.json"
    command = ["soak", "--steps", "24", "--every", "0", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(
        soak, "Watch", lambda device: Watch(device, lambda d: QUIET)
    )  # collecting garbage takes long here
    assert soak.main() == 0
    told = capsys.readouterr().out
    assert "only the ops run" in told and "0 faults, " in told and "median step by quarter" in told
    report = json.loads(file.read_text())
    assert report["models"] is False and report["steps"] == {"ops": 24}
    assert report["faults"] == [] and report["nice"] == os.nice(0)
    monkeypatch.setattr(Layer, "step", lambda self, check: ["something"])
    assert soak.main() == 1
    assert capsys.readouterr().out.count("FAULT ops, step") == soak.MOST_FAULTS
