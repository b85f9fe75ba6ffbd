"""The matrix of cases of gemv_and_partial_norm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch

from onepass.formats import FLOATS, FP8_FORMATS
from tests.gemv_norm.checks import BLOCKS, Case
from tests.grid import grid

BF16, F16, F32 = FLOATS
E4M3, E4M3UZ = FP8_FORMATS
INT8 = torch.int8


FP8_ROWS: Final[dict[str, Any]] = {"weight": E4M3, "scale": "row"}
LAYOUTS: Final = ["sliced", "misaligned"]


def _size_and_dtype_cases() -> Iterator[Case]:
    c = partial(grid, Case)
    yield from c("rows", list(range(1, 17)), 48, 640, (24,))
    yield from c("k", 2, 20, [1, 2, 7, 8, 33, 64, 255, 512, 513, 1000, 2048, 2049, 2560], (13,))
    for n, width in ((1, 1), (2, 1), (3, 3), (17, 5), (31, 31), (64, 64), (100, 37), (130, 129)):
        yield from c("columns", [1, 9], n, 256, (width,))
    for act in FLOATS:
        yield from c("dtypes", [1, 7], 40, 520, (24,), act, gamma=list(dict.fromkeys((act, F32))))
        others = [gamma for gamma in FLOATS if gamma not in (act, F32)]
        yield from c("gammas", [1, 7], 40, 520, (24,), act, gamma=others)
        yield from c("gammas", 3, 70, 384, (32, 16), act, gamma=others, codes=E4M3)
        yield from c("gammas", 33, 40, 640, (24,), act, gamma=others, scale="row", fused=False)
        yield from c("fp8 weights", [1, 16], 40, 1040, (24,), act, E4M3, scale="row")
        yield from c("values", 9, 48, 256, (24, 8), act, values="special")
    yield from c("fp8 weights", [1, 4], 40, 1040, (24,), BF16, E4M3, scale=["none", "tensor"])
    yield from c("fp8 weights", 2, 40, 1041, (24,), BF16, E4M3, scale="row")
    for act in FLOATS:
        yield from c("int8 weights", 2, 40, 1040, (24,), act, INT8, scale=["none", "tensor", "row"])
        yield from c("block scales", 3, 140, 520, (130,), act, E4M3, scale=list(BLOCKS))
    yield from c("int8 weights", [1, 16], 41, 1041, (24, 7), weight=INT8, scale="row")
    yield from c("block scales", [1, 16], 300, 257, (24, 150), weight=E4M3, scale="block", codes=[None, E4M3])
    yield from c("fp8 output", 3, 70, 384, (64,), codes=[E4M3, E4M3UZ])
    yield from c("fp8 output", 16, 70, 384, (40,), codes=[E4M3, E4M3UZ])
    yield from c("fp8 output", 2, 70, 384, (64,), F32, codes=E4M3)
    yield from c("segments", [1, 6], 80, 300, [(16, 16), (15, 17, 1), (8, 8, 8, 8), (1, 1, 1, 1)])
    yield from c("segments", 6, 80, 304, (30, 40), codes=E4M3)
    yield from c("segments", 1, 64, 320, (48, 16), gamma=F32)


def _memory_and_value_cases() -> Iterator[Case]:
    c = partial(grid, Case)
    yield from c("layouts", [1, 3, 11], 40, 512, (24,), layout=LAYOUTS)
    yield from c("layouts", 2, 40, 512, (24,), F32, layout=LAYOUTS)
    yield from c("layouts", 2, 40, 1024, (24,), layout=LAYOUTS, **FP8_ROWS)
    yield from c("layouts", 2, 140, 300, (24,), weight=E4M3, scale="block", layout=LAYOUTS)
    yield from c("layouts", 2, 40, 512, (24,), weight=INT8, scale="row", layout=LAYOUTS)
    yield from c("traced", [1, 16], 60, 1024, (24, 20), traced=True)
    yield from c("traced", 1, 2112, 7168, (1536,), traced=True)
    yield from c("traced", 2, 60, 1024, (24,), F32, traced=True)
    yield from c("empty", 0, 40, 64, (24,))
    yield from c("values", 9, 48, 256, (24,), weight=E4M3, codes=E4M3UZ, values="special")
    for width in (513, 3000, 4096, 4097, 9000):
        yield from c("wide norms", 1, width + 5, 32, (width,))
        yield from c("wide norms", 5, width + 5, 32, (width,), codes=E4M3)
    yield from c("large", [1, 2, 4, 8, 16], 2112, 7168, (1536,))
    yield from c("large", [1, 16], 2112, 7168, (1536, 512), codes=E4M3)
    yield from c("large", [1, 16], 2112, 7168, (1536,), **FP8_ROWS)
    yield from c("large", [1, 16], 2112, 7168, (1536,), F32)
    yield from c("large", [1, 16], 300, 40000, (200,))
    for n, k, widths in (
        (2112, 7168, (1536, 512)),
        (2112, 5120, (1536,)),
        (4096, 4096, (4096,)),
        (2624, 6144, (2048,)),
    ):
        yield from c("large", 1, n, k, widths)
    yield from c("large", 16, 300, 16500, (200,), **FP8_ROWS)
    yield from c("large", 16, 300, 9001, (200,), F32)


def _two_launch_cases() -> Iterator[Case]:
    """Our own products, which fp8 weights and scales need, for any number of rows."""
    c = partial(grid, Case, fused=False)
    yield from c("two launches", [1, 4, 16, 17, 40, 70, 300], 40, 640, (24,), **FP8_ROWS)
    yield from c("two launches", 40, 10, 100, (7,), **FP8_ROWS)
    yield from c("two launches", 33, 40, 700, (24,), list(FLOATS), E4M3)
    yield from c("two launches", 65, 30, 320, (30,), list(FLOATS), scale="tensor")
    yield from c("two launches", 40, 40, 512, (24,), weight=[E4M3, None], scale="row", layout=LAYOUTS)
    yield from c("two launches", [1, 17, 64], 140, 300, (24,), weight=E4M3, scale=list(BLOCKS))
    yield from c("two launches", 33, 40, 300, (24,), weight=INT8, scale="row")
    yield from c("two launches", 20, 48, 256, (24,), weight=E4M3, values="special")
    yield from c("large", [32, 64, 1000], 2112, 7168, (1536,), **FP8_ROWS)
    yield from c("large", 64, 2112, 7168, (1536,), scale="row")


CASES = (*_size_and_dtype_cases(), *_memory_and_value_cases(), *_two_launch_cases())
THREADED = (Case("threads", 3, 96, 320, (64,)), Case("threads", 2, 400, 700, (130, 129)))
"""Cases with little work, which the calling thread does, and with enough to split on a CPU, for `tools/concurrency.py`."""
