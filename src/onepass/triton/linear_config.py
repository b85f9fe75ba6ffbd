"""How a `linear` call is divided. Results do not depend on anything chosen here but the order of
summation (`product_config`).
"""

from functools import cache
from typing import NamedTuple

import torch

from ..specs.linear import LinearSpec
from .chip import Chip
from .product_config import Order, PieceTile, StreamTile, is_contiguous, order_of, piece_tile, stream_tile
from .rms_norm_config import row_config
from .tuning import tuning


class Stats(NamedTuple):
    """The norm of ``rows`` rows, each summed in ``bins`` bins (`device.bins`)."""

    rows: int
    bins: int


class ProductTile(NamedTuple):
    """Tiles of ``columns`` columns and ``rows`` rows; a step takes ``run`` blocks of a piece, and
    ``stages`` steps are on their way.

    ``group`` tiles below each other run at the same time. ``mask``: a step may
    reach beyond K.
    ``weights_first``: weights are a tensor core's left side, which may be registers.
    """

    columns: int
    rows: int
    pieces: int
    block: int
    run: int
    stages: int
    group: int
    warps: int
    mask: bool
    weights_first: bool


class LinearConfig(NamedTuple):
    """The tile of one kernel: ``pieces`` for 16-bit weights; for others ``stream`` for few rows and
    ``product`` for many.
    """

    stream: StreamTile | None = None
    stats: Stats | None = None
    product: ProductTile | None = None
    pieces: PieceTile | None = None


def fuses_norm(spec: LinearSpec, m: int, k: int, chip: Chip) -> bool:
    """Whether programs norm x themselves; otherwise the norm is a launch of its own."""
    table = tuning(chip).linear
    if is_contiguous(spec.x, spec.weight) or m > table.normed_rows:
        return False
    return spec.weight.itemsize == 1 or k <= table.normed_float32_columns


def _few_rows(order: Order, n: int, k: int, chip: Chip) -> int:
    """The largest number of rows whose 8-bit weights are streamed."""
    table = tuning(chip).linear.few_rows[order.pieces]
    return next(rows for most_n, most_k, rows in table if n <= most_n and k <= most_k)


@cache
def linear_config(spec: LinearSpec, m: int, n: int, k: int, aligned: bool, chip: Chip) -> LinearConfig:
    """The configuration of a call with ``n`` weight rows."""
    if is_contiguous(spec.x, spec.weight):
        return LinearConfig(pieces=piece_tile(m, n, k, aligned, chip, descriptors=True))
    table = tuning(chip).linear
    order = order_of(spec.x, spec.weight, spec.weight_scale, n)
    if spec.x == torch.float32 or not chip.sums_sixteen or m <= _few_rows(order, n, k, chip):
        stream = stream_tile(spec.x, spec.weight, spec.weight_scale, m, n, k, aligned, chip)
        stats = None
        if spec.gamma is not None or spec.residual is not None:
            bins = row_config(k, spec.x.itemsize, chip, "norm", "small").bins
            stats = Stats(1 << (m - 1).bit_length(), bins)
        return LinearConfig(stream, stats)
    tiles = table.tiles[order.block]
    columns, rows, run, stages, warps = next(tile for most_m, most_n, tile in tiles if m <= most_m and n <= most_n)
    mask = k % (order.pieces * order.block * run if run > 1 else order.block) != 0
    tile = ProductTile(columns, rows, *order, run, stages, table.group, warps, mask, weights_first=True)
    return LinearConfig(product=tile)
