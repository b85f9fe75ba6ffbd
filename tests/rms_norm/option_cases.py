"""Cases of the options that change one step of a norm or its quantization: which sums are rounded, how codes are made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from onepass.formats import FLOATS, FP8_FORMATS
from onepass.prologues import silu_and_mul
from tests.grid import grid
from tests.oracle.case import Case

BF16, F16, F32 = FLOATS


def sum_cases(op: str, rounding: str, round_sum: bool, lengths: list[int]) -> Iterator[Case]:
    """One of the two pairings of ``rounding`` and ``round_sum`` that neither rounding implies."""
    c = partial(grid, Case, op, "sums", options={"rounding": rounding, "round_sum": round_sum})
    yield from c((3,), lengths, residual=BF16)
    yield from c((9,), 384, residual=BF16, values="special")
    yield from c((3, 4), 640, residual=BF16, layout="misaligned")
    yield from c((3,), 640, F16, residual=F16)
    yield from c((3,), 640, BF16, F32, residual=F32)


def vllm_cases(op: str) -> Iterator[Case]:
    """Division by the scale, a smallest scale and a bound in memory: alone, and together as in vLLM's kernels."""
    c = partial(grid, Case, op)
    vllm = {"rounding": "hf", "round_sum": False, "quantize": "divide", "min_scale": 1 / (448 * 512)}
    bounds = {"bounded": 1.5, **vllm}
    group: dict[str, Any] = {"group_size": 128}
    lengths = [128, 640, 4096, 5120, 7168, 8192, 16384, 20480]
    yield from c("vllm", (3,), lengths, residual=[None, BF16], options=[vllm, vllm | group])
    norms = [bounds | {"group_size": size, "return_norm": True} for size in (None, 64)]
    for x in FLOATS:
        yield from c("vllm", (5,), [640, 4096], x, residual=x, options=norms)
    for bound in (0.0, -2.0, -math.inf, math.nan, math.inf):
        bounded = bounds | {"bounded": bound}
        yield from c("vllm", (3,), [640, 4096], options=[bounded | group, bounded])
    grouped = [bounds | {"group_size": size} for size in (None, 128)]
    yield from c("vllm", (3, 4), 1536, residual=BF16, layout=["misaligned", "transposed"], options=grouped)
    for out in FP8_FORMATS:
        special = [bounds | {"out_dtype": out, "group_size": size, "return_norm": True} for size in (None, 128)]
        yield from c("vllm", (9,), [384, 4096], values="special", options=special)
    yield from c("vllm", (9,), 20480, values="special", options=bounds | group)
    yield from c("vllm", (9,), 20480, residual=BF16, values="special", options=bounds)
    for rounding in ("once", "hf"):
        divide: dict[str, Any] = {"rounding": rounding, "quantize": "divide"}
        with_norm = [divide | {"return_norm": True} | more for more in ({}, group, {"static_scale": True})]
        yield from c("divide", (4,), 640, F32, options=with_norm)
        yield from c("divide", (4,), [4096, 20480], options=with_norm)
        yield from c("divide", (9,), 384, values="special", options=divide)
    ways: list[dict[str, Any]] = [group, {"scale_format": "ue8m0"}, {"scales_dtype": F16}, {"bounded": -1.0}]
    yield from c("scales", (9,), 384, values="special", options=[{"min_scale": 0.01} | way for way in ways])
    yield from c("scales", (4,), 20480, options=[{"bounded": 1.5, "min_scale": 1e-5} | way for way in ways])
    yield from sum_cases(op, "once", True, [640, 4096])
    yield from _static_cases(op)
    fused = {"prologue": silu_and_mul, **bounds}
    yield from c("prologues", (4,), 1536, operands=("full",), residual=BF16, options=fused)


def _static_cases(op: str) -> Iterator[Case]:
    """Given scales as in vLLM's and FlashInfer's kernels: a norm rounded twice, and an unrounded one that is divided."""
    c = partial(grid, Case, op, "static")
    vllm: dict[str, Any] = {"static_scale": True, "rounding": "hf"}
    flashinfer: dict[str, Any] = {"static_scale": True, "quantize": "divide"}
    yield from c((3,), [640, 2048, 4096, 7168, 20000], residual=[None, BF16], options=[vllm, flashinfer])
    yield from c((3,), 640, F16, BF16, residual=F16, options=[vllm, flashinfer])
    yield from c((9,), 384, residual=BF16, values="special", options=[vllm, flashinfer])
