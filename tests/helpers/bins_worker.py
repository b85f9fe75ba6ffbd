"""Run with TRITON_INTERPRET=1: prints a line for each way of adding up a row that does not give the sum its definition gives."""

from typing import get_args

import torch
import triton
import triton.language as tl

from onepass.triton.config import Crowd, RowConfig, Work, row_config, row_places
from onepass.triton.device.bins import squares_of_places, sum_places, sum_places_and_peak
from onepass.triton.device.row import tile_columns


@triton.jit
def _kernel(
    x, total, peak, n, PEAK: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, SETS: tl.constexpr,
    PIECES: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    place = tile_columns(CHUNK, WARPS, LANES)
    row = tl.arange(0, ROWS)
    chunks = ()
    peaks = tl.zeros((ROWS, CHUNK), tl.int32)
    for c in tl.static_range(COUNT):
        columns = c * CHUNK + place
        h = tl.load(x + row[:, None] * n + columns[None, :], mask=(columns < n)[None, :], other=0.0)
        chunks = chunks + (h,)
        peaks = tl.maximum(peaks, h.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    squares = squares_of_places(chunks, ROWS, CHUNK, COUNT, SETS, SIZE, WARPS, LANES)
    if PEAK:
        sums, sizes = sum_places_and_peak(squares, peaks, ROWS, CHUNK, SIZE, SETS, PIECES, WARPS, LANES, False)
        tl.store(peak + row, sizes.to(tl.float32, bitcast=True))
    else:
        sums = sum_places(squares, ROWS, SIZE, SETS, PIECES)
    tl.store(total + row, sums)


def defined(x: torch.Tensor) -> torch.Tensor:
    """Squares of each place one after the other, then neighbours, in float32 at every step; squares here are exact."""
    n = x.shape[1]
    places = row_places(n)
    padded = torch.zeros(x.shape[0], -(-n // places) * places)
    padded[:, :n] = x * x
    sums = torch.zeros(x.shape[0], places)
    for part in padded.split(places, dim=1):
        sums = sums + part
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums[:, 0]


def wrong(config: RowConfig, n: int, vectors: bool, with_peak: bool) -> bool:
    """Whether a tile of rows adds up to anything else than it should."""
    x = torch.randn(config.rows, n).to(torch.bfloat16).float() * torch.logspace(-3, 3, n)
    x = x.to(torch.bfloat16).float()
    total, peak = torch.empty(config.rows), torch.empty(config.rows)
    lanes = 0 if vectors or config.rows > 1 else 32
    _kernel[(1,)](
        x, total, peak, n, with_peak, config.rows, config.chunk, config.count, config.sets, config.pieces(vectors, 32),
        config.size(vectors), config.warps, lanes,
    )  # fmt: skip
    found = [torch.equal(total, defined(x))]
    if with_peak:
        found.append(torch.equal(peak, x.abs().amax(1)))
    return not all(found)


if __name__ == "__main__":
    torch.manual_seed(0)
    tried = 0
    for n in (33, 64, 100, 128, 300, 512, 600, 1024, 1536, 2048, 2050, 4096, 5000, 7168, 8192, 16384):
        for itemsize in (2, 4):
            for config in {row_config(n, itemsize, 32, w, c) for w in get_args(Work) for c in get_args(Crowd)}:
                for vectors in (True, False):
                    for with_peak in (True, False):
                        tried += 1
                        if wrong(config, n, vectors, with_peak):
                            print("wrong:", n, vectors, with_peak, config)
    print(tried, "tried")
