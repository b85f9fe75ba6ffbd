"""The GEMV routine: tiles of ``y = act @ weight.T``, and the norm of a segment when its last tile is done.

Threads take tiles of columns one by one. A tile of a normed segment goes to the float32 workspace ``y``, and the
segment's counter goes up by one, which releases the tile and acquires those counted before. Whoever counts the last
tile of a segment norms it, all rows, and leaves the counter at zero. Tiles of the tail are rounded and stored at once.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

import torch
from llvmlite import ir

from ..formats import Fp8Format, ScaleRule
from ..specs.gemv_norm import MAX_ROWS, GemvSpec
from .arguments import SUM, TILE
from .emit import dot
from .emit.bits import (
    encode,
    fill_codes,
    is_finite,
    load_row,
    load_scalar,
    magnitude,
    make_scale,
    multiplier,
    store_codes,
    store_row,
    store_scalar,
)
from .emit.dot import VECTOR
from .emit.fields import Fields
from .emit.function import Cell, Function
from .emit.vec import F32, I32, I64, LANES, Bool, Float, Int, constant, declare, type_of
from .rms_norm_kernels import each_block

_SETTLE: Final = 32 * LANES
"""Columns after which a row's partial sum of squares is put aside and begun anew, as the row kernels do."""
_SCALE: Final = ScaleRule("row", torch.float32)
_EVENTS: Final = 16
"""Slots of a block in the trace."""
_ENTER, _K_BEGIN, _K_END, _BEFORE, _AFTER, _APPLY, _LOADED, _REDUCED, _APPLIED, _EXIT = range(10)


def build(spec: GemvSpec, wide: bool) -> str:
    """The LLVM module of ``spec``, three functions of the argument block.

    ``prepare`` expands ``act``. ``serial`` does everything. Or ``prepare`` is called first and then, on each thread of
    a team, ``parallel``, which takes tiles until none is left. ``wide`` says that the CPU has 32 registers of 16 lanes.
    """
    module = ir.Module(name="onepass")
    expand = dot.expand_act(module, spec)
    f = Function(module, "prepare", 1)
    fields = _fields(f, spec)
    act, m, k, target = (fields.integer(name) for name in ("act", "m", "k", "scratch"))
    stride = fields.integer("act.stride") * spec.act.itemsize
    f.call(expand, act, stride, m, fields.integer("block") * fields.integer("blocks"), k, target)
    f.builder.ret_void()
    tile = _tile(module, spec, dot.walks(module, spec, wide), _norms(module, spec))
    _serial(module, spec, f, tile)
    _parallel(module, spec, tile)
    return str(module)


def _fields(f: Function, spec: Any) -> Fields:
    """The argument block, a function's first parameter."""
    return Fields(f, spec, f.parameters[0])


class Trace:
    """Writes the times of one block; for an untraced spec it emits nothing."""

    def __init__(self, f: Function, spec: GemvSpec, slots: Int) -> None:
        self.f = f
        self.slots = slots
        self.clock = f.room(16) if spec.traced else None

    def mark(self, event: int) -> None:
        """The time now, in nanoseconds of the monotonic clock."""
        if self.clock is None:
            return
        f = self.f
        clock = declare(f.builder, "clock_gettime", I32, [I32, ir.PointerType()])
        f.builder.call(clock, [ir.Constant(I32, time.CLOCK_MONOTONIC), f.pointer(self.clock)])
        seconds, nanoseconds = (Int(f.builder, f.load(self.clock + 8 * i, I64, lanes=0)) for i in range(2))
        f.store((seconds * 1_000_000_000 + nanoseconds).ir, self.slots + 8 * event)


# --- the norm of a segment -----------------------------------------------------------------------------------------


def _norms(module: Any, spec: GemvSpec) -> list[Function]:
    """The norm routine of each segment; segments that differ in sizes and addresses alone share one."""
    found: dict[tuple[torch.dtype, bool], Function] = {}
    kinds = [(gamma, i == 0 and spec.fp8 is not None) for i, gamma in enumerate(spec.gammas)]
    for gamma, coded in kinds:
        if (gamma, coded) not in found:
            found[gamma, coded] = _norm(module, spec, gamma, spec.fp8 if coded else None, f"norm{len(found)}")
    return [found[kind] for kind in kinds]


class Norm(NamedTuple):
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


def _norm(module: Any, spec: GemvSpec, gamma: torch.dtype, fp8: Fp8Format | None, name: str) -> Function:
    """Norm all rows of a segment: sums of squares, then ``rs`` of all rows, then all outputs."""
    f = Function(module, name, len(Norm._fields), private=True)
    segment = Norm(*f.parameters)
    fields = _fields(f, spec)
    rows, eps, y_stride = fields.integer("m"), fields.number("eps"), fields.integer("y.stride") * 4
    trace = Trace(f, spec, segment.slots)
    zero = f.index(0)
    totals, tops, roots, scales = (f.room(MAX_ROWS * size) for size in (4 * LANES, 4 * LANES, 4, 4))

    def y(m: Int, at: Int, mask: Bool | None) -> Float:
        return load_row(f, torch.float32, segment.y + m * y_stride + at * 4, mask, False)

    def g(at: Int, mask: Bool | None) -> Float:
        return load_row(f, gamma, segment.gamma + at * gamma.itemsize, mask, False)

    trace.mark(_APPLY)
    with f.loop(zero, rows) as m:
        none, nothing = f.zeros()
        total, settled, top = Cell(f, none), Cell(f, none), Cell(f, nothing)

        def collect(at: Int, mask: Bool | None) -> None:
            value = y(m, at, mask)
            total.set(value.fma(value, total.get()))
            if fp8 is not None:
                top.set(top.get().max(magnitude(value * g(at, mask))))
            with f.when(((at + LANES) & (_SETTLE - 1)).eq(0)):
                settled.set(settled.get() + total.get())
                total.set(f.zeros()[0])

        each_block(f, zero, segment.width, collect)
        f.store((settled.get() + total.get()).ir, totals + m * (4 * LANES))
        if fp8 is not None:
            f.store(top.get().ir, tops + m * (4 * LANES))
    trace.mark(_LOADED)
    with f.loop(zero, rows) as m:
        squares = Float(f.builder, f.load(totals + m * (4 * LANES), F32))
        v = squares.sum_lanes() / segment.width.to_float() + eps
        rs = v.eq(0.0).where(v.number(0.0), v.number(1.0) / v.sqrt())
        rs = is_finite(v).where(rs, v.number(float("nan")))
        if fp8 is not None:
            amax = Int(f.builder, f.load(tops + m * (4 * LANES), I32)).max_lane().float() * rs
            scale = make_scale(_SCALE, fp8.max, amax, amax.number(float("inf")))
            store_scalar(f, torch.float32, scale, segment.scale + m * segment.scale_stride)
            store_scalar(f, torch.float32, scale, scales + m * 4)
            rs = multiplier(rs, scale)
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
                codes = encode(fp8, fp8.max, y(m, at, mask) * g(at, mask) * factor)
                store_codes(f, codes, out + at, mask, False)

        each_block(f, zero, segment.width, write)
        if fp8 is not None:
            nan_code = fp8.nan_code
            with f.when(load_scalar(f, torch.float32, scales + m * 4).is_nan()):
                each_block(f, zero, segment.width, lambda at, mask: fill_codes(f, nan_code, out + at, mask))
    trace.mark(_APPLIED)
    f.builder.ret_void()
    return f


# --- tiles ---------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A segment or the tail: its first tile, its first column and the column after its last."""

    tile: Int
    begin: Int
    end: Int


def _parts(fields: Fields, spec: GemvSpec) -> list[Part]:
    return [Part(*(fields.integer("parts", 3 * i + j) for j in range(3))) for i in range(len(spec.gammas) + 1)]


def _tiles(fields: Fields, spec: GemvSpec) -> Int:
    """The number of tiles."""
    return fields.integer("parts", 3 * (len(spec.gammas) + 1))


def _span(parts: list[Part], tile: Int) -> tuple[Int, Int]:
    """The first column of a tile, and the number of its columns."""
    begin = parts[0].begin + (tile - parts[0].tile) * TILE
    end = parts[0].end
    for part in parts[1:]:
        inside = ~(tile < part.tile)
        begin = inside.where(part.begin + (tile - part.tile) * TILE, begin)
        end = inside.where(part.end, end)
    return begin, (end - begin).min(TILE)


def _tile(module: Any, spec: GemvSpec, walks: dict[int, Function], norms: list[Function]) -> Function:
    """``tile(arguments, index, thread)``: one tile from beginning to end."""
    f = Function(module, "tile", 3, private=True)
    _, index, thread = f.parameters
    fields = _fields(f, spec)
    parts = _parts(fields, spec)
    slots = fields.integer("trace") + index * (8 * _EVENTS) if spec.traced else f.index(0)
    trace = Trace(f, spec, slots)
    trace.mark(_ENTER)
    if spec.traced:
        units = fields.integer("units")
        with f.when(~units.eq(0)):
            f.store(f.builder.trunc(thread.ir, I32), units + index * 4)
    column, width = _span(parts, index)
    sums = f.room(MAX_ROWS * TILE * VECTOR)
    with f.loop(f.index(0), fields.integer("block") * fields.integer("blocks") * TILE, 2) as at:
        f.store(f.zeros()[0].ir, sums + at * VECTOR)
    trace.mark(_K_BEGIN)
    weight, stride = fields.integer("weight"), fields.integer("weight.stride") * spec.weight.itemsize
    blocks = fields.integer("blocks")
    beyond = weight + _span(parts, index + fields.integer("team"))[0] * stride  # what this thread likely does next
    for size, walk in walks.items():
        with f.when(fields.integer("block").eq(size)):
            f.call(
                walk, weight + column * stride, stride, width, fields.integer("scratch"), blocks, fields.integer("k"),
                sums, beyond,
            )  # fmt: skip
    with f.choice(index < parts[-1].tile) as (normed, tail):
        with normed:
            y, y_stride = fields.integer("y") + column * 4, fields.integer("y.stride") * 4
            _reduce(f, spec, fields, sums, column, width, torch.float32, y, y_stride)
            trace.mark(_K_END)
            for i, norm in enumerate(norms):
                with f.when(~(index < parts[i].tile) & (index < parts[i + 1].tile)):
                    _arrive(f, spec, fields, trace, norm, parts, i)
        with tail:
            start = (column - parts[-1].begin) * spec.act.itemsize
            out, out_stride = fields.integer("unnormed") + start, fields.integer("unnormed.stride") * spec.act.itemsize
            _reduce(f, spec, fields, sums, column, width, spec.act, out, out_stride)
            trace.mark(_K_END)
    trace.mark(_EXIT)
    f.builder.ret_void()
    return f


def _reduce(
    f: Function,
    spec: GemvSpec,
    fields: Fields,
    sums: Int,
    column: Int,
    width: Int,
    dtype: torch.dtype,
    out: Int,
    stride: Int,
) -> None:
    """Fold the lanes' sums of a tile into values of y, apply the weights' scales and store."""
    zero = Float(f.builder, constant(type_of(F32, SUM), 0.0))
    for first in range(0, TILE, SUM):
        with f.when(width > first):
            lanes = f.first_lanes((width - first).min(SUM), SUM)
            scale = _weight_scale(f, spec, fields, column + first, lanes)
            with f.loop(f.index(0), fields.integer("m")) as m:
                vectors = [zero] * SUM
                for n in range(min(SUM, TILE - first)):
                    place = sums + (m * TILE + (first + n)) * VECTOR
                    vectors[n] = Float(f.builder, f.load(place, F32, lanes=SUM))
                value = dot.fold(vectors)
                if scale is not None:
                    value = value * scale
                store_row(f, dtype, value, out + m * stride + first * dtype.itemsize, lanes, False)


def _weight_scale(f: Function, spec: GemvSpec, fields: Fields, column: Int, lanes: Bool) -> Float | None:
    """The scales of some columns of y."""
    if spec.weight_scale == "none":
        return None
    address = fields.integer("weight_scale")
    if spec.weight_scale == "tensor":
        return load_scalar(f, torch.float32, address).splat(SUM)
    return load_row(f, torch.float32, address + column * 4, lanes, False, SUM)


def _arrive(
    f: Function, spec: GemvSpec, fields: Fields, trace: Trace, norm: Function, parts: list[Part], i: int
) -> None:
    """Count a tile of segment ``i``; the last one's thread norms the segment."""
    given = fields.integer("counter")
    own = fields.block + fields.offsets["counter0"]
    counter = f.pointer(given.eq(0).where(own, given) + 4 * i)
    trace.mark(_BEFORE)
    before = f.builder.atomic_rmw("add", counter, ir.Constant(I32, 1), "acq_rel")
    trace.mark(_AFTER)
    arrived = Int(f.builder, f.builder.zext(before, I64)) + 1
    part = parts[i]
    with f.when(arrived.eq(parts[i + 1].tile - part.tile)):
        coded = i == 0 and spec.fp8 is not None
        size = 1 if coded else spec.act.itemsize
        nothing = f.index(0)
        f.call(norm, *Norm(
            fields.block,
            fields.integer("y") + part.begin * 4,
            part.end - part.begin,
            fields.integer(f"gamma{i}"),
            fields.integer(f"normed{i}"),
            fields.integer(f"normed{i}.stride") * size,
            fields.integer("scale") if coded else nothing,
            fields.integer("scale.stride") * 4 if coded else nothing,
            trace.slots,
        ))  # fmt: skip
        f.builder.store(ir.Constant(I32, 0), counter)


# --- entry points --------------------------------------------------------------------------------------------------


def _serial(module: Any, spec: GemvSpec, prepare: Function, tile: Function) -> None:
    f = Function(module, "serial", 1)
    f.call(prepare, f.parameters[0])
    zero = f.index(0)
    with f.loop(zero, _tiles(_fields(f, spec), spec)) as index:
        f.call(tile, f.parameters[0], index, zero)
    f.builder.ret_void()


def _parallel(module: Any, spec: GemvSpec, tile: Function) -> None:
    """Every thread of a team runs this on the same block, which counts threads and the tiles already taken."""
    f = Function(module, "parallel", 1)
    fields = _fields(f, spec)
    tiles, one = _tiles(fields, spec), f.index(1)
    thread = fields.count("threads", one)
    take, work, done = (f.builder.append_basic_block(name) for name in ("take", "work", "done"))
    f.builder.branch(take)
    f.builder.position_at_end(take)
    index = fields.count("next", one)
    f.builder.cbranch((index < tiles).ir, work, done)
    f.builder.position_at_end(work)
    f.call(tile, f.parameters[0], index, thread)
    f.builder.branch(take)
    f.builder.position_at_end(done)
    f.builder.ret_void()
