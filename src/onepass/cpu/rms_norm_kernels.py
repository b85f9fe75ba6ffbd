"""The row routine: load, prologue, residual, statistics, scale, store, assembled for one `RowSpec`.

A row is read once to find its statistics and again, out of the cache, to write its outputs; a group of columns, or a
row whose norm itself is quantized (``rounding="hf"``, or division by the scale), is read once more for its largest value. All
writes of an element follow all reads of it, so an output may be its own input. One row is the work of one thread and
no step depends on the other rows: the result is a function of the row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from llvmlite import ir

from ..specs.rms_norm import RowSpec
from . import arguments
from .emit import prologue
from .emit.bits import (
    divisor,
    encode,
    fill_codes,
    is_finite,
    lane_mask,
    load_row,
    load_scalar,
    magnitude,
    make_scale,
    multiplier,
    round_to,
    store_codes,
    store_row,
    store_scalar,
    with_nan,
)
from .emit.fields import Fields, Place, Rows
from .emit.function import Cell, Function
from .emit.vec import F32, LANES, Bool, Float, Int

Body = Callable[[Int, "Bool | None"], None]
"""What to do at a column offset; the mask, if any, says how many columns are left there."""

_LINE: Final = 64
_AHEAD: Final = 3072
"""Bytes between a row's reads and their prefetches, about 300 ns at full speed. Hardware prefetchers alone leave the
cores waiting for a third of the time."""

_SETTLE: Final = 32 * LANES
"""Columns after which partial sums are put aside and begun anew, so that the error of a long sum stays that of a short
one: 131072 columns in one chain were 2e-6 off."""


def each_block(f: Function, begin: Int, end: Int, body: Body) -> None:
    """Call ``body`` for the blocks of ``range(begin, end)``: whole ones in a loop, then the masked rest."""
    whole = end - ((end - begin) & (LANES - 1))
    with f.loop(begin, whole, LANES) as at:
        body(at, None)
    with f.when(whole < end):
        body(whole, f.first_lanes(end - whole))


def is_paired(spec: RowSpec) -> bool:
    """Whether the kernel holds columns in paired order."""
    return spec.x == torch.bfloat16


class Row:
    """Emits the work on rows. Column offsets are `Int`s; ``mask`` limits the last block.

    The statistics of a row are collected while the row before it is written: reading memory and computing codes then
    overlap instead of taking turns.
    """

    def __init__(self, f: Function, spec: RowSpec, fields: Fields, kept: Int) -> None:
        self.f = f
        self.spec = spec
        self.kept = kept if arguments.keeps_h(spec) else None
        self.n = fields.integer("n")
        self.count = self.n.to_float()
        self.weights = fields.integer("scratch")
        self.eps, self.bound = fields.number("eps"), fields.number("scale_ub")
        if "scale_ub_tensor" in fields:
            bound = load_scalar(f, torch.float32, fields.integer("scale_ub_tensor"))
            self.bound = bound.is_nan().where(bound.number(float("inf")), bound)
        self.least = fields.number("min_scale") if "min_scale" in fields else None
        self.static = (
            load_scalar(f, torch.float32, fields.integer("static_scale")) if "static_scale" in fields else None
        )
        self.group_stride = fields.integer("scale.group") if "scale.group" in fields else None
        self.paired = is_paired(spec)
        self.total, self.top = (Cell(f, zero) for zero in f.zeros())
        self.settled = Cell(f, f.zeros()[0])
        self.collects_top = spec.scale is not None and spec.scale.kind == "row" and not spec.quantizes_norm

    def place(self, rows: Rows) -> Place:
        """The row that ``rows`` is at."""
        at = {name: rows.address(name) for name in rows.names}
        operands = [(i, o) for i, o in enumerate(self.spec.operands) if o.kind == "row"]
        return Place(at, {i: load_scalar(self.f, o.dtype, at[f"operand{i}"]) for i, o in operands})

    # --- values at a block ---

    def _load(self, dtype: torch.dtype, base: Int, at: Int, mask: Bool | None) -> Float:
        return load_row(self.f, dtype, base + at * dtype.itemsize, mask, self.paired)

    def g(self, at: Int) -> Float:
        """``gamma + weight_offset``, as `_prepare` left it."""
        return Float(self.f.builder, self.f.load(self.weights + at * 4, F32))

    def _operand(self, row: Place, index: int, at: Int, mask: Bool | None) -> Float:
        """A prologue's tensor at a block; a group of columns is one block or several."""
        _, dtype, group = operand = self.spec.operands[index]
        if operand.kind == "row":
            return row.scalars[index]
        base = row.at[f"operand{index}"]
        return (
            load_scalar(self.f, dtype, base + at // group * dtype.itemsize)
            if group
            else self._load(dtype, base, at, mask)
        )

    def h(self, row: Place, at: Int, mask: Bool | None) -> Float:
        """``prologue(x, *operands) + residual``; 0 beyond the row's end."""
        spec = self.spec
        value = self._load(spec.x, row.at["x"], at, mask)
        if spec.prologue is not None:
            operands = [self._operand(row, i, at, mask) for i in range(len(spec.operands))]
            value = prologue.apply(spec.prologue, value, operands)
            if mask is not None:  # f(0) need not be 0
                value = lane_mask(mask, self.paired).where(value, 0.0)
        if spec.residual is not None:
            value = value + self._load(spec.residual, row.at["residual"], at, mask)
            if spec.round_sum:
                value = round_to(spec.residual, value)
        return value

    def h_again(self, row: Place, at: Int, mask: Bool | None) -> Float:
        """``h`` of a block that was collected before."""
        if self.kept is None:
            return self.h(row, at, mask)
        return Float(self.f.builder, self.f.load(self.kept + at * 4, F32))

    def normed(self, h: Float, g: Float, rs: Float) -> Float:
        """The norm, before the rounding of its store."""
        if self.spec.rounding == "once":
            return h * rs * g
        return round_to(self.spec.x, round_to(self.spec.x, h * rs) * g)

    def quantized(self, h: Float, g: Float, rs: Float) -> Float:
        """What the codes are made of, before the scale: ``h * g``, or the norm with its roundings."""
        return self.normed(h, g, rs) if self.spec.quantizes_norm else h * g

    # --- passes ---

    def fetch(self, row: Place, at: Int) -> None:
        """Prefetch the row's inputs some way ahead, beyond its end those of the row likely to follow."""
        streams = [("x", self.spec.x)] + ([("residual", self.spec.residual)] if self.spec.residual is not None else [])
        streams += [(f"operand{i}", o.dtype) for i, o in enumerate(self.spec.operands) if o.kind == "full"]
        for name, dtype in streams:
            for line in range(0, LANES * dtype.itemsize, _LINE):
                self.f.prefetch(row.at[name] + at * dtype.itemsize + (_AHEAD + line))

    def collect(self, row: Place, at: Int, mask: Bool | None) -> None:
        """Add a block to the sum of squares and, if the row has one scale, to the maximum of ``|h * g|``."""
        h = self.h(row, at, mask)
        if self.kept is not None:
            self.f.store(h.ir, self.kept + at * 4)
        self.total.set(h.fma(h, self.total.get()))
        if self.collects_top:
            self.top.set(self.top.get().max(magnitude(h * self.g(at))))
        with self.f.when(((at + LANES) & (_SETTLE - 1)).eq(0)):
            self.settled.set(self.settled.get() + self.total.get())
            self.total.set(self.f.zeros()[0])

    def statistics(self) -> tuple[Float, Int]:
        """``rs`` and the bits of the maximum of what was collected; begins anew."""
        v = (self.settled.get() + self.total.get()).sum_lanes() / self.count + self.eps
        rs = v.eq(0.0).where(v.number(0.0), v.number(1.0) / v.sqrt())
        top = self.top.get().max_lane()
        zero, none = self.f.zeros()
        for cell, value in ((self.total, zero), (self.settled, zero), (self.top, none)):
            cell.set(value)
        return is_finite(v).where(rs, v.number(float("nan"))), top

    def largest(self, row: Place, begin: Int, end: Int, rs: Float) -> Int:
        """The bits of the largest magnitude to be quantized in a range of columns."""
        top = Cell(self.f, self.f.zeros()[1])

        def body(at: Int, mask: Bool | None) -> None:
            value = self.quantized(self.h_again(row, at, mask), self.g(at), rs)
            top.set(top.get().max(magnitude(value)))

        each_block(self.f, begin, end, body)
        found: Int = top.get().max_lane()
        return found

    def scale(self, row: Place, top: Int, rs: Float, group: Int | None = None) -> Float:
        """Make and store the scale of the row or of one group; returns the stored value."""
        rule = self.spec.scale
        assert rule is not None
        amax = top.float() if self.spec.quantizes_norm else top.float() * rs
        scale = make_scale(rule, self.spec.fp8_max, amax, self.bound, self.least)
        address = row.at["scale"]
        if group is not None and self.group_stride is not None:
            address = address + group * self.group_stride * rule.dtype.itemsize
        store_scalar(self.f, rule.dtype, scale, address)
        return scale

    def write(self, row: Place, following: Place | None, begin: Int, end: Int, rs: Float, scale: Float | None) -> None:
        """Store every output of a range of columns, and collect the same columns of the following row."""
        spec = self.spec
        divides = spec.scale is not None and spec.scale.divides
        k = rs
        if scale is not None:
            k = divisor(scale) if divides else multiplier(1.0 if spec.rounding == "hf" else rs, scale)

        def body(at: Int, mask: Bool | None) -> None:
            h, g = self.h_again(row, at, mask), self.g(at)
            if following is not None:
                if mask is None:
                    self.fetch(following, at)
                self.collect(following, at, mask)
            if spec.residual is not None:
                store_row(
                    self.f, spec.residual, h, row.at["new_residual"] + at * spec.residual.itemsize, mask, self.paired
                )
            if spec.norm is not None:
                store_row(
                    self.f,
                    spec.norm,
                    self.normed(h, g, rs),
                    row.at["norm"] + at * spec.norm.itemsize,
                    mask,
                    self.paired,
                )
            if spec.fp8 is not None:
                value = self.quantized(h, g, rs)
                value = value / k if divides else value * k
                codes = encode(spec.fp8, spec.fp8_max, value)
                if self.static is not None:
                    codes = with_nan(spec.fp8, codes, value)
                store_codes(self.f, codes, row.at["codes"] + at, mask, self.paired)

        each_block(self.f, begin, end, body)
        if spec.fp8 is not None and self.static is None and scale is not None:
            # With a scale of its own a row or group is NaN as a whole: rare, so it is mended rather than tested for.
            nan_code = spec.fp8.nan_code
            with self.f.when(scale.is_nan()):
                each_block(
                    self.f, begin, end, lambda at, mask: fill_codes(self.f, nan_code, row.at["codes"] + at, mask)
                )

    def finish(self, row: Place, following: Place | None, rs: Float, top: Int) -> None:
        """Scales and outputs of a row whose statistics are known."""
        rule = self.spec.scale
        zero = self.f.index(0)
        if rule is None or rule.kind == "static":
            self.write(row, following, zero, self.n, rs, self.static)
        elif rule.kind == "row":
            if self.spec.quantizes_norm:
                top = self.largest(row, zero, self.n, rs)
            self.write(row, following, zero, self.n, rs, self.scale(row, top, rs))
        else:
            groups = (self.n + (rule.group - 1)) // rule.group
            with self.f.loop(zero, groups) as group:
                begin = group * rule.group
                end = (begin + rule.group).min(self.n)
                scale = self.scale(row, self.largest(row, begin, end, rs), rs, group)
                self.write(row, following, begin, end, rs, scale)

    def run(self, rows: Rows, begin: Int, end: Int) -> None:
        """All rows of a range."""
        first = self.place(rows)
        each_block(self.f, self.f.index(0), self.n, lambda at, mask: self.collect(first, at, mask))
        with self.f.loop(begin, end) as index:
            row = self.place(rows)
            rs, top = self.statistics()
            with self.f.choice((index + 1).eq(end)) as (last, other):
                with last:
                    self.finish(row, None, rs, top)
                with other:
                    rows.advance()
                    self.finish(row, self.place(rows), rs, top)


def build(spec: RowSpec) -> str:
    """The LLVM module of ``spec``, three functions of the argument block.

    ``serial`` does everything. Or ``prepare`` is called first and then, on each thread of a team, ``parallel``, which
    takes chunks of rows until none is left.
    """
    module = ir.Module(name="onepass")
    _prepare(module, spec)
    worker = Function(module, "rows", 4, private=True)
    block, begin, end, kept = worker.parameters
    fields = Fields(worker, spec, block)
    row = Row(worker, spec, fields, kept)
    rows = Rows(worker, spec, fields, begin)
    row.run(rows, begin, end)
    worker.builder.ret_void()
    _serial(module, spec, worker)
    _parallel(module, spec, worker)
    return str(module)


def _prepare(module: Any, spec: RowSpec) -> None:
    """Write ``gamma + weight_offset`` as float32, in the order of the lanes, to scratch memory of whole blocks."""
    f = Function(module, "prepare", 1)
    fields = Fields(f, spec, f.parameters[0])
    gamma, weights, offset = fields.integer("gamma"), fields.integer("scratch"), fields.number("weight_offset")

    def body(at: Int, mask: Bool | None) -> None:
        g = load_row(f, spec.gamma, gamma + at * spec.gamma.itemsize, mask, is_paired(spec)) + offset
        f.store(g.ir, weights + at * 4)

    each_block(f, f.index(0), fields.integer("n"), body)
    f.builder.ret_void()


def _kept(fields: Fields, thread: Int) -> Int:
    """Where a thread keeps ``h``: its row of scratch memory, after the weights."""
    columns = (fields.integer("n") + (LANES - 1)) & -LANES
    return fields.integer("scratch") + (thread + 1) * columns * 4


def _serial(module: Any, spec: RowSpec, worker: Function) -> None:
    f = Function(module, "serial", 1)
    block = f.parameters[0]
    fields = Fields(f, spec, block)
    f.builder.call(module.globals["prepare"], [block.ir])
    zero = f.index(0)
    f.builder.call(worker.function, [block.ir, zero.ir, fields.integer("rows").ir, _kept(fields, zero).ir])
    f.builder.ret_void()


def _parallel(module: Any, spec: RowSpec, worker: Function) -> None:
    """Every thread of a team runs this on the same block, which counts threads and the rows already taken."""
    f = Function(module, "parallel", 1)
    block = f.parameters[0]
    fields = Fields(f, spec, block)
    rows, chunk = fields.integer("rows"), fields.integer("chunk")
    kept = _kept(fields, fields.count("threads", f.index(1)))
    take = f.builder.append_basic_block("take")
    work = f.builder.append_basic_block("work")
    done = f.builder.append_basic_block("done")
    f.builder.branch(take)
    f.builder.position_at_end(take)
    first = fields.count("next", chunk)
    f.builder.cbranch((first < rows).ir, work, done)
    f.builder.position_at_end(work)
    f.builder.call(worker.function, [block.ir, first.ir, (first + chunk).min(rows).ir, kept.ir])
    f.builder.branch(take)
    f.builder.position_at_end(done)
    f.builder.ret_void()
