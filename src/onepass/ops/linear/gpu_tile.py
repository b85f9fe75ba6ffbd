"""How a `linear` call is divided. Results do not depend on anything chosen here but the order of
summation (`gpu.product_tile`).

A module of its own, because it must not import Triton.
"""

from functools import cache
from typing import NamedTuple

from ...gpu.chip import Chip, tuning
from ...gpu.product_tile import PieceTile, StreamTile, is_contiguous, piece_tile, stream_tile
from ..rms_norm.gpu_tile import row_config
from .launch import LinearSpec


class Stats(NamedTuple):
    """The norm of ``rows`` rows, each summed in ``bins`` bins (`gpu.lib.reduce`)."""

    rows: int
    bins: int


class LinearConfig(NamedTuple):
    """The tile of one kernel: ``pieces`` for 16-bit x, ``stream`` for float32 x."""

    stream: StreamTile | None = None
    stats: Stats | None = None
    pieces: PieceTile | None = None


def fuses_norm(spec: LinearSpec, m: int, k: int, chip: Chip) -> bool:
    """Whether programs norm x themselves; otherwise the norm is a launch of its own."""
    table = tuning(chip).linear
    return not is_contiguous(spec.x) and m <= table.normed_rows and k <= table.normed_columns


@cache
def linear_config(spec: LinearSpec, m: int, n: int, k: int, aligned: bool, chip: Chip) -> LinearConfig:
    """The configuration of a call with ``n`` weight rows."""
    if is_contiguous(spec.x):
        product = (spec.weight, spec.weight_scale, m, n, k, aligned, chip)
        return LinearConfig(pieces=piece_tile(*product, descriptors=True, static=spec.static))
    stats = None
    if spec.gamma is not None or spec.residual is not None:
        bins = row_config(k, spec.x.itemsize, chip, "norm", "small").bins
        stats = Stats(1 << (m - 1).bit_length(), bins)
    return LinearConfig(stream_tile(spec.weight_scale, m, k, aligned), stats)
