"""rms_norm, rms_norm_fused_fp8, layer_norm, rms_norm_add_rms_norm and quantize of bfloat16 rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.formats import E4M3FN

from .workload import (
    EPS,
    GROUP,
    Call,
    Family,
    Problem,
    Stream,
    Workload,
    grouped,
    metas,
    moved_bytes,
    normed,
    quantized,
    randoms,
)

_MODEL = tuple((m, 7168) for m in (1, 32, 128, 1024, 4096, 16384))
_CPU = (*((m, 4096) for m in (1, 16, 256, 4096)), (4096, 7168))
_ENGINE = ((1, 64), *((m, 4096) for m in (1, 4, 16, 1024, 4096)), (4096, 16384))
"""What an engine on a CPU calls, from one short row to a long prefill."""
SANDWICH = "rms_norm_add_rms_norm"
"""Rows of Gemma 3: 1152 columns in its smallest model of text, 5376 in its largest. Its GPU kernels have not run yet."""
SANDWICH_FP8 = "rms_norm_add_rms_norm_quant"
QUANTIZE = "quantize"
"""Rows of DeepSeek-V3's hidden size. Its GPU kernels have not run yet."""
_QUANTIZED = ((1, 7168), (64, 7168), (4096, 7168))
SHAPES = {
    ("rms_norm_fused_fp8", "cuda"): (*_MODEL, (128, 4096), (16384, 4096), (1024, 8192), (8192, 16384), (2048, 40960)),
    ("rms_norm", "cuda"): (*_MODEL, (16384, 4096), (8192, 16384), (262144, 128)),
    ("rms_norm_fused_fp8", "cpu"): _CPU,
    ("rms_norm", "cpu"): (*_ENGINE, (4096, 7168)),
    ("layer_norm", "cuda"): ((1, 8192), (4096, 8192), (16384, 8192)),
    ("layer_norm", "cpu"): ((1, 4096), (256, 4096)),
    (SANDWICH, "cuda"): ((1, 5376), (16, 5376), (4096, 5376)),
    (SANDWICH_FP8, "cuda"): ((1, 5376), (4096, 5376)),
    (SANDWICH_FP8, "cpu"): ((1, 5376), (256, 5376)),
    (SANDWICH, "cpu"): ((1, 1152), (1, 5376), (16, 5376), (256, 5376), (4096, 5376)),
    (QUANTIZE, "cuda"): (*_QUANTIZED, (16384, 7168)),
    (QUANTIZE, "cpu"): _QUANTIZED,
}
_MORE = ((1, 7168), (4096, 7168))
WITH_MORE = {"rms_norm": (*_ENGINE, *_MORE), "rms_norm_fused_fp8": _MORE}
"""Shapes that are also measured with a residual, or with one scale per group."""
MORE = {"rms_norm": "residual", "rms_norm_fused_fp8": f"groups of {GROUP}"}
IN_PLACE = "onepass, in place"
"""The sum in place, as engines call it. On a GPU it has the kernel of the other form, and is not measured."""
SEPARATE = "add, then rms_norm"
"""A norm with a residual as two launches: torch's sum and our norm."""
TWO = "rms_norm, then the next norm"
"""A post-norm and the next norm with the residual as two launches of ours."""
STREAMS: dict[str, Stream] = {
    "rms_norm": "copy",
    "rms_norm_fused_fp8": "halve",
    "layer_norm": "copy",
    SANDWICH: "copy",
    SANDWICH_FP8: "halve",
    QUANTIZE: "halve",
}


def norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """`onepass.rms_norm` in torch."""
    return normed(x, gamma, eps).to(x.dtype)


def centered(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """`onepass.layer_norm` in torch."""
    h = x.float()
    return normed(h - h.mean(-1, keepdim=True), gamma, eps).to(x.dtype)


def added(x: Tensor, gamma: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.rms_norm` of ``x + residual`` in torch."""
    h = x.float() + residual.float()
    return normed(h, gamma, eps).to(x.dtype), h.to(x.dtype)


def sandwiched(x: Tensor, post: Tensor, pre: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.rms_norm_add_rms_norm` in torch."""
    h = normed(x, post, eps).to(x.dtype).float() + residual.float()
    return normed(h, pre, eps).to(x.dtype), h.to(x.dtype)


def sandwiched_fp8(x: Tensor, post: Tensor, pre: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, ...]:
    """`onepass.rms_norm_add_rms_norm_quant` to fp8 in torch."""
    h = normed(x, post, eps).to(x.dtype).float() + residual.float()
    return *quantized(normed(h, pre, eps)), h.to(x.dtype)


def per_row(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`onepass.rms_norm_fused_fp8` in torch."""
    return quantized(normed(x, gamma, eps))


def per_group(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`onepass.rms_norm_fused_fp8` with one scale per `GROUP` columns in torch."""
    return grouped(normed(x, gamma, eps))


def activated_fp8(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.quantize` of a gated MLP's activation in torch."""
    return quantized(torch.nn.functional.silu(gate.float()) * x.float())


def plain_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.quantize` to fp8 in torch."""
    return quantized(x.float())


def problem(op: str, m: int, n: int, device: str, more: bool = False) -> Problem:
    """Random inputs, and our call with outputs allocated beforehand.

    With ``more``, a residual or one scale per group, the problem has another name: not every peer can do that.
    """
    x, gamma = randoms(device, (m, n), (n,))
    name = f"{op}, {MORE[op]}" if more else op
    if op == "layer_norm":
        layer = partial(onepass.layer_norm, x, gamma, None, EPS, out=torch.empty_like(x))
        return Problem(name, {"onepass": layer}, centered, (x, gamma, EPS))
    if op == "rms_norm":
        ours = partial(onepass.rms_norm, x, gamma, EPS, out=torch.empty_like(x))
        if not more:
            return Problem(name, {"onepass": ours}, norm, (x, gamma, EPS))
        residual = torch.randn_like(x)
        both = partial(ours, residual=residual, residual_out=torch.empty_like(x))
        y, h = torch.empty_like(x), torch.empty_like(x)

        def separate() -> object:
            return onepass.rms_norm(torch.add(x, residual, out=h), gamma, EPS, out=y), h

        contenders: dict[str, Call] = {"onepass": both, SEPARATE: separate}
        if device == "cpu":
            mine, total = x.clone(), residual.clone()
            given = {"residual": total, "out": mine, "residual_out": total}
            contenders[IN_PLACE] = partial(onepass.rms_norm, mine, gamma, EPS, **given)
        return Problem(name, contenders, added, (x, gamma, EPS, residual))
    codes, scale = torch.empty_like(x, dtype=E4M3FN.dtype), torch.empty(m, n // GROUP if more else 1, device=device)
    group = GROUP if more else None
    fp8 = partial(onepass.rms_norm_fused_fp8, x, gamma, EPS, group_size=group, out=codes, scale_output=scale)
    return Problem(name, {"onepass": fp8}, per_group if more else per_row, (x, gamma, EPS))


def sandwich_problem(m: int, n: int, device: str) -> Problem:
    """A post-norm, an addition and a norm in one launch, and as two of ours."""
    x, residual, post, pre = randoms(device, (m, n), (m, n), (n,), (n,))
    b, y, h = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    one = partial(onepass.rms_norm_add_rms_norm, x, post, pre, EPS, residual=residual, out=y, residual_out=h)

    def two() -> object:
        onepass.rms_norm(x, post, EPS, out=b)
        return onepass.rms_norm(b, pre, EPS, residual=residual, out=y, residual_out=h)

    return Problem(SANDWICH, {"onepass": one, TWO: two}, sandwiched, (x, post, pre, EPS, residual))


def sandwich_fp8_problem(m: int, n: int, device: str) -> Problem:
    """The same to fp8."""
    x, residual, post, pre = randoms(device, (m, n), (m, n), (n,), (n,))
    b, h, codes = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x, dtype=E4M3FN.dtype)
    outs: dict[str, Any] = {
        "residual": residual,
        "residual_out": h,
        "out": codes,
        "scale_out": torch.empty(m, 1, device=device),
    }
    one = partial(onepass.rms_norm_add_rms_norm_quant, x, post, pre, EPS, **outs)

    def two() -> object:
        onepass.rms_norm(x, post, EPS, out=b)
        return onepass.rms_norm_fused_quant(b, pre, EPS, **outs)

    return Problem(SANDWICH_FP8, {"onepass": one, TWO: two}, sandwiched_fp8, (x, post, pre, EPS, residual))


def quantize_problem(m: int, n: int, device: str, gated: bool = False) -> Problem:
    """Rows to fp8, alone or times a gate: both are then halves of what a merged projection returns."""
    (both,) = randoms(device, (m, 2 * n if gated else n))
    x, codes, scale = (
        both[:, -n:],
        torch.empty(m, n, dtype=E4M3FN.dtype, device=device),
        torch.empty(m, 1, device=device),
    )
    ours = partial(onepass.quantize, x, out=codes, scale_out=scale)
    if not gated:
        return Problem(QUANTIZE, {"onepass": ours}, plain_fp8, (x,))
    gate = both[:, :n]
    return Problem(f"{QUANTIZE}, silu_mul", {"onepass": partial(ours, gate=gate)}, activated_fp8, (x, gate))


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[M, N]; at some shapes also with a residual, or with one scale per group."""
    if len(shape) != 2:
        return []
    m, n = shape
    x, gamma = metas((m, n), (n,))
    if op == SANDWICH:
        moved = moved_bytes([x, x, gamma, gamma, x, x])
        return [Workload(op, shape, moved, partial(sandwich_problem, m, n), STREAMS[op])]
    if op == SANDWICH_FP8:
        moved = moved_bytes([x, x, gamma, gamma, x, *onepass.rms_norm_fused_fp8(x, gamma)])
        return [Workload(op, shape, moved, partial(sandwich_fp8_problem, m, n), STREAMS[op])]
    if op == QUANTIZE:
        results = onepass.quantize(x)
        makes = {gated: partial(quantize_problem, m, n, gated=gated) for gated in (False, True)}
        plain = Workload(op, shape, moved_bytes([x, *results]), makes[False], STREAMS[op])
        about = {"with": "silu_mul"}
        return [plain, Workload(op, shape, moved_bytes([x, x, *results]), makes[True], STREAMS[op], about)]
    found = []
    for more in (False, True) if shape in WITH_MORE.get(op, ()) else (False,):
        if op != "rms_norm_fused_fp8":
            others: tuple[Tensor, ...] = (x, x, x) if more else (x,)
        else:
            others = onepass.rms_norm_fused_fp8(x, gamma, group_size=GROUP if more else None)
        about = {"with": MORE[op]} if more else {}
        make = partial(problem, op, m, n, more=more)
        found.append(Workload(op, shape, moved_bytes([x, gamma, *others]), make, STREAMS[op], about))
    return found


FAMILY = Family(
    "rows", ("rms_norm_fused_fp8", "rms_norm", "layer_norm", SANDWICH, SANDWICH_FP8, QUANTIZE), SHAPES, workloads, "MxN"
)
