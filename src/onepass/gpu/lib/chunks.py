"""Rows in chunks, and their gamma: one for all rows, one for each row, or none."""

import triton
import triton.language as tl

from .row import chunk_mask, factor, row_start


@triton.jit
def weight_factor(weight, weight_offset, MATH: tl.constexpr):
    """`factor` of a loaded gamma, or 1 without one."""
    if MATH.weightless:
        return 1.0
    else:
        return factor(weight, weight_offset, MATH)


@triton.jit
def load_chunks(pointer, start, inner, n, present, TILE: tl.constexpr, POLICY: tl.constexpr):
    """The chunks of a tile of rows, unconverted."""
    chunks = ()
    for c in tl.static_range(TILE.count):
        columns = c * TILE.chunk + inner
        addresses = pointer + start[:, None] + columns[None, :]
        if TILE.rows == 1 and (TILE.whole or c < TILE.count - 1):
            chunks = chunks + (tl.load(addresses, eviction_policy=POLICY),)
        else:
            mask = chunk_mask(columns, n, present, c == TILE.count - 1)
            chunks = chunks + (tl.load(addresses, mask=mask, other=0.0, eviction_policy=POLICY),)
    return chunks


@triton.jit
def load_weights(gamma, row_gamma, row, shape, inner, present, TILE: tl.constexpr):
    """The chunks of gamma: of each row, of all rows, or 1."""
    n = shape.n
    if row_gamma.at is not None:
        start = row_start(row, shape, row_gamma, TILE.levels)
        return load_chunks(row_gamma.at, start, inner, n, present, TILE, "")
    else:
        return load_columns(gamma, inner, n, TILE)


@triton.jit
def load_columns(pointer, inner, n, TILE: tl.constexpr):
    """The chunks of numbers that all rows share; 1 without any."""
    chunks = ()
    for c in tl.static_range(TILE.count):
        columns = c * TILE.chunk + inner
        if pointer is None:
            chunks = chunks + (1.0,)
        elif c == TILE.count - 1 and not TILE.whole:
            chunks = chunks + (tl.load(pointer + columns[None, :], mask=(columns < n)[None, :], other=0.0),)
        else:
            chunks = chunks + (tl.load(pointer + columns[None, :]),)
    return chunks


@triton.jit
def load_g(gamma, row_gamma, row, shape, columns, mask, weight_offset, MATH: tl.constexpr, LEVELS: tl.constexpr):
    """`weight_factor` of some columns of one row."""
    if row_gamma.at is not None:
        start = row_start(row, shape, row_gamma, LEVELS)
        weight = tl.load(row_gamma.at + start[:, None] + columns[None, :], mask=mask, other=0.0)
    elif gamma is not None:
        weight = tl.load(gamma + columns[None, :], mask=mask, other=0.0)
    else:
        weight = 1.0
    return weight_factor(weight, weight_offset, MATH)
