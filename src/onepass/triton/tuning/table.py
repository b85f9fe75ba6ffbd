"""What a tuning table contains; `h200` has the measurements behind each value."""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

ANY: Final = 1 << 62
"""A limit that every size is within."""

Variant = Literal[
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
"""What a row kernel does, as far as its tile depends on it.

"norm" stores the norm of a 16-bit row, "wide gamma" has a float32 gamma, and "residual" adds a
residual. "fp8" quantizes with one scale per row and "group" with one per group, also with a
residual. "group, residual" includes float32 gammas, and "group, norm" also stores the norm.
"prologue" runs a user's function, and "more" is everything else.
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


class StreamCut(NamedTuple):
    """Warps and columns per program; loads of weights (``depth``) and act (``ahead``) in flight,
    and of weights before the previous kernel ends (``pace``).
    """

    warps: int
    columns: int
    depth: int
    ahead: int
    pace: int


@dataclass(frozen=True)
class StreamTuning:
    """Products with few rows: cuts by pieces and bits per weight, then by the largest M and N they are for."""

    most_rows: int
    unaligned_rows: int
    unaligned_8bit_rows: int
    unaligned_registers: int
    most_values: int
    cuts: dict[tuple[int, int], tuple[tuple[int, int, StreamCut], ...]]
    unaligned_8bit_cut: StreamCut


@dataclass(frozen=True)
class LinearTuning:
    """`linear`: up to ``normed_rows`` rows of up to ``normed_columns`` columns, by bits per weight, are
    normed by the product's programs.

    ``few_rows`` are streamed, by pieces and bits per weight, then by the largest N and K a number is
    for. More rows take a tile of columns, rows, blocks per step, stages and warps, by block and bits per weight,
    then by the largest M and N it is for.
    """

    normed_rows: int
    normed_columns: dict[int, int]
    few_rows: dict[tuple[int, int], tuple[tuple[int, int, int], ...]]
    group: int
    tiles: dict[tuple[int, int], tuple[tuple[int, int, tuple[int, int, int, int, int]], ...]]


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
class Tuning:
    """All thresholds and tiles of a chip."""

    rows: RowTuning
    stream: StreamTuning
    linear: LinearTuning
    qk: QkTuning
    mla: MlaTuning
