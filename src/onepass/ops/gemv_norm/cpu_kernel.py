"""The GEMV routine: tiles of ``y = act @ weight.T``, and the norm of a segment when its last tile is done.

Threads take tiles of columns one by one. A tile of a normed segment is stored to the float32 workspace ``y``, and the
segment's counter is incremented, which releases the tile and acquires those counted before. The thread that counts the
last tile of a segment normalizes all its rows and resets the counter. Tiles of the tail are rounded and stored at once.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import torch
from llvmlite import ir

from ...cpu.llvm import bits, dot
from ...cpu.llvm.bits import load_row, load_scalar, magnitude, store_row, store_scalar
from ...cpu.llvm.dot import VECTOR
from ...cpu.llvm.emit import I32, I64, LANES, Arguments, Bool, Cell, Float, Function, Int, Module, declare
from ...cpu.llvm.loops import SumOfSquares, each_block, reciprocal_root, take
from ...cpu.sizes import SUM, TILE
from ...formats import Fp8Format, ScaleRule
from .launch import MAX_ROWS, GemvSpec

_SCALE: Final = ScaleRule("row", torch.float32)
_EVENTS: Final = 16
"""Slots of a block in the trace."""
_ENTER, _K_BEGIN, _K_END, _BEFORE, _AFTER, _APPLY, _LOADED, _REDUCED, _APPLIED, _EXIT = range(10)


def build(spec: GemvSpec, offsets: dict[str, int], features: str) -> str:
    """The LLVM module of ``spec``. The CPU's features affect loops, never results. ``prepare`` expands ``act``."""
    module = Module(features)
    product = dot.Product(spec.act, spec.weight, spec.weight_scale)
    expand = dot.expand_act(module, product)
    prepare = Function(module, "prepare", 1)
    args = Arguments(prepare, offsets)
    act, m, k, target = (args.integer(name) for name in ("act", "m", "k", "scratch"))
    stride = args.integer("act.stride") * spec.act.itemsize
    prepare.call(expand, act, stride, m, args.integer("block") * args.integer("blocks"), k, target)
    prepare.builder.ret_void()
    walks = dot.walks(module, product, wide="+avx512f" in features)
    norms = _norms(module, spec, offsets)
    tile = TileKernel(module, spec, offsets).emit(walks, norms)

    f = Function(module, "serial", 1)
    block, zero = f.parameters[0], f.index(0)
    f.call(prepare, block)
    with f.loop(zero, _tiles(Arguments(f, offsets), spec)) as index:
        f.call(tile, block, index, zero)
    f.builder.ret_void()

    f = Function(module, "parallel", 1)
    args, one = Arguments(f, offsets), f.index(1)
    tiles = _tiles(args, spec)
    thread = args.fetch_add("threads", one)
    take(f, args, tiles, one, lambda index: f.call(tile, args.block, index, thread))
    return str(module)


class Trace:
    """Writes the times of one block; for an untraced spec it emits nothing."""

    def __init__(self, f: Function, spec: GemvSpec, slots: Int) -> None:
        self.f = f
        self.slots = slots
        self.clock = f.allocate(16) if spec.traced else None

    def mark(self, event: int) -> None:
        """Record the current time, in nanoseconds of the monotonic clock."""
        if self.clock is None:
            return
        f = self.f
        clock = declare(f.builder, "clock_gettime", I32, [I32, ir.PointerType()])
        f.builder.call(clock, [ir.Constant(I32, time.CLOCK_MONOTONIC), f.pointer(self.clock)])
        seconds, nanoseconds = (Int(f.builder, f.load(self.clock + 8 * i, I64, lanes=0)) for i in range(2))
        f.store((seconds * 1_000_000_000 + nanoseconds).ir, self.slots + 8 * event)


# --- the norm of a segment -----------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """Parameters of a norm routine. Strides are in bytes; ``scale`` is for codes only."""

    block: Int
    y: Int
    width: Int
    gamma: Int
    out: Int
    out_stride: Int
    scale: Int
    scale_stride: Int
    slots: Int


def _norms(module: Module, spec: GemvSpec, offsets: dict[str, int]) -> list[Function]:
    """The norm routine of each segment. Segments that differ only in sizes and addresses share one."""
    functions: dict[tuple[torch.dtype, bool], Function] = {}
    kinds = [(gamma, i == 0 and spec.fp8 is not None) for i, gamma in enumerate(spec.gammas)]
    for gamma, coded in kinds:
        if (gamma, coded) not in functions:
            f = Function(module, f"norm{len(functions)}", len(Segment._fields), private=True)
            functions[gamma, coded] = f
            _norm(f, spec, offsets, gamma, spec.fp8 if coded else None)
    return [functions[kind] for kind in kinds]


def _norm(f: Function, spec: GemvSpec, offsets: dict[str, int], gamma: torch.dtype, fp8: Fp8Format | None) -> None:
    """Normalize all rows of a segment: sums of squares, then ``rs`` of all rows, then all outputs."""
    segment = Segment(*f.parameters)
    args = Arguments(f, offsets)
    rows, eps, y_stride = args.integer("m"), args.number("eps"), args.integer("y.stride") * 4
    trace = Trace(f, spec, segment.slots)
    zero = f.index(0)
    totals, tops, roots, scales = (f.allocate(MAX_ROWS * size) for size in (4 * LANES, 4 * LANES, 4, 4))

    def y(m: Int, at: Int, mask: Bool | None) -> Float:
        return load_row(f, torch.float32, segment.y + m * y_stride + at * 4, mask, False)

    def g(at: Int, mask: Bool | None) -> Float:
        return load_row(f, gamma, segment.gamma + at * gamma.itemsize, mask, False)

    trace.mark(_APPLY)
    with f.loop(zero, rows) as m:
        no_sum, no_top = f.zeros()
        squares, top = SumOfSquares(Cell(f, no_sum), Cell(f, no_sum)), Cell(f, no_top)

        def collect(at: Int, mask: Bool | None) -> None:
            value = y(m, at, mask)
            squares.add(value)
            if fp8 is not None:
                top.set(top.get().max(magnitude(value * g(at, mask))))
            squares.settle(at)

        each_block(f, zero, segment.width, collect)
        f.store(squares.get().ir, totals + m * (4 * LANES))
        if fp8 is not None:
            f.store(top.get().ir, tops + m * (4 * LANES))
    trace.mark(_LOADED)
    with f.loop(zero, rows) as m:
        rs = reciprocal_root(f.floats(totals + m * (4 * LANES)), segment.width.to_float(), eps)
        if fp8 is not None:
            amax = Int(f.builder, f.load(tops + m * (4 * LANES), I32)).max_lane().float() * rs
            scale = bits.make_scale(_SCALE, fp8.max, amax, amax.number(float("inf")))
            store_scalar(f, torch.float32, scale, segment.scale + m * segment.scale_stride)
            store_scalar(f, torch.float32, scale, scales + m * 4)
            rs = bits.multiplier(rs, scale)
        store_scalar(f, torch.float32, rs, roots + m * 4)
    trace.mark(_REDUCED)
    with f.loop(zero, rows) as m:
        factor = load_scalar(f, torch.float32, roots + m * 4)
        out = segment.out + m * segment.out_stride

        def write(at: Int, mask: Bool | None) -> None:
            if fp8 is None:
                value = y(m, at, mask) * factor * g(at, mask)
                store_row(f, spec.act, value, out + at * spec.act.itemsize, mask, False)
            else:
                codes = bits.encode(fp8, fp8.max, y(m, at, mask) * g(at, mask) * factor)
                bits.store_codes(f, codes, out + at, mask, False)

        each_block(f, zero, segment.width, write)
        if fp8 is not None:
            with f.when(load_scalar(f, torch.float32, scales + m * 4).is_nan()):
                each_block(f, zero, segment.width, lambda at, mask: bits.fill_nan(f, fp8, out + at, mask))
    trace.mark(_APPLIED)
    f.builder.ret_void()


# --- tiles ---------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A segment or the tail: its first tile, its first column and the column after its last."""

    tile: Int
    begin: Int
    end: Int


def _tiles(args: Arguments, spec: GemvSpec) -> Int:
    """The number of tiles."""
    return args.integer("parts", 3 * (len(spec.gammas) + 1))


class TileKernel:
    """Emits ``tile(block, index, thread)``: one tile from beginning to end."""

    def __init__(self, module: Module, spec: GemvSpec, offsets: dict[str, int]) -> None:
        self.f = f = Function(module, "tile", 3, private=True)
        self.spec = spec
        self.args = args = Arguments(f, offsets)
        self.index = f.parameters[1]
        numbers = range(len(spec.gammas) + 1)
        self.parts = [Part(*(args.integer("parts", 3 * i + j) for j in range(3))) for i in numbers]
        slots = args.integer("trace") + self.index * (8 * _EVENTS) if spec.traced else f.index(0)
        self.trace = Trace(f, spec, slots)

    def emit(self, walks: dict[int, Function], norms: list[Function]) -> Function:
        """The function."""
        f, spec, args, index, trace = self.f, self.spec, self.args, self.index, self.trace
        trace.mark(_ENTER)
        if spec.traced:
            units = args.integer("units")
            with f.when(~units.eq(0)):
                f.store(f.builder.trunc(f.parameters[2].ir, I32), units + index * 4)
        column, width = self.span(index)
        sums = f.allocate(MAX_ROWS * TILE * VECTOR)
        trace.mark(_K_BEGIN)
        weight, stride = args.integer("weight"), args.integer("weight.stride") * spec.weight.itemsize
        blocks = args.integer("blocks")
        scaled = "weight_scale" in args
        scales = [args.integer(name) if scaled else f.index(0) for name in ("weight_scale", "weight_scale.stride")]
        following = weight + self.span(index + args.integer("team"))[0] * stride  # this thread's next tile, likely
        for size, walk in walks.items():
            with f.when(args.integer("block").eq(size)):
                first, act, k = weight + column * stride, args.integer("scratch"), args.integer("k")
                f.call(walk, first, stride, width, act, blocks, k, sums, following, *scales, column)
        with f.choice(index < self.parts[-1].tile) as (normed, tail):
            with normed:
                y, y_stride = args.integer("y") + column * 4, args.integer("y.stride") * 4
                self.reduce(sums, column, width, torch.float32, y, y_stride)
                trace.mark(_K_END)
                for i, norm in enumerate(norms):
                    with f.when(~(index < self.parts[i].tile) & (index < self.parts[i + 1].tile)):
                        self.arrive(norm, i)
            with tail:
                size = spec.act.itemsize
                start = (column - self.parts[-1].begin) * size
                out, out_stride = args.integer("unnormed") + start, args.integer("unnormed.stride") * size
                self.reduce(sums, column, width, spec.act, out, out_stride)
                trace.mark(_K_END)
        trace.mark(_EXIT)
        f.builder.ret_void()
        return f

    def span(self, tile: Int) -> tuple[Int, Int]:
        """The first column of a tile, and the number of its columns."""
        first, *others = self.parts
        begin, end = first.begin + (tile - first.tile) * TILE, first.end
        for part in others:
            inside = ~(tile < part.tile)
            begin = inside.where(part.begin + (tile - part.tile) * TILE, begin)
            end = inside.where(part.end, end)
        return begin, (end - begin).min(TILE)

    def reduce(self, sums: Int, column: Int, width: Int, dtype: torch.dtype, out: Int, stride: Int) -> None:
        """Fold the sums of a tile's lanes into values of y, apply the weights' scales and store."""
        f, args, kind = self.f, self.args, self.spec.weight_scale
        scales = args.integer("weight_scale") if kind != "none" else f.index(0)
        for first in range(0, TILE, SUM):
            with f.when(width > first):
                lanes = f.first_lanes((width - first).min(SUM), SUM)
                scale = dot.column_scale(f, kind, scales, column + first, lanes)
                with f.loop(f.index(0), args.integer("m")) as m:
                    value = dot.tile_sums(f, sums, m, first)
                    if scale is not None:
                        value = value * scale
                    store_row(f, dtype, value, out + m * stride + first * dtype.itemsize, lanes, False)

    def arrive(self, norm: Function, i: int) -> None:
        """Count a tile of segment ``i``; the last one's thread normalizes the segment."""
        f, args, part = self.f, self.args, self.parts[i]
        shared = args.integer("counter")
        own = args.block + args.offsets["counter0"]
        counter = f.pointer(shared.eq(0).where(own, shared) + 4 * i)
        self.trace.mark(_BEFORE)
        before = f.builder.atomic_rmw("add", counter, ir.Constant(I32, 1), "acq_rel")
        self.trace.mark(_AFTER)
        arrived = Int(f.builder, f.builder.zext(before, I64)) + 1
        with f.when(arrived.eq(self.parts[i + 1].tile - part.tile)):
            coded = i == 0 and self.spec.fp8 is not None
            size = 1 if coded else self.spec.act.itemsize
            segment = Segment(
                block=args.block,
                y=args.integer("y") + part.begin * 4,
                width=part.end - part.begin,
                gamma=args.integer(f"gamma{i}"),
                out=args.integer(f"normed{i}"),
                out_stride=args.integer(f"normed{i}.stride") * size,
                scale=args.integer("scale") if coded else f.index(0),
                scale_stride=args.integer("scale.stride") * 4 if coded else f.index(0),
                slots=self.trace.slots,
            )
            f.call(norm, *segment)
            f.builder.store(ir.Constant(I32, 0), counter)
