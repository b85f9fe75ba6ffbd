"""`onepass.engines.vllm` and the vLLM plugin equal vLLM's formulas byte for byte; part of ``python -m tools.checks --promises``.

Only ``rs``, the reciprocal root of a row, depends on the order of a sum and on the hardware. So the formulas, in plain
torch, are evaluated for every float32 within a few ulp of the exact root, and a row passes if all of its bytes are those
of one such root. Nothing else may differ.

The formulas are those of vLLM's ``csrc``: ``layernorm_kernels.cu``, and ``layernorm_utils.cuh``, ``quant_conversions.cuh`` and
``utils.cuh`` of its quantization. ``scalar_t(a)`` there is a rounding to the tensors' dtype. The plugin's are those of the native
functions in ``vllm/ir/ops/layernorm.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from onepass.engines import plugin, vllm, vllm_0_19
from onepass.formats import FLOATS
from onepass.testing.tensors import same_bytes

Promise = Callable[[], str | None]
EPS: Final = 1e-5
NEAR: Final = range(-8, 9)
"""Distance in ulp that a float32 root may have from the exact one: a sum of 20,480 squares in another order is off by 2,
a GPU's reciprocal root by 2."""
QMAX: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0, torch.float8_e5m2: 57344.0}
BOUNDS: Final = (None, 1.5, 0.0, -2.0)


def roots(h: Tensor, eps: float = EPS) -> Iterator[Tensor]:
    """Candidates for ``rs`` of the rows of h, float32 [rows, 1]."""
    exact = (h.double().square().mean(-1, keepdim=True) + torch.tensor(eps, dtype=torch.float32)).rsqrt().float()
    for distance in NEAR:
        yield (exact.view(torch.int32) + distance).view(torch.float32)


def normed_once(h: Tensor, rs: Tensor, weight: Tensor) -> Tensor:
    """The norms of vLLM 0.20 and later: ``scalar_t(x * s_variance * w)``."""
    return (h.float() * rs * weight.float()).to(h.dtype)


def normed_twice(h: Tensor, rs: Tensor, weight: Tensor) -> Tensor:
    """The norms of vLLM 0.19, and those inside its fp8 kernels: ``scalar_t(x * rms) * weight``, in weight's dtype."""
    return ((h.float() * rs).to(weight.dtype).float() * weight.float()).to(weight.dtype)


def quantized(y: Tensor, dtype: torch.dtype, group: int, scale_ub: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes like y and scales [rows, groups] as vLLM's fp8 kernels make them: C's fmin and fmax, and a true division."""
    qmax = torch.tensor(QMAX[dtype])
    values = y.float().unflatten(-1, (-1, group))
    scale = values.abs().amax(-1)
    if scale_ub is not None:
        scale = torch.fmin(scale, scale_ub.reshape(()))
    scale = torch.fmax(scale / qmax, 1.0 / (qmax * 512.0))
    divided = (values / scale.unsqueeze(-1)).clamp(-float(qmax), float(qmax))
    return divided.to(dtype).flatten(-2), scale


def rows_that_differ(got: Sequence[Tensor], candidates: Iterator[Sequence[Tensor]]) -> list[int]:
    """Rows of which no candidate has all bytes."""
    matched = torch.zeros(got[0].shape[0], dtype=torch.bool)
    for candidate in candidates:
        same = torch.ones_like(matched)
        for mine, theirs in zip(got, candidate, strict=True):
            if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
                raise ValueError(f"{mine.dtype} {list(mine.shape)}, expected {theirs.dtype} {list(theirs.shape)}")
            same &= (_bytes(mine) == _bytes(theirs)).all(-1)
        matched |= same
    return [int(row) for row in (~matched).nonzero().flatten()]


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8).reshape(t.shape[0], -1)


def inputs(dtype: torch.dtype, n: int, rows: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and weight on the CPU: rows of several sizes, among them zeros and rows below vLLM's least scale."""
    generator = torch.Generator().manual_seed(n)
    x, residual = (torch.randn(rows, n, generator=generator) for _ in range(2))
    sizes = torch.tensor([1.0, 30.0, 0.02, 1.0])[torch.arange(rows) % 4, None]
    x, residual = x * sizes, residual * sizes
    for row, size in ((0, 0.0), (1, 1e-5)):
        x[row] *= size
        residual[row] *= size
    weight = 1 + 0.3 * torch.randn(n, generator=generator)
    weight[:64] *= 1e-4  # a group whose scale is below the least
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


def _message(rows: list[int]) -> str | None:
    return f"rows {rows[:8]} have bytes that no float32 root explains" if rows else None


def norm_bytes(device: str, dtype: torch.dtype, n: int) -> str | None:
    """``rms_norm`` and ``fused_add_rms_norm`` of both versions."""
    x, residual, weight = inputs(dtype, n)
    total = x + residual
    for module, norm in ((vllm, normed_once), (vllm_0_19, normed_twice)):
        out = torch.empty_like(x, device=device)
        module.rms_norm(out, x.to(device), weight.to(device), EPS)
        wrong = rows_that_differ([out.cpu()], ([norm(x, rs, weight)] for rs in roots(x)))
        a, b = x.to(device, copy=True), residual.to(device, copy=True)
        module.fused_add_rms_norm(a, b, weight.to(device), EPS)
        if not same_bytes(b.cpu(), total):
            return f"{module.__name__}: the residual is not the rounded sum"
        wrong += rows_that_differ([a.cpu()], ([norm(total, rs, weight)] for rs in roots(total)))
        if wrong:
            return f"{module.__name__}: {_message(wrong)}"
    return None


def code_bytes(
    device: str, dtype: torch.dtype, n: int, group: int | None, added: bool, bound: float | None, out: torch.dtype
) -> str | None:
    """The two functions with fp8."""
    x, residual, weight = inputs(dtype, n)
    limit = None if bound is None else torch.tensor([bound])
    given = residual.to(device, copy=True) if added else None
    moved = (x.to(device), weight.to(device), EPS, out)
    upper = None if limit is None else limit.to(device)
    if group is None:
        codes, scales = vllm.rms_norm_dynamic_per_token_quant(*moved, upper, given)
    else:
        codes, scales = vllm.rms_norm_per_block_quant(*moved, [1, group], upper, given)
    h = x.float() + residual.float() if added else x.float()
    if given is not None and not same_bytes(given.cpu(), h.to(dtype)):
        return "the residual is not the rounded sum"
    candidates = (quantized(normed_twice(h, rs, weight), out, group or n, limit) for rs in roots(h))
    return _message(rows_that_differ([codes.cpu(), scales.cpu()], candidates))


def native_bytes(device: str, dtype: torch.dtype, n: int) -> str | None:
    """The plugin's two functions: the norm of the unrounded sum, rounded twice, or once with another weight or none."""
    x, residual, weight = inputs(dtype, n)
    total = x.float() + residual.float()
    for gamma in (weight, weight.float(), None):
        own = torch.ones(n) if gamma is None else gamma
        norm = normed_twice if gamma is not None and gamma.dtype == dtype else normed_once
        given = None if gamma is None else gamma.to(device)
        y = plugin.norm(x.to(device), given, EPS).cpu()
        wrong = rows_that_differ([y], ([norm(x.float(), rs, own).to(dtype)] for rs in roots(x)))
        a, b = x.to(device, copy=True), residual.to(device, copy=True)
        results = plugin.norm_of_sum(a, b, given, EPS)
        if results[0].data_ptr() != a.data_ptr() or results[1].data_ptr() != b.data_ptr():
            return "the activations are not overwritten"
        if not same_bytes(b.cpu(), total.to(dtype)):
            return "the residual is not the rounded sum"
        wrong += rows_that_differ([a.cpu()], ([norm(total, rs, own).to(dtype)] for rs in roots(total)))
        if wrong:
            return f"weight {None if gamma is None else gamma.dtype}: {_message(wrong)}"
    return None


def static_bytes(device: str, dtype: torch.dtype, n: int, added: bool) -> str | None:
    """The two functions with a given scale: a norm rounded twice, of the rounded sum, times the scale's reciprocal.

    Many values lie halfway between two codes times this scale, so a division would give other codes.
    """
    x, residual, weight = inputs(dtype, n)
    scale, out = torch.tensor([7 / 1024]), torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device)
    moved = (weight.to(device), scale.to(device), EPS)
    given = residual.to(device, copy=True)
    if added:
        vllm.fused_add_rms_norm_static_fp8_quant(out, x.to(device), given, *moved)
    else:
        vllm.rms_norm_static_fp8_quant(out, x.to(device), *moved)
    h = x + residual if added else x
    if added and not same_bytes(given.cpu(), h):
        return "the residual is not the rounded sum"
    limit = QMAX[torch.float8_e4m3fn]
    codes = ((normed_twice(h, rs, weight).float() * (1.0 / scale)).clamp(-limit, limit) for rs in roots(h))
    return _message(rows_that_differ([out.cpu()], ([values.to(torch.float8_e4m3fn)] for values in codes)))


def every_quotient(device: str, dtype: torch.dtype, group: int | None) -> str | None:
    """Every value of few exponents over every largest value: all ties there are, with a root that is exactly 1.

    x is 1 and -1, so the norm is the weight: all significands of 15 exponents (bfloat16; 4 of float16) in one row, or in groups that
    each begin with the row's largest value.
    """
    steps, exponents = (128, 15) if dtype is torch.bfloat16 else (1024, 4)
    significands = 1 + torch.arange(steps) / steps
    smaller = torch.cat([significands * 2.0**-e for e in range(1, exponents + 1)])
    for largest in significands[:: steps // 128].tolist():
        if group is None:
            weight = torch.cat([torch.tensor([2 * largest]), smaller])
        else:
            blocks = smaller[: smaller.numel() // (group - 1) * (group - 1)].view(-1, group - 1)
            weight = torch.cat([torch.full((len(blocks), 1), 2 * largest), blocks], 1).flatten()
        weight = weight.to(dtype)
        x = torch.ones(2, weight.numel(), dtype=dtype)
        x[:, ::2] = -1
        moved = (x.to(device), weight.to(device), 0.0, torch.float8_e4m3fn)
        if group is None:
            got = vllm.rms_norm_dynamic_per_token_quant(*moved)
        else:
            got = vllm.rms_norm_per_block_quant(*moved, [1, group])
        expected = quantized(x * weight, torch.float8_e4m3fn, group or weight.numel(), None)
        for mine, theirs in zip(got, expected, strict=True):
            if not same_bytes(mine.cpu(), theirs):
                return f"other bytes where the largest value is {2 * largest}"
    return None


def captured(group: int | None) -> str | None:
    """A graph reads the bound when it is replayed: nothing of it was read on the host."""
    x, residual, weight = (t.cuda() for t in inputs(torch.bfloat16, 4096))
    bound, out = torch.tensor([1.5], device="cuda"), torch.float8_e4m3fn

    def call(added: Tensor) -> tuple[Tensor, Tensor]:
        if group is None:
            return vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, out, bound, added)
        return vllm.rms_norm_per_block_quant(x, weight, EPS, out, [1, group], bound, added)

    call(residual.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    given = residual.clone()
    with torch.cuda.graph(graph):
        got = call(given)
    for value in (1.5, 0.25, -1.0, math.inf):
        bound.fill_(value)
        given.copy_(residual)
        graph.replay()
        again = residual.clone()
        expected = (*call(again), again)
        if not all(same_bytes(a, b) for a, b in zip((*got, given), expected, strict=True)):
            return f"a replay with a bound of {value} differs from a call"
    return None


def captured_cache(kind: str) -> str | None:
    """A graph writes MLA's cache by the slots that it finds when it is replayed: nothing was read on the host."""
    generator = torch.Generator().manual_seed(9)
    kv_c, k_pe = (torch.randn(8, n, generator=generator).bfloat16().cuda() for n in (512, 64))
    scale = torch.tensor([0.37], device="cuda")
    dtype = torch.bfloat16 if kind == "auto" else torch.float8_e4m3fn
    given, expected = (torch.zeros(6, 4, 576, dtype=dtype, device="cuda") for _ in range(2))
    slots = torch.arange(8, device="cuda")
    vllm.concat_and_cache_mla(kv_c, k_pe, given, slots, kind, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vllm.concat_and_cache_mla(kv_c, k_pe, given, slots, kind, scale)
    for places in ([3, -1, 17, 0, -1, 8, 9, 22], [-1] * 8, [7, 6, 5, 4, 3, 2, 1, 0]):
        slots.copy_(torch.tensor(places))
        for cache in (given, expected):
            cache.zero_()
        graph.replay()
        for token, slot in enumerate(places):
            if slot >= 0:
                entry = torch.cat((kv_c[token], k_pe[token]))
                code = entry if kind == "auto" else (entry.float() / scale).clamp(-448, 448).to(dtype)
                expected[slot // 4, slot % 4] = code
        if not same_bytes(given, expected):
            return f"a replay with the slots {places} wrote something else"
    return None


def vllm_promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of each."""
    for dtype in FLOATS:
        label = str(dtype).removeprefix("torch.")
        # each dtype is compiled on a GPU, and float16 takes the same paths as bfloat16
        for n in (640, 7168) if device == "cuda" and dtype == torch.float16 else (100, 640, 4096, 7168, 20480):
            yield f"vLLM's bytes: norms, {n} columns of {label}", partial(norm_bytes, device, dtype, n)
            yield f"vLLM's bytes: native norms, {n} columns of {label}", partial(native_bytes, device, dtype, n)
            for added in (False, True):
                name = f"vLLM's bytes: static codes, {n} columns of {label}{', residual' if added else ''}"
                yield name, partial(static_bytes, device, dtype, n, added)
            for group in (None, 64, 128):
                if n % (group or 1) or (n > 4096 and group == 64):
                    continue
                for added in (False, True):
                    for bound in BOUNDS if n == 640 else (None, 1.5):
                        parts = [
                            f"{n} columns of {label}",
                            f"groups of {group}" if group else "",
                            "residual" if added else "",
                        ]
                        parts += [f"bound {bound}" if bound is not None else ""]
                        name = f"vLLM's bytes: codes, {', '.join(p for p in parts if p)}"
                        yield name, partial(code_bytes, device, dtype, n, group, added, bound, torch.float8_e4m3fn)
    if device == "cuda":
        for kind in ("auto", "fp8"):
            yield f"a captured graph writes the slots in memory, {kind}", partial(captured_cache, kind)
        for group in (None, 128):
            yield f"a captured graph reads the bound in memory, group {group}", partial(captured, group)
    fnuz = torch.float8_e4m3fnuz
    yield "vLLM's bytes: e4m3fnuz", partial(code_bytes, device, FLOATS[0], 640, None, True, math.nan, fnuz)
    for dtype in FLOATS[:2]:
        for group in (None, 128):
            name = f"vLLM's bytes: every quotient of {str(dtype).removeprefix('torch.')}{f', groups of {group}' if group else ''}"
            yield name, partial(every_quotient, device, dtype, group)
