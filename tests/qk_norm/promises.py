"""Promises of the QK-RMSNorm ops that need no oracle: bytes depend on the row alone, and halves make the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.formats import E4M3FN, ROUNDINGS
from onepass.ops.qk_norm.op import apply_qk_rms_norm, qk_rms_norm, row_mean_of_squares_qk, row_sum_of_squares_qk
from onepass.rope import Rope
from onepass.testing.tensors import same_bytes

Promise = Callable[[], str | None]
WIDTHS = ((128, 64), (1000, 37), (1536, 256), (6144, 1024), (16384, 1024), (20000, 1000))


def promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise that can be tested on ``device``."""
    for dtype in (torch.bfloat16, torch.float32):  # float16 takes the same paths as bfloat16
        for nq, nk in WIDTHS:
            label = f"{nq} + {nk} columns of {str(dtype).removeprefix('torch.')}"
            arguments = (device, nq, nk, dtype)
            yield f"q and k, a row alone is the row in a batch: {label}", partial(_batch, *arguments)
            yield f"q and k, alignment and strides change no bit: {label}", partial(_layout, *arguments)
            yield f"q and k, statistics and application are the fused call: {label}", partial(_halves, *arguments)
            yield f"q and k, codes are the division by the scale: {label}", partial(_codes, *arguments)
    if device == "cuda":
        yield "q and k, a captured graph replays on new inputs", _graph


def _inputs(device: str, rows: int, nq: int, nk: int, dtype: torch.dtype) -> list[Tensor]:
    q, k = (torch.randn(rows, n, device=device).to(dtype) for n in (nq, nk))
    return [q, k, torch.randn(nq, device=device), torch.randn(nk, device=device)]


def _rope(device: str, positions: Tensor) -> Rope:
    freqs = torch.arange(64, device=device, dtype=torch.float32).cos().repeat(5000, 1)
    return Rope(freqs, positions, dim=2, head_dim=4)


def _all(q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor) -> list[Tensor]:
    results = [row_sum_of_squares_qk(q, k), row_mean_of_squares_qk(q, k), *qk_rms_norm(q, k, gamma_q, gamma_k)]
    if q.shape[-1] % 64 == k.shape[-1] % 64 == 0:
        results += qk_rms_norm(q, k, gamma_q[:64], gamma_q[:64], per_head=True, rounding="hf")
        codes = qk_rms_norm(q, k, gamma_q[:64], gamma_q[:64], per_head=True, out_dtype=E4M3FN.dtype, eps_k=0.1)
        results += [codes[0].view(torch.uint8), codes[1].view(torch.uint8), *codes[2:]]
    if q.shape[-1] % 4 == k.shape[-1] % 4 == 0:
        positions = torch.full(q.shape[:-1], 3, device=q.device)
        results += qk_rms_norm(q, k, gamma_q, gamma_k, rope=_rope(str(q.device), positions))
    return results


def _batch(device: str, nq: int, nk: int, dtype: torch.dtype) -> str | None:
    q, k, *gammas = _inputs(device, 300 if device == "cuda" else 70, nq, nk, dtype)
    whole = _all(q, k, *gammas)
    for rows in (1, 3, 17, 64):
        for begin in (0, 1, q.shape[0] - rows):
            part = slice(begin, begin + rows)
            for index, (some, full) in enumerate(zip(_all(q[part], k[part], *gammas), whole, strict=True)):
                if not same_bytes(some, full[part]):
                    return f"result {index} of rows {begin} to {begin + rows} differs from the whole batch's"
    return None


def _layout(device: str, nq: int, nk: int, dtype: torch.dtype) -> str | None:
    q, k, *gammas = _inputs(device, 9, nq, nk, dtype)
    expected = _all(q, k, *gammas)
    for shift in (1, 2, 4, 8):
        wide = torch.empty(9, nq + nk + 2 * shift, device=device, dtype=dtype)
        packed = wide[:, shift : shift + nq].copy_(q), wide[:, shift + nq : shift + nq + nk].copy_(k)
        weight = torch.empty(nq + shift, device=device)[shift:].copy_(gammas[0])
        for label, a, b, g in (
            ("packed", *packed, gammas[0]),
            ("gamma moved", q, k, weight),
            ("k moved", q, packed[1], gammas[0]),
        ):
            for index, (one, other) in enumerate(zip(_all(a, b, g, gammas[1]), expected, strict=True)):
                if not same_bytes(one, other):
                    return f"result {index} differs with {label}, {shift} elements off"
    return None


def _halves(device: str, nq: int, nk: int, dtype: torch.dtype) -> str | None:
    q, k, gamma_q, gamma_k = _inputs(device, 33, nq, nk, dtype)
    means = row_mean_of_squares_qk(q, k)
    sums = row_sum_of_squares_qk(q, k)
    counts = torch.tensor([nq, nk], dtype=torch.float64, device=device)
    if not same_bytes((sums.double() / counts).float(), means):
        return "the means are not the sums divided by the counts"
    if not same_bytes(row_mean_of_squares_qk(k, q).flip(-1), means):
        return "a row's mean depends on the tensor beside it"
    for rounding in ROUNDINGS:
        fused = qk_rms_norm(q, k, gamma_q, gamma_k, rounding=rounding)
        parts = torch.empty_like(q), torch.empty_like(k)
        apply_qk_rms_norm(*parts, gamma_q, gamma_k, means, q, k, 1e-6, rounding=rounding)
        for side, one, other in zip("qk", fused, parts, strict=True):
            if not same_bytes(one, other):
                return f"{side} differs with rounding={rounding!r}"
    return None


def _codes(device: str, nq: int, nk: int, dtype: torch.dtype) -> str | None:
    """The float32 result, divided by its scale; a given scale has the bytes of the same scale of a row's own."""
    q, k, gamma_q, gamma_k = _inputs(device, 33, nq, nk, dtype)
    *codes, q_scale, k_scale = qk_rms_norm(q, k, gamma_q, gamma_k, out_dtype=E4M3FN.dtype)
    plain = qk_rms_norm(q, k, gamma_q, gamma_k, out_dtype=torch.float32)
    most = torch.tensor(E4M3FN.max, device=device)  # on a GPU torch multiplies by the reciprocal of a number
    for side, y, code, scale in zip("qk", plain, codes, (q_scale, k_scale), strict=True):
        if not same_bytes(y.abs().amax(-1, keepdim=True) / most, scale):
            return f"a scale of {side} is not the largest magnitude over 448"
        if not same_bytes((y / scale).to(E4M3FN.dtype), code):
            return f"{side} is not the quotient"
    for row in (0, 32):
        given: dict[str, Any] = {"q_scale": q_scale[row], "k_scale": k_scale[row], "out_dtype": E4M3FN.dtype}
        alone = qk_rms_norm(q[row : row + 1], k[row : row + 1], gamma_q, gamma_k, **given)
        if not all(same_bytes(one, all_[row : row + 1]) for one, all_ in zip(alone, codes, strict=True)):
            return "a given scale gives other codes"
    return None


def _graph() -> str | None:
    q, k, gamma_q, gamma_k = _inputs("cuda", 16, 6144, 1024, torch.bfloat16)
    rope = _rope("cuda", torch.arange(16, device="cuda"))
    qk_rms_norm(q, k, gamma_q, gamma_k, rope=rope)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = qk_rms_norm(q, k, gamma_q, gamma_k, rope=rope)
    for _ in range(5):
        q.copy_(torch.randn_like(q))
        graph.replay()
        if not all(
            same_bytes(a, b) for a, b in zip(results, qk_rms_norm(q, k, gamma_q, gamma_k, rope=rope), strict=True)
        ):
            return "a replay differs from an eager call"
    return None
