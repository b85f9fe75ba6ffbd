"""Which tile a row gets. No choice made here changes a bit of any result: the order of sums is one of columns (`_places`, `_tree`)."""

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

MAX_BLOCK: Final = 16384
LONGEST_ROWS: Final = 65536
"""Rows of more columns are walked in wider steps."""
MAX_THREADS: Final = 1024
SHARED_TILE: Final = 2048
"""Elements of a tile that several short rows share, with two warps: 262144 x 128 took 34 us so, 41 with 1024 and one (tuning/3)."""
EARLY_ROWS: Final = 16
"""Up to this many rows the next kernel may start at once, above it after the loads, us at once and after the loads: norm of 8 x 7168
1.38 and 1.44, of 64 x 7168 2.45 and 2.15 [29]; q and k of 128 x (6144 + 1024), statistics 2.24 and 2.06, application 2.81 and 2.67 [34]."""
FP8_EARLY_ROWS: Final = 32
"""The same for rows to fp8 with one scale: 32 x 7168 1.56 and 1.70, 64 x 7168 2.26 and 2.10 [33]."""


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
    """``rows`` rows a program, in ``count`` tiles of ``chunk`` columns; ``long`` rows are walked tile by tile.

    ``vec`` columns of a tile lie in one thread side by side; rows begin at multiples of ``unit`` columns. ``registers``
    caps what a thread may use, for more programs on a multiprocessor; 0 leaves it to the compiler.
    """

    chunk: int
    count: int
    rows: int
    warps: int
    unit: int
    vec: int
    long: bool
    registers: int = 0

    places: int = 0
    """Places of a row, whatever the tile (`row_places`)."""

    whole: bool = False
    """Whether a row is all of its tiles, and nothing is masked."""

    reread: bool = False
    """Whether a row is read a second time to be written, not held."""

    early_gamma: bool = True
    """Whether gamma is requested with the row, or once the row has come: then the two need not be held side by side."""

    @property
    def sets(self) -> int:
        """Chunks that hold all places of a row."""
        return max(1, self.places // self.chunk)

    def pieces(self, vectors: bool, warp_size: int) -> int:
        """Pieces of a chunk that are added up apart: what a warp loads at once, or one a warp where loads are scalar; not too many."""
        if vectors:
            most = max(1, self.chunk // (warp_size * self.vec))
        else:
            most = self.warps if self.rows == 1 else 1
        return min(most, MOST_SUMS // self.sets)


Work = Literal["norm", "wide gamma", "fp8", "group", "group and more", "more", "prologue"]
"""What a row kernel does: store the norm of a 16-bit row; the same with a float32 gamma; quantize one to fp8 with one scale; with one a
group; the same with a residual, the norm besides or a float32 gamma; more than that; or a user's function besides."""

_MEASURED: Final[dict[Work, dict[int, tuple[int, int]]]] = {
    "norm": {4096: (8, 0), 8192: (8, 0), 16384: (16, 40)},
    "wide gamma": {4096: (4, 0), 8192: (4, 0), 16384: (4, 0)},
    "fp8": {4096: (4, 0), 8192: (4, 96), 16384: (4, 0)},
    "group": {4096: (4, 0), 8192: (4, 96), 16384: (8, 0)},
    "group and more": {4096: (4, 0), 8192: (8, 0), 16384: (16, 0)},
}
"""(warps, registers) by the power of two above the row's length; H200, bfloat16, us, from benchmarks/h200/tuning, file in
brackets. Norm: 1 x 7168 1.30 (4 warps: 1.35), 4096 x 7168 29.2 [26], 16384 x 4096 64.8 (4: 65.8) [28], 8192 x 16384 read twice
128.3, held by 8 warps 129.8, by 16 131.0 [27]. Wide gamma: 4096 x 7168 29.0 (8: 30.9), 8192 x 16384 143 (8: 196) [28]. fp8:
1 x 7168 1.49 (8: 1.53), 4096 x 7168 22.3 (8: 22.6, without the cap 22.5) [32], 16384 x 4096 48.0 (8: 53.3) [28], 8192 x 16384 95.9
(8: 102) [31]. Groups of 128: 4096 x 7168 24.5 (8: 26.6, without the cap 25.9), 4096 x 8192 26.3 (8: 26.5) [33], 16384 x 4096 49.1
(8: 55.2), 8192 x 16384 107 (16: 109) [32]."""
MOST_CAPPED: Final = 56
"""Columns of a row in one thread up to which the cap holds: 4096 x 8192 by groups with it took 32.1 [33]."""
MOST_SUMS: Final = 16
"""Sums of a row that a thread gets at once, to add up the last of them."""
REREAD: Final = 8192
"""Above so many columns a norm reads its row twice."""
MOST_HELD: Final = 64
"""Columns of a row in one thread up to which gamma is held beside them: 8192 x 16384 to fp8 with 128 columns a thread took 97.0 with
gamma late [26]."""


def _whole_chunks(n: int, widest: int, vec: int) -> tuple[int, int]:
    """Columns of a chunk and of a thread in it: half as many where rows then are whole chunks, and none is masked."""
    if vec > 1 and n % widest == widest // 2:
        return widest // 2, vec // 2
    return widest, vec


def row_places(n: int) -> int:
    """Places in which a row of ``n`` columns is added up: more for longer rows, which more threads share."""
    return 512 if n <= SHARED_TILE else 2048 if n <= 8192 else 4096 if n <= LONGEST_ROWS else 8192


@cache
def row_config(n: int, itemsize: int, warp_size: int, work: Work) -> RowConfig:
    """The tile for rows of ``n`` elements of ``itemsize`` bytes.

    Short rows share a tile of two warps; `_MEASURED` has what was best for long ones. More work needs more registers a
    column, so there a warp takes 1024 columns. Rows walked in blocks want many warps and few columns a thread: 2048 x
    40000 took 90 us to the norm (8 warps: 125) and 89 to fp8 (132), 64 x 131072 to fp8 20 (42) [6].
    """
    full = 16 // itemsize
    block = max(warp_size, 1 << (n - 1).bit_length())
    places = row_places(n)
    if n > MAX_BLOCK:
        chunk, warps = (8192, 32) if n > LONGEST_ROWS else (4096, 16)
        warps = min(warps, MAX_THREADS // warp_size)
        vec = 1 if n % full else full
        registers = 128 if work == "prologue" and warps <= 16 and vec > 1 else 0
        return RowConfig(chunk, 0, 1, warps, vec, vec, True, registers, places)
    if block <= SHARED_TILE:
        vec = max(1, min(full, block // warp_size))
        vec = 1 if n % vec else vec
        chunk, rows = min(block, places), SHARED_TILE // block
        whole = rows == 1 and n % chunk == 0 and work != "prologue"
        return RowConfig(chunk, -(-n // chunk), rows, 2, vec, vec, False, 0, chunk, whole)
    warps, registers = _MEASURED.get(work, {}).get(block, (max(4, block // 1024), 0))
    warps = min(warps, places // (warp_size * full))
    unit = 1 if n % full else full
    chunk, vec = _whole_chunks(n, warp_size * warps * full, unit)
    count = -(-n // chunk)
    whole = n % chunk == 0 and work != "prologue"
    reread = work == "norm" and n > REREAD
    columns = count * chunk // (warp_size * warps)
    capped = unit > 1 and (reread or columns <= MOST_CAPPED)
    early_gamma = not reread and columns <= MOST_HELD
    return RowConfig(
        chunk, count, 1, warps, unit, vec, False, registers if capped else 0, places, whole, reread, early_gamma
    )


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
