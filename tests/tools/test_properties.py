"""Properties of every op: random calls lie between their bounds, and algebraic identities hold to the byte.

`tools.fuzz` draws calls from a Random that hypothesis drives, so hypothesis shrinks failures. ``make fuzz`` is the
long run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import onepass
from onepass.formats import FLOATS, FP8_FORMATS
from onepass.testing.tensors import same_bytes
from tools.fuzz.cases import OPS, configuration, draw_case
from tools.fuzz.draw import Values

ROOT = Path(__file__).parents[2]
POOL = 16
"""Configurations per op; each is compiled."""


def examples(number: int) -> settings:
    """The same examples in every run; kernels are compiled within them, so there is no deadline."""
    return settings(
        max_examples=number, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


# --- random calls ---------------------------------------------------------------------------------------------------


@pytest.mark.full  # 500 calls of each op; test_case has chosen ones
@pytest.mark.parametrize("op", OPS)
@given(r=st.randoms(use_true_random=False))
@examples(500)
def test_random_calls(op: str, r: Random) -> None:
    case = draw_case(op, r, configuration(op, 11, r.randrange(POOL), False))
    with torch.inference_mode():
        assert case.run("cpu") is None


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
def test_random_calls_of_the_gpu_kernels() -> None:
    """The Triton kernels, interpreted; cases with values that the interpreter misreads are left out."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "ignore", "-m", "tools.fuzz", "--device", "interpreter"]
    done = subprocess.run(
        [*command, "--cases", "160", "--configurations", "16", "--seed", "5"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and re.match("1.. passed, 0 failed on interpreter", done.stdout), (
        done.stdout + done.stderr
    )


LATER = {"rms_norm_add_rms_norm", "rms_norm_add_rms_norm_quant", "quantize"}
"""Ops that are newer than the recorded run. The next one has them."""


def test_the_long_run_is_recorded() -> None:
    found = json.loads((ROOT / "benchmarks" / "cpu" / "fuzz.json").read_text())
    assert set(found["cases"]) == set(OPS) - LATER and sum(found["cases"].values()) == 1_000_000
    assert found["failed"] == 0 and found["device"] == "cpu" and not found["failures"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("out", FP8_FORMATS)
def test_a_nan_row_is_nan_with_a_static_scale_of_zero(out: torch.dtype, bad: float) -> None:
    """Found by fuzzing: on the CPU, all codes but the NaN were zero."""
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
        x = torch.where(x.abs() < 2.0**-6, 1.0, x).to(dtype)  # avoids subnormals
        scaled = x * 2.0**power

        def both(t: Tensor) -> list[Tensor]:
            norm = onepass.rms_norm(t, gamma, 0.0, rounding=rounding)
            return [norm, *onepass.rms_norm_fused_fp8(t, gamma, 0.0, rounding=rounding)]

        ours, theirs = both(x), both(scaled)
        assert all_same(ours, theirs)
        assert not all_same(ours, [onepass.rms_norm(x, gamma, 0.9), *ours[1:]]) or not x.any()

    @given(shape=shapes, dtype=dtypes, seed=seeds, power=st.integers(-6, 6))
    @examples(60)
    def test_a_power_of_two_in_gamma_only_changes_the_scale(
        self, shape: tuple[int, int], dtype: torch.dtype, seed: int, power: int
    ) -> None:
        x, gamma = tensor(seed, *shape, dtype=dtype), tensor(seed + 1, shape[1])
        codes, scale = onepass.rms_norm_fused_fp8(x, gamma)
        again, larger = onepass.rms_norm_fused_fp8(x, gamma * 2.0**power)
        assert all_same((codes, scale * 2.0**power), (again, larger))

    @given(shape=shapes, dtype=dtypes, seed=seeds, rounding=roundings)
    @examples(60)
    def test_negating_x_negates_the_norm(
        self, shape: tuple[int, int], dtype: torch.dtype, seed: int, rounding: Any
    ) -> None:
        x, gamma = tensor(seed, *shape, dtype=dtype), tensor(seed + 1, shape[1], dtype=dtype)
        y, negative = (onepass.rms_norm(t, gamma, rounding=rounding) for t in (x, -x))
        assert same_bytes(y, -negative)
        (codes, scale), (others, same) = (onepass.rms_norm_fused_fp8(t, gamma, rounding=rounding) for t in (x, -x))
        assert same_bytes(scale, same) and same_bytes(codes.view(torch.uint8) ^ 0x80, others.view(torch.uint8))

    @given(shape=shapes, dtype=dtypes, seed=seeds, out=st.sampled_from(tuple(FP8_FORMATS)))
    @examples(60)
    def test_dequantized_codes_are_close_to_the_norm(
        self, shape: tuple[int, int], dtype: torch.dtype, seed: int, out: torch.dtype
    ) -> None:
        """Within half a code step: 1/16 of a normal code, half the smallest code below that."""
        x, gamma = tensor(seed, *shape, dtype=dtype), tensor(seed + 1, shape[1], dtype=torch.float32)
        codes, scale, norm = onepass.rms_norm_fused_fp8(x.float(), gamma, out_dtype=out, return_norm=True)
        y, s = norm.double(), scale.double()
        smallest = 2.0 ** (-2 - FP8_FORMATS[out].bias)
        half = torch.maximum(y.abs() / 16, s * smallest / 2) * (1 + 1e-5)
        assert ((codes.double() * s - y).abs() <= half).all()
        assert ((codes.double() * s - y).abs() > half / 50).any() or shape[1] < 20  # the bound is tight

    @given(shape=shapes, dtype=dtypes, seed=seeds, rounding=roundings)
    @examples(60)
    def test_statistics_then_application_equals_the_fused_call(
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
    def test_one_launch_equals_two_if_sums_are_exact(self, m: int, k: int, widths: tuple[int, int], seed: int) -> None:
        """Small integers: no sum is rounded, so only the sign of a zero, which is unspecified, may differ."""
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
    def test_segments_equal_separate_calls(
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
    def test_a_zero_residual_and_the_add_prologue(self, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
        """`x + 0` is x, and a float32 residual equals a prologue that adds."""
        x, gamma = tensor(seed, *shape, dtype=dtype), tensor(seed + 1, shape[1], dtype=dtype)
        y, h = onepass.rms_norm(x, gamma, residual=torch.zeros_like(x))
        assert all_same((y, h), (onepass.rms_norm(x, gamma), x))
        assert same_bytes(y, onepass.rms_norm_fused_fp8(x, gamma, return_norm=True)[2])
        r = tensor(seed + 2, *shape)
        codes, scale, _ = onepass.rms_norm_fused_fp8(x, gamma, residual=r)
        assert all_same(
            (codes, scale), onepass.rms_norm_fused_fp8(x, gamma, prologue=onepass.prologues.add, prologue_args=[r])
        )
