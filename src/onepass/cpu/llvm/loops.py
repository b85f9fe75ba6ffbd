"""Loops over columns and over rows that several kernels share, and their sums of squares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from . import bits
from .emit import I32, I64, LANES, Arguments, Bool, Cell, Float, Function, Int, Module, declare

Body = Callable[[Int, "Bool | None"], None]
"""Emits the work on the block at a column offset; the mask, if any, selects the columns that exist."""

LINE: Final = 64
"""Bytes of a cache line."""
AHEAD: Final = 3072
"""Bytes between a row's reads and their prefetches, about 300 ns at full speed. With hardware prefetchers alone the
cores wait for a third of the time."""
SETTLE: Final = 32 * LANES
"""Columns after which partial sums are set aside and restarted, so that long sums are as accurate as short ones:
131072 columns in one chain were off by 2e-6."""


def each_block(f: Function, begin: Int, end: Int, body: Body) -> None:
    """Emit ``body`` for the blocks of ``range(begin, end)``: a loop over whole blocks, then a masked rest."""
    whole = end - ((end - begin) & (LANES - 1))
    with f.loop(begin, whole, LANES) as at:
        body(at, None)
    with f.when(whole < end):
        body(whole, f.first_lanes(end - whole))


def prefetch(f: Function, dtype: torch.dtype, row: Int, at: Int, level: int = 1) -> None:
    """Prefetch a block some way ahead into the cache ``level``. Past the row's end this is likely the next row."""
    for line in range(0, LANES * dtype.itemsize, LINE):
        f.prefetch(row + at * dtype.itemsize + (AHEAD + line), level)


class SumOfSquares:
    """A row's sum of squares, per lane."""

    def __init__(self, total: Cell, settled: Cell) -> None:
        self.f, self.total, self.settled = total.function, total, settled

    def add(self, h: Float) -> None:
        """Add the squares of a block."""
        self.total.set(h.fma(h, self.total.get()))

    def add_values(self, h: Float) -> None:
        """Add a block itself, for a mean."""
        self.total.set(self.total.get() + h)

    def settle(self, at: Int) -> None:
        """Set the sum aside at regular intervals. To be called after the block at ``at``."""
        with self.f.when(((at + LANES) & (SETTLE - 1)).eq(0)):
            self.settled.set(self.settled.get() + self.total.get())
            self.total.set(self.f.zeros()[0])

    def get(self) -> Float:
        """The sum."""
        result: Float = self.settled.get() + self.total.get()
        return result

    def clear(self) -> None:
        """Start over."""
        for cell in (self.total, self.settled):
            cell.set(self.f.zeros()[0])


def reciprocal_root(sums: Float, count: Float, eps: Float) -> Float:
    """``rs = 1 / sqrt(mean + eps)`` of sums of squares per lane: 0 for 0, NaN if the mean is not finite."""
    v = sums.sum_lanes() / count + eps
    rs = v.eq(0.0).where(v.number(0.0), v.number(1.0) / v.sqrt())
    return bits.is_finite(v).where(rs, v.number(float("nan")))


def take(f: Function, args: Arguments, total: Int, chunk: Int, body: Callable[[Int], None]) -> None:
    """On every thread of a team: take ``chunk`` of ``total`` items from a shared counter until none is left."""
    taking, working, done = (f.builder.append_basic_block(name) for name in ("take", "work", "done"))
    f.builder.branch(taking)
    f.builder.position_at_end(taking)
    first = args.fetch_add("next", chunk)
    f.builder.cbranch((first < total).ir, working, done)
    f.builder.position_at_end(working)
    body(first)
    f.builder.branch(taking)
    f.builder.position_at_end(done)
    f.builder.ret_void()


def wait(f: Function, args: Arguments, name: str, index: Int, least: Int) -> None:
    """Wait until one of the counters ``name`` is at least ``least``, and see what was written before it was counted up."""
    counter = args.counter(name, index)
    testing, waiting, done = (f.builder.append_basic_block(name) for name in ("test", "wait", "done"))
    f.builder.branch(testing)
    f.builder.position_at_end(testing)
    count = Int(f.builder, f.builder.load_atomic(counter, "acquire", 8, typ=I64))
    f.builder.cbranch((count < least).ir, waiting, done)
    f.builder.position_at_end(waiting)
    f.builder.call(declare(f.builder, "sched_yield", I32, []), [])
    f.builder.branch(testing)
    f.builder.position_at_end(done)


def entry_points(
    module: Module,
    offsets: dict[str, int],
    worker: Function,
    count: str,
    memory: Callable[[Arguments, Int], Int] | None = None,
    prepare: Function | None = None,
) -> None:
    """``serial`` and ``parallel``, which call ``worker(block, begin, end)`` for all of ``count`` rows.

    ``memory(args, thread)`` is the address of a thread's scratch memory, the worker's fourth parameter.
    """
    f = Function(module, "serial", 1)
    args, zero = Arguments(f, offsets), f.index(0)
    if prepare is not None:
        f.call(prepare, args.block)
    end = args.integer(count)
    f.call(worker, args.block, zero, end, *([memory(args, zero)] if memory is not None else []))
    f.builder.ret_void()

    f = Function(module, "parallel", 1)
    args = Arguments(f, offsets)
    rows, chunk = args.integer(count), args.integer("chunk")
    own = [memory(args, args.fetch_add("threads", f.index(1)))] if memory is not None else []
    take(f, args, rows, chunk, lambda first: f.call(worker, args.block, first, (first + chunk).min(rows), *own))
