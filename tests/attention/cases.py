"""The matrix of cases of the attention of decode steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onepass.ops.attention.launch import SPLIT
from tests.attention.checks import BF16, F16, AttentionCase
from tests.grid import grid


def _cases() -> Iterator[AttentionCase]:
    case = AttentionCase
    yield case("short", mask="none")
    yield case("short", mask="zeros", x=F16)
    yield case("short", tokens=3, context=SPLIT + 44, part=True)
    yield case("short", heads=(20, 1), context=2 * SPLIT + 1, columns=72, mask="padded")
    yield case("short", heads=(3, 3), context=1, mask="shared", columns=8)
    yield case("short", 3, tokens=2, context=3 * SPLIT, mask="padded", part=True)
    yield case("empty", 0)
    yield case("special", 4, context=SPLIT + 9, values="special")
    yield from grid(case, "columns", 5, (8, 2), 1, [200, 700], [64, 80, 96, 128, 256], [BF16, F16], ["none", "padded"])
    yield from grid(case, "columns", 5, (8, 2), 4, [200, 700], [64, 80, 96, 128, 256], [BF16, F16], "padded")
    for batch, context in ((1, 128), (16, 128), (1, 5000), (3, 20000)):
        yield case("large", batch, (32, 8), 1, context, 128, mask="none")
    yield case("large", 2, (32, 2), 16, 3000, 128, mask="each", part=True)
    yield case("large", 2, (71, 1), 1, 1000, 64, mask="padded")


CASES: Final = tuple(_cases())
