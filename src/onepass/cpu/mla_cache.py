"""MLA's cache write on the CPU, serially when there is little to do, else on torch's threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import torch

from ..specs.mla_cache import MlaCall, MlaSpec, mla_spec
from . import compiler
from . import threads as _parallel
from .rms_norm import SERIAL_BELOW

_CHUNK: Final = 16384
"""Elements a thread takes at a time, about, or more."""
_CHUNKS_PER_THREAD: Final = 16
_ENTRY: Final = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class _Kernel:
    """Machine code of one spec and the packer of its argument block."""

    def __init__(self, spec: MlaSpec) -> None:
        from . import mla_cache_kernels

        self._code = compiler.linked(spec, lambda: mla_cache_kernels.build(spec), "serial", "parallel")
        self.pack = mla_cache_kernels.packer()
        self.serial: Callable[[bytes], None] = _ENTRY(self._code["serial"])
        self.parallel: int = self._code["parallel"]


_kernels: dict[MlaSpec, _Kernel] = {}


def _kernel(spec: MlaSpec) -> _Kernel:
    """The code of ``spec``, which is that of all specs that differ from it in index tensors alone, or turn nothing."""
    plain = mla_spec(
        spec.q, spec.q_out, spec.kv, spec.gamma, spec.cache, spec.freqs or torch.float32,
        style=spec.style if spec.freqs is not None else "interleaved", scale=spec.scale, rounding=spec.rounding,
    )  # fmt: skip
    with compiler.lock:
        if plain not in _kernels:
            _kernels[plain] = _Kernel(plain)
        found = _kernels[spec] = _kernels[plain]
    return found


def launch(call: MlaCall) -> None:
    """Run the kernel of ``spec`` on checked arguments, writing ``q_out`` and the entries of ``blocks``."""
    spec, rows = call.spec, call.rows
    kernel = _kernels.get(spec) or _kernel(spec)
    tokens = rows.tokens
    columns = (rows.heads + 1) * rows.rope + rows.latent
    threads = chunk = 1
    if tokens > 1 and tokens * columns >= SERIAL_BELOW:
        threads = torch.get_num_threads()
        chunk = max(1, _CHUNK // columns, tokens // (threads * _CHUNKS_PER_THREAD))
        threads = min(threads, -(-tokens // chunk))
    block = kernel.pack(chunk, call)
    if threads == 1:
        kernel.serial(block)
    else:
        _parallel.run(kernel.parallel, block, threads)
