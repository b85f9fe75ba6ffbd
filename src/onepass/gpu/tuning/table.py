"""What a tuning table contains; `h200` has the measurements behind each value."""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

ANY: Final = 1 << 62
"""A limit that every size is within."""

Variant = Literal[
    "norm",
    "norm, float32 gamma",
    "norm, residual",
    "row scale",
    "row scale, residual",
    "static scale",
    "group scales",
    "group scales, residual",
    "group scales, norm",
    "other",
    "layer norm, row scale",
    "layer norm, group scales",
    "layer norm, gate or bias",
    "prologue",
]
"""What a row kernel does, as far as its tile depends on it.

"norm" stores the norm of a 16-bit row. "row scale", "group scales" and "static scale" quantize it instead, and "group
scales, norm" does both. "group scales, residual" includes float32 gammas. "layer norm" subtracts the mean first, and
"layer norm, gate or bias" is any other LayerNorm, or quantizes what follows a gate or a bias. "prologue" runs a user's
function, and "other" is everything else.
"""

Regime = Literal["small", "large", "streaming"]
"""Few rows, where latency dominates; many rows; or more bytes than any cache holds."""


class Tile(NamedTuple):
    """The tile of rows of more than 1024 columns."""

    warps: int
    vec: int = 0
    """Adjacent columns per thread; 0: 16 bytes, or 8 if rows are then whole chunks."""
    registers: int = 0
    """Register limit per thread; 0: none."""
    twice: bool = False
    """Whether a row is read again for the output instead of being held in registers."""
    late: bool = False
    """Whether gamma is loaded after the row although registers could hold both."""


@dataclass(frozen=True)
class RowTuning:
    """Row kernels."""

    early_rows: int
    fp8_early_rows: int
    small_rows: int
    small_long_rows: int
    long_row_bytes: int
    streaming_bytes: int
    most_held: int
    small_tile: Tile
    shared_tile: Tile
    tiles: dict[Regime, dict[Variant, dict[int, Tile]]]
    long_norm_columns: int
    long_fp8_registers: int
    long_prologue_registers: int


@dataclass(frozen=True)
class StreamTuning:
    """Products of float32 rows, and the norms that follow a product."""

    unaligned_registers: int


class GemvCut(NamedTuple):
    """Warps and columns per program; steps of weights (``depth``) and act (``ahead``) in flight,
    and of weights before the previous kernel ends (``pace``). ``split``: four programs share four times the normed columns,
    and each sums a quarter of K.
    """

    warps: int
    columns: int
    depth: int
    ahead: int
    pace: int
    split: bool = False


@dataclass(frozen=True)
class GemvTuning:
    """GEMV kernels of 16-bit act: cuts by the largest M and N they are for, of 16-bit weights and of 8-bit ``codes``."""

    most_rows: int
    unaligned_rows: int
    cuts: tuple[tuple[int, int, GemvCut], ...]
    codes: tuple[tuple[int, int, GemvCut], ...]


PieceKind = Literal["cube", "flat", "descriptors", "split", "decoded"]


class PieceCut(NamedTuple):
    """A tile of weights: columns, rows, columns of K per step, stages and warps.

    ``late``: the next kernel may start after the sums, not at once.
    """

    kind: PieceKind
    columns: int
    rows: int
    step: int
    stages: int
    warps: int
    late: bool = False


@dataclass(frozen=True)
class PieceTuning:
    """Products of 16-bit rows: tiles by the largest M, N and K they are for. The first that fits is taken; each
    list ends with cubes for chips that use nothing else. ``cuts``: tiles of 16-bit weights, by the number of
    pieces. ``codes``: tiles of 8-bit weights. ``blocks``: a tile of decoded weights whose step is a block. Tiles that
    differ for static weights of few rows come before these.
    """

    group: int
    cuts: dict[int, tuple[tuple[int, int, int, PieceCut], ...]]
    codes: tuple[tuple[int, int, int, PieceCut], ...]
    blocks: PieceCut
    static_cuts: dict[int, tuple[tuple[int, int, int, PieceCut], ...]]
    static_codes: tuple[tuple[int, int, int, PieceCut], ...]


@dataclass(frozen=True)
class LinearTuning:
    """`linear` of float32 rows: up to ``normed_rows`` rows of up to ``normed_columns`` columns are normed by the
    product's programs.
    """

    normed_rows: int
    normed_columns: int


@dataclass(frozen=True)
class QkTuning:
    """QK-norm kernels."""

    tile: int
    warps: int
    most_chunks: int
    apply_tile: int
    pieces: tuple[int, ...]
    rows_per_thread: int
    registers: int


@dataclass(frozen=True)
class MlaTuning:
    """MLA cache-write kernels: columns per program by the largest size they are for."""

    search_widths: tuple[int, ...]
    early_programs: int
    most_columns: int
    most_tokens: int
    threads: int
    q_columns: tuple[tuple[int, int], ...]
    kv_columns: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class QkCacheTuning:
    """Cache-write kernels of q, k and v: columns per program by the most elements of a call they are for.

    Programs have one warp, unless statistics cover all heads: then a warp per ``whole_columns``.
    """

    early_programs: int
    columns: tuple[tuple[int, int], ...]
    whole_columns: int
    most_warps: int


@dataclass(frozen=True)
class Tuning:
    """All thresholds and tiles of a chip."""

    rows: RowTuning
    stream: StreamTuning
    gemv: GemvTuning
    pieces: PieceTuning
    linear: LinearTuning
    qk: QkTuning
    mla: MlaTuning
    qk_cache: QkCacheTuning
