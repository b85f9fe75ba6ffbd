"""Products of each head with a weight of its own.

A program multiplies up to 16 rows of a head by a tile of columns of its weight, in the order of K. The tile does not depend
on the number of rows, so neither do the bytes of a row.
"""

import triton
import triton.language as tl

from ...gpu.lib.numbers import cast
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.lib.product import _operand
from ..attention.gpu_kernel import _request


@triton.jit
def _weights_at(weight, k, n, rows, MATH: tl.constexpr):
    """Where rows k and columns n of a weight are: [k, n], or its transpose if columns are contiguous."""
    if MATH.order == "rows":
        return weight + k.to(tl.int64)[:, None] * rows.weight_step + n[None, :]
    else:
        return weight + n.to(tl.int64)[:, None] * rows.weight_step + k[None, :]


@triton.jit
def _there(k, n, rows, MATH: tl.constexpr):
    """Which elements of `_weights_at` exist."""
    if MATH.order == "rows":
        return (k < rows.k)[:, None] & (n < rows.n)[None, :]
    else:
        return (n < rows.n)[:, None] & (k < rows.k)[None, :]


@triton.jit
def _head_product_kernel(x, weight, out, rows, ahead, TILE: tl.constexpr, MATH: tl.constexpr):
    """One tile of rows and columns of one head. Programs with the same weights are neighbours."""
    launch_dependents(MATH.pdl)
    DTYPE: tl.constexpr = x.dtype.element_ty
    block = tl.program_id(0)
    down, across = tl.cdiv(rows.rows, TILE.rows), tl.cdiv(rows.n, TILE.columns)
    row = block % down * TILE.rows + tl.arange(0, TILE.rows)
    n0 = block // down % across * TILE.columns
    n = n0 + tl.arange(0, TILE.columns)
    h = (block // down // across).to(tl.int64)
    weight += h * rows.weight_head
    if MATH.pdl:
        if ahead:  # one address per cache line
            for at in tl.range(0, rows.k, TILE.step):
                if MATH.order == "rows":
                    k, c = at + tl.arange(0, TILE.step), n0 + tl.arange(0, TILE.columns // 64) * 64
                else:
                    k, c = at + tl.arange(0, TILE.step // 64) * 64, n
                k, c = tl.minimum(k, rows.k - 1), tl.minimum(c, rows.n - 1)
                _request(_weights_at(weight, k, c, rows, MATH))
    wait(MATH.pdl)
    inside = (row < rows.rows)[:, None]
    x_at = x + h * rows.x_head + row.to(tl.int64)[:, None] * rows.x_row
    sums = tl.zeros((TILE.rows, TILE.columns), tl.float32)
    for at in tl.range(0, rows.k, TILE.step, num_stages=TILE.stages):
        k = at + tl.arange(0, TILE.step)
        if MATH.even:
            v = tl.load(x_at + k[None, :], mask=inside, other=0.0)
            w = tl.load(_weights_at(weight, k, n, rows, MATH), eviction_policy="evict_first")
        else:
            v = tl.load(x_at + k[None, :], mask=inside & (k < rows.k)[None, :], other=0.0)
            w = tl.load(_weights_at(weight, k, n, rows, MATH), mask=_there(k, n, rows, MATH), other=0.0)
        w = _operand(w, MATH)
        sums = tl.dot(_operand(v, MATH), w if MATH.order == "rows" else tl.trans(w), sums)
    place = (row.to(tl.int64) * rows.heads + h)[:, None] * rows.n + n[None, :]
    if not MATH.even:
        inside = inside & (n < rows.n)[None, :]
    tl.store(out + place, cast(sums, DTYPE, MATH.hw_rounding), mask=inside)
