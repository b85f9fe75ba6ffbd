"""Cases of the options that change one step of a norm or of its quantization: which sums are rounded, how codes are made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..formats import FLOATS, FP8_FORMATS
from ..prologues import silu_and_mul
from . import oracle
from .case import Case

BF16, F16, F32 = FLOATS


def sum_cases(op: str, pairing: tuple[str, bool], lengths: tuple[int, ...], **others: Any) -> Iterator[Case]:
    """One of the two pairings of ``rounding`` and ``round_sum`` that neither rounding implies."""
    options = {"rounding": pairing[0], "round_sum": pairing[1], **others}
    for n in lengths:
        yield Case(op, "sums", (3,), n, residual=BF16, options=options)
    yield Case(op, "sums", (9,), 384, residual=BF16, values="special", options=options)
    yield Case(op, "sums", (3, 4), 640, residual=BF16, layout="misaligned", options=options)
    yield Case(op, "sums", (3,), 640, F16, residual=F16, options=options)
    yield Case(op, "sums", (3,), 640, BF16, F32, residual=F32, options=options)


def vllm_cases(op: str) -> Iterator[Case]:
    """Division by the scale, a least scale and a bound in memory: alone, and together as vLLM's kernels have them."""
    least = 1 / (448 * 512)
    vllm = {"rounding": "hf", "round_sum": False, "quantize": "divide", "min_scale": least}
    bounds = {"bounded": 1.5, **vllm}
    for n in (128, 640, 4096, 5120, 7168, 8192, 16384, 20480):
        for options in (vllm, {**vllm, "group_size": 128}):
            yield Case(op, "vllm", (3,), n, options=options)
            yield Case(op, "vllm", (3,), n, residual=BF16, options=options)
    for n in (640, 4096):
        for x in FLOATS:
            for group in (None, 64):
                exact = {**bounds, "group_size": group, "return_norm": True}
                yield Case(op, "vllm", (5,), n, x, residual=x, options=exact)
        for bound in (0.0, -2.0, math.nan, math.inf):
            yield Case(op, "vllm", (3,), n, options={**bounds, "bounded": bound, "group_size": 128})
            yield Case(op, "vllm", (3,), n, options={**bounds, "bounded": bound})
    for layout in ("misaligned", "transposed"):
        for group in (None, 128):
            yield Case(op, "vllm", (3, 4), 1536, residual=BF16, layout=layout, options={**bounds, "group_size": group})
    for out in FP8_FORMATS:
        for group in (None, 128):
            for n in (384, 4096):
                special = {**bounds, "out_dtype": out, "group_size": group, "return_norm": True}
                yield Case(op, "vllm", (9,), n, values="special", options=special)
    yield Case(op, "vllm", (9,), 20480, values="special", options={**bounds, "group_size": 128})
    yield Case(op, "vllm", (9,), 20480, residual=BF16, values="special", options=bounds)
    for rounding in ("once", "hf"):
        for n in (640, 4096, 20480):
            for more in ({}, {"group_size": 128}, {"static_scale": True}):
                options = {"rounding": rounding, "quantize": "divide", "return_norm": True, **more}
                yield Case(op, "divide", (4,), n, F32 if n == 640 else BF16, options=options)
        yield Case(op, "divide", (9,), 384, values="special", options={"rounding": rounding, "quantize": "divide"})
    scales: tuple[dict[str, Any], ...] = (
        {"group_size": 128}, {"scale_format": "ue8m0"}, {"scales_dtype": F16}, {"bounded": -1.0},
    )  # fmt: skip
    for more in scales:
        yield Case(op, "scales", (9,), 384, values="special", options={"min_scale": 0.01, **more})
        yield Case(op, "scales", (4,), 20480, options={"bounded": 1.5, "min_scale": 1e-5, **more})
    yield from sum_cases(op, ("once", True), (640, 4096))
    yield Case(
        op, "prologues", (4,), 1536, operands=("full",), residual=BF16, options={"prologue": silu_and_mul, **bounds}
    )


def verify_division(host: dict[str, Any], out: Tensor, scale: Tensor, norm: Tensor) -> str | None:
    """With the norm stored as it was quantized, scales and codes are known to the byte: no reciprocal gives all of them."""
    if norm.dtype != torch.float32 and host.get("rounding") != "hf":
        return None
    fmt, group = FP8_FORMATS[out.dtype], host.get("group_size") or norm.shape[-1]
    fp8_max = host.get("fp8_max") or fmt.max
    y = norm.float()
    grouped = y.unflatten(-1, (-1, group))
    if "static_scale" not in host and scale.dtype == torch.float32:
        amax = grouped.abs().amax(-1)
        bound = math.inf if host.get("scale_ub") is None else float(host["scale_ub"])
        wanted = (amax if math.isnan(bound) else amax.clamp(max=bound)) / fp8_max
        least = torch.tensor(host.get("min_scale", 0.0))
        wanted = torch.where(amax.isfinite(), torch.maximum(wanted, least), torch.nan)
        if not torch.equal(wanted.view(torch.int32)[~wanted.isnan()], scale.view(torch.int32)[~wanted.isnan()]):
            return "scales are not those of the stored norm"
    divided = grouped / torch.where(scale == 0, math.inf, scale.float()).unsqueeze(-1)
    form = (fmt.bias, fp8_max, fmt.nan_code, fmt.has_negative_zero)
    different = int((oracle.encode(divided.flatten(-2).double(), *form) != out.view(torch.uint8)).sum())
    return f"{different} codes are not those of the stored norm divided by its scale" if different else None
