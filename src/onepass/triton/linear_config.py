"""How a `linear` call is divided. Results do not depend on anything chosen here but the order of
summation (`product_config`).
"""

from functools import cache
from typing import NamedTuple

import torch

from ..specs.linear import LinearSpec
from .chip import Chip
from .product_config import Order, StreamTile, order_of, stream_tile
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
    """The tile of either kernel: ``stream`` for few rows, ``product`` for many."""

    stream: StreamTile | None
    stats: Stats | None
    product: ProductTile | None


def fuses_norm(spec: LinearSpec, m: int, k: int, chip: Chip) -> bool:
    """Whether programs norm x themselves; otherwise the norm is a launch of its own."""
    table = tuning(chip).linear
    return m <= table.normed_rows and k <= table.normed_columns[8 if spec.weight.itemsize == 1 else 16]


def _few_rows(order: Order, bits: int, n: int, k: int, chip: Chip) -> int:
    """The largest number of rows that are streamed."""
    table = tuning(chip).linear.few_rows[order.pieces, bits]
    return next(rows for most_n, most_k, rows in table if n <= most_n and k <= most_k)


@cache
def linear_config(spec: LinearSpec, m: int, n: int, k: int, aligned: bool, chip: Chip) -> LinearConfig:
    """The configuration of a call with ``n`` weight rows."""
    table = tuning(chip).linear
    order = order_of(spec.x, spec.weight_scale, n)
    bits = 8 * spec.weight.itemsize
    if spec.x == torch.float32 or not chip.sums_sixteen or m <= _few_rows(order, min(bits, 16), n, k, chip):
        stream = stream_tile(spec.x, spec.weight, spec.weight_scale, m, n, k, aligned, chip)
        stats = None
        if spec.gamma is not None or spec.residual is not None:
            bins = row_config(k, spec.x.itemsize, chip, "norm", "small").bins
            stats = Stats(1 << (m - 1).bit_length(), bins)
        return LinearConfig(stream, stats, None)
    tiles = table.tiles[order.block, min(bits, 16)]
    columns, rows, run, stages, warps = next(tile for most_m, most_n, tile in tiles if m <= most_m and n <= most_n)
    mask = k % (order.pieces * order.block * run if run > 1 else order.block) != 0
    tile = ProductTile(columns, rows, *order, run, stages, table.group, warps, mask, bits == 8 or rows < 64)
    return LinearConfig(None, None, tile)
