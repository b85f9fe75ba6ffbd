"""The matrix of cases of the QK-RMSNorm ops."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from onepass.formats import FLOATS
from tests.grid import grid
from tests.qk_norm.checks import APPLY, FNUZ, FP8, FUSED, I32, I64, MEANS, OPS, SUMS, QkCase, Turn

BF16, F16, F32 = FLOATS

WIDTHS = {
    "short": ((1, 1), (31, 33), (127, 129), (200, 512)),
    "model": ((6144, 1024), (4096, 4096), (1536, 256), (896, 128)),
    "odd": ((1025, 4097), (7919, 13)),
    "wide": ((12288, 1024), (16384, 2048), (20000, 1000), (1000, 131072)),
}
"""model: MiniMax-M2 is 6144 + 1024, one of its four ranks 1536 + 256; OLMo-2 is 4096 + 4096."""
_ROUNDINGS = [{"rounding": "once"}, {"rounding": "hf"}]


def _common_cases(op: str) -> Iterator[QkCase]:
    c = partial(grid, QkCase, op)
    for group, widths in WIDTHS.items():
        for nq, nk in widths:
            yield from c(group, (5,), nq, nk)
    layouts = ["packed", "misaligned", "transposed", "expanded"]
    yield from c("layouts", (3, 4), 200, 512, layout=layouts)
    yield from c("layouts", (3, 4), 6144, 1024, layout=layouts)
    yield from c("layouts", (3, 4), 20000, 1000, layout="misaligned")
    yield from c("layouts", (2, 3, 4), 200, 512, layout="transposed")
    yield from c("levels", (2, 3, 2, 3), 200, 512, layout="reversed")
    yield from c("ranks", [(), (2, 1, 3, 2)], 200, 512)
    yield from c("empty", (0,), 200, 512)
    yield from c("large", (1024,), 6144, 1024)
    yield from c("values", (9,), 640, 128, list(FLOATS), values="special")
    yield from c("values", (9,), 20000, 1000, values="special")


def _stats_cases(op: str) -> Iterator[QkCase]:
    yield from _common_cases(op)
    yield from grid(QkCase, op, "dtypes", (4,), 640, 128, list(FLOATS))


def _norm_cases(op: str) -> Iterator[QkCase]:
    c = partial(grid, QkCase, op)
    yield from _common_cases(op)
    for x in FLOATS:
        others = [gamma for gamma in FLOATS if gamma not in (x, F32)]
        yield from c("dtypes", (3,), 640, 128, x, list(dict.fromkeys((x, F32))), options=_ROUNDINGS)
        yield from c("gammas", (3,), 640, 128, x, others, options=_ROUNDINGS)
        yield from c("gammas", (5,), 6144, 1024, x, others, turn=Turn("half", 64, 128, I64))
        yield from c("gammas", (3,), 640, 128, x, BF16, gamma_k=F16)
        yield from c("gammas", (3, 4), 20000, 200, x, x, gamma_k=F32 if x != F32 else BF16, layout="misaligned")
        yield from c("dtypes", (3,), 640, 128, x, out=[out for out in FLOATS if out != x])
    yield from c("dtypes", (3,), 640, 128, out=F32, options={"rounding": "hf"})
    yield from c("options", (4,), 640, 128, options=[{"weight_offset": 1.0}, {"eps": 1e-3}])
    yield from c("options", (9,), 640, 128, options={"eps": 0.0}, values="special")
    for style in ("half", "interleaved"):
        turn = partial(Turn, style)
        yield from c("rope", (5,), 6144, 1024, turn=turn(64, 128, I64))
        yield from c("rope", (2, 3), 512, 128, turn=turn(64, 128))
        yield from c("rope", (2, 3), 480, 96, F16, turn=turn(40, 96, I32), layout="packed")
        yield from c("rope", (2, 3), 240, 80, F32, turn=turn(80, 80, I32), layout="misaligned")
        yield from c("rope", (3,), 512, 128, turn=turn(128, 128, I32), options={"rounding": "hf"})
        yield from c("rope", (3,), 20160, 192, turn=turn(64, 96, I32))
        yield from c("rope", (3,), 256, 128, F32, turn=turn(2, 128, I64), out=BF16)
        yield from c("rope", (9,), 512, 128, turn=turn(64, 128), values="special")
    yield from c("rope", (), 512, 128, turn=Turn("half", 64, 128))
    turns = [Turn("half", 64, 128, positions) for positions in (None, I64)]
    yield from c("levels", (2, 3, 2, 2, 3), 512, 128, turn=turns, layout="reversed")


def _head_cases() -> Iterator[QkCase]:
    c = partial(grid, QkCase, FUSED, "heads")
    whole = Turn("half", 128, 128, I64)
    for x in FLOATS:
        others = [gamma for gamma in FLOATS if gamma not in (x, F32)]
        yield from c((7,), 512, 256, x, x, head=128, options=_ROUNDINGS)
        yield from c((7,), 512, 256, x, others, head=128, turn=whole)
    yield from c((7,), 512, 256, gamma=BF16, gamma_k=F32, head=128, layout="packed")
    for d in (1, 33, 64, 96, 1100):
        yield from c((3,), 5 * d, d, head=d)
    yield from c((5,), 4096, 1024, gamma=BF16, head=128, layout="packed")
    yield from c((2, 3), 256, 128, head=64, layout=["heads", "transposed"])
    yield from c((4,), 256, 128, head=64, options={"weight_offset": 1.0, "eps": 1e-5}, out=F32)
    yield from c((9,), 384, 96, head=96, values="special")
    yield from c((2,), 40000, 20000, head=20000)
    for style in ("half", "interleaved"):
        turn = partial(Turn, style)
        yield from c((5,), 4096, 1024, gamma=BF16, head=128, turn=turn(128, 128, I64), layout="packed")
        yield from c((2, 5), 384, 96, head=96, turn=turn(48, 96))
        yield from c((2, 3), 256, 128, head=64, turn=turn(64, 64, I32), layout="heads")
        yield from c((3,), 256, 64, gamma=BF16, head=64, turn=turn(64, 64), options={"rounding": "hf"})
    yield QkCase(FUSED, "levels", (2, 3, 2, 3), 256, 128, head=64, layout="reversed")
    yield QkCase(FUSED, "large", (2048,), 4096, 1024, gamma=BF16, head=128, turn=whole, layout="packed")


def _applied_code_cases() -> Iterator[QkCase]:
    """fp8 results with given scales, and an eps of k's own, of rows whose statistics are given."""
    c = partial(grid, QkCase, APPLY, "codes", given_scales=True)
    yield from c((3,), 640, 128, out=[FP8, FNUZ], options=_ROUNDINGS)
    yield from c((5,), 1536, 256, gamma=BF16, out=FP8, layout=["packed", "misaligned"])
    yield from c((3,), 640, 128, F32, BF16, out=FP8, options={"eps_k": 0.1})
    for style in ("half", "interleaved"):
        yield from c((3,), 512, 128, turn=Turn(style, 64, 128, I32), out=FP8, options=_ROUNDINGS)
    yield from c((3,), 20000, 1000, F16, out=FP8)
    yield from c((9,), 640, 128, out=FP8, values="special", options={"eps": 0.0})
    yield QkCase(APPLY, "options", (4,), 640, 128, options={"eps": 1e-3, "eps_k": 0.5})
    yield QkCase(APPLY, "options", (4,), 512, 128, turn=Turn("half", 64, 128, I64), options={"eps_k": 0.5})


def _code_cases() -> Iterator[QkCase]:
    """fp8 results, and an eps of k's own."""
    c = partial(grid, QkCase, FUSED, "codes")
    yield from c((3,), 640, 128, out=FP8, options=_ROUNDINGS, given_scales=[False, True])
    yield from c((3,), 640, 128, F16, BF16, out=[FP8, FNUZ], options={"rounding": "hf"})
    yield from c((3,), 640, 128, F32, out=FNUZ, given_scales=[False, True])
    yield from c((5,), 4096, 1024, gamma=BF16, head=128, out=FP8, given_scales=[False, True], layout="packed")
    yield from c((2, 3), 256, 128, head=64, out=FP8, layout=["heads", "transposed"])
    for style in ("half", "interleaved"):
        turn = partial(Turn, style)
        yield from c((5,), 4096, 1024, gamma=BF16, out=FP8, head=128, turn=turn(128, 128, I64), layout="packed")
        yield from c((3,), 512, 128, turn=turn(64, 128, I32), out=FP8, options={"rounding": "hf"})
        yield from c((3,), 512, 128, turn=turn(64, 128, I32), out=FP8, given_scales=True)
        yield from c((2, 5), 384, 96, head=96, turn=turn(40, 96), out=FNUZ)
        yield from c((2, 3), 256, 128, F32, head=64, turn=turn(64, 64, I32), out=FP8, layout="heads")
        yield from c((3,), 20160, 192, turn=turn(64, 96, I32), out=FP8)
        yield from c((9,), 512, 128, turn=turn(64, 128), out=FP8, values="special")
    yield from c((3, 4), 20000, 1000, out=FP8, layout="misaligned")
    for x in (BF16, F32):
        yield from c((9,), 640, 128, x, out=FP8, values="special", given_scales=[False, True], options={"eps": 0.0})
    yield from c((9,), 384, 96, head=96, out=FNUZ, values="special")
    yield QkCase(FUSED, "empty", (0,), 200, 512, out=FP8)
    yield QkCase(FUSED, "large", (1024,), 4096, 1024, gamma=BF16, out=FP8, head=128, layout="packed")
    yield QkCase(FUSED, "levels", (2, 3, 2, 3), 256, 128, head=64, out=FP8, layout="reversed")
    c = partial(grid, QkCase, FUSED, "two eps")
    yield from c((4,), [640, 20000], 128, options={"eps": 1e-5, "eps_k": 0.5})
    yield from c(
        (4,), 256, 128, head=64, turn=Turn("half", 64, 64), options={"eps": 0.25, "eps_k": 1e-6}, out=[None, FP8]
    )


CASES = (
    *_stats_cases(SUMS),
    *_stats_cases(MEANS),
    *_norm_cases(APPLY),
    *_norm_cases(FUSED),
    *_head_cases(),
    *_code_cases(),
    *_applied_code_cases(),
)
THREADED = (
    *(QkCase(op, "threads", (5,), 256, 64) for op in OPS),
    QkCase(FUSED, "threads", (70,), 1536, 512, turn=Turn("half", 32, 64)),
)
"""Cases with little work, which the calling thread does, and with enough to split on a CPU, for `tools/concurrency.py`."""
