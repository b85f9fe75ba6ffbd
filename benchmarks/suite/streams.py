"""Memory streams on a CPU, on torch's own threads: the best possible time of any kernel that moves the same number of bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from onepass.cpu import compile as compiler
from onepass.cpu import threads
from onepass.cpu.llvm import emit

from .workload import Call, Stream

_CHUNK = 65536
_VECTOR = 4 * emit.LANES
"""Bytes in a vector of the copy and of the read."""
_STREAMS = 16
"""Rows that one thread of the reading kernel reads at a time; 16 was the fastest of 1 to 16."""
_WORTH_THREADS = 1 << 18
"""Bytes from which more threads pay off."""
_WIDTHS = (14336, 4096, 1024, _VECTOR)
"""Bytes per row of what is read; the widest that leaves enough rows is used."""

Body = Callable[[emit.Function, Any, Any, Any, Any, Any], None]


def _kernel(name: str, body: Body) -> Any:
    """A kernel whose threads take chunks of ``total`` until none is left; ``body`` moves one chunk."""
    module = ir.Module(name=name)
    f = emit.Function(module, name, 1)
    builder = f.builder
    block = f.parameters[0]
    chunk, total, source, target = (emit.Int(builder, f.load(block + 8 * i, emit.I64, lanes=0)) for i in range(1, 5))
    take, work, done = (builder.append_basic_block() for _ in range(3))
    builder.branch(take)
    builder.position_at_end(take)
    first = emit.Int(builder, builder.atomic_rmw("add", f.pointer(block), chunk.ir, "monotonic"))
    builder.cbranch((first < total).ir, work, done)
    builder.position_at_end(work)
    body(f, first, chunk, total, source, target)
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
    return compiler.link(compiler.compile_ir(str(module), *compiler.host()), name)


@cache
def _halver() -> Any:
    def body(f: emit.Function, first: Any, chunk: Any, total: Any, source: Any, target: Any) -> None:
        with f.loop(first, (first + chunk).min(total), 2 * emit.LANES) as at:
            for half in (0, emit.LANES):
                words = f.load(source + (at + half) * 2, emit.I16)
                f.store(f.builder.trunc(words, ir.VectorType(emit.I8, emit.LANES)), target + at + half)

    return _kernel("halve", body)


@cache
def _copier() -> Any:
    def body(f: emit.Function, first: Any, chunk: Any, total: Any, source: Any, target: Any) -> None:
        with f.loop(first, (first + chunk).min(total), 2 * _VECTOR) as at:
            for half in (0, _VECTOR):
                f.store(f.load(source + at + half, emit.I32), target + at + half)

    return _kernel("copy", body)


@cache
def _reader(width: int) -> Any:
    """Reads rows of ``width`` bytes, `_STREAMS` at a time, and stores only the OR of their bits."""

    def body(f: emit.Function, first: Any, chunk: Any, total: Any, source: Any, target: Any) -> None:
        seen = emit.Cell(f, f.zeros()[1])
        base = source + first * width
        with f.loop(f.index(0), f.index(width), _VECTOR) as at:
            value = seen.get()
            for row in range(_STREAMS):
                value = value | emit.Int(f.builder, f.load(base + f.index(width * row) + at, emit.I32))
            seen.set(value)
        f.store(seen.get().ir, target)

    return _kernel(f"read{width}", body)


def _run(linked: Any, name: str, chunk: int, total: int, source: Tensor, target: Tensor) -> None:
    block = struct.pack("=5q", 0, chunk, total, source.data_ptr(), target.data_ptr())
    several = source.nbytes >= _WORTH_THREADS
    threads.run(linked[name], block, torch.get_num_threads() if several else 1)


def halve(source: Tensor, target: Tensor) -> None:
    """Read ``source`` (16 bit, a multiple of 64 elements) and write ``target`` (8 bit) as fast as memory allows."""
    _run(_halver(), "halve", _CHUNK, source.numel(), source, target)


def copy(source: Tensor, target: Tensor) -> None:
    """Copy bytes (a multiple of 256) as fast as memory allows."""
    _run(_copier(), "copy", _CHUNK, source.numel(), source, target)


def read(source: Tensor, sink: Tensor) -> None:
    """Read all rows of ``source`` (bytes, a multiple of 16 rows) as fast as memory allows; ``sink`` has 32 words."""
    width = source.shape[1]
    _run(_reader(width), f"read{width}", _STREAMS, source.shape[0], source, sink)


def calls(kind: Stream, size: int, sets: int) -> list[Call]:
    """``sets`` streams that each move ``size`` bytes, or slightly less where the size does not divide."""
    made: list[Call] = []
    for _ in range(sets):
        if kind == "read":
            width = next((w for w in _WIDTHS if size >= 8 * _STREAMS * w), _WIDTHS[-1])
            rows = max(1, size // width // _STREAMS) * _STREAMS
            sink = torch.zeros(emit.LANES, dtype=torch.int32)
            made.append(partial(read, torch.ones(rows, width, dtype=torch.uint8), sink))
        elif kind == "halve":
            words = torch.ones(max(64, size // 3 & -64), dtype=torch.bfloat16)
            made.append(partial(halve, words, torch.zeros(words.shape, dtype=torch.uint8)))
        else:
            octets = torch.ones(max(256, size // 2 & -256), dtype=torch.uint8)
            made.append(partial(copy, octets, torch.zeros_like(octets)))
    return made
