"""QK-RMSNorm on the CPU: q and k in one go, serially when there is little to do, else on torch's threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ..qk import QkRows, QkSpec
from . import _compile, _parallel
from ._args import BLOCK
from .rms_norm import SERIAL_BELOW, scratch

_CHUNK: Final = 16384
"""Elements a thread takes at a time, about, or more."""
_CHUNKS_PER_THREAD: Final = 16
_ENTRY: Final = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_SYMBOLS: Final = ("serial", "parallel")


class _Kernel:
    """Machine code of one spec and the packer of its argument block."""

    def __init__(self, spec: QkSpec) -> None:
        from . import _qk

        self._code = _compile.linked(spec, lambda: _qk.build(spec), *_SYMBOLS)
        self.pack = _qk.packer(spec)
        self.serial: Callable[[bytes], None] = _ENTRY(self._code["serial"])
        self.parallel: int = self._code["parallel"]


_kernels: dict[QkSpec, _Kernel] = {}


def _kernel(spec: QkSpec) -> _Kernel:
    with _compile.lock:
        found = _kernels.get(spec)
        if found is None:
            found = _kernels[spec] = _Kernel(spec)
    return found


def launch(
    spec: QkSpec,
    rows: QkRows,
    q: Tensor,
    k: Tensor,
    gamma_q: Tensor | None,
    gamma_k: Tensor | None,
    q_out: Tensor | None,
    k_out: Tensor | None,
    stats: Tensor | None,
    freqs: Tensor | None,
    positions: Tensor | None,
    eps: float,
    weight_offset: float,
) -> None:
    """Run the kernel of ``spec`` on checked arguments, writing the outputs that are given."""
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
    block = kernel.pack(
        scratch.address, room, chunk, rows, q, k, gamma_q, gamma_k, q_out, k_out, stats, freqs, positions, eps, weight_offset
    )  # fmt: skip
    if threads == 1:
        kernel.serial(block)
    else:
        _parallel.run(kernel.parallel, block, threads)
