"""The matrix of cases of linear."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from onepass.formats import FLOATS
from onepass.ops.linear.launch import ACTIVATIONS
from tests.grid import grid
from tests.linear.checks import BF16, E4M3, F16, F32, INT8, Case

BLOCKS: Final[dict[str, Any]] = {"weight": E4M3, "scale": "block"}


def _option_cases() -> Iterator[Case]:
    c = partial(grid, Case)
    hf = {"rounding": "hf"}
    for x in FLOATS:
        yield from c("dtypes", [1, 5], 40, 136, x)
        yield from c("dtypes", 3, 136, 200, x, E4M3, ["none", "tensor", "row", "block", "ue8m0"])
        yield from c("dtypes", 3, 72, 200, x, INT8, ["none", "row"])
        yield from c("values", 9, 24, 140, x, values="special")
        yield from c("values", 9, 48, 264, x, E4M3, "block", x, F32, F32, values="special")
        yield from c("norm", 4, 40, 320, x, gamma=x, residual=x)
        yield from c("activation", 3, 46, 96, x, gamma=x, add=x, options=[_act(i, **hf) for i in range(3)])
        yield from c("activation", 5, 46, 96, x, bias=x, options=[_act(i) for i in range(3)])
    yield from c("dtypes", 2, 40, 136, scale=["tensor", "row"])
    yield from c("dtypes", 17, 40, 136, F32, scale="row")
    yield from c("dtypes", 3, 72, 200, F16, INT8, "tensor")
    yield from c("dtypes", 3, 136, 200, weight=[E4M3, INT8], scale="column")
    yield from c("rows", [1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 130], 48, 160)
    yield from c("rows", [1, 8, 17, 64, 130], 144, 272, **BLOCKS)
    yield from c("rows", [1, 33], 48, 160, weight=INT8, scale="row")
    yield from c("rows", [2, 16, 64], 40, 136, F32)
    yield from c("norm", 5, 40, 320, gamma=BF16, residual=[None, F32])
    yield from c("norm", 5, 40, 320, gamma=[F16, F32], residual=BF16)
    yield from c("norm", 5, 40, 320, F16, gamma=[F16, F32], residual=[None, F32], options=hf)
    yield from c("norm", 5, 40, 321, gamma=BF16, residual=[BF16, F32], options=hf)
    yield from c("norm", 3, 40, 320, residual=[BF16, F32])
    yield from c("norm", 3, 40, 320, F16, residual=F32, bias=F16, options=hf)
    yield from c("norm", 2, 40, 300, gamma=F32, options={"weight_offset": 1.0, "eps": 1e-3})
    yield from c("norm", [1, 19], 40, 2000, F16, E4M3, "block", F32, F16)
    yield from c("activation", 4, 384, 160, weight=E4M3, scale=["block", "ue8m0", "row"], options=_act(0))
    yield from c("activation", [1, 18], 90, 200, weight=INT8, scale="row", bias=F32, add=F32, options=_act(1))
    yield from c("activation", [1, 33], 40, 256, gamma=BF16, residual=BF16, options=_act(0))
    yield from c("activation", 2, 2, 64, options=_act(2, out_dtype=F32))
    yield from c("add", [1, 17], 40, 96, add=[BF16, F32], options=[{}, {"out_dtype": F32}])
    yield from c("add", 3, 40, 96, F16, add=[F16, F32], options=hf)
    yield from c("add", 3, 40, 96, F32, add=F32, bias=BF16)
    yield from c("bias", [2, 20], 72, 96, bias=[BF16, F32])
    yield from c("bias", 2, 136, 260, weight=E4M3, scale=["tensor", "block"], bias=F32, options={"out_dtype": F32})
    yield from c("bias", 3, 72, 96, F32, bias=F16, options=hf)


def _size_and_memory_cases() -> Iterator[Case]:
    c = partial(grid, Case)
    hf = {"rounding": "hf"}
    yield from c("sizes", [1, 17], [1, 7, 600, 1500, 3000, 4100], 56)
    yield from c("sizes", 2, [1100, 4224], 144, **BLOCKS)
    yield from c("sizes", 2, 4128, 72, gamma=BF16, options=_act(0))
    yield from c("sizes", 3, 20, [1, 3, 17, 33, 127, 129, 1000, 4100])
    yield from c("sizes", 3, 300, [128, 257], weight=E4M3, scale=["block", "ue8m0"])
    yield from c("sizes", 2, 20, 1001, [F16, F32], gamma=F32)
    layouts = ["sliced", "misaligned"]
    yield from c("layouts", [1, 17], 40, 264, residual=F32, gamma=BF16, add=BF16, layout=layouts)
    yield from c("layouts", [2, 17], 140, 264, add=F32, layout=layouts, **BLOCKS)
    yield from c("layouts", 2, 40, 256, F32, INT8, "row", layout=layouts)
    yield from c("layouts", (3, 2, 2), 40, 64, gamma=F32, residual=BF16, add=F32, layout=["reversed", "sliced"])
    yield from c("layouts", (4, 3), 40, 64, layout=["transposed", "expanded"])
    yield from c("layouts", (), 40, 64, residual=BF16, add=BF16)
    yield from c("values", 9, 40, 160, gamma=BF16, options=[_act(i, **hf) for i in range(3)], values="special")
    yield from c("values", 9, 40, 160, weight=INT8, scale="row", residual=F32, values="special")
    yield from c("values", 9, 260, 300, weight=E4M3, scale="ue8m0", options=[{}, _act(0)], values="special")
    yield from c("empty", [0, (2, 0)], 40, 64, gamma=BF16, residual=BF16, add=F32)


def _large_cases() -> Iterator[Case]:
    c = partial(grid, Case)
    yield from c("decoded", 130, 2656, 160, weight=E4M3, scale=["row", "block"])
    yield from c("decoded", 260, 2656, 144, weight=E4M3, scale=["tensor", "ue8m0"], bias=BF16)
    yield from c("decoded", 260, 48, 512, F16, weight=INT8, scale="row", options=_act(0))
    yield from c("decoded", 260, 40, 640, weight=E4M3, scale="block", options=_act(1), values="special")
    yield from c("decoded", 520, 2656, 64, weight=E4M3, scale="row", gamma=BF16, add=BF16)
    yield from c("decoded", 1030, 16, 144, weight=INT8, scale="row")
    yield from c("decoded", 130, 8464, 64, F16, weight=E4M3, scale=["row", "block"])
    yield from c("large", [16, 64], 4096, 4096, gamma=BF16, residual=BF16)
    yield from c("large", [1, 16, 256], 1536, 7168, gamma=BF16, **BLOCKS)
    yield from c("large", 16, 9728, 2560, gamma=BF16, options=_act(0))
    yield from c("large", [2, 33], 2560, 9728, F16, add=F16)
    yield from c("large", [20, 50, 100], 2656, 9216)
    yield from c("large", 100, 2112, 1536, bias=BF16, options=[{}, _act(0)])
    yield from c("large", 100, 8464, 256)
    yield from c("large", 8, 1000, 4096, F32, gamma=F32)


def _act(index: int, **options: Any) -> dict[str, Any]:
    return {"activation": ACTIVATIONS[index], **options}


def _static_cases() -> Iterator[Case]:
    """Every tile of static weights, with what decode steps of models have around a product."""
    c = partial(grid, Case)
    static = {"static_weight": True}
    hf = {**static, "rounding": "hf"}
    gated: list[dict[str, Any]] = [_act(i, **hf) for i in (0, 1)]
    for n, k in ((1504, 512), (3008, 1024), (4256, 512), (7168, 128), (8480, 128), (25376, 128), (33824, 128)):
        yield from c("static", [1, 16], n, k, options=[hf, static, *gated])
        yield from c("static", [3, 13], n, k, bias=BF16, options=hf)
        yield from c("static", [8, 16], n, k, add=BF16, options=hf)
        yield from c("static", [2, 11], n, k, gamma=BF16, residual=BF16, options=static)
    for n, k in ((1504, 512), (3008, 1024), (4256, 512), (7168, 128), (8480, 128)):
        yield from c("static", [1, 16], n, k, F16, options=[hf, gated[0]])
        yield from c("static", [5, 16], n, k, F16, add=F16, options=hf)
        yield from c("static", [7, 9], n, k - 32, add=BF16, options=hf)
    rows: dict[str, Any] = {"weight": E4M3, "scale": "row"}
    each: dict[str, Any] = {"weight": E4M3, "scale": ["row", "block"]}
    for n, k in ((1504, 1024), (3008, 512), (4256, 1024), (7168, 1024), (8480, 512)):
        yield from c("static", [1, 16], n, k, **each, options=[hf, gated[0]])
        yield from c("static", [6, 15], n, k, **each, add=BF16, options=hf)
        yield from c("static", [1, 16], n, k - 32, **rows, options=hf)
    yield from c("static", [1, 16], 8480, 2560, **each, options=gated[0])
    yield from c("static", [1, 16], 8480, 2560, **rows, options=hf)
    yield from c("static", [1, 16], 25376, 512, **each, options=gated[0])
    yield from c("static", [1, 16], 25376, 480, **rows, options=gated)
    yield from c("static", [1, 16], 33824, 1024, **rows, options=gated[0])
    yield from c("static", [1, 16], 33824, 512, weight=E4M3, scale="block", options=gated[0])
    yield from c("static", [1, 16], 3008, [8640, 8704], **rows, options=hf)
    yield from c("static", [2, 15], 3008, 8704, **each, add=BF16, options=hf)
    yield from c("static", [1, 16], 7168, 2240, **rows, options=hf)
    yield from c("static", [1, 16], 3008, 2752, options=hf)
    for n in (1504, 3008, 4256):
        yield from c("static", [1, 16], n, 512, weight=INT8, scale="row", options=hf)
        yield from c("static", [4, 16], n, 512, weight=E4M3, scale="ue8m0", options=hf)
    yield from c("static", [1, 16], 4256, [512, 1024], weight=E4M3, scale=["row", "tensor"], bias=BF16, options=hf)
    yield from c("static", [1, 16], 3008, 1024, layout=["sliced", "misaligned"], options=hf)
    yield from c("static", [9, 16], 3008, 512, values="special", options=hf)
    yield from c("static", [9, 16], 3008, 512, weight=E4M3, scale="row", values="special", options=gated[0])


CASES = (*_option_cases(), *_size_and_memory_cases(), *_large_cases())
GPU_CASES = tuple(_static_cases())
"""Cases of what only a GPU does differently."""
THREADED = (
    Case("threads", 3, 96, 320),
    Case("threads", 2, 400, 700, gamma=BF16, residual=F32, options={"activation": "silu_mul"}),
    Case("threads", 40, 300, 400, weight=E4M3, scale="block", gamma=F32),
)
"""Cases with little work, which the calling thread does, and with enough to split on a CPU, for `tools/concurrency.py`."""
