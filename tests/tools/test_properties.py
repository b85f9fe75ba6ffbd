"""Properties of every op: random calls lie between their bounds, and what algebra says of the results holds to the byte.

Calls are drawn by `tools.fuzz` from a Random that hypothesis drives, so a failure is shrunk by it. The long run
of the same is ``make fuzz``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import onepass
from onepass.formats import FLOATS, FP8_FORMATS, OPERAND_GROUPS, QUANTIZE, QUANTIZED
from onepass.testing import compare, oracle
from onepass.testing.case import same_bytes
from tools.fuzz import OPS, bounds, cases, configuration, draw, draw_case, gemv_norm, numbered, shrink
from tools.fuzz import __main__ as fuzz_driver
from tools.fuzz import qk_norm as qk
from tools.fuzz import rms_norm as rows
from tools.fuzz.draw import EQUAL, KINDS, Place, Values

ROOT = Path(__file__).parents[2]
POOL = 16
"""Configurations of an op: each is compiled."""


def examples(number: int) -> settings:
    """The same examples in every run; kernels are compiled within them, so there is no deadline."""
    return settings(
        max_examples=number, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


# --- random calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@given(r=st.randoms(use_true_random=False))
@examples(1000)
def test_random_calls(op: str, r: Random) -> None:
    case = draw_case(op, r, configuration(op, 11, r.randrange(POOL), False))
    with torch.inference_mode():
        assert case.run("cpu") is None


@pytest.mark.slow
def test_random_calls_of_the_gpu_kernels() -> None:
    """The Triton kernels, interpreted; a few of the cases have values that the interpreter misreads and are left out."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "ignore", "-m", "tools.fuzz", "--device", "interpreter"]
    done = subprocess.run(
        [*command, "--cases", "240", "--configurations", "24", "--seed", "5"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and re.match("2.. passed, 0 failed on interpreter", done.stdout), (
        done.stdout + done.stderr
    )


def test_the_long_run_is_recorded() -> None:
    found = json.loads((ROOT / "benchmarks" / "cpu" / "fuzz.json").read_text())
    assert set(found["cases"]) == set(OPS) and sum(found["cases"].values()) == 1_000_000
    assert found["failed"] == 0 and found["device"] == "cpu" and not found["failures"]


class TestFuzz:
    """The fuzz itself: it draws everything, repeats what it drew, and finds what is wrong."""

    def drawn(self, op: str, count: int) -> list[Any]:
        return [numbered(3, index, (op,), 200, False) for index in range(count)]

    def test_cases_are_of_all_kinds(self) -> None:
        found = self.drawn("rms_norm_fused_fp8", 4000)
        configs = {case.config for case in found}
        for name, values in (
            ("x", (*FLOATS, *QUANTIZED)), ("out", FP8_FORMATS), ("group", (None, 64, 128)), ("rounding", ("once", "hf")),
            ("static", (True, False)), ("ue8m0", (True, False)), ("norm", (True, False)), ("prologue", ("", *rows._PROLOGUES)),
            ("operand_group", (0, *OPERAND_GROUPS)),
            ("quantize", QUANTIZE), ("round_sum", (None, True, False)), ("least", (True, False)), ("bounded", (True, False)),
        ):  # fmt: skip
            assert {getattr(c, name) for c in configs} == set(values), name
        assert {case.values.kind for case in found} == set(KINDS[:-2])
        assert {case.values.spoil for case in found} == {"", "nan", "inf", "-inf"}
        assert {case.values.other for case in found} == {None, *KINDS}
        assert {len(case.lead) for case in found} == {0, 1, 2, 3, 4} and any(0 in case.lead for case in found)
        for name in ("reverse", "every", "expanded"):
            assert {getattr(case.places[0], name) for case in found} == {True, False}, name
        assert {1, 2, 31, 32, 33, 127, 129, 255, 257} <= {case.n for case in self.drawn("rms_norm", 4000)}

    @pytest.mark.parametrize(
        ("option", "other"),
        [
            ("quantize", {"divide": "reciprocal"}),
            ("round_sum", {True: False, False: True}),
            ("min_scale", dict.fromkeys(rows._LEAST, 0.0)),
        ],
    )
    def test_another_option_is_found(self, option: str, other: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """What a call with another value of one option stores is not taken for what was asked for."""
        before = onepass.rms_norm_fused_fp8
        monkeypatch.setattr(rows, "rms_norm_fused_fp8", lambda **a: before(**{**a, option: other[a[option]]}))
        drawn: list[Any] = [numbered(3, index, ("rms_norm_fused_fp8",), 40, False) for index in range(400)]
        with torch.inference_mode():
            assert any(rows.inputs(c).get(option) in other and c.run("cpu") is not None for c in drawn)

    def test_batches_of_mla_are_of_all_kinds(self) -> None:
        found = [case.case for case in self.drawn("fused_rope_rmsnorm_quantization", 8000)]
        assert len({c.page for c in found}) > 100 and {c.page for c in found} >= {1, 2, 3, 64}
        assert {c.index for c in found} == {torch.uint32, torch.int32, torch.int64}
        assert {c.layout for c in found} == {"contiguous", "slices", "misaligned", "transposed"}
        assert (
            any(not c.batch for c in found) and any(c.rope == 0 for c in found) and any(c.latent > 600 for c in found)
        )

    def test_a_number_is_a_case(self) -> None:
        every = tuple(OPS)
        once, again = ([repr(numbered(1, index, every, 9, False)) for index in range(300)] for _ in range(2))
        assert once == again and len(set(once)) == 300
        shares = [[numbered(1, index, every, 9, False, (job, 3)) for index in range(300)] for job in range(3)]
        assert all(sum(case is not None for case in who) == 1 for who in zip(*shares, strict=True))
        assert {case.op for case in self.drawn("qk_rms_norm", 9)} == {"qk_rms_norm"}

    @pytest.mark.parametrize("op", OPS)
    def test_where_shapes_are_compiled_few_are_drawn(self, op: str) -> None:
        """Of one configuration: as many shapes and places as frames, but values as many as cases."""
        found: list[Any] = [numbered(3, index, (op,), 1, True) for index in range(200)]
        told = [{name: repr(getattr(case, name)) for name in OPS[op].VALUES} for case in found]
        frames = {repr(replace(case, **{name: getattr(found[0], name) for name in OPS[op].VALUES})) for case in found}
        assert 1 < len(frames) <= cases.FRAMES and len({str(each) for each in told}) > 150

    @pytest.mark.parametrize("place", [Place(1, 2, 3), Place(reverse=True, every=True), Place(3, 0, 1, True, True)])
    @pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 2)])
    def test_places_hold_values_between_guards(self, place: Place, lead: tuple[int, ...]) -> None:
        values = torch.randn(*lead, 5)
        there = place.put(values)
        assert torch.equal(there, values)
        memory = torch.empty(0).set_(there.untyped_storage())
        assert int((memory == memory).sum()) == values.numel()  # all else is NaN

    @pytest.mark.parametrize("family", [rows, qk, gemv_norm])
    def test_zeros_are_found(self, family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of what is not zero, as results of ordinary values."""
        verify, tried = family.verify, []

        def zeroed(case: Any, host: Any, results: tuple[Tensor, ...], *rest: Any) -> str | None:
            assert verify(case, host, results, *rest) is None
            for i, t in enumerate(results):
                if t.dim() and t.numel() and (t.reshape(-1).view(torch.uint8) & 0x7F).any():
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
    def test_a_row_that_differs_among_more_rows_is_found(self, result: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert gemv_norm._run_often(given, normed, unnormed, None) == "rows differ among more rows"
        monkeypatch.undo()
        assert gemv_norm._run_often(given, normed, unnormed, None) is None

    def test_tensor_cores_may_lose_more_of_subnormal_numbers(self) -> None:
        """Products cut off 25 bits below the largest exponent, a subnormal number's taken for -14: one value differs, as on an H200."""
        case: Any = cases.numbered(2027, 530330, tuple(OPS), 12, True)
        case = replace(case, config=replace(case.config, gammas=(torch.float16,)))
        host = gemv_norm.inputs(case)
        act, weight = host["act"].double()[:, None], host["weight"].double()
        exponents = [t.abs().clamp_min(2.0**-14).log2().floor() for t in (act, weight)]
        unit = 2.0 ** ((exponents[0] + exponents[1]).amax(-1, keepdim=True) - 25)
        y = ((act * weight / unit).trunc() * unit).sum(-1) * host["weight_scale"].double()
        normed, _ = gemv_norm._normed(bounds.Bounds(y, y).part(slice(0, 35)), host["gamma"].double(), case.eps)
        found = normed.low.half(), y[:, 35:].half()
        assert found[0][4, 15].item() == pytest.approx(-0.0258331299)
        assert gemv_norm.verify(case, host, found, gemv_norm.products(case, host, "cuda")) is None
        on_cpu = gemv_norm.verify(case, host, found, gemv_norm.products(case, host, "cpu"))
        assert on_cpu is not None and on_cpu.startswith("segment 0: 1 of 490 values out of bounds, first at (4, 15)")

    def test_one_unit_in_the_last_place_is_found(self) -> None:
        y = torch.randn(50, 40, dtype=torch.float64) + 3
        for dtype in (torch.bfloat16, torch.float16):
            exact = bounds.around(y, y.abs() * compare.FLOAT32_ERROR)
            right = y.to(dtype)
            assert exact.stored(right) is None
            right.view(torch.int16)[7, 7] += 2
            assert exact.stored(right) is not None
        for fmt in FP8_FORMATS.values():
            codes = oracle.encode(y, fmt.bias, fmt.max, fmt.nan_code, fmt.has_negative_zero)
            assert compare.between(codes.view(fmt.dtype), *exact, fmt) is None
            codes[7, 7] += 2
            assert compare.between(codes.view(fmt.dtype), *exact, fmt) is not None

    def test_a_zero_has_its_sign(self) -> None:
        zero = torch.tensor([0.0, -0.0], dtype=torch.float64)
        assert compare.between(zero.float(), zero, zero) is None
        assert compare.between(zero.flip(0).float(), zero, zero) is not None
        fmt = FP8_FORMATS[torch.float8_e4m3fn]
        assert compare.between(zero.to(fmt.dtype), zero, zero, fmt) is None
        assert compare.between(zero.flip(0).to(fmt.dtype), zero, zero, fmt) is not None

    @pytest.mark.parametrize("rounded", [None, torch.float32])
    def test_infinity_times_what_may_be_zero_is_either(self, rounded: torch.dtype | None) -> None:
        rs, g = torch.tensor([[1e-3]], dtype=torch.float64), torch.tensor([[float("inf")]], dtype=torch.float64)
        results = [torch.tensor([[value]]) for value in (float("nan"), float("inf"))]
        doubtful, sure = (bounds.normed(torch.full_like(g, h), rs, g, rounded) for h in (1e-45, 1.0))
        assert [doubtful.stored(t) for t in results] == [None, None]
        assert sure.stored(results[0]) is not None and sure.stored(results[1]) is None

    def test_a_failure_is_made_simpler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A norm that is wrong from 20 columns on, of several rows."""
        monkeypatch.setattr(
            rows, "verify", lambda case, host, results: "wrong" if case.n >= 20 and case.lead != (1,) else None
        )
        case = next(c for c in self.drawn("rms_norm", 500) if c.n > 100 and len(c.lead) == 2 and 0 not in c.lead)
        simplest: Any
        with torch.inference_mode():
            simplest, message = shrink(case, "cpu")
        assert message == "wrong" and simplest.n == 20 and simplest.values == EQUAL and simplest.lead in ((), (2,))

    def test_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        """Two processes have the cases of one; a case is run again by its number. Those two are ``python -m tools.fuzz``."""
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
        monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # the driver takes one, and would keep it here

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
    def test_a_process_that_breaks_down(
        self, end: str, status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever it reported before; but one that the driver itself stops at the end of its minutes counts."""
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
            with pytest.raises(SystemExit, match="a process broke down"):
                fuzz_driver.main()
        else:
            assert fuzz_driver.main() == status


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("out", FP8_FORMATS)
def test_a_nan_row_is_nan_with_a_static_scale_of_zero(out: torch.dtype, bad: float) -> None:
    """Found by the fuzz: on the CPU all but the NaN itself were codes of zero."""
    x = torch.ones(3, 70)
    x[1, 3] = bad
    codes = onepass.rms_norm_fused_fp8(x, torch.ones(70), static_scale=torch.tensor(0.0), out_dtype=out)[0].view(
        torch.uint8
    )
    assert codes[1].eq(FP8_FORMATS[out].nan_code).all() and not codes[::2].any()


# --- algebra --------------------------------------------------------------------------------------------------------

shapes = st.tuples(st.integers(1, 9), st.integers(1, 200))
dtypes = st.sampled_from(FLOATS)
seeds = st.integers(0, 1000)
roundings = st.sampled_from(("once", "hf"))


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return Values(start=seed * 37).make(shape, dtype)


def all_same(some: Any, others: Any) -> bool:
    return all(same_bytes(a, b) for a, b in zip(some, others, strict=True))


class TestAlgebra:
    @given(shape=shapes, dtype=dtypes, seed=seeds, power=st.integers(-6, 6), rounding=roundings)
    @examples(60)
    def test_a_power_of_two_changes_nothing_without_eps(
        self, shape: tuple[int, int], dtype: torch.dtype, seed: int, power: int, rounding: Any
    ) -> None:
        x, gamma = tensor(seed, *shape, dtype=dtype), tensor(seed + 1, shape[1], dtype=dtype)
        x = torch.where(x.abs() < 2.0**-6, 1.0, x).to(dtype)  # none that becomes subnormal
        scaled = x * 2.0**power
        ours, theirs = ([onepass.rms_norm(t, gamma, 0.0, rounding=rounding), *onepass.rms_norm_fused_fp8(t, gamma, 0.0, rounding=rounding)]
                        for t in (x, scaled))  # fmt: skip
        assert all_same(ours, theirs)
        assert not all_same(ours, [onepass.rms_norm(x, gamma, 1.0), *ours[1:]]) or not x.any()

    @given(shape=shapes, dtype=dtypes, seed=seeds, power=st.integers(-6, 6))
    @examples(60)
    def test_a_power_of_two_in_gamma_is_in_the_scale_alone(
        self, shape: tuple[int, int], dtype: torch.dtype, seed: int, power: int
    ) -> None:
        x, gamma = tensor(seed, *shape, dtype=dtype), tensor(seed + 1, shape[1])
        codes, scale = onepass.rms_norm_fused_fp8(x, gamma)
        again, larger = onepass.rms_norm_fused_fp8(x, gamma * 2.0**power)
        assert all_same((codes, scale * 2.0**power), (again, larger))

    @given(shape=shapes, dtype=dtypes, seed=seeds, rounding=roundings)
    @examples(60)
    def test_signs_go_through(self, shape: tuple[int, int], dtype: torch.dtype, seed: int, rounding: Any) -> None:
        x, gamma = tensor(seed, *shape, dtype=dtype), tensor(seed + 1, shape[1], dtype=dtype)
        y, negative = (onepass.rms_norm(t, gamma, rounding=rounding) for t in (x, -x))
        assert same_bytes(y, -negative)
        (codes, scale), (others, same) = (onepass.rms_norm_fused_fp8(t, gamma, rounding=rounding) for t in (x, -x))
        assert same_bytes(scale, same) and same_bytes(codes.view(torch.uint8) ^ 0x80, others.view(torch.uint8))

    @given(shape=shapes, dtype=dtypes, seed=seeds, out=st.sampled_from(tuple(FP8_FORMATS)))
    @examples(60)
    def test_dequantized_is_the_norm(
        self, shape: tuple[int, int], dtype: torch.dtype, seed: int, out: torch.dtype
    ) -> None:
        """Within half a step of the codes: 1 in 16 of a normal code, half the smallest code below."""
        x, gamma = tensor(seed, *shape, dtype=dtype), tensor(seed + 1, shape[1], dtype=torch.float32)
        codes, scale, norm = onepass.rms_norm_fused_fp8(x.float(), gamma, out_dtype=out, return_norm=True)
        y, s = norm.double(), scale.double()
        smallest = 2.0 ** (-2 - FP8_FORMATS[out].bias)
        half = torch.maximum(y.abs() / 16, s * smallest / 2) * (1 + 1e-5)
        assert ((codes.double() * s - y).abs() <= half).all()
        assert ((codes.double() * s - y).abs() > half / 50).any() or shape[1] < 20  # the bound is near

    @given(shape=shapes, dtype=dtypes, seed=seeds, rounding=roundings)
    @examples(60)
    def test_statistics_then_application_is_the_fused_call(
        self, shape: tuple[int, int], dtype: torch.dtype, seed: int, rounding: Any
    ) -> None:
        q, k = tensor(seed, *shape, dtype=dtype), tensor(seed + 1, shape[0], 77, dtype=dtype)
        gammas = tensor(seed + 2, shape[1]), tensor(seed + 3, 77)
        fused = onepass.qk_rms_norm(q, k, *gammas, rounding=rounding)
        parts = torch.empty_like(q), torch.empty_like(k)
        onepass.apply_qk_rms_norm(*parts, *gammas, onepass.row_mean_of_squares_qk(q, k), q, k, 1e-6, rounding=rounding)
        assert all_same(fused, parts)
        onepass.qk_rms_norm(q, k, *gammas, rounding=rounding, out=(q, k))
        assert all_same(fused, (q, k))

    @given(
        m=st.integers(1, 16),
        k=st.integers(1, 200),
        widths=st.tuples(st.integers(1, 40), st.integers(0, 30)),
        seed=seeds,
    )
    @examples(60)
    def test_one_launch_is_two_where_sums_are_exact(self, m: int, k: int, widths: tuple[int, int], seed: int) -> None:
        """Small integers: no sum is rounded, so neither order nor launches show, but for the sign of a zero, which is not promised."""
        act, weight = (
            tensor(s, rows, k).mul(2).round().clamp(-3, 3) for s, rows in ((seed, m), (seed + 1, sum(widths)))
        )
        gamma = tensor(seed + 2, widths[0])
        one = onepass.gemv_and_partial_norm(act, weight, gamma)
        assert same_bytes(one[1] + 0.0, (act @ weight.T)[:, widths[0] :] + 0.0)
        two = onepass.gemv_and_partial_norm(act, weight, gamma, fused=False)
        assert all_same(tuple(t + 0.0 for t in one), tuple(t + 0.0 for t in two))

    @given(
        m=st.integers(1, 16),
        k=st.integers(1, 200),
        widths=st.tuples(*[st.integers(1, 30)] * 3),
        seed=seeds,
        dtype=dtypes,
    )
    @examples(60)
    def test_segments_are_calls_of_their_own(
        self, m: int, k: int, widths: tuple[int, int, int], seed: int, dtype: torch.dtype
    ) -> None:
        act, weight = tensor(seed, m, k, dtype=dtype), tensor(seed + 1, sum(widths), k, dtype=dtype)
        gammas = [tensor(seed + 2 + i, width, dtype=dtype) for i, width in enumerate(widths[:2])]
        whole = onepass.gemv_and_partial_norm(act, weight, gammas[0], segments=gammas[1:])
        first = onepass.gemv_and_partial_norm(act, weight[: widths[0]], gammas[0])
        second = onepass.gemv_and_partial_norm(act, weight[widths[0] : sum(widths[:2])], gammas[1])
        rest = onepass.gemv_and_partial_norm(act, weight[sum(widths[:2]) - 1 :], gammas[0][:1])
        assert all_same(whole, (first[0], second[0], rest[1]))

    @given(shape=shapes, dtype=dtypes, seed=seeds)
    @examples(40)
    def test_a_residual_of_zero_and_an_added_one(self, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
        """`x + 0` is x, and a float32 residual is what a prologue that adds is."""
        x, gamma = tensor(seed, *shape, dtype=dtype), tensor(seed + 1, shape[1], dtype=dtype)
        y, h = onepass.rms_norm(x, gamma, residual=torch.zeros_like(x))
        assert all_same((y, h), (onepass.rms_norm(x, gamma), x))
        assert same_bytes(y, onepass.rms_norm_fused_fp8(x, gamma, return_norm=True)[2])
        r = tensor(seed + 2, *shape)
        codes, scale, _ = onepass.rms_norm_fused_fp8(x, gamma, residual=r)
        assert all_same(
            (codes, scale), onepass.rms_norm_fused_fp8(x, gamma, prologue=onepass.prologues.add, prologue_args=[r])
        )
