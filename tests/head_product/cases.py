"""The matrix of cases of products of each head with a weight of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.grid import grid
from tests.head_product.checks import BF16, F16, HeadCase


def _cases() -> Iterator[HeadCase]:
    case = HeadCase
    yield from grid(case, "short", 3, 2, 128, 128, [BF16, F16], ["rows", "columns"])
    yield case("short", 17, 3, 200, 72)
    yield case("short", 17, 3, 200, 72, F16, "columns")
    yield case("short", 1, 1, 8, 8, order="columns")
    yield case("short", 33, 1, 256, 136, F16)
    yield case("empty", 0)
    yield from grid(case, "special", 5, 2, 136, 40, BF16, ["rows", "columns"], "special")
    yield from grid(case, "large", 20, 16, 192, 136, [BF16, F16], ["rows", "columns"])
    yield case("large", 4, 128, 128, 512, F16)
    yield case("large", 4, 128, 512, 128, F16, "columns")
    for rows in (1, 16, 50):
        yield case("large", rows, 128, 128, 512)
        yield case("large", rows, 128, 512, 128, order="columns")


CASES: Final = tuple(_cases())
