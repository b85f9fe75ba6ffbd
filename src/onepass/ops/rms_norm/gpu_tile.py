"""The tile of a row kernel. Results do not depend on any choice made here (`gpu.lib.reduce`).

A module of its own, because it must not import Triton.
"""

from functools import cache
from math import gcd
from typing import Final, NamedTuple

from ...gpu.chip import INTERPRETER, Chip, tuning
from ...gpu.tuning.table import Regime, Tile, Variant

MAX_BLOCK: Final = 16384
LONGEST_ROWS: Final = 65536
"""Rows of more columns are walked in wider steps."""
MAX_THREADS: Final = 1024
SHARED_TILE: Final = 2048
"""Elements of a tile that several short rows share, with two warps."""
MOST_SUMS: Final = 16
"""Partial sums of a row that each thread receives and adds after the exchange."""

assumed: Final[list[Regime]] = []
"""The regime assumed for every call; set by tests."""


class RowConfig(NamedTuple):
    """``rows`` rows per program, in ``count`` tiles of ``chunk`` columns; ``long`` rows are walked
    tile by tile.

    A thread holds ``vec`` adjacent columns of a tile; rows begin at multiples of ``unit`` columns.
    ``registers`` limits the registers per thread, to fit more programs on a multiprocessor; 0
    leaves it to the compiler. ``bins`` is `row_bins` of the row. ``whole``: a row fills its tiles,
    and nothing is masked. ``reread``: a row is read again for the output. Gamma is requested with
    the row (``early_gamma``), or after it has arrived, so that both need not be held at once.
    ``late``: the latter although registers could hold both.
    """

    chunk: int
    count: int  # type: ignore[assignment]
    rows: int
    warps: int
    unit: int
    vec: int
    long: bool
    registers: int = 0
    bins: int = 0
    whole: bool = False
    reread: bool = False
    early_gamma: bool = True
    late: bool = False

    # Filled in by `laid_out`: `sets` chunks hold all bins of a row. When each thread has added its
    # adjacent columns, `size` sums of a chunk are left, and its `pieces` are summed separately.
    # `lanes` is 0 where tiles hold columns in order (`tile_columns`).
    sets: int = 0
    pieces: int = 0
    size: int = 0
    lanes: int = 0
    levels: int = 1
    early_rows: int = 0
    """Rows up to which the next kernel may start at once."""
    lane_scales: bool = False
    """Whether `store_groups_by_lane` makes the scales."""
    assembly: bool = False
    """Whether kernels may contain PTX."""

    def laid_out(self, vectors: bool, warp_size: int, levels: int = 1) -> "RowConfig":
        """The constants of a kernel whose loads are ``vectors``. A piece is what a warp loads at
        once, or one warp's share.
        """
        sets = max(1, self.bins // self.chunk)
        if vectors:
            pieces = max(1, self.chunk // (warp_size * self.vec))
        else:
            pieces = self.warps if self.rows == 1 else 1
        return self._replace(
            sets=sets,
            pieces=min(pieces, MOST_SUMS // sets),
            size=self.chunk // self.vec if vectors else self.chunk,
            lanes=0 if vectors or self.rows > 1 else warp_size,
            levels=levels,
            unit=0,  # kernels do not depend on these four
            registers=0,
            bins=0,
            late=False,
        )


def batch_regime(rows: int, row_bytes: int, chip: Chip = INTERPRETER) -> Regime:
    """The regime of this many rows of this many bytes."""
    if assumed:
        return assumed[-1]
    table = tuning(chip).rows
    small = table.small_rows if row_bytes <= table.long_row_bytes else table.small_long_rows
    return "small" if rows <= small else "large" if rows * row_bytes < table.streaming_bytes else "streaming"


def row_bins(n: int) -> int:
    """Bins in which a row of ``n`` columns is summed: more threads share longer rows."""
    return 512 if n <= SHARED_TILE else 2048 if n <= 8192 else 4096 if n <= LONGEST_ROWS else 8192


def row_unit(n: int, itemsize: int) -> int:
    """Columns of a row of ``n`` that a thread can load at a time, up to 16 bytes."""
    full = 16 // itemsize
    if n <= SHARED_TILE // 2:
        return gcd(n, full)
    return 1 if n % full else full


def _tile(n: int, chip: Chip, variant: Variant, regime: Regime) -> Tile:
    """The measured tile of these rows, or one warp per 1024 columns."""
    table = tuning(chip).rows
    if n <= SHARED_TILE:
        return table.small_tile if regime == "small" or variant == "norm" else table.shared_tile
    for tiles in (table.tiles[regime], table.tiles["large"]):
        for longest, tile in tiles.get(variant, {}).items():
            if n <= longest:
                return tile
    return Tile(max(4, (1 << (n - 1).bit_length()) // 1024))


@cache
def row_config(n: int, itemsize: int, chip: Chip, variant: Variant, regime: Regime) -> RowConfig:
    """The tile for rows of ``n`` elements of ``itemsize`` bytes."""
    full, unit, warp_size = 16 // itemsize, row_unit(n, itemsize), chip.warp_size
    if n <= SHARED_TILE // 2:
        return _short_rows(n, warp_size, variant, regime, full, unit)
    if n > MAX_BLOCK:
        return _long_rows(n, chip, variant, unit)
    bins = row_bins(n)
    warps, given, registers, reread, late = _tile(n, chip, variant, regime)
    vec = min(given or full, full)
    warps = min(warps, bins // (warp_size * vec))
    chunk = warp_size * warps * vec
    if unit > 1 and not given and not reread and n % chunk == chunk // 2:
        chunk, vec = chunk // 2, vec // 2  # rows are then whole chunks, and none is masked
    count = -(-n // chunk)
    whole = n % chunk == 0 and variant != "prologue"
    held = count * chunk // (warp_size * warps) <= tuning(chip).rows.most_held
    late = late and held
    if unit == 1:
        vec, registers = 1, 0
    return RowConfig(
        chunk, count, 1, warps, unit, vec, False, registers, bins, whole, reread, held and not (reread or late), late
    )


def _short_rows(n: int, warp_size: int, variant: Variant, regime: Regime, full: int, unit: int) -> RowConfig:
    """In a small batch each row has a tile; otherwise rows share tiles of two warps, each row
    within one warp.

    A row uses as few lanes as 16-byte loads allow. Times on an H200 from bfloat16 to fp8, in us:
    262144 x 128 29.5 (in all lanes of a warp 43.5); 65536 x 512 26.7 (each row in both warps 29.6,
    tiles half as large 41); 64 x 512 1.14 with a tile per row (shared tiles 1.41) [36].
    """
    block = max(warp_size, 1 << (n - 1).bit_length())
    bins = min(block, row_bins(n))
    if regime == "small":
        rows, warps, chunk = 1, 1 if block <= 8 * warp_size else 2, bins
        vec = max(1, min(full, chunk // (warps * warp_size)))
    else:
        rows, warps, chunk, vec = SHARED_TILE // block, 2, min(block, max(warp_size * full, block // 2)), full
    whole = rows == 1 and n % chunk == 0 and variant != "prologue"
    return RowConfig(chunk, -(-n // chunk), rows, warps, unit, min(vec, unit), False, 0, bins, whole)


def _long_rows(n: int, chip: Chip, variant: Variant, unit: int) -> RowConfig:
    """Many warps walk a row, with few columns per thread: with few rows in flight, the second read
    of a row hits the cache.
    """
    table, bins = tuning(chip).rows, row_bins(n)
    warps = 32 if n > LONGEST_ROWS or (variant == "norm" and n > table.long_norm_columns) else 16
    warps = min(warps, MAX_THREADS // chip.warp_size)
    registers = 0
    if unit > 1 and variant == "row scale":
        registers = table.long_fp8_registers
    elif unit > 1 and variant == "prologue" and warps <= 16:
        registers = table.long_prologue_registers
    return RowConfig(bins, 0, 1, warps, unit, min(unit, bins // (warps * chip.warp_size)), True, registers, bins)
