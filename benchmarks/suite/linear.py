"""`linear` at the sizes of published models, with bfloat16 and fp8 weights, alone and with what can be fused.

Weights are [N, K]. Up to 16 rows of x, calls rotate through more weights than a cache holds, because in a
model each layer has its own. With more rows, calls use one set of inputs. Weights are static, as in `onepass.patch`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import onepass
from onepass.formats import E4M3FN, SCALE_BLOCK

from .workload import EPS, Family, Problem, Workload, quantized

OP, FP8, FUSED, BATCH = "linear", "linear, fp8", "linear, fused", "linear, batch"
ROWS, BLOCKS = "fp8 rows", "fp8 blocks"
"""fp8 weights with a float32 scale per row, or per block of 128 x 128."""
NORM, NORM_BLOCKS, SILU, ADD = "norm", "norm, fp8 blocks", "silu_mul", "add"
THEN = "norm, then onepass"
FEW = 16
"""Rows up to which weights are cold."""
SIZES = (
    (4096, 4096),
    (6144, 4096),
    (24576, 4096),
    (4096, 12288),
    (24576, 1536),
    (36864, 7168),
    (7168, 18432),
    (7168, 16384),
    (2112, 7168),
)
"""N and K: projections of Qwen3 8B and DeepSeek-V3."""
_ROWS_OF = {OP: (1, 2, 4, 8, 16), FP8: (1, 4, 8, 16), BATCH: (32, 64, 128, 256, 512, 2048, 8192)}
_BATCHES = ((24576, 4096), (4096, 12288), (6144, 4096), (2112, 7168))
_FUSED: dict[tuple[int, int], tuple[tuple[int, ...], tuple[str, ...]]] = {
    (6144, 4096): ((1, 4, 16), (NORM, NORM_BLOCKS)),
    (2112, 7168): ((1, 4, 16), (NORM, NORM_BLOCKS)),
    (24576, 4096): ((1, 8), (SILU,)),
    (4096, 4096): ((1, 8), (ADD,)),
    (7168, 16384): ((1, 8), (ADD,)),
}
"""Rows and what is fused, by N and K."""
_ON_CPU = tuple((m, n, k) for n, k in ((2112, 7168), (4096, 4096)) for m in (1, 4, 16, 64))
_AUTOTUNED = {(1, 4096, 4096), (8, 4096, 4096), (1, 2112, 7168), (16, 2112, 7168), (1, 24576, 4096)}
"""M, N and K that `torch.compile` is also measured at in its max-autotune mode, which takes about 20 s per shape."""


def _shapes(sizes: tuple[tuple[int, int], ...], op: str) -> tuple[tuple[int, ...], ...]:
    return tuple((m, n, k) for n, k in sizes for m in _ROWS_OF[op])


SHAPES: dict[tuple[str, str], tuple[tuple[int, ...], ...]] = {
    (OP, "cuda"): _shapes(SIZES, OP),
    (FP8, "cuda"): _shapes(SIZES, FP8),
    (FUSED, "cuda"): tuple((m, n, k) for (n, k), (rows, _) in _FUSED.items() for m in rows),
    (BATCH, "cuda"): _shapes(_BATCHES, BATCH),
    (OP, "cpu"): tuple(shape for shape in _ON_CPU if shape[0] <= FEW),
    (FP8, "cpu"): _ON_CPU,
    (FUSED, "cpu"): ((1, 2112, 7168),),
    (BATCH, "cpu"): tuple(shape for shape in _ON_CPU if shape[0] > FEW),
}
"""M, N, K."""


# --- inputs ---------------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """A weight [N, K] and its scale. Without a scale, the weight is bfloat16."""

    weight: Tensor
    scale: Tensor | None = None


def blocks(weight: Tensor) -> Weight:
    """fp8 codes with a float32 scale per block."""
    n, k = weight.shape
    size = SCALE_BLOCK
    padded = functional.pad(weight.float(), (0, -k % size, 0, -n % size))
    tiles = padded.unflatten(1, (-1, size)).unflatten(0, (-1, size))
    scale = (tiles.abs().amax((1, 3)) / E4M3FN.max).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (tiles / scale[:, None, :, None]).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype)
    return Weight(codes.flatten(2, 3).flatten(0, 1)[:n, :k].contiguous(), scale)


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """The bfloat16 weight of fp8 codes."""
    if scale.dim() == 1:
        return (weight.float() * scale[:, None]).bfloat16()
    n, k = weight.shape
    factors = scale.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return (weight.float() * factors).bfloat16()


def random_weight(n: int, k: int, fmt: str, device: str) -> Weight:
    """A random weight in a format of `weight_format`."""
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5
    if fmt == BLOCKS:
        return blocks(weight)
    if fmt == ROWS:
        codes, scale = quantized(weight.float())
        return Weight(codes, scale.flatten())
    return Weight(weight)


@lru_cache(2)
def weights(n: int, k: int, fmt: str, device: str, sets: int) -> tuple[Weight, ...]:
    """``sets`` weights. Those of the last two sizes are kept, so that all M share them."""
    return tuple(random_weight(n, k, fmt, device) for _ in range(sets))


# --- the same in torch ----------------------------------------------------------------------------------------------


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """The product alone."""
    return functional.linear(x, weight)


def scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The product with an fp8 weight."""
    return functional.linear(x, dequantized(weight, scale))


def normed(x: Tensor, weight: Tensor, gamma: Tensor) -> Tensor:
    """The norm, then the product."""
    return functional.linear(functional.rms_norm(x, gamma.shape, gamma, EPS), weight)


def normed_scaled(x: Tensor, weight: Tensor, gamma: Tensor, scale: Tensor) -> Tensor:
    """The norm, then the product with an fp8 weight."""
    return normed(x, dequantized(weight, scale), gamma)


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """Gate and up in one product, then silu(gate) * up."""
    gate, up = functional.linear(x, weight).chunk(2, -1)
    return functional.silu(gate) * up


def added(x: Tensor, weight: Tensor, add: Tensor) -> Tensor:
    """The product plus the residual."""
    return functional.linear(x, weight) + add


_COMPOSED: dict[str, Callable[..., Tensor]] = {
    "": plain,
    ROWS: scaled,
    BLOCKS: scaled,
    NORM: normed,
    NORM_BLOCKS: normed_scaled,
    SILU: gated,
    ADD: added,
}


# --- workloads ------------------------------------------------------------------------------------------------------


def problem(m: int, kind: str, given: Weight, device: str) -> Problem:
    """Random rows, and our call with an output allocated beforehand. ``kind`` is empty for the product alone."""
    weight, scale = given
    n, k = weight.shape
    x, gamma = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, k), (k,)))
    out = torch.empty(m, n // 2 if kind == SILU else n, device=device, dtype=torch.bfloat16)
    options: dict[str, Any] = {"out": out, "static_weight": True} | ({} if scale is None else {"weight_scale": scale})
    more: list[Tensor] = []
    if kind in (NORM, NORM_BLOCKS):
        options |= {"gamma": gamma, "eps": EPS}
        more.append(gamma)
    elif kind == SILU:
        options["activation"] = SILU
    elif kind == ADD:
        more.append(torch.randn_like(out))
        options["add"] = more[0]
    ours: dict[str, Callable[[], object]] = {"onepass": partial(onepass.linear, x, weight, **options)}
    if "gamma" in options:
        ours[THEN] = _two_calls(x, weight, gamma, {name: options[name] for name in options.keys() - {"gamma", "eps"}})
    arguments = (x, weight, *more, *(() if scale is None else (scale,)))
    return Problem(f"{OP}, {kind}" if kind else OP, ours, _COMPOSED[kind], arguments)


def _two_calls(x: Tensor, weight: Tensor, gamma: Tensor, options: dict[str, Any]) -> Callable[[], object]:
    a = torch.empty_like(x)

    def both() -> object:
        onepass.rms_norm(x, gamma, EPS, out=a)
        return onepass.linear(a, weight, **options)

    return both


def _problems(m: int, n: int, k: int, kind: str, device: str, sets: int) -> list[Problem]:
    return [problem(m, kind, each, device) for each in weights(n, k, weight_format(kind), device, sets)]


def weight_format(kind: str) -> str:
    """How weights are stored: `ROWS`, `BLOCKS`, or empty for bfloat16."""
    return next((fmt for fmt in (ROWS, BLOCKS) if fmt in kind), "")


def weight_bytes(n: int, k: int, kind: str) -> int:
    """The bytes of the weights, without scales."""
    return n * k * (1 if weight_format(kind) else 2)


def _workload(op: str, m: int, n: int, k: int, kind: str) -> Workload:
    width = n // 2 if kind == SILU else n
    scales = {ROWS: n, BLOCKS: -(-n // SCALE_BLOCK) * -(-k // SCALE_BLOCK)}.get(weight_format(kind), 0) * 4
    reads = weight_bytes(n, k, kind) + scales
    moved = reads + 2 * (m * k + m * width * (2 if kind == ADD else 1) + k * (NORM in kind.split(", ")))
    many = partial(_problems, m, n, k, kind)
    return Workload(
        op,
        (m, n, k),
        moved,
        lambda device: many(device, 1)[0],
        "read",
        {"with": kind} if kind else {},
        (OP,),
        cold=op != BATCH,
        many=many,
        reads=reads,
        sets=1 if op == BATCH else 0,
        slow=(m, n, k) in _AUTOTUNED,
    )


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """The workloads of [M, N, K]. What is fused depends on N and K. Sizes that are not listed have everything."""
    if len(shape) != 3:
        return []
    m, n, k = shape
    if (op == BATCH) != (m > FEW) and op != FP8:
        return []
    listed = _FUSED.get((n, k), ((), (NORM, NORM_BLOCKS, SILU, ADD)))[1]
    kinds = {OP: ("",), BATCH: ("",), FP8: (ROWS, BLOCKS), FUSED: listed}[op]
    return [_workload(op, m, n, k, kind) for kind in kinds if kind != SILU or n % 2 == 0]


FAMILY = Family("linear", (OP, FP8, FUSED, BATCH), SHAPES, workloads, f"MxNxK, M up to {FEW}, or more with {BATCH!r}")
