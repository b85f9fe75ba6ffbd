"""The matrix of cases of MLA's cache write."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from onepass.formats import FLOATS
from tests.grid import grid
from tests.mla_cache.checks import BF16, F16, F32, FNUZ, FP8, I32, I64, RAGGED, U32, MlaCase

STYLES: Final = ["interleaved", "half"]
ROUNDED: Final[dict[str, Any]] = {"rounding": "reference"}


def _size_and_dtype_cases() -> Iterator[MlaCase]:
    c, floats = partial(grid, MlaCase), list(FLOATS)
    for tokens, heads in ((1, 128), (3, 16)):  # DeepSeek-V3, whole and one of eight ranks
        yield from c("model", ((70, tokens),), heads, 512, cache=[FP8, BF16], page=64)
    yield from c("model", ((0, 5), (40, 1)), 8, 512, 64, style="half", scale="token", page=16, layout="slices")
    # widths
    yield from c("widths", latent=[1, 2, 31, 33, 127, 129, 577, 1000, 1536, 2047, 2048])
    for rope, turned in ((2, None), (6, None), (34, 18), (96, 64), (128, None), (250, 200), (256, None), (64, 2)):
        yield from c("widths", rope=rope, turned=turned, style=STYLES, latent=96)
    for rope, turned in ((258, 40), (576, None), (1024, 1024)):
        yield from c("widths", rope=rope, turned=turned, style=STYLES, latent=96, scale="token")
    yield from c("heads", ((3, 2), (0, 1)), [1, 2, 3, 7, 65, 256])
    yield from c("heads", ((3, 2), (0, 1)), [1, 5], rope=[512, 1000], turned=64, out=FP8, layout="slices")
    # dtypes
    for q in FLOATS:
        yield from c("dtypes", q=q, kv=q, gamma=q)
        yield from c("dtypes", q=q, kv=[kv for kv in FLOATS if kv != q], gamma=F32)
    for kv, gamma in ((BF16, F16), (F16, BF16), (F32, BF16), (F32, F16)):
        yield from c("gammas", kv=kv, gamma=gamma)
        yield from c("gammas", kv=kv, gamma=gamma, latent=577, scale="token", options=ROUNDED)
    yield from c("dtypes", kv=[BF16, F32], gamma=F32, cache=[FP8, FNUZ, *floats], style="half")
    yield from c("dtypes", q=F32, out=[FP8, FNUZ, *floats], gamma=F32, cache=BF16)
    yield from c("dtypes", freqs=[BF16, F16])


def _column_and_scale_cases() -> Iterator[MlaCase]:
    """Norms of only some of the columns that do not rotate, no rotation, and scales."""
    c = partial(grid, MlaCase)
    for latent, normed in ((128, 64), (129, 128), (577, 512), (512, 448), (2048, 1), (96, 95), (64, 64)):
        yield from c("part", latent=latent, normed=normed)
    yield from c("part", latent=576, normed=512, scale=["tensor", "token"], page=5)
    yield from c("part", latent=256, normed=200, scale=["tensor", "token"], cache=FNUZ, options=ROUNDED)
    yield from c("part", latent=600, normed=512, rope=0, freqs=None, cache=BF16)
    yield from c("part", latent=512, normed=384, kv=F32, gamma=F32, cache=F32, style="half")
    yield from c("part", latent=160, normed=128, kv=F16, gamma=BF16, cache=F16, layout="slices", slots=I64)
    yield from c("part", latent=160, normed=33, layout="misaligned", options={"weight_offset": 1.0})
    yield from c("part", ((0, 16),), latent=128, normed=100, values="special", scale=["token", "none"])
    # no rotation, and nothing to rotate
    yield from c("nope", turned=0)
    yield from c("nope", turned=0, freqs=None, cache=BF16)
    yield from c("nope", turned=0, freqs=None, q=F32, out=FP8, scale="token")
    yield from c("nope", rope=0, freqs=None)
    yield from c("nope", rope=0, freqs=None, latent=33, scale="token", padding=(1, 2))
    # scales
    for latent, rope in ((128, 64), (577, 10)):
        yield from c("scales", latent=latent, rope=rope, cache=[FP8, FNUZ], scale=["tensor", "token"])
    yield from c("scales", kv=F32, gamma=F32, scale="token")
    yield from c("scales", scale="token", layout="slices", latent=512)


def _packed_cases() -> Iterator[MlaCase]:
    """Entries of 656 bytes."""
    packed = partial(grid, MlaCase, "packed", latent=512, rope=64, scale="tile")
    for kv in FLOATS:
        yield from packed(q=kv, kv=kv, gamma=F32, style=STYLES)
    yield from packed(((70, 1),), 128, page=64, options=ROUNDED)
    yield from packed(RAGGED, 16, page=64, slots=I64, positions=I64, layout=["slices", "misaligned"])
    yield from packed(turned=[0, 18], page=5, padding=(1, 2), layout="transposed")
    yield from packed(normed=384, options=ROUNDED | {"weight_offset": 1.0})
    yield from packed(out=FP8, style="half", options={"epsilon": 1e-3})
    yield from packed(((0, 16),), kv=[BF16, F32], gamma=BF16, values="special", options=[{}, {"epsilon": 0.0}])
    yield from packed(RAGGED, fault="pages")


def _option_and_slot_cases() -> Iterator[MlaCase]:
    c = partial(grid, MlaCase)
    yield from c("options", options=[{"weight_offset": 1.0}, {"epsilon": 1e-3}])
    yield from c("reference", options=ROUNDED)
    yield from c("reference", q=F16, cache=F32, options=ROUNDED)
    yield from c("reference", kv=F16, q=F32, gamma=F16, scale="token", options=ROUNDED)
    yield from c("reference", kv=F32, gamma=F32, cache=FNUZ, scale="tensor", options=ROUNDED)
    yield from c("reference", out=FP8, gamma=F32, style="half", cache=BF16, options=ROUNDED)
    yield from c("reference", out=F32, gamma=F32, cache=F32, options=ROUNDED | {"weight_offset": 1.0})
    yield from c("ragged", RAGGED, index=[U32, I32, I64], page=[4, 1])
    yield from c("ragged", RAGGED, page=7, padding=(2, 3))
    yield from c("ragged", ((0, 0), (4, 0)), padding=(0, 2))
    yield from c("ragged", (), padding=(0, 3))
    yield from c("ragged", tuple((i % 9, 1) for i in range(40)), page=3)
    yield from c("ragged", ((30, 40),), page=256)
    for slots in (I32, I64):
        yield from c("slots", RAGGED, slots=slots)
        yield from c("slots", RAGGED, slots=slots, positions=slots, scale="token", page=5)
        yield from c("slots", positions=slots)
    yield from c("slots", turned=0, freqs=None, slots=I64, cache=BF16)
    yield from c("bad tables", RAGGED, index=[I32, I64, U32], fault=["pages", "width"], scale="token")
    yield from c("bad tables", RAGGED, index=[I32, I64], fault="lengths", scale="token")
    yield from c("bad tables", RAGGED, slots=I64, fault="slots", scale="token")
    yield from c("bad tables", RAGGED, slots=I32, fault="slots")


def _memory_and_value_cases() -> Iterator[MlaCase]:
    c = partial(grid, MlaCase)
    layouts = ["slices", "misaligned", "transposed"]
    yield from c("layouts", heads=5, layout=layouts, style=STYLES)
    yield from c("layouts", heads=3, latent=512, q=F32, kv=F32, gamma=F32, cache=BF16, layout=layouts)
    yield from c("layouts", latent=512, layout="slices", cache=F16, slots=I64)
    for kv in (BF16, F32):
        scales = ["none", "tensor", "token"]
        yield from c("values", ((0, 16),), kv=kv, gamma=kv, q=kv, scale=scales, values="special")
    yield from c("values", ((0, 16),), cache=FNUZ, out=FNUZ, scale="token", values="special")
    half: dict[str, Any] = {"style": "half", "options": {"epsilon": 0.0}}
    yield from c("values", ((0, 16),), cache=BF16, out=FP8, values="special", **half)
    yield from c("empty", ((3, 0), (5, 0)))
    yield from c("large", ((0, 150), (13, 0), (900, 37), (100, 1)), 128, 512, page=64)
    yield from c("large", ((0, 2000),), 1, 512, page=64, scale="token", layout="slices")
    yield from c("large", ((0, 2000),), 2, 512, normed=384, page=64)
    yield from c("large", ((0, 700), (50, 30)), 16, 512, page=64, scale="tile")


CASES = (
    *_size_and_dtype_cases(),
    *_column_and_scale_cases(),
    *_packed_cases(),
    *_option_and_slot_cases(),
    *_memory_and_value_cases(),
)
THREADED = (
    MlaCase("threads"),
    MlaCase("threads", ((0, 70), (3, 50)), heads=16, scale="token", style="half"),
)
"""Cases with little work, which the calling thread does, and with enough to split on a CPU, for `tools/concurrency.py`."""
