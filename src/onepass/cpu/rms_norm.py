"""RMSNorm rows on the CPU: normalise, add, quantize.

`launch` packs a call into an argument block and runs the spec's kernel on it: serially when there is little to do,
else on torch's threads.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Final

import torch

from ..specs.rms_norm import RowCall, RowSpec
from . import compiler
from . import threads as _parallel
from .arguments import BLOCK

SERIAL_BELOW: Final = 131072
"""Elements under which waking other threads costs more than it saves: with two threads 64 rows of 4096 gain a little,
16 rows lose."""
_CHUNK: Final = 16384
"""Elements a thread takes at a time, about, or more: enough to be worth the taking."""
_CHUNKS_PER_THREAD: Final = 16
"""The first row of a chunk is read with nothing to compute meanwhile, so few chunks are fast, while more let a thread
that is held up leave its rows to the others."""


class _Scratch(threading.local):
    """Float32 memory of the calling thread, from a cache line's beginning on; it only grows."""

    size = 0
    address = 0

    def grow(self, size: int) -> None:
        """Make room for ``size`` numbers; an interrupt in between leaves room for none."""
        self.size = 0
        self.memory = bytearray(4 * size + 64)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.address = (start + 63) & ~63
        self.size = size


scratch = _Scratch()


def launch(call: RowCall) -> None:
    """Run the kernel of ``spec`` on checked arguments, writing the outputs that are given.

    ``strides`` belong to x, residual, norm, codes, scale, new_residual and the operands, in this order. Rows are
    contiguous; an output may be the input it replaces.
    """
    spec, geom, n = call.spec, call.geom, call.n
    kernel = compiler.kernel(spec)
    rows = geom[0]
    threads = chunk = 1
    if rows > 1 and rows * n >= SERIAL_BELOW:
        threads = torch.get_num_threads()
        chunk = max(1, _CHUNK // n, rows // (threads * _CHUNKS_PER_THREAD))
        threads = min(threads, -(-rows // chunk))
    needed = (n + BLOCK) * (threads + 1) if kernel.keeps_h else n + BLOCK
    if scratch.size < needed:
        scratch.grow(needed)
    block = kernel.pack(scratch.address, chunk, call)
    if threads == 1:
        kernel.serial(block)
    else:
        kernel.prepare(block)
        _parallel.run(kernel.parallel, block, threads)


def precompile(spec: RowSpec) -> None:
    """Have the kernel of ``spec`` ready, in memory and in the cache directory."""
    compiler.kernel(spec)


def describe() -> dict[str, str]:
    """What the backend runs on."""
    cpu, features = compiler.host()
    enabled = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
    width = 512 if "avx512f" in enabled else 256 if "avx" in enabled else 128
    directory = compiler.cache_directory()
    return {
        "cpu": cpu,
        "vector": f"{width} bit",
        "threads": f"{torch.get_num_threads()}, {_parallel.describe()}",
        "cache": str(directory) if directory is not None else "off",
    }
