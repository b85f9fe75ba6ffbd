"""Which tile a row gets: a pure function of the row's length, its dtype and the chip, never of the number of rows.

What may follow the number of rows (the grid, dependent launch) changes no bit of any result.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

MAX_BLOCK: Final = 16384
LONG_BLOCK: Final = 8192
ELEMENTS_PER_WARP: Final = 1024


@dataclass(frozen=True)
class Chip:
    """What a kernel must know of its target: ``cuda`` 90 or ``hip`` gfx942."""

    backend: str
    arch: int | str
    warp_size: int

    @property
    def has_pdl(self) -> bool:
        return self.backend == "cuda" and int(self.arch) >= 90

    @property
    def casts_e4m3fn(self) -> bool:
        """Whether Triton's own cast to e4m3fn is a saturating hardware instruction here."""
        return self.backend == "cuda" and int(self.arch) >= 89


INTERPRETER: Final = Chip("interpreter", 0, 32)


@dataclass(frozen=True)
class RowConfig:
    """``rows`` x ``block`` tiles, ``vec`` columns a thread at a time; ``long`` rows are walked block by block."""

    block: int
    rows: int
    warps: int
    vec: int
    long: bool


@lru_cache(maxsize=None)
def row_config(n: int, itemsize: int, warp_size: int) -> RowConfig:
    """The tile for rows of ``n`` elements of ``itemsize`` bytes.

    8 warps on a 7168-column row came within 4 % of the copy ceiling on an H200, 32 warps at half of it: hence 1024
    elements a warp. Short rows share a program of one warp, so that a row's sum never crosses warps.
    """
    long = n > MAX_BLOCK
    block = LONG_BLOCK if long else max(32, 1 << (n - 1).bit_length())
    block = max(block, warp_size)
    warps = max(1, min(16, block // ELEMENTS_PER_WARP))
    vec = min(16 // itemsize, block // (warp_size * warps))
    if n % vec:
        vec = 1
    rows = 1 if long else max(1, min(8, ELEMENTS_PER_WARP // block))
    return RowConfig(block, rows, warps, vec, long)


PDL_MAX_BYTES: Final = 8 << 20


def dependent_launch(chip: Chip, moved: int) -> bool:
    """Programmatic dependent launch takes 0.5-0.7 us off a small call and costs on large ones."""
    return chip.has_pdl and moved <= PDL_MAX_BYTES


def grid_size(tiles: int) -> int:
    """Programs to launch for so many tiles of rows."""
    return tiles
