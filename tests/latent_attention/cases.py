"""The matrix of cases of the attention of decode steps to latents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onepass.ops.attention.launch import SPLIT
from tests.attention.checks import BF16, F16
from tests.grid import grid
from tests.latent_attention.checks import DEEPSEEK, LatentCase


def _cases() -> Iterator[LatentCase]:
    case = LatentCase
    yield case("short", mask="none")
    yield case("short", mask="zeros", x=F16, columns=(128, 64))
    yield case("short", tokens=3, context=SPLIT + 44, part=True)
    yield case("short", heads=20, context=2 * SPLIT + 1, columns=(72, 24), mask="padded")
    yield case("short", heads=3, context=1, mask="shared", columns=(40, 8))
    yield case("short", 2, 3, tokens=2, context=2 * SPLIT, mask="padded", part=True)
    yield case("empty", 0)
    yield case("special", 4, 2, context=SPLIT + 9, values="special")
    sizes = [(40, 8), (256, 32), DEEPSEEK]
    yield from grid(case, "columns", 3, 20, 1, [200, 700], sizes, [BF16, F16], ["none", "padded"])
    yield from grid(case, "columns", 3, 20, 4, [200, 700], sizes, [BF16, F16], "padded")
    for batch, context in ((1, 128), (16, 128), (1, 5000), (2, 9000)):
        yield case("large", batch, 128, 1, context, DEEPSEEK, mask="none")
    yield case("large", 16, 128, 1, 1024, DEEPSEEK, mask="padded", part=True)
    yield case("large", 2, 128, 16, 1000, DEEPSEEK, mask="each", part=True)


CASES: Final = tuple(_cases())
