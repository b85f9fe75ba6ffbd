"""Promises of `linear`.

A fused call has the bytes of separate steps, a call in place those of one that is not, and a product those of the GEMV,
except for 16-bit weights on a GPU.
Graphs replay on new inputs, and kernels wait for their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from onepass.formats import E4M3FN, FLOATS
from onepass.gpu.product_tile import MOST_STATIC
from onepass.ops.gemv_norm.op import gemv_and_partial_norm
from onepass.ops.linear.op import linear
from onepass.ops.rms_norm.op import rms_norm
from onepass.testing.tensors import same_bytes
from tests.oracle.weights import scales, whole_numbers

Promise = Callable[[], str | None]
_ROWS: Final = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 130)
_MORE_ROWS: Final = (*_ROWS[:-1], 65, 130, 257, 300)
"""On a GPU: with these, every class of rows in the H200's tables of tiles."""
_SHAPES: Final = ((40, 1001), (300, 2100), (600, 520), (1536, 300), (3000, 264), (4224, 136), (8200, 1088))
"""N and K: on a GPU, a sum has 16 pieces below 8192 rows of weight and 4 from there on. Two have several blocks per piece."""
_LATE: Final = ((2112, 1024), (3000, 1024), (4608, 1024), (7168, 1024), (9216, 2560), (26624, 2560), (33856, 2560))
"""N and K: every class of columns in the H200's tables of static weights."""
_KINDS: Final = ("float", "fp8 row", "fp8 block", "int8 row")
_TILES: Final = ((5000, 264), (9000, 264), (9000, 2304))
"""Further N and K for which 8-bit weights have tiles of their own on the H200."""
_FEW_FLOATS: Final = ((300, 2100), (1536, 300), (8200, 1088))
"""N and K for which a GPU, where each dtype is compiled, takes float16 and float32 too."""


def promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise that can be tested on ``device``."""
    for kind in _KINDS:
        for n, k in _SHAPES:
            label = f"{kind} weights, N = {n}, K = {k}"
            yield f"a row alone is the row in a batch: linear, {label}", partial(_batch, device, n, k, kind)
            floats = FLOATS if device != "cuda" or (n, k) in _FEW_FLOATS else FLOATS[:1]
            if device == "cuda" and kind == "float":  # the GEMV sums 16-bit weights in an order of its own
                floats = (torch.float32,)
            yield f"linear: its product is the GEMV's: {label}", partial(_gemv, device, n, k, kind, floats)
        for n, k in _TILES if device == "cuda" and kind != "float" else ():
            label = f"{kind} weights, N = {n}, K = {k}"
            yield f"a row alone is the row in a batch: linear, {label}", partial(_batch, device, n, k, kind)
    for dtype in FLOATS:
        label = str(dtype).removeprefix("torch.")
        yield f"linear: fused is separate: {label}", partial(_separate, device, dtype)
    yield "linear: a residual and an addition in place, a thousand times", partial(_in_place, device)
    if device == "cuda":
        yield "linear: a graph replays on new inputs", _graph
        for static in (False, True):
            label = "static weights" if static else "weights"
            yield f"linear: x is read after the kernel that writes it: {label}", partial(_chain, static)
        for kind in _KINDS:
            yield f"linear: x of a kernel that writes late: {kind} weights", partial(_late, kind)


def weights_of(device: str, n: int, k: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weights and their scale."""
    generator = torch.Generator().manual_seed(n + k)
    normal = torch.randn(n, k, generator=generator)
    name, _, scale = kind.partition(" ")
    weight = whole_numbers(normal) if name == "int8" else normal.to(E4M3FN.dtype if name == "fp8" else dtype)
    return weight.to(device), scales(scale, n, k, generator).to(device) if scale else None


def _batch(device: str, n: int, k: int, kind: str) -> str | None:
    """A row alone and in batches, with norm and activation."""
    weight, scale = weights_of(device, n, k, kind, torch.bfloat16)
    counts = _MORE_ROWS if device == "cuda" else _ROWS
    most = counts[-1]
    x, gamma = torch.randn(most, k, device=device).bfloat16(), torch.ones(k, device=device)
    options: dict[str, Any] = {"gamma": gamma, "weight_scale": scale, "activation": "silu_mul"}
    whole = linear(x, weight, **options)
    for m in counts:
        for begin in {0, most - m}:
            rows = slice(begin, begin + m)
            for static in (False, True) if device == "cuda" and m <= MOST_STATIC else (False,):
                if not same_bytes(linear(x[rows], weight, static_weight=static, **options), whole[rows]):
                    return f"rows {begin} to {begin + m} differ from the whole batch's, static_weight={static}"
    return None


def _gemv(device: str, n: int, k: int, kind: str, floats: Sequence[torch.dtype]) -> str | None:
    for dtype in floats:
        weight, scale = weights_of(device, n, k, kind, dtype)
        x, gamma = torch.randn(16, k, device=device).to(dtype), torch.ones(1, device=device)
        whole = linear(x, weight, weight_scale=scale)
        for m in (1, 7, 16):
            unnormed = gemv_and_partial_norm(x[:m], weight, gamma, weight_scale=scale)[1]
            if not same_bytes(unnormed, whole[:m, 1:]):
                return f"{m} rows of {dtype} differ"
    return None


def _separate(device: str, dtype: torch.dtype) -> str | None:
    """Norm, product, bias, activation and addition, each alone."""
    n, k = 1408, 520
    for kind in _KINDS:
        weight, scale = weights_of(device, n, k, kind, dtype)
        for m in (1, 5, 40, 300) if device == "cuda" else (1, 5, 40):
            x, residual = torch.randn(m, k, device=device).to(dtype), torch.randn(m, k, device=device)
            gamma, bias = torch.randn(k, device=device).to(dtype), torch.randn(n, device=device)
            add = torch.randn(m, n // 2, device=device).to(dtype)
            a, h = rms_norm(x, gamma, residual=residual)
            y = linear(a, weight, weight_scale=scale, out_dtype=torch.float32) + bias
            gated = linear(y, torch.eye(n, device=device), activation="silu_mul")
            options: dict[str, Any] = {"gamma": gamma, "bias": bias, "weight_scale": scale, "add": add}
            got = linear(x, weight, residual=residual, activation="silu_mul", **options)
            if not same_bytes(got[1], h) or not same_bytes(got[0], (gated + add.float()).to(dtype)):
                return f"{m} rows with {kind} weights differ"
    return None


def _in_place(device: str) -> str | None:
    """In one launch, every block would read the residual while one of them overwrites it."""
    x, weight = torch.randn(3, 1024, device=device).bfloat16(), torch.randn(4224, 1024, device=device).bfloat16()
    first, addition = torch.randn(3, 1024, device=device), torch.randn(3, 4224, device=device).bfloat16()
    gamma = torch.ones(1024, device=device)
    expected = linear(x, weight, gamma=gamma, residual=first, add=addition)
    for repeat in range(1000 if device == "cuda" else 20):
        residual, add = first.clone(), addition.clone()
        linear(x, weight, gamma=gamma, residual=residual, add=add, out=add, residual_out=residual)
        if not same_bytes(add, expected[0]) or not same_bytes(residual, expected[1]):
            return f"repeat {repeat} differs"
    return None


def _graph() -> str | None:
    x, weight = torch.randn(2, 2048, device="cuda").bfloat16(), torch.randn(3000, 2048, device="cuda").bfloat16()
    gamma, residual = torch.ones(2048, device="cuda"), torch.randn(2, 2048, device="cuda")
    linear(x, weight, gamma=gamma, residual=residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain = [linear(x, weight, gamma=gamma, residual=residual) for _ in range(20)]
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        expected = linear(x, weight, gamma=gamma, residual=residual)
        for call in chain:
            if not all(same_bytes(a, b) for a, b in zip(call, expected, strict=True)):
                return "a replay differs from an eager call"
    return None


def _chain(static: bool) -> str | None:
    """Each product reads what the previous one wrote."""
    weight = torch.randn(2048, 2048, device="cuda").bfloat16() / 45
    x = torch.randn(4, 2048, device="cuda").bfloat16()
    expected = x
    for _ in range(50):
        expected = linear(expected, weight, add=expected)
        torch.cuda.synchronize()
    for repeat in range(50):
        y = x
        for _ in range(50):
            y = linear(y, weight, add=y, static_weight=static)
        if not same_bytes(y, expected):
            return f"repeat {repeat}: a product did not wait for its input"
    return None


def _late(kind: str) -> str | None:
    """The kernel in front lets the next one start at once, and writes x after 100 microseconds."""
    from tools.promises.late import copy_late

    for n, k in _LATE:
        weight, scale = weights_of("cuda", n, k, kind, torch.bfloat16)
        for m in (1, MOST_STATIC):
            source, add = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(m, n, device="cuda").bfloat16()
            expected = linear(source, weight, weight_scale=scale, add=add)
            x, sum_ = torch.empty_like(source), torch.empty_like(add)
            for repeat in range(3):
                x.fill_(torch.nan)
                sum_.fill_(torch.nan)
                torch.cuda.synchronize()
                copy_late(add, sum_)
                copy_late(source, x)
                if not same_bytes(linear(x, weight, weight_scale=scale, add=sum_, static_weight=True), expected):
                    return f"{m} x {n} x {k}, repeat {repeat}: x was read too early"
    return None
