"""``y = act @ weight.T`` and the norm of its segments on the CPU, in one parallel region.

`launch` packs a call into an argument block and runs the spec's kernel on it: serially when there is little to do,
else on torch's threads.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import torch

from ..specs import gemv_norm
from ..specs.gemv_norm import MAX_ROWS, GemvCall, GemvSpec
from . import arguments as _args
from . import compiler
from . import threads as _parallel
from .rms_norm import scratch

TILE: Final = _args.TILE
"""Columns of y in a tile."""
SERIAL_BELOW: Final = 131072
"""Weights under which waking other threads costs more than it saves: with two threads 192 rows of 1024 gain, 96 do
not."""


def blocks(spec: GemvSpec, n: int, k: int, widths: tuple[int, ...]) -> int:
    """The number of tiles, which are the blocks of a trace."""
    return sum(gemv_norm.tiles(n, widths, TILE))


@cache
def _parts(n: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """First tile, first column and end of each segment and of the tail; then the number of tiles."""
    found: list[int] = []
    tile = begin = 0
    for count, width in zip(gemv_norm.tiles(n, widths, TILE), (*widths, n - sum(widths)), strict=True):
        found += [tile, begin, begin + width]
        tile, begin = tile + count, begin + width
    return (*found, tile)


def launch(call: GemvCall) -> None:
    """Run the kernel of ``spec`` on checked arguments.

    ``y`` is a float32 workspace for the normed columns, if there are any. ``counter`` has an int32 for each segment,
    all zero, which they are again on return; without it the kernel counts in memory of this call. A product without norms may have
    more rows than a kernel holds: it runs for so many at a time.
    """
    spec, widths, act, unnormed, n, k = call.spec, call.widths, call.act, call.unnormed, call.n, call.k
    if act.shape[0] > MAX_ROWS and unnormed is not None:
        for rows, out in zip(act.split(MAX_ROWS), unnormed.split(MAX_ROWS), strict=True):
            launch(call._replace(act=rows, unnormed=out))
        return
    kernel = compiler.kernel(spec)
    parts = _parts(n, widths)
    size, count = row_blocks = _args.row_blocks(act.shape[0])
    needed = size * count * -(-k // _args.CHUNK) * _args.CHUNK
    if scratch.size < needed:
        scratch.grow(needed)
    threads = 1 if n * k < SERIAL_BELOW else min(torch.get_num_threads(), parts[-1])
    arguments = kernel.pack(scratch.address, threads, parts, row_blocks, call)
    if threads == 1:
        kernel.serial(ctypes.create_string_buffer(arguments, len(arguments)))
    else:
        kernel.prepare(arguments)
        _parallel.run(kernel.parallel, arguments, threads)


def precompile(spec: GemvSpec) -> None:
    """Have the kernel of ``spec`` ready, in memory and in the cache directory."""
    compiler.kernel(spec)
