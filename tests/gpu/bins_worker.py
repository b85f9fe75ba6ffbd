"""Run with TRITON_INTERPRET=1: prints a line for every tile that does not sum a row as defined."""

from typing import get_args

import torch
import triton
import triton.language as tl

from onepass.gpu.chip import INTERPRETER
from onepass.gpu.lib.reduce import bin_squares, sum_bins, sum_bins_and_peak
from onepass.gpu.lib.row import tile_columns
from onepass.gpu.tuning.table import Regime, Variant
from onepass.ops.rms_norm.gpu_tile import RowConfig, row_bins, row_config
from tests.oracle.interpreter import quick_interpreter


@triton.jit
def _kernel(x, total, peak, n, PEAK: tl.constexpr, TILE: tl.constexpr):
    inner = tile_columns(TILE)
    row = tl.arange(0, TILE.rows)
    chunks = ()
    peaks = tl.zeros((TILE.rows, TILE.chunk), tl.int32)
    for c in tl.static_range(TILE.count):
        columns = c * TILE.chunk + inner
        h = tl.load(x + row[:, None] * n + columns[None, :], mask=(columns < n)[None, :], other=0.0)
        chunks = chunks + (h,)
        peaks = tl.maximum(peaks, h.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    squares = bin_squares(chunks, TILE)
    if PEAK:
        sums, sizes = sum_bins_and_peak(squares, peaks, TILE, False)
        tl.store(peak + row, sizes.to(tl.float32, bitcast=True))
    else:
        sums = sum_bins(squares, TILE)
    tl.store(total + row, sums)


def defined(x: torch.Tensor) -> torch.Tensor:
    """Squares of each bin one after the other, then neighbours, in float32 at every step; squares here are exact."""
    n = x.shape[1]
    bins = row_bins(n)
    padded = torch.zeros(x.shape[0], -(-n // bins) * bins)
    padded[:, :n] = x * x
    sums = torch.zeros(x.shape[0], bins)
    for part in padded.split(bins, dim=1):
        sums = sums + part
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums[:, 0]


def wrong(config: RowConfig, n: int, vectors: bool, with_peak: bool) -> bool:
    """Whether a tile of rows has another sum than defined."""
    x = torch.randn(config.rows, n).to(torch.bfloat16).float() * torch.logspace(-3, 3, n)
    x = x.to(torch.bfloat16).float()
    total, peak = torch.empty(config.rows), torch.empty(config.rows)
    _kernel[(1,)](x, total, peak, n, with_peak, config.laid_out(vectors, INTERPRETER.warp_size))
    found = [torch.equal(total, defined(x))]
    if with_peak:
        found.append(torch.equal(peak, x.abs().amax(1)))
    return not all(found)


def main() -> None:
    """Try every tile."""
    tried = 0
    for n in (33, 64, 100, 128, 300, 512, 600, 1024, 1536, 2048, 2050, 4096, 5000, 7168, 8192, 16384):
        for itemsize in (2, 4):
            tiles = {row_config(n, itemsize, INTERPRETER, v, r) for v in get_args(Variant) for r in get_args(Regime)}
            for config in tiles:
                for vectors in (True, False):
                    for with_peak in (True, False):
                        tried += 1
                        if wrong(config, n, vectors, with_peak):
                            print("wrong:", n, vectors, with_peak, config)
    print(tried, "tried")


if __name__ == "__main__":
    torch.manual_seed(0)
    with quick_interpreter():
        main()
