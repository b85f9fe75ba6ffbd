"""Which tile a row gets. No choice made here changes a bit of any result: the order of sums is one of columns (`_places`, `_tree`)."""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Final, Literal, NamedTuple

MAX_BLOCK: Final = 16384
LONGEST_ROWS: Final = 65536
"""Rows of more columns are walked in wider steps."""
MAX_THREADS: Final = 1024
SHARED_TILE: Final = 2048
"""Elements of a tile that several short rows share, with two warps."""
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
        """Whether the chip has programmatic dependent launch."""
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

    def size(self, vectors: bool) -> int:
        """Sums of a chunk that are left when each thread has added up its neighbouring columns."""
        return self.chunk // self.vec if vectors else self.chunk

    def pieces(self, vectors: bool, warp_size: int) -> int:
        """Pieces of a chunk that are added up apart: what a warp loads at once, or one a warp where loads are scalar; not too many."""
        if vectors:
            most = max(1, self.chunk // (warp_size * self.vec))
        else:
            most = self.warps if self.rows == 1 else 1
        return min(most, MOST_SUMS // self.sets)


Work = Literal[
    "norm",
    "wide gamma",
    "residual",
    "fp8",
    "fp8, residual",
    "group",
    "group, residual",
    "group, norm",
    "more",
    "prologue",
]
"""What a row kernel does: store the norm of a 16-bit row; the same with a float32 gamma; with a residual; quantize one to fp8 with one
scale; the same with a residual; with a scale a group; the same with a residual or a float32 gamma; with the norm stored besides; more
than that; or a user's function besides."""

Crowd = Literal["few", "many", "flood"]
"""How many rows there are: so few that the time of one counts; many; or more bytes than any cache could keep."""

FEW_ROWS: Final = 256
"""512 x 128 to fp8 take 1.47 us as few, 1.6 as many, 1024 x 128 1.97 and 1.62; to the norm 256 x 128 1.1 and 1.1, 512 x 128 1.47 and 1.25
[37]."""
FEW_LONG_ROWS: Final = 1024
"""The same for rows of more than `LONG_ROW` bytes: 1024 x 16384 to fp8 14.9 us and 17.0 [37]."""
LONG_ROW: Final = 16384
FLOOD_BYTES: Final = 160 << 20
"""From so many bytes of x on, norms of 4097 to 8192 columns are read twice. Us so, and held: 8192 x 7168 56.8 and 56.2 [36], 12288 x 7168
84.5 and 86.0, 16384 x 7168 111.7 and 113.5, 16384 x 8192 128.0 and 132.5, 20480 x 5120 99.6 and 100.8 [37]."""

assumed: Final[list[Crowd]] = []
"""What every call is taken for, whatever its rows: checks set it (`onepass.testing.batch_regime`). It changes no bit of any result."""


def crowd_of(rows: int, row_bytes: int) -> Crowd:
    """How many rows of so many bytes are."""
    if assumed:
        return assumed[-1]
    few = FEW_ROWS if row_bytes <= LONG_ROW else FEW_LONG_ROWS
    return "few" if rows <= few else "many" if rows * row_bytes < FLOOD_BYTES else "flood"


class Tile(NamedTuple):
    """What `_TILES` says of rows of more than 2048 columns."""

    warps: int
    vec: int = 0
    """Columns that lie in one thread side by side; 0: as many as 16 bytes have, or half if rows then are whole chunks."""
    registers: int = 0
    """The most a thread may use; 0: any."""
    twice: bool = False
    """Whether a row is read a second time to be written, not held."""


_TILES: Final[dict[Crowd, dict[Work, dict[int, Tile]]]] = {
    "many": {
        "norm": {8192: Tile(8), 16384: Tile(16, 0, 40, twice=True)},
        "wide gamma": {16384: Tile(4)},
        "residual": {4096: Tile(4), 8192: Tile(16, 4)},
        "fp8": {4096: Tile(4), 7168: Tile(4, 0, 96), 8192: Tile(4), 16384: Tile(4, 0, 168)},
        "fp8, residual": {8192: Tile(4)},
        "group": {4096: Tile(4), 7168: Tile(4, 0, 96), 8192: Tile(4), 16384: Tile(8)},
        "group, norm": {4096: Tile(4), 8192: Tile(8, 8, 80)},
    },
    "few": {
        "fp8": {4096: Tile(8), 8192: Tile(4), 16384: Tile(8, 0, 128)},
        "group": {8192: Tile(4), 16384: Tile(8)},
        "group, norm": {4096: Tile(4), 8192: Tile(8)},
    },
    "flood": {"norm": {4096: Tile(8), 8192: Tile(8, 8, 56, twice=True)}},
}
"""By the longest row that has it; few rows and a flood, where they want another than many. H200, bfloat16, us, from
benchmarks/h200/tuning, file in brackets. Norm: 16384 x 1536 25.0 (2 warps: 25.2) [36], 4096 x 7168 28.8 (4: 28.9), 16384 x 4096 65.1
(4: 66.5), 8192 x 16384 read twice 128 (by 8: 144) [35]. Wide gamma: 4096 x 7168 29.0 (8: 30.9), 8192 x 16384 143 (8: 196) [28].
Residual: 16384 x 7168 225.5 (8: 228.1) [36]. fp8: 16384 x 7168 82.4 (8: 91.1), 16384 x 4096 48.0 (8: 53.4) [35], 8192 x 16384 96.4 (8:
101.4, without the cap 110.1); with a residual 4096 x 7168 50.5 (8: 52.1) [36]. Groups of 128: 4096 x 7168 24.4 (8: 27.4, without the
cap 26.0) [35], 4096 x 8192 26.3 (8: 26.5) [33], 16384 x 4096 49.1 (8: 55.2) [32], 8192 x 16384 109 (16: 111) [35]; with the norm
besides 4096 x 7168 44.9 (whole chunks, each chunk's scales in lanes of their own: 54.8) [36]. Few rows to fp8: 128 x 4096 2.05 (4:
2.15), 1 x 8192 1.43 (with a cap 1.53), 1 x 16384 2.03 (4: 2.59); with groups and norm 1 x 7168 2.12 (in the other way 2.34) [35, 36]. A
flood: `FLOOD_BYTES`."""
MOST_SUMS: Final = 16
"""Sums of a row that a thread gets at once, to add up the last of them."""
MOST_HELD: Final = 64
"""Columns of a row in one thread up to which gamma is held beside them: 8192 x 16384 to fp8 with 128 columns a thread took 97.0 with
gamma late [26]."""


def row_places(n: int) -> int:
    """Places in which a row of ``n`` columns is added up: more for longer rows, which more threads share."""
    return 512 if n <= SHARED_TILE else 2048 if n <= 8192 else 4096 if n <= LONGEST_ROWS else 8192


def _tile(n: int, work: Work, crowd: Crowd) -> Tile:
    """The measured tile of such rows, else a warp for 1024 columns: more work needs more registers a column.

    Up to 2048 columns, 4 warps, or 2 with twice the columns each: 1 x 1536 to fp8 1.04 and 1.11, 1 x 2048 1.08 and 1.19, but 16384 x 2048
    26.1 and 25.0 [36].
    """
    if n <= SHARED_TILE:
        return Tile(4, 4) if crowd == "few" or work == "norm" else Tile(2)
    for tiles in (_TILES[crowd], _TILES["many"]):
        for longest, tile in tiles.get(work, {}).items():
            if n <= longest:
                return tile
    return Tile(max(4, (1 << (n - 1).bit_length()) // 1024))


@cache
def row_config(n: int, itemsize: int, warp_size: int, work: Work, crowd: Crowd) -> RowConfig:
    """The tile for rows of ``n`` elements of ``itemsize`` bytes."""
    full = 16 // itemsize
    if n <= SHARED_TILE // 2:
        return _short_rows(n, warp_size, work, crowd, full)
    unit = 1 if n % full else full
    if n > MAX_BLOCK:
        return _long_rows(n, warp_size, work, unit)
    places = row_places(n)
    warps, given, registers, reread = _tile(n, work, crowd)
    vec = min(given or full, full)
    warps = min(warps, places // (warp_size * vec))
    chunk = warp_size * warps * vec
    if unit > 1 and not given and not reread and n % chunk == chunk // 2:
        chunk, vec = chunk // 2, vec // 2  # rows are whole chunks then, and none is masked
    count = -(-n // chunk)
    whole = n % chunk == 0 and work != "prologue"
    early_gamma = not reread and count * chunk // (warp_size * warps) <= MOST_HELD
    if unit == 1:
        vec, registers = 1, 0
    return RowConfig(chunk, count, 1, warps, unit, vec, False, registers, places, whole, reread, early_gamma)


def _short_rows(n: int, warp_size: int, work: Work, crowd: Crowd, full: int) -> RowConfig:
    """Many rows share a tile of two warps, and each lies in one of them, in lanes as few as loads of 16 bytes leave; few have a tile each.

    H200, bfloat16, to fp8, us: 262144 x 128 29.5, in all lanes of a warp 43.5; 65536 x 512 26.7, each row in both warps 29.6; tiles half as
    large 41; 64 x 512 1.14 with a tile each, 1.41 sharing [36].
    """
    block = max(warp_size, 1 << (n - 1).bit_length())
    places = min(block, row_places(n))
    if crowd == "few":
        rows, warps, chunk = 1, 1 if block <= 8 * warp_size else 2, places
        vec = max(1, min(full, chunk // (warps * warp_size)))
    else:
        rows, warps, chunk, vec = SHARED_TILE // block, 2, min(block, max(warp_size * full, block // 2)), full
    unit = gcd(n, full)
    whole = rows == 1 and n % chunk == 0 and work != "prologue"
    return RowConfig(chunk, -(-n // chunk), rows, warps, unit, min(vec, unit), False, 0, places, whole)


def _long_rows(n: int, warp_size: int, work: Work, unit: int) -> RowConfig:
    """Walked, by many warps with few columns a thread: a row's second reading finds it in the cache if few rows are under way.

    H200, bfloat16, us, with 16 and with 32 warps: 2048 x 20480 to the norm 45.7 and 56.3, 2048 x 40960 109 and 93.3, to fp8 88.9 and 107.5;
    capped at 32 registers 2048 x 20480 to fp8 takes 44.4, not 46.9 [35, 36].
    """
    places = row_places(n)
    warps = 32 if n > LONGEST_ROWS or (work == "norm" and n > 24576) else 16
    warps = min(warps, MAX_THREADS // warp_size)
    registers = 0
    if unit > 1 and work == "fp8":
        registers = 32
    elif unit > 1 and work == "prologue" and warps <= 16:
        registers = 128
    return RowConfig(places, 0, 1, warps, unit, min(unit, places // (warps * warp_size)), True, registers, places)


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
    Statistics alone need half, and with a cap take more.
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
