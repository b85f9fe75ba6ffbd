"""Promises of the row norms and of `quantize`: a row's bytes depend on the row alone, graphs replay, indices are 64-bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.formats import FLOATS, ROUNDINGS
from onepass.ops.rms_norm.op import (
    quantize,
    rms_norm,
    rms_norm_add_rms_norm,
    rms_norm_add_rms_norm_quant,
    rms_norm_fused_fp8,
    rms_norm_fused_quant,
)
from onepass.testing.tensors import same_bytes

Promise = Callable[[], str | None]
"""Returns None, or how the promise is broken."""

LENGTHS = (64, 127, 128, 512, 1000, 1408, 4096, 5000, 7168, 16384, 20000)
ON_GPU = {torch.bfloat16: LENGTHS, torch.float16: (127, 512, 7168), torch.float32: (64, 127, 1000, 4096, 7168, 20000)}
"""Lengths on a GPU, where each dtype is compiled. float16 takes the same paths as bfloat16."""


def promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise that can be tested on ``device``."""
    for dtype in FLOATS:
        for n in ON_GPU[dtype] if device == "cuda" else LENGTHS:
            label = f"{n} columns of {str(dtype).removeprefix('torch.')}"
            yield f"a row alone is the row in a batch: {label}", partial(_batch, device, n, dtype)
            yield f"alignment changes no bit: {label}", partial(_alignment, device, n, dtype)
            yield f"what else is stored changes no bit: {label}", partial(_stored, device, n, dtype)
            yield f"a post-norm in the launch changes no bit: {label}", partial(_sandwiched, device, n, dtype)
            yield f"codes and scales without a norm are those of torch: {label}", partial(_divided, device, n, dtype)
    yield "a thousand repeats change no bit", lambda: _repeats(device)
    if device == "cuda":
        yield "a captured graph replays on new inputs", _graph
        yield "more than 2**32 elements are addressed", _huge


def _all(x: Tensor, gamma: Tensor) -> list[Tensor]:
    group = 64 if x.shape[-1] % 64 == 0 else None
    results = [rms_norm(x, gamma), *rms_norm(x, gamma, residual=x), *rms_norm_fused_fp8(x, gamma)]
    results += rms_norm_fused_fp8(x, gamma, rounding="hf", return_norm=True, group_size=group)
    results += rms_norm_fused_quant(x, gamma, format="int8", rounding="stored")
    if x.shape[-1] % 32 == 0:
        results += [*rms_norm_fused_quant(x, gamma, format="mxfp4"), *rms_norm_fused_quant(x, gamma, format="nvfp4")]
    results += [*quantize(x), *quantize(x, gate=x, rounding="hf", format="int8", group_size=group)]
    results += [*rms_norm_add_rms_norm(x, gamma, gamma, residual=x)]
    return [*results, *rms_norm_add_rms_norm_quant(x, gamma, gamma, residual=x, format="int8", rounding="hf")]


def _inputs(device: str, rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, n, device=device).to(dtype)
    return x, torch.randn(n, device=device).to(dtype)


def _batch(device: str, n: int, dtype: torch.dtype) -> str | None:
    x, gamma = _inputs(device, 4096 if n <= 512 else 300, n, dtype)
    whole = _all(x, gamma)
    for rows in (1, 2, 3, 17, 64, 255):
        for begin in (0, 1, 101, x.shape[0] - rows):
            for index, (part, full) in enumerate(zip(_all(x[begin : begin + rows], gamma), whole, strict=True)):
                if not same_bytes(part, full[begin : begin + rows]):
                    return f"result {index} of rows {begin} to {begin + rows} differs from the whole batch's"
    return None


def _alignment(device: str, n: int, dtype: torch.dtype) -> str | None:
    x, gamma = _inputs(device, 33, n, dtype)
    expected = _all(x, gamma)
    for shift in (1, 2, 3, 4, 7, 8):
        moved = torch.empty(33 * n + 64, device=device, dtype=dtype)[shift : shift + 33 * n].view(33, n).copy_(x)
        weight = torch.empty(n + 64, device=device, dtype=dtype)[shift : shift + n].copy_(gamma)
        apart = torch.empty(33, n + shift, device=device, dtype=dtype)[:, :n].copy_(x)
        for label, a, g in (("x moved", moved, gamma), ("gamma moved", x, weight), ("rows apart", apart, gamma)):
            for index, (one, other) in enumerate(zip(_all(a, g), expected, strict=True)):
                if not same_bytes(one, other):
                    return f"result {index} differs with {label} by {shift} elements"
    return None


def _stored(device: str, n: int, dtype: torch.dtype) -> str | None:
    x, gamma = _inputs(device, 65, n, dtype)
    nothing = torch.zeros_like(x)
    norm, (_, scale) = rms_norm(x, gamma), rms_norm_fused_fp8(x, gamma)
    row = rms_norm_fused_fp8(x, gamma, return_norm=True)
    both = rms_norm_fused_fp8(x, gamma, residual=nothing, return_norm=True)
    static = torch.ones(1, device=device)
    norms = {
        "with a residual": rms_norm(x, gamma, residual=nothing)[0],
        "with codes": row[-1],
        "with codes and a residual": both[-1],
        "with given scales": rms_norm_fused_fp8(x, gamma, static_scale=static, return_norm=True)[-1],
    }
    if n % 64 == 0:
        norms["with groups"] = rms_norm_fused_fp8(x, gamma, group_size=64, return_norm=True)[-1]
        norms["with pairs of codes"] = rms_norm_fused_quant(x, gamma, format="nvfp4", return_norm=True)[-1]
    scales = {"with a norm": row[1], "with a norm and a residual": both[1]}
    for label, other in norms.items():
        if not same_bytes(norm, other):
            return f"the norm {label} differs from the norm alone"
    for label, other in scales.items():
        if not same_bytes(scale, other):
            return f"the scales {label} differ from those with codes alone"
    return None


def _sandwiched(device: str, n: int, dtype: torch.dtype) -> str | None:
    """`rms_norm_add_rms_norm` is bit-identical to the separate calls, in each rounding."""
    x, post = _inputs(device, 65, n, dtype)
    residual, pre = _inputs(device, 65, n, dtype)
    for rounding in ROUNDINGS:
        for round_sum in (False, True):
            b = rms_norm(x, post, rounding=rounding)
            options: dict[str, Any] = {"residual": residual, "rounding": rounding, "round_sum": round_sum}
            pairs: list[Any] = [(rms_norm_add_rms_norm(x, post, pre, **options), rms_norm(b, pre, **options))]
            codes = rms_norm_add_rms_norm_quant(x, post, pre, return_norm=True, **options)
            pairs.append((codes, rms_norm_fused_quant(b, pre, return_norm=True, **options)))
            for ours, wanted in pairs:
                if not all(map(same_bytes, ours, wanted)):
                    return f"{len(ours)} results with rounding {rounding!r} and round_sum={round_sum} differ"
    return None


def _divided(device: str, n: int, dtype: torch.dtype) -> str | None:
    """Scales and codes are known to the byte where nothing is computed before them."""
    x, _ = _inputs(device, 65, n, dtype)
    for group in (None, 64) if n % 64 == 0 else (None,):
        y = x.float().unflatten(-1, (-1, group or n))
        most = torch.tensor(448.0, device=device)  # on a GPU torch multiplies by the reciprocal of a number
        scale = y.abs().amax(-1, keepdim=True) / most
        for way, quotient in {"reciprocal": y * (1 / scale), "divide": y / scale}.items():
            codes, ours = quantize(x, quantize=way, group_size=group)  # type: ignore[arg-type]
            if not same_bytes(ours, scale.squeeze(-1)):
                return f"scales of groups of {group} are not the largest magnitude over 448"
            if not same_bytes(codes, quotient.clamp(-448, 448).to(codes.dtype).flatten(-2)):
                return f"codes of groups of {group} are not those of the {way}"
    return None


def _repeats(device: str) -> str | None:
    x, gamma = _inputs(device, 64, 7168, torch.bfloat16)
    first = rms_norm_fused_fp8(x, gamma)
    for repeat in range(1000):
        if not all(same_bytes(a, b) for a, b in zip(first, rms_norm_fused_fp8(x, gamma), strict=True)):
            return f"repeat {repeat} differs"
    return None


def _graph() -> str | None:
    x, gamma = _inputs("cuda", 128, 4096, torch.bfloat16)

    def calls() -> list[Tensor]:
        packed = rms_norm_fused_quant(x, gamma, format="mxfp8", scale_layout="column_packed")
        tiled = rms_norm_fused_quant(x, gamma, format="nvfp4", scale_layout="128x4")
        return [*rms_norm_fused_fp8(x, gamma, residual=x), *packed, *tiled]

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = calls()
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = calls()
        if not all(same_bytes(a, b) for a, b in zip(results, expected, strict=True)):
            return "a replay differs from an eager call"
    return None


def _huge() -> str | None:
    rows, n = 2**32 // 8192 + 100, 8192
    x = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    for part in x.split(65536):
        part.normal_()
    gamma = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    y = rms_norm(x, gamma)
    q, scale = rms_norm_fused_fp8(x, gamma)
    pairs, scales = rms_norm_fused_quant(x, gamma, format="nvfp4")
    for begin in (0, 2**31 // n - 2, 2**32 // n - 2, rows - 4):
        part = slice(begin, begin + 4)
        ours = (y[part], q[part], scale[part], pairs[part], scales[part])
        few = x[part].clone()
        quantized = rms_norm_fused_quant(few, gamma, format="nvfp4")
        expected = (rms_norm(few, gamma), *rms_norm_fused_fp8(few, gamma), *quantized)
        if not all(same_bytes(a, b) for a, b in zip(ours, expected, strict=True)):
            return f"rows {begin} to {begin + 4} of {rows} differ"
    return None
