"""The GEMV with partial norm on a CPU, taking turns with a kernel that only reads the weights and with torch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import cycle
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

import onepass

from ..cpu import _compile, _function, _parallel, _vec
from .timing import interleaved_times

ROWS = (1, 4, 16)
N, K, NORMED = 2112, 7168, 1536
SETS = 6
"""Weights in rotation, 30 MB each, so that none is in a cache."""
_STREAMS = 16
"""Rows that one thread of the reading kernel walks at a time: of 1 to 16 the fastest."""


@cache
def _reader() -> Any:
    """A kernel that reads rows, `_STREAMS` at a time, and keeps nothing but the bits they have in common."""
    module = ir.Module(name="reader")
    f = _function.Function(module, "read", 1)
    builder = f.builder
    block = f.parameters[0]
    total, width, source, sink = (_vec.Int(builder, f.load(block + 8 * i, _vec.I64, lanes=0)) for i in range(1, 5))
    take, work, done = (builder.append_basic_block() for _ in range(3))
    builder.branch(take)
    builder.position_at_end(take)
    step = f.index(_STREAMS)
    first = _vec.Int(builder, builder.atomic_rmw("add", f.pointer(block), step.ir, "monotonic"))
    builder.cbranch((first < total).ir, work, done)
    builder.position_at_end(work)
    seen = _function.Cell(f, f.zeros()[1])
    base = source + first * width
    with f.loop(f.index(0), width, 4 * _vec.LANES) as at:
        value = seen.get()
        for row in range(_STREAMS):
            value = value | _vec.Int(builder, f.load(base + width * row + at, _vec.I32))
        seen.set(value)
    f.store(seen.get().ir, sink)
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
    return _compile.link(_compile.compile_ir(str(module), *_compile.host()), "read")


def read(weight: Tensor, sink: Tensor) -> None:
    """Read all of ``weight`` (rows a multiple of 16, bytes of a row of 128) as fast as memory allows."""
    rows, width = weight.shape[0], weight.stride(0) * weight.element_size()
    block = struct.pack("=5q", 0, rows, width, weight.data_ptr(), sink.data_ptr())
    _parallel.run(_reader()["read"], block, torch.get_num_threads())


def composed(act: Tensor, weight: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """The op as a user would write it in torch."""
    y = torch.nn.functional.linear(act, weight)
    return torch.nn.functional.rms_norm(y[:, :NORMED], (NORMED,), gamma, 1e-6), y[:, NORMED:]


def rows(peers: bool = True, rounds: int = 40) -> Iterator[dict[str, Any]]:
    """Microseconds of onepass, the reading kernel and torch, in turns, the weights rotating."""
    weights = [torch.randn(N, K).bfloat16() for _ in range(SETS)]
    gamma = torch.randn(NORMED).bfloat16()
    sink = torch.zeros(_vec.LANES, dtype=torch.int32)
    compiled = torch.compile(composed, dynamic=False, fullgraph=True)
    for m in ROWS:
        act = torch.randn(m, K).bfloat16()
        outs = [torch.empty(m, w, dtype=torch.bfloat16) for w in (NORMED, N - NORMED)]
        calls: dict[str, Callable[[Tensor], object]] = {
            "read of the weights": lambda w: read(w, sink),
            "onepass": partial(_ours, act, gamma, outs),
        }
        if peers:
            calls["torch.compile"] = partial(_theirs, compiled, act, gamma)
            calls["torch eager"] = partial(_theirs, composed, act, gamma)
        turns = {name: partial(_next, call, cycle(weights)) for name, call in calls.items()}
        yield {
            "op": "gemv_and_partial_norm",
            "shape": [m, N, K],
            "normed": NORMED,
            "dtype": "bfloat16",
            "bytes": (N * K + m * K + m * N + NORMED) * 2,
            "us": interleaved_times(turns, rounds=rounds),
        }


def _ours(act: Tensor, gamma: Tensor, outs: list[Tensor], weight: Tensor) -> object:
    return onepass.gemv_and_partial_norm(act, weight, gamma, out=outs)


def _theirs(function: Callable[..., object], act: Tensor, gamma: Tensor, weight: Tensor) -> object:
    return function(act, weight, gamma)


def _next(call: Callable[[Tensor], object], weights: Iterator[Tensor]) -> object:
    return call(next(weights))
