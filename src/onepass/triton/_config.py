"""Which tile a row gets: a pure function of the row's length, its dtype and the chip, never of the number of rows.

What may follow the number of rows (the grid, dependent launch) changes no bit of any result.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

MAX_BLOCK: Final = 16384
MAX_THREADS: Final = 1024
SHARED_TILE: Final = 2048
"""Elements of a tile that several short rows share, with two warps: 262144 x 128 took 34 us so, 41 with 1024 and one (tuning/3)."""
EARLY_ROWS: Final = 128
"""Up to this many rows the next kernel may start at once, above it after the loads. Norm of 1 x 7168 with 8 warps: 1.40
us at once, 1.63 after the loads (tuning/2); of 1024 x 7168: 9.43 at once (tuning/3), 9.07 after the loads (tuning/4)."""


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
    """``rows`` x ``block`` tiles, ``vec`` columns a thread at a time; ``long`` rows are walked block by block.

    ``registers`` caps what a thread may use, for more programs on a multiprocessor; 0 leaves it to the compiler.
    """

    block: int
    rows: int
    warps: int
    vec: int
    long: bool
    registers: int = 0

    row_warps: int = 0
    """Warps that a row of a shared tile spreads over; 0: all of them."""

    def alone(self) -> "RowConfig":
        """The same row in a tile of its own, where loads are scalar: as many warps as it has in the shared tile."""
        return replace(self, rows=1, warps=self.row_warps or self.warps, registers=0)


Work = Literal["norm", "fp8", "more", "prologue"]
"""What a row kernel does: store the norm of a 16-bit row, quantize one to fp8 with one scale, more than that, or a user's
function besides."""

_MEASURED: Final[dict[Work, dict[int, tuple[int, int]]]] = {
    "norm": {4096: (8, 0), 8192: (8, 0), 16384: (16, 0)},
    "fp8": {4096: (4, 0), 8192: (4, 80), 16384: (16, 0)},
    "more": {8192: (8, 128)},
    "prologue": {8192: (8, 128)},
}
"""(warps, registers) by block; H200, bfloat16, us, from benchmarks/h200/tuning, file in brackets. Norm: 16384 x 4096 65.7 (4
warps: 66.7) [4], 4096 x 7168 29.5 (4: 29.5) [4], 8192 x 16384 130.1 (8: 130.3) [3]. fp8: 16384 x 4096 47.9 (8: 53.1) [2],
16384 x 7168 83.1 with 80 registers (85.9 without) [4], with 8 warps 90.7 at best [3], 8192 x 16384 101.9 (8: 103.6) [3].
More: left to itself the assembler takes 80 registers for 8192 columns and spills; a cap of 128 makes it take 92 and
spill nothing. A prologue likewise."""


@cache
def row_config(n: int, itemsize: int, warp_size: int, work: Work) -> RowConfig:
    """The tile for rows of ``n`` elements of ``itemsize`` bytes.

    Short rows share a tile of two warps; `_MEASURED` has what was best for long ones. More work needs more registers a
    column, so there a warp takes 1024 columns. Rows walked in blocks want many warps and few columns a thread: 2048 x
    40000 took 90 us to the norm (8 warps: 125) and 89 to fp8 (132), 64 x 131072 to fp8 20 (42) [6].
    """
    long = n > MAX_BLOCK
    rows, registers = 1, 0
    if long:
        block, warps = (8192, 32) if work == "norm" or n > 65536 else (4096, 16)
        warps = min(warps, MAX_THREADS // warp_size)
        registers = 128 if work == "prologue" and warps <= 16 else 0
    else:
        block = max(warp_size, 1 << (n - 1).bit_length())
        warps, registers = _MEASURED[work].get(block, (max(4, block // 1024), 0))
    if block <= SHARED_TILE:
        rows, warps = SHARED_TILE // block, 2
    vec = max(1, min(16 // itemsize, block // (warp_size * (1 if rows > 1 else warps))))
    if n % vec:
        vec, registers = 1, 0
    spread = min(warps, max(1, block // (warp_size * vec)))
    return RowConfig(block, rows, warps, vec, long, registers, spread)


QK_TILE: Final = 4096
"""Elements of a tile of short rows; 1024 a warp."""
QK_FOLD: Final = 8192
"""Columns of the blocks in which longer rows are walked; `_tree.FOLD`."""
QK_WARPS: Final = 4
"""Warps of a program whose rows come in chunks, at least."""
MOST_CHUNKS: Final = 4
"""Chunks of a row. H200, us, 4096 x (6144 + 1024), from 22-qk-chunks.json and 23-qk-chunks-early.json in
benchmarks/h200/tuning: with 1, 2, 4 and 8 warps along a row of q statistics took 14.8, 14.5, 14.1 and 14.2, the whole
norm 39.3, 34.1, 31.7 and 32.0. With gamma loaded early, for which only few chunks leave the registers, it took 32.9, and
30.0 with two warps along a row of k instead of one."""
APPLY_TILE: Final = 8192
"""Elements of a tile where statistics are given: four rows of a piece of 2048 columns share one read of gamma."""
PIECES: Final = (2048, 1024, 512, 256)
ROWS_OF_A_THREAD: Final = 4
"""Each row costs a thread two addresses."""


@dataclass(frozen=True)
class Side:
    """Tiles of q or of k: ``rows`` x ``block``, of which ``step`` columns count; ``long`` rows are walked block by block.

    ``vec`` columns are loaded at a time: 16 bytes, or one where a row may begin anywhere. Where statistics are taken, a row
    that is not long comes in ``count`` tiles of ``chunk`` columns.
    """

    block: int
    rows: int
    step: int
    long: bool
    vec: int
    chunk: int
    count: int = 1


@dataclass(frozen=True)
class QkConfig:
    """The tiles of both tensors, which share a launch and so its number of warps.

    ``registers`` caps those of a thread where a norm is stored: left to itself the assembler may take 80 and spill.
    Statistics alone need half as many, and with a cap take more.
    """

    q: Side
    k: Side
    warps: int
    registers: int


@cache
def qk_config(
    nq: int, nk: int, vecs: tuple[int, int], warp_size: int, given: bool, head: int, elements: int = 8
) -> QkConfig:
    """Tiles for rows of ``nq`` and ``nk`` columns, ``elements`` of them in 16 bytes; ``given`` statistics; ``head``
    columns that rotate together, or 0.

    A tile of q has about as many elements as one of k: the shorter rows share one. With given statistics a row may be
    cut, and is, into pieces that are a power of two and waste at most an eighth. No sum depends on any of this.
    """
    padded = [max(32, 1 << (n - 1).bit_length()) for n in (nq, nk)]
    one_warp = warp_size * elements
    if not given and one_warp < max(padded) <= QK_FOLD:
        return _in_chunks((nq, nk), padded, vecs, warp_size, head, one_warp)
    most = QK_FOLD if head else 2 * QK_FOLD
    if given:
        blocks = [_piece(n, p, head) for n, p in zip((nq, nk), padded, strict=True)]
        long = [False, False]
        tile = max(APPLY_TILE, *blocks)
    else:
        long = [n > most for n in (nq, nk)]
        blocks = [QK_FOLD if walked else p for p, walked in zip(padded, long, strict=True)]
        tile = max(QK_TILE, *blocks)
    threads = MAX_THREADS if any(long) else tile // 32
    q, k = (
        Side(
            block, _rows(tile, block, threads, vec, walked), block // head * head if head else block, walked, vec, block
        )
        for block, walked, vec in zip(blocks, long, vecs, strict=True)
    )
    return QkConfig(q, k, threads // warp_size, 128 if threads <= 512 else 0)


def _in_chunks(
    widths: tuple[int, int], padded: list[int], vecs: tuple[int, int], warp_size: int, head: int, one_warp: int
) -> QkConfig:
    """A row comes in two to four chunks of as many warps as that takes; the shorter rows share a program."""
    along = [max(1, min(block // (2 * one_warp), max(2, block // (MOST_CHUNKS * one_warp)))) for block in padded]
    warps = max(QK_WARPS, *along)
    elements = max(widths) * warps // max(along)
    sides = []
    for n, block, vec, spread in zip(widths, padded, vecs, along, strict=True):
        chunk = min(block, one_warp * spread)
        rows = warps // spread
        while rows * 2 * n <= elements and rows < ROWS_OF_A_THREAD * (warps // spread) * (one_warp * spread // chunk):
            rows *= 2
        step = block // head * head if head else block
        sides.append(Side(block, rows, step, False, vec, chunk, -(-n // chunk)))
    return QkConfig(sides[0], sides[1], warps, 0)


def _rows(tile: int, block: int, threads: int, vec: int, walked: bool) -> int:
    at_once = max(1, threads * vec // block)
    return 1 if walked else min(tile // block, ROWS_OF_A_THREAD * at_once)


def _piece(n: int, padded: int, head: int) -> int:
    """Columns of a piece: the most that waste little, or one row's, or one head's."""
    least = max(32, 1 << (head - 1).bit_length()) if head else 32
    for piece in PIECES:
        if least <= piece <= padded and -n % (piece // head * head if head else piece) <= n // 8:
            return piece
    return max(min(padded, PIECES[0]), least)
