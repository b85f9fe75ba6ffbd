"""`tools.fuzz` itself: it covers all options, is reproducible, and detects wrong results."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.formats import FLOATS, FP8_CODES, FP8_FORMATS, GROUP_SIZES, OPERAND_GROUPS, QUANTIZE, QUANTIZED
from onepass.ops.linear.launch import ACTIVATIONS
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.ops.rms_norm.launch import GATE_ACTIVATIONS, GATE_ORDERS
from onepass.testing import compare
from tests.gemv_norm import checks as gemv_checks
from tests.gemv_norm import fuzz as gemv_norm
from tests.linear import fuzz as linear
from tests.oracle import bounds
from tests.qk_norm import fuzz as qk
from tests.rms_norm import fuzz as rows
from tests.rms_norm.fuzz_configuration import PROLOGUES
from tools.fuzz import __main__ as fuzz_driver
from tools.fuzz import cases, draw
from tools.fuzz.cases import OPS, numbered, shrink
from tools.fuzz.draw import EQUAL, KINDS, Place, Values
from tools.fuzz.steps import finish

ROOT = Path(__file__).parents[2]
POOL = 16
"""Configurations per op; each is compiled."""


def drawn(op: str, count: int) -> list[Any]:
    return [numbered(3, index, (op,), 200, False) for index in range(count)]


def test_cases_cover_all_options_and_values() -> None:
    found = drawn("rms_norm_fused_fp8", 4000)
    configs = {case.config for case in found}
    expected: dict[str, Any] = {
        **dict.fromkeys(("static", "ue8m0", "norm", "least", "bounded", "heads", "rstd"), (True, False)),
        "x": (*FLOATS, *QUANTIZED),
        "out": FP8_CODES,
        "group": (None, *GROUP_SIZES),
        "rounding": ("once", "hf"),
        "prologue": ("", *PROLOGUES),
        "operand_group": (0, *OPERAND_GROUPS),
        "quantize": QUANTIZE,
        "round_sum": (None, True, False),
    }
    for name, values in expected.items():
        assert {getattr(c, name) for c in configs} == set(values), name
    assert {case.values.kind for case in found} == set(KINDS[:-2])
    assert {case.values.spoil for case in found} == {"", "nan", "inf", "-inf"}
    assert {case.values.other for case in found} == {None, *KINDS}
    assert {len(case.lead) for case in found} == {0, 1, 2, 3, 4} and any(0 in case.lead for case in found)
    for name in ("reverse", "every", "expanded"):
        assert {getattr(case.places[0], name) for case in found} == {True, False}, name
    assert {1, 2, 31, 32, 33, 127, 129, 255, 257} <= {case.n for case in drawn("rms_norm", 4000)}


@pytest.mark.sampled(3)  # one option stays
@pytest.mark.parametrize(
    ("option", "other"),
    [
        ("quantize", {"divide": "reciprocal"}),
        ("round_sum", {True: False, False: True}),
        ("min_scale", dict.fromkeys(rows._LEAST, 0.0)),
    ],
)
def test_wrong_options_are_detected(option: str, other: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of a call with another value of one option are rejected."""
    before = onepass.rms_norm_fused_fp8
    monkeypatch.setattr(rows, "rms_norm_fused_fp8", lambda **a: before(**{**a, option: other[a[option]]}))
    drawn: list[Any] = [numbered(3, index, ("rms_norm_fused_fp8",), 40, False) for index in range(400)]
    with torch.inference_mode():
        assert any(rows.inputs(c).get(option) in other and c.run("cpu") is not None for c in drawn)


def test_cases_of_norms_cover_gates_and_heads() -> None:
    for op in ("rms_norm", "rms_norm_fused_quant"):
        configs = {case.config for case in drawn(op, 2000)}
        assert {(c.gate_order, c.gate_activation) for c in configs if c.gate} == set(
            product(GATE_ORDERS, GATE_ACTIVATIONS)
        )
    for op in ("rms_norm", "layer_norm", "rms_norm_fused_quant"):
        assert {(c.heads, c.rstd) for c in {case.config for case in drawn(op, 2000)}} == set(
            product((True, False), repeat=2)
        )


def test_a_wrong_activation_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    before = onepass.rms_norm
    other = dict(zip(GATE_ACTIVATIONS, (*GATE_ACTIVATIONS[1:], GATE_ACTIVATIONS[0]), strict=True))

    def faulty(**given: Any) -> Any:
        return before(**given | {k: other[v] for k, v in given.items() if k == "gate_activation"})

    monkeypatch.setattr(rows, "rms_norm", faulty)
    found: list[Any] = [numbered(3, index, ("rms_norm",), POOL, False) for index in range(60)]
    gated = [case for case in found if case.config.gate is not None and case.elements]
    with torch.inference_mode():
        wrong = {case.config.gate_activation for case in gated if case.run("cpu") is not None}
    assert wrong == set(other)


def test_cases_of_linear_cover_all_options() -> None:
    found = drawn("linear", 4000)
    configs = {case.config for case in found}
    expected: dict[str, Any] = {
        "x": FLOATS,
        "weight": (*FLOATS, torch.float8_e4m3fn, torch.int8),
        "scale": ("none", "tensor", "row", "column", "block", "ue8m0"),
        **dict.fromkeys(("gamma", "bias"), (None, *FLOATS)),
        **dict.fromkeys(("residual", "add"), (None, *FLOATS)),
        "activation": (None, *ACTIVATIONS),
        "rounding": ("once", "hf"),
    }
    for name, values in expected.items():
        assert {getattr(c, name) for c in configs} == set(values), name
    assert {c.out for c in configs} == {None, *FLOATS}
    assert {(name, name in c.flags) for c in configs for name in linear.FLAGS} == set(
        product(linear.FLAGS, (True, False))
    )
    assert {len(case.lead) for case in found} == {0, 1, 2, 3, 4} and any(0 in case.lead for case in found)
    assert {1, 2, 31, 127, 128, 129, 257} <= {case.k for case in found}
    assert max(math.prod(case.lead) for case in found) > 64 and max(case.n for case in found) > 1000


@pytest.mark.full  # test_wrong_options_are_detected stays
@pytest.mark.parametrize(
    "change",
    [
        lambda a: {"rounding": "once" if a["rounding"] == "hf" else "hf", "out_dtype": None},
        lambda a: {"activation": "gelu_mul" if a["activation"] == "silu_mul" else a["activation"]},
        lambda a: {"bias": None},
        lambda a: {"add": None},
        lambda a: {"eps": 1e-2},
    ],
)
def test_wrong_steps_of_linear_are_detected(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of a call with another value of one option are rejected."""
    honest = onepass.linear

    def faulty(**given: Any) -> Any:
        changed = given | {k: v for k, v in change(given).items() if k in given}
        return honest(**(changed if changed["out_dtype"] == given["out_dtype"] else given))

    monkeypatch.setattr(linear, "linear", faulty)
    drawn: list[Any] = [numbered(3, index, ("linear",), POOL, False) for index in range(200)]
    with torch.inference_mode():
        found = (c.run("cpu") for c in drawn)
        assert any(message is not None and "values out of bounds" in message for message in found)


def test_mla_batches_cover_all_layouts() -> None:
    found = [case.case for case in drawn("fused_rope_rmsnorm_quantization", 8000)]
    assert len({c.page for c in found}) > 100 and {c.page for c in found} >= {1, 2, 3, 64}
    assert {c.index for c in found} == {torch.uint32, torch.int32, torch.int64}
    assert {c.layout for c in found} == {"contiguous", "slices", "misaligned", "transposed"}
    assert any(not c.batch for c in found) and any(c.rope == 0 for c in found) and any(c.latent > 600 for c in found)


def test_a_seed_and_a_number_identify_a_case() -> None:
    every = tuple(OPS)
    once, again = ([repr(numbered(1, index, every, 9, False)) for index in range(300)] for _ in range(2))
    assert once == again and len(set(once)) == 300
    shares = [[numbered(1, index, every, 9, False, (job, 3)) for index in range(300)] for job in range(3)]
    assert all(sum(case is not None for case in who) == 1 for who in zip(*shares, strict=True))
    assert {case.op for case in drawn("qk_rms_norm", 9)} == {"qk_rms_norm"}


@pytest.mark.parametrize("op", OPS)
def test_bounded_runs_draw_few_shapes(op: str) -> None:
    """Per configuration there are as many shapes and layouts as frames, and as many values as cases."""
    found: list[Any] = [numbered(3, index, (op,), 1, True) for index in range(200)]
    told = [{name: repr(getattr(case, name)) for name in OPS[op].VALUES} for case in found]
    frames = {repr(replace(case, **{name: getattr(found[0], name) for name in OPS[op].VALUES})) for case in found}
    assert 1 < len(frames) <= cases.FRAMES and len({str(each) for each in told}) > 150


@pytest.mark.parametrize("place", [Place(1, 2, 3), Place(reverse=True, every=True), Place(3, 0, 1, True, True)])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 2)])
def test_places_hold_values_between_guards(place: Place, lead: tuple[int, ...]) -> None:
    values = torch.randn(*lead, 5)
    there = place.put(values)
    assert torch.equal(there, values)
    memory = torch.empty(0).set_(there.untyped_storage())
    assert int((memory == memory).sum()) == values.numel()  # all else is NaN


@pytest.mark.full  # compiles the kernels of test_random_calls
@pytest.mark.parametrize("family", [rows, qk, gemv_norm, linear])
def test_zeros_are_detected(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nonzero results of ordinary values are replaced by zeros."""
    verify, tried = family.verify, []

    def zeroed(case: Any, host: Any, results: tuple[Tensor, ...], *rest: Any) -> str | None:
        assert verify(case, host, results, *rest) is None
        for i, t in enumerate(results):
            flat = t.clone(memory_format=torch.contiguous_format).reshape(-1)
            if t.dim() and t.numel() and (flat.view(torch.uint8) & 0x7F).any():
                zeros = torch.zeros(t.numel() * t.element_size(), dtype=torch.uint8).view(t.dtype).view(t.shape)
                tried.append(verify(case, host, (*results[:i], zeros, *results[i + 1 :]), *rest))
        return None

    monkeypatch.setattr(family, "verify", zeroed)
    with torch.inference_mode():
        for op in family.OPS:
            for index in range(60):
                case: Any = cases.numbered(11, index, (op,), POOL, False)
                ordinary = {
                    "values": Values(),
                    "act": Values(),
                    "weight": Values(),
                    "gamma": Values(),
                    "scale": Values(),
                }
                names = {k: v for k, v in ordinary.items() if isinstance(getattr(case, k, None), Values)}
                assert draw.but(case, **names).run("cpu") is None
    assert len(tried) > 60 and None not in tried


@pytest.mark.parametrize("result", [0, 1])
def test_rows_that_change_in_larger_batches_are_detected(result: int, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = onepass.gemv_and_partial_norm

    def faulty(act: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        results = honest(act, *rest, **options)
        if act.shape[0] > 16:
            results[result].view(torch.int16)[-1, -1] ^= 1
        return results

    monkeypatch.setattr(gemv_norm, "gemv_and_partial_norm", faulty)
    act, weight = torch.randn(3, 32).bfloat16(), torch.randn(9, 32).to(torch.float8_e4m3fn)
    given: dict[str, Any] = {"act": act, "weight": weight, "gamma": torch.ones(5).bfloat16(), "eps": 1e-6}
    normed, unnormed = honest(**given, fused=False)
    assert finish(gemv_norm._often(given, normed, unnormed, None), "cpu") == "rows differ among more rows"
    monkeypatch.undo()
    assert finish(gemv_norm._often(given, normed, unnormed, None), "cpu") is None


def test_tensor_cores_may_lose_more_of_subnormal_numbers() -> None:
    """Products cut off 25 bits below the largest exponent, with -14 for subnormals: one value differs, as on an H200."""
    half = torch.float16
    case = gemv_norm.GemvCase(
        gemv_norm.GemvConfiguration("gemv_and_partial_norm", half, half, "row", (half,)),
        *(14, 36, 8, (35,), 1e-5),
        act=Values("subnormal", 6, start=531560),
        weight=Values("ties", start=698210),
        scale=Values(start=5),
        gamma=Values(start=94035),
    )
    host = gemv_norm.inputs(case)
    act, weight = host["act"].double()[:, None], host["weight"].double()
    exponents = [t.abs().clamp_min(2.0**-14).log2().floor() for t in (act, weight)]
    unit = 2.0 ** ((exponents[0] + exponents[1]).amax(-1, keepdim=True) - 25)
    y = ((act * weight / unit).trunc() * unit).sum(-1) * host["weight_scale"].double()
    normed, _ = gemv_checks.normed_bounds(bounds.Bounds(y, y).part(slice(0, 35)), host["gamma"].double(), case.eps)
    found = normed.low.half(), y[:, 35:].half()
    assert found[0][4, 15].item() == pytest.approx(-0.0258331299)
    assert gemv_checks.verify_call(host, found, gemv_checks.products(host, on_gpu=True)) is None
    on_cpu = gemv_checks.verify_call(host, found, gemv_checks.products(host, on_gpu=False))
    assert on_cpu is not None and on_cpu.startswith("segment 0: 1 of 490 values out of bounds, first at (4, 15)")


def test_one_unit_in_the_last_place_is_detected() -> None:
    y = torch.randn(50, 40, dtype=torch.float64) + 3
    for dtype in (torch.bfloat16, torch.float16):
        exact = bounds.around(y, y.abs() * bounds.FLOAT32_ERROR)
        right = y.to(dtype)
        assert exact.stored(right) is None
        right.view(torch.int16)[7, 7] += 2
        assert exact.stored(right) is not None
    for fmt in FP8_FORMATS.values():
        codes = rms_norm_reference.encode(y, fmt.bias, fmt.max, fmt.nan_code, fmt.has_negative_zero)
        assert compare.between(codes.view(fmt.dtype), *exact, fmt) is None
        codes[7, 7] += 2
        assert compare.between(codes.view(fmt.dtype), *exact, fmt) is not None


def test_signs_of_zeros_are_compared() -> None:
    zero = torch.tensor([0.0, -0.0], dtype=torch.float64)
    assert compare.between(zero.float(), zero, zero) is None
    assert compare.between(zero.flip(0).float(), zero, zero) is not None
    fmt = FP8_FORMATS[torch.float8_e4m3fn]
    assert compare.between(zero.to(fmt.dtype), zero, zero, fmt) is None
    assert compare.between(zero.flip(0).to(fmt.dtype), zero, zero, fmt) is not None


@pytest.mark.parametrize("rounded", [None, torch.float32])
def test_infinity_times_a_possible_zero_may_be_nan_or_infinity(rounded: torch.dtype | None) -> None:
    rs, g = torch.tensor([[1e-3]], dtype=torch.float64), torch.tensor([[float("inf")]], dtype=torch.float64)
    results = [torch.tensor([[value]]) for value in (float("nan"), float("inf"))]
    doubtful, sure = (bounds.normed(torch.full_like(g, h), rs, g, rounded) for h in (1e-45, 1.0))
    assert [doubtful.stored(t) for t in results] == [None, None]
    assert sure.stored(results[0]) is not None and sure.stored(results[1]) is None


def test_failures_are_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that is wrong for at least 20 columns and several rows."""
    monkeypatch.setattr(
        rows, "verify", lambda case, host, results: "wrong" if case.n >= 20 and case.lead != (1,) else None
    )
    case = next(c for c in drawn("rms_norm", 500) if c.n > 100 and len(c.lead) == 2 and 0 not in c.lead)
    simplest: Any
    with torch.inference_mode():
        simplest, message = shrink(case, "cpu")
    assert message == "wrong" and simplest.n == 20 and simplest.values == EQUAL and simplest.lead in ((), (2,))


@pytest.mark.full  # starts processes and compiles kernels; test_crashed_processes_fail_the_run stays
def test_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes run the same cases as one; a case can be run again by its number."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setattr(
        torch, "set_num_threads", lambda _: None
    )  # the driver sets one thread, which would persist here

    def driver(*words: str) -> tuple[int, str]:
        common = ("fuzz", "--seed", "11", "--configurations", str(POOL), "--op", "rms_norm")
        monkeypatch.setattr(sys, "argv", [*common, *words])
        return fuzz_driver.main(), capfd.readouterr().out

    assert driver("--cases", "80", "--jobs", "2", "--json", str(tmp_path / "found"))[0] == 0
    found = json.loads((tmp_path / "found").read_text())
    assert found["cases"] == {"rms_norm": 80} and found["failed"] == 0 and found["seed"] == 11
    status, told = driver("--first", "60", "--cases", "20")
    assert status == 0 and told.startswith("20 passed, 0 failed on cpu")
    status, told = driver("--only", "7")
    assert status == 0 and repr(numbered(11, 7, ("rms_norm",), POOL, False)) in told


@pytest.mark.parametrize(
    ("end", "status"), [("exit 0", 0), ("exit 1", 1), ("exit 3", None), ("kill -SEGV $$", None), ("sleep 600", 0)]
)
def test_crashed_processes_fail_the_run(
    end: str, status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash fails the run whatever was reported before; being stopped at the time limit does not."""
    report = {"device": "cpu", "cases": {"rms_norm": 3}, "failed": int(status == 1), "failures": [], "seconds": 1.0}
    (tmp_path / "report").write_text(json.dumps(report))
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nfor last; do :; done\ncp {tmp_path}/report $last\ntouch {tmp_path}/reported.$$\n{end}\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "argv", ["fuzz", "--jobs", "2", "--minutes", "100"])
    if end.startswith("sleep"):
        asked = iter(range(99))

        def clock() -> float:
            """The time is up as soon as both processes have reported."""
            begun = next(asked) > 0
            while begun and len([*tmp_path.glob("reported.*")]) < 2:
                time.sleep(0.01)
            return 1e9 if begun else 0.0

        monkeypatch.setattr(fuzz_driver, "time", SimpleNamespace(perf_counter=clock))
    if status is None:
        with pytest.raises(SystemExit, match="a process crashed"):
            fuzz_driver.main()
    else:
        assert fuzz_driver.main() == status
