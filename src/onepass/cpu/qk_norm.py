"""QK-RMSNorm on the CPU: q and k in one go, serially when there is little to do, else on torch's threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import torch

from ..specs.qk_norm import QkCall, QkSpec
from . import compiler
from . import threads as _parallel
from .arguments import BLOCK
from .rms_norm import SERIAL_BELOW, scratch

_CHUNK: Final = 16384
"""Elements a thread takes at a time, about, or more."""
_CHUNKS_PER_THREAD: Final = 16
_ENTRY: Final = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_SYMBOLS: Final = ("serial", "parallel")


class _Kernel:
    """Machine code of one spec and the packer of its argument block."""

    def __init__(self, spec: QkSpec) -> None:
        from . import qk_norm_kernels

        self._code = compiler.linked(spec, lambda: qk_norm_kernels.build(spec), *_SYMBOLS)
        self.pack = qk_norm_kernels.packer(spec)
        self.serial: Callable[[bytes], None] = _ENTRY(self._code["serial"])
        self.parallel: int = self._code["parallel"]


_kernels: dict[QkSpec, _Kernel] = {}


def _kernel(spec: QkSpec) -> _Kernel:
    with compiler.lock:
        found = _kernels.get(spec)
        if found is None:
            found = _kernels[spec] = _Kernel(spec)
    return found


def launch(call: QkCall) -> None:
    """Run the kernel of ``spec`` on checked arguments, writing the outputs that are given."""
    spec, rows = call.spec, call.rows
    kernel = _kernels.get(spec) or _kernel(spec)
    tokens = rows.geom[0]
    columns = rows.heads[0] * rows.widths[0] + rows.heads[1] * rows.widths[1]
    threads = chunk = 1
    if tokens > 1 and tokens * columns >= SERIAL_BELOW:
        threads = torch.get_num_threads()
        chunk = max(1, _CHUNK // columns, tokens // (threads * _CHUNKS_PER_THREAD))
        threads = min(threads, -(-tokens // chunk))
    room = 0
    if spec.rope is not None:
        room = spec.rope.head_dim + BLOCK
        if scratch.size < room * threads:
            scratch.grow(room * threads)
    block = kernel.pack(scratch.address, room, chunk, call)
    if threads == 1:
        kernel.serial(block)
    else:
        _parallel.run(kernel.parallel, block, threads)
