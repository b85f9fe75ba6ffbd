"""The matrix of cases of the norm, rotation and cache write of q, k and v."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from onepass.formats import FLOATS
from tests.grid import grid
from tests.qk_cache.checks import BF16, F32, FNUZ, FP8, I32, I64, Angles, QkCacheCase

_ROUNDINGS: Final[list[Any]] = ["once", "hf", "hf_rope"]
NORMS: Final[list[Any]] = ["none", "head", "whole"]


WHOLE: Final = Angles(128, pair=BF16)


def _size_and_dtype_cases() -> Iterator[QkCacheCase]:
    c = partial(grid, QkCacheCase)
    # models: Llama 3 and Qwen3, Gemma 3, OLMo-2, Phi-3, GLM-4
    for lead in ((1,), (3,)):
        yield from c("model", lead, 32, 8, 128, norm=["none", "head"], angles=Angles(128), page=16, memory="packed")
    yield from c("model", (2, 2), 32, 8, 128, norm=["none", "head"], angles=WHOLE, rounding="hf", layout="dense")
    offset: dict[str, Any] = {"weight_offset": 1.0}
    yield from c("model", (3,), 16, 8, 256, angles=Angles(256), rounding=["once", "hf_rope"], options=offset)
    yield from c("model", (2,), 32, 32, 128, norm="whole", angles=Angles(128), rounding=["once", "hf_rope"])
    yield from c("model", (3,), 32, 32, 96, norm="none", angles=Angles(96), rounding=["once", "hf"])
    for style in ("half", "interleaved"):
        yield from c("model", (3,), 32, 2, 128, norm="none", angles=Angles(64, style), rounding=["once", "hf"])
    # heads and columns
    for d, dim in ((1, 0), (2, 2), (6, 4), (17, 16), (33, 0), (80, 80), (96, 40), (128, 128), (192, 64), (1000, 1000)):
        for style in ("half", "interleaved") if dim else ("",):
            turn = Angles(dim, style, I32) if dim else None
            yield from c("columns", (3,), 3, 2, d, d + 1, norm=NORMS, angles=turn)
    yield from c("columns", (2,), 1, 1, 1024, 8, norm=NORMS, angles=Angles(1024))
    for q_heads, k_heads in ((1, 1), (5, 3), (7, 7), (2, 9), (33, 1)):
        yield from c("heads", (3,), q_heads, k_heads, 32, norm=NORMS, angles=Angles(32))
    yield from c("heads", (2,), 160, 70, 128, norm="whole", angles=[None, Angles(128), Angles(64, "interleaved")])
    yield from c("heads", (2,), 100, 3, 96, norm="whole", angles=Angles(48), rounding="hf")
    # dtypes
    for x in FLOATS:
        yield from c("dtypes", x=x, gamma=x, norm=NORMS, cache=x, rounding=_ROUNDINGS)
        yield from c("dtypes", x=x, gamma=[g for g in FLOATS if g != x], cache=x)
        yield from c("dtypes", x=x, gamma=x, cache=[d for d in FLOATS if d != x], rounding=["once", "hf"])
        yield from c("dtypes", x=x, gamma=x, angles=Angles(64, pair=x), rounding=_ROUNDINGS, layout="HND")
        yield from c("dtypes", x=x, norm="none", angles=Angles(64, pair=next(d for d in FLOATS if d != x)))
        yield from c("dtypes", x=x, norm="none", angles=Angles(64, "interleaved", pair=x), rounding="hf")
        yield from c("dtypes", x=x, gamma=F32, out=[d for d in FLOATS if d != x])
    yield from c("dtypes", gamma=BF16, gamma_k=F32, norm=["head", "whole"])
    # fp8
    for fmt in (FP8, FNUZ):
        yield from c("fp8", cache=fmt, scale=["", "k", "v", "kv"], norm=["none", "head"])
        yield from c("fp8", x=F32, cache=fmt, scale="kv", rounding=["once", "hf"], angles=Angles(32, "interleaved"))
        yield from c("fp8", (2, 3), cache=fmt, scale="kv", layout=["HND", "dense"], norm="whole")
    yield from c("fp8", q_heads=3, k_heads=3, head=80, angles=Angles(40), cache=FP8, scale="kv", memory="misaligned")


def _rotation_and_cache_cases() -> Iterator[QkCacheCase]:
    c = partial(grid, QkCacheCase)
    for style in ("half", "interleaved"):
        for positions in (None, I32, I64):
            yield from c("rope", [(5,), (2, 3)], angles=Angles(64, style, positions), layout="HND")
        yield from c("rope", (2, 3), angles=Angles(32, style, pair=BF16), rounding=_ROUNDINGS, layout="dense")
        yield from c("rope", (2, 3), angles=Angles(64, style, pair=F32, shared=True), norm=NORMS)
        yield from c("rope", (7,), angles=Angles(2, style), norm=NORMS, rounding=["once", "hf"])
    yield from c("rope", angles=None, norm=NORMS, rounding=_ROUNDINGS)
    # caches
    for layout in ("NHD", "HND"):
        yield from c("paged", (9,), layout=layout, page=[1, 5, 16], slots=[I32, I64])
        yield from c("paged", (3, 4), layout=layout, memory=["packed", "parts", "transposed"])
    for start in ("default", "int", "one", "each"):
        yield from c("dense", [(2, 3), (3, 1), (1, 4)], layout="dense", start=start, index=[I32, I64])
    yield from c("dense", (3, 5), layout="dense", memory=["packed", "misaligned", "parts", "transposed"])
    yield from c("dense", (2, 3), layout="dense", angles=Angles(64, positions=None), norm="none", value=48)
    yield from c("no cache", [(5,), (2, 3)], cache=None, norm=NORMS, rounding=_ROUNDINGS)
    yield from c("no cache", (2, 3), cache=None, out=F32, memory=["packed", "parts", "misaligned"])
    yield from c("no cache", (5,), cache=None, angles=None, norm="none", out=[BF16, F32])


def _option_cases() -> Iterator[QkCacheCase]:
    c = partial(grid, QkCacheCase)
    # three positions per token: Qwen2-VL, Qwen3-VL, Qwen3.5, and other sizes
    for sections, style in (((16, 24, 24), "contiguous"), ((24, 20, 20), "interleaved")):
        turn = Angles(128, sections=sections, section_style=style)
        yield from c(
            "mrope", [(3,), (2, 3)], 16, 8, 128, angles=turn, rounding=["once", "hf"], page=16, memory="packed"
        )
    turn = Angles(64, sections=(11, 11, 10), section_style="interleaved")
    yield from c("mrope", (3,), 8, 2, 256, angles=turn, rounding="hf_rope", options={"weight_offset": 1.0})
    for sections, style in (((1, 1, 1), "contiguous"), ((7, 5, 3), "contiguous"), ((7, 5, 5), "interleaved")):
        for pairs in ("half", "interleaved"):
            turn = Angles(2 * sum(sections), pairs, I32, sections=sections, section_style=style)
            yield from c("mrope", (2, 3), 3, 1, [34, 96], angles=turn, norm=NORMS, memory=["contiguous", "parts"])
    yield from c(
        "mrope", (5,), cache=None, norm="none", angles=Angles(64, sections=(12, 10, 10)), rounding=["once", "hf"]
    )
    # a norm of v, as in Gemma 4
    for x in FLOATS:
        yield from c("norm of v", norm_v=True, x=x, gamma=x, cache=x, norm=NORMS, rounding=_ROUNDINGS)
    yield from c("norm of v", (3,), 16, 8, 256, norm_v=True, rounding="hf_rope", angles=Angles(256), page=16)
    for value in (1, 7, 16, 33, 80, 128, 1000):
        yield from c("norm of v", (3,), 3, 2, value=value, norm_v=True, norm=["none", "whole"])
    yield from c("norm of v", (2, 3), norm_v=True, layout=["HND", "dense"], memory=["misaligned", "transposed"])
    yield from c("norm of v", norm_v=True, cache=[F32, FP8], options={"eps": 0.0}, values="special")
    # scales of heads, and of each token's heads
    for fmt in (FP8, FNUZ):
        yield from c("scales", cache=fmt, scale=["k", "v", "kv"], scaling="head", norm=["none", "whole"])
        yield from c(
            "scales", cache=fmt, scale="kv", scaling="own", norm=NORMS, norm_v=[False, True], rounding=_ROUNDINGS
        )
    many: dict[str, Any] = {"cache": FP8, "scale": "kv", "scaling": ["head", "own"]}
    yield from c("scales", (2, 3), layout=["HND", "dense"], memory=["packed", "misaligned"], **many)
    yield from c("scales", (3,), 5, 3, 80, 72, angles=Angles(40, "interleaved"), x=[F32, BF16], **many)
    yield from c("scales", (3,), 33, 33, 96, norm="none", angles=[None, Angles(48)], **many)
    yield from c("scales", (2,), 160, 70, 128, norm="whole", angles=Angles(128), **many)
    yield from c("scales", (9,), values="special", norm=["none", "head"], **many)
    # keys alone, as an indexer has
    for layout in ("NHD", "HND", "dense"):
        yield from c(
            "keys alone", (2, 3), 4, 1, 128, keys=True, layout=layout, angles=Angles(64), memory=["packed", "parts"]
        )
    yield from c("keys alone", keys=True, cache=FP8, scale="k", scaling=["tensor", "head", "own"], norm=NORMS)


def _memory_and_value_cases() -> Iterator[QkCacheCase]:
    c = partial(grid, QkCacheCase)
    layouts: list[Any] = ["packed", "misaligned", "transposed"]
    yield from c("layouts", (4,), 5, 3, 96, norm=["none", "head"], angles=Angles(96), memory=layouts)
    yield from c(
        "layouts", (2, 3), 5, 3, 80, 72, norm=["none", "head"], angles=Angles(40, "interleaved"), memory=layouts
    )
    yield from c("layouts", (2, 3), norm="whole", memory=["packed", "misaligned", "parts"])
    yield from c("layouts", (4,), x=F32, gamma=F32, cache=F32, memory=layouts)
    # options and values
    yield from c("options", options=[{"weight_offset": 1.0}, {"eps": 1e-3}], norm=["head", "whole"])
    for x in (BF16, F32):
        yield from c("values", (9,), x=x, gamma=x, cache=x, norm=NORMS, rounding=["once", "hf"], values="special")
    yield from c("values", (9,), cache=[FP8, FNUZ], scale="kv", values="special")
    yield from c("values", (9,), options={"eps": 0.0}, values="special", angles=Angles(32, "interleaved"))
    yield from c("empty", [(0,), (0, 3), (2, 0)], cache=[None, BF16])
    # many tokens
    yield from c("large", (1000,), 32, 8, 128, angles=Angles(128), page=64, norm=["none", "head"], memory="packed")
    yield from c("large", (4, 300), 32, 8, 128, angles=WHOLE, rounding="hf", layout="dense", memory="packed")
    yield from c("large", (600,), 32, 32, 128, norm="whole", angles=Angles(128), rounding=["once", "hf_rope"])
    yield from c("large", (600,), 32, 2, 128, norm="none", angles=Angles(64, "interleaved"), cache=FP8, scale="kv")


CASES: Final = (*_size_and_dtype_cases(), *_rotation_and_cache_cases(), *_option_cases(), *_memory_and_value_cases())
THREADED: Final = (
    QkCacheCase("threads"),
    QkCacheCase("threads", (4, 60), 16, 4, norm="whole", layout="dense"),
)
"""Cases with little work, which the calling thread does, and with enough to split on a CPU, for `tools/concurrency.py`."""
