"""The row routine: load, prologue, residual, statistics, scale, store, assembled for one `RowSpec`.

A row is read once for its statistics and again, from the cache, to write its outputs. A group of columns, or a row
whose norm itself is quantized (``rounding="hf"``, or division by the scale), is read once more for its largest value.
A residual sum that is rounded before the norm is stored by the first pass, and the others read it instead of the
inputs. No input is read after an output was written over it, so an output may overwrite its input. One thread processes
a row and no step depends on other rows: the result is a function of the row alone. A post-norm takes one more pass over x,
for its own statistics, before the sum with the residual can be collected.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from llvmlite import ir

from ...core.layout import LEVELS, TILE_BYTES, TILE_GROUPS, TILE_ROWS
from ...cpu.llvm import bits, prologue
from ...cpu.llvm.bits import load_row, load_scalar, magnitude, round_to, store_row
from ...cpu.llvm.emit import I8, LANES, Arguments, Bool, Cell, Float, Function, Int, Module, declare
from ...cpu.llvm.loops import LINE, SumOfSquares, each_block, entry_points, prefetch, reciprocal_root
from ...cpu.llvm.math_functions import sigmoid
from .cpu import FAR, keeps_h
from .launch import RowSpec


def build(spec: RowSpec, offsets: dict[str, int], features: str) -> str:
    """The LLVM module of ``spec``."""
    module = Module(features)
    prepare = prepare_gamma(module, spec, offsets)
    worker = Function(module, "rows", 4, private=True)
    _, begin, end, saved = worker.parameters
    args = Arguments(worker, offsets)
    kernel = RowKernel(worker, spec, args, saved if keeps_h(spec) else None)
    kernel.run(Cursor(worker, spec, args, begin), begin, end)
    kernel.fence()
    worker.builder.ret_void()
    entry_points(module, offsets, worker, "rows", _saved, prepare)
    return str(module)


def _saved(args: Arguments, thread: Int) -> Int:
    """Where a thread saves ``h``: its row of scratch memory, after the weights."""
    columns = (args.integer("n") + (LANES - 1)) & -LANES
    return args.integer("scratch") + (thread + 1) * columns * 4


class RowKernel:
    """Emits the work on rows. Column offsets are `Int`s; ``mask`` limits the last block.

    The statistics of a row are collected while the previous row is written, so that reading memory and computing codes
    overlap.
    """

    def __init__(self, f: Function, spec: RowSpec, args: Arguments, saved: Int | None) -> None:
        self.f, self.spec, self.saved, self.paired = f, spec, saved, is_paired(spec)
        self.n = args.integer("n")
        self.count = self.n.to_float()
        self.gamma = args.integer("gamma") if reads_gamma(spec) else None
        self.weights, self.offset = args.integer("scratch"), args.number("weight_offset")
        self.gamma_post = args.integer("gamma_post") if spec.post is not None else None
        self.branch_scale = args.number("branch_scale") if spec.scaled else None
        self.eps, self.bound = args.number("eps"), args.number("scale_ub")
        if "scale_ub_tensor" in args:
            bound = load_scalar(f, torch.float32, args.integer("scale_ub_tensor"))
            self.bound = bound.is_nan().where(bound.number(float("inf")), bound)
        self.least = args.number("min_scale") if "min_scale" in args else None
        number = load_scalar(f, torch.float32, args.integer("static_scale")) if "static_scale" in args else None
        static = spec.scale is not None and spec.scale.kind == "static"
        self.static = number if static else None
        self.overall = None if static else number
        self.group_stride = args.integer("scale.group") if "scale.group" in args else None
        total, self.top = (Cell(f, zero) for zero in f.zeros())
        self.squares = SumOfSquares(total, Cell(f, f.zeros()[0]))
        self.stores_early = spec.residual is not None and spec.round_sum and saved is None
        """Whether ``h`` is stored as the new residual by the first pass and loaded from there by the others."""
        self.mean: Float | None = None
        self.post_rs: Float | None = None
        """The ``rs`` of the post-norm of the row that is collected."""
        self.far = args.integer("far") if "far" in args and "sse2" in f.builder.module.features else None
        """Which outputs bypass the caches, if any may: see `FAR`."""
        self.bypass: dict[str, Bool] = {}
        """Whether outputs of the current row do."""
        self.collects_top = (
            spec.scale is not None and spec.scale.kind == "row" and (spec.unnormed or not spec.quantizes_norm)
        )
        self.collects_nothing = spec.unnormed and not self.collects_top and saved is None
        """Whether the first pass over a row is left out."""

    def row(self, cursor: Cursor) -> Row:
        """The row that ``cursor`` is at."""
        at = {name: cursor.address(name) for name in cursor.names}
        rule = self.spec.scale
        scale = at.get("scale")
        if rule is not None and rule.packing == "128x4":
            scale = self.tile_row(cursor)
        operands = [(i, o) for i, o in enumerate(self.spec.operands) if o.kind == "row"]
        return Row(at, {i: load_scalar(self.f, o.dtype, at[f"operand{i}"]) for i, o in operands}, scale)

    def tile_row(self, cursor: Cursor) -> Int:
        """Where a row's scales begin in tiles of 128 rows and four groups."""
        rule, row = self.spec.scale, cursor.number()
        assert rule is not None
        tiles = (self.n // rule.group + (TILE_GROUPS - 1)) // TILE_GROUPS
        inside = (row & 31) * 16 + ((row & (TILE_ROWS - 1)) // 32) * TILE_GROUPS
        return cursor.base["scale"] + row // TILE_ROWS * tiles * TILE_BYTES + inside

    # --- values of a block ---

    def load(self, dtype: torch.dtype, base: Int, at: Int, mask: Bool | None) -> Float:
        """A block of a tensor's row."""
        return load_row(self.f, dtype, base + at * dtype.itemsize, mask, self.paired)

    def store(
        self, dtype: torch.dtype, value: Float, row: Row, name: str, at: Int, mask: Bool | None, exact: bool = False
    ) -> None:
        """Store a block of a row of the tensor ``name``. ``exact``: the value is rounded to ``dtype``."""
        address = row.at[name] + at * dtype.itemsize
        store_row(self.f, dtype, value, address, mask, self.paired, exact, self.bypass.get(name))

    def store_residual(self, row: Row, h: Float, at: Int, mask: Bool | None) -> None:
        """Store a block of the new residual, if there is one."""
        if self.spec.residual is not None:
            self.store(self.spec.residual, h, row, "new_residual", at, mask, exact=self.spec.round_sum)

    def g(self, row: Row, at: Int, mask: Bool | None) -> Float:
        """``gamma + weight_offset``: 1, the row's, or that of all rows, if need be as `prepare_gamma` stored it."""
        if self.spec.gamma is None:
            return self.eps.number(1.0)
        if self.spec.per_row:
            return self.load(self.spec.gamma, row.at["row_gamma"], at, mask) + self.offset
        if self.gamma is None:
            return self.f.floats(self.weights + at * 4)
        return self.load(self.spec.gamma, self.gamma, at, mask) + self.offset

    def operand(self, row: Row, index: int, at: Int, mask: Bool | None) -> Float:
        """A prologue's operand. A group of columns that share a number is one block or several."""
        kind, dtype, group = self.spec.operands[index]
        if kind == "row":
            return row.scalars[index]
        base = row.at[f"operand{index}"]
        if group:
            return load_scalar(self.f, dtype, base + at // group * dtype.itemsize)
        return self.load(dtype, base, at, mask)

    def h(self, row: Row, at: Int, mask: Bool | None) -> Float:
        """``prologue(x, *operands) + residual``, or without a norm what is quantized; 0 beyond the row's end."""
        spec = self.spec
        value = self.load(spec.x, row.at["x"], at, mask)
        if spec.unnormed:
            return self.product(value, row, at, mask)
        if spec.prologue is not None:
            operands = [self.operand(row, i, at, mask) for i in range(len(spec.operands) - sum(spec.after))]
            value = prologue.apply(spec.prologue, value, operands)
            if mask is not None:  # f(0) need not be 0
                value = bits.lane_mask(mask, self.paired).where(value, 0.0)
        if spec.post is not None:
            value = self.post_normed(value, at, mask)
        if spec.residual is not None:
            value = value + self.load(spec.residual, row.at["residual"], at, mask)
            if spec.round_sum:
                value = round_to(spec.residual, value)
        return value

    def product(self, x: Float, row: Row, at: Int, mask: Bool | None) -> Float:
        """A block of x times its activated gate, if there is one, with the roundings."""
        spec = self.spec
        if spec.gate < 0:
            return x
        factor = self.activated(row, at, mask)
        y = x * (round_to(spec.x, factor) if spec.rounding == "hf" else factor)
        return y if spec.rounding == "once" else round_to(spec.x, y)

    def activated(self, row: Row, at: Int, mask: Bool | None) -> Float:
        """What a block of the gate multiplies by."""
        gate = self.operand(row, self.spec.gate, at, mask)
        return sigmoid(gate) if self.spec.gate_activation == "sigmoid" else gate * sigmoid(gate)

    def post_normed(self, x: Float, at: Int, mask: Bool | None) -> Float:
        """The post-norm of a block of the row that is collected, and its product, rounded as they would be stored."""
        spec = self.spec
        assert spec.post is not None
        assert self.gamma_post is not None
        assert self.post_rs is not None
        a = x * self.post_rs
        if spec.rounding == "hf":
            a = round_to(spec.x, a)
        b = round_to(spec.x, a * (self.load(spec.post, self.gamma_post, at, mask) + self.offset))
        return b if self.branch_scale is None else round_to(spec.x, b * self.branch_scale)

    def h_again(self, row: Row, at: Int, mask: Bool | None) -> Float:
        """``h`` of a block that was collected before."""
        if self.stores_early and self.spec.residual is not None:
            return self.load(self.spec.residual, row.at["new_residual"], at, mask)
        if self.saved is None:
            return self.h(row, at, mask)
        return self.f.floats(self.saved + at * 4)

    def centered(self, h: Float) -> Float:
        """``h`` minus the row's mean, if the norm subtracts it."""
        return h if self.mean is None else h - self.mean

    def normed(self, h: Float, rs: Float, row: Row, at: Int, mask: Bool | None) -> Float:
        """The norm with its bias and gate, before it is rounded to the output's dtype."""
        spec, g, h = self.spec, self.g(row, at, mask), self.centered(h)

        def rounded(value: Float) -> Float:
            return round_to(spec.x, value) if spec.rounding == "hf" else value

        y = rounded(rounded(h * rs) * g)
        if spec.bias >= 0:
            y = rounded(y + self.operand(row, spec.bias, at, mask))
        if spec.gate >= 0:
            y = rounded(y * self.activated(row, at, mask))
        return y

    def quantized(self, h: Float, rs: Float, row: Row, at: Int, mask: Bool | None) -> Float:
        """The values to be quantized, before the scale: ``h * g``, or the norm with its roundings."""
        if self.spec.unnormed:
            return h
        if not self.spec.quantizes_norm:
            return self.centered(h) * self.g(row, at, mask)
        y = self.normed(h, rs, row, at, mask)
        return round_to(self.spec.x, y) if self.spec.rounding == "stored" else y

    # --- passes over a row ---

    def fetch(self, row: Row, at: Int) -> None:
        """Prefetch the row's inputs. The first cache holds several of them, their outputs and gamma for too short a time."""
        operands = {f"operand{i}": o.dtype for i, o in enumerate(self.spec.operands) if o.kind == "full"}
        level = 1 if self.spec.residual is None else 2
        for name, dtype in {"x": self.spec.x, "residual": self.spec.residual, **operands}.items():
            if dtype is not None:
                prefetch(self.f, dtype, row.at[name], at, level)

    def begin(self, row: Row) -> Row:
        """The row, before anything of it is collected: with a post-norm, its ``rs`` is computed."""
        if self.spec.post is None:
            return row

        def body(at: Int, mask: Bool | None) -> None:
            if mask is None:
                self.fetch(row, at)
            self.squares.add(self.load(self.spec.x, row.at["x"], at, mask))
            self.squares.settle(at)

        each_block(self.f, self.f.index(0), self.n, body)
        self.post_rs = reciprocal_root(self.squares.get(), self.count, self.eps)
        self.squares.clear()
        return row

    def collect(self, row: Row, at: Int, mask: Bool | None) -> None:
        """Add a block to the sum of squares, if it is normed, and, if the row has one scale, to the maximum of ``|h * g|``."""
        if self.collects_nothing:
            return
        h = self.h(row, at, mask)
        if self.saved is not None:
            self.f.store(h.ir, self.saved + at * 4)
        if self.stores_early:
            self.store_residual(row, h, at, mask)
        if self.spec.centered:
            self.squares.add_values(h)
        else:
            if not self.spec.unnormed:
                self.squares.add(h)
            if self.collects_top:
                self.top.set(self.top.get().max(magnitude(h * self.g(row, at, mask))))
        if not self.spec.unnormed:
            self.squares.settle(at)

    def collect_centered(self, row: Row) -> None:
        """Compute the row's mean from what was collected, and collect again without it."""
        mean = self.squares.get().sum_lanes() / self.count
        self.mean = bits.is_finite(mean).where(mean, mean.number(float("nan")))
        self.squares.clear()

        def body(at: Int, mask: Bool | None) -> None:
            h = self.centered(self.h_again(row, at, mask))
            if mask is not None:
                h = bits.lane_mask(mask, self.paired).where(h, 0.0)
            self.squares.add(h)
            if self.collects_top:
                self.top.set(self.top.get().max(magnitude(h * self.g(row, at, mask))))
            self.squares.settle(at)

        each_block(self.f, self.f.index(0), self.n, body)

    def statistics(self, row: Row) -> tuple[Float, Int]:
        """``rs`` and the bits of the maximum of what was collected; both start over."""
        if self.spec.centered:
            self.collect_centered(row)
        one = self.eps.number(1.0)
        rs = one if self.spec.unnormed else reciprocal_root(self.squares.get(), self.count, self.eps)
        top = self.top.get().max_lane()
        self.squares.clear()
        self.top.set(self.f.zeros()[1])
        return rs, top

    def largest(self, row: Row, begin: Int, end: Int, rs: Float) -> Int:
        """The bits of the largest magnitude to be quantized in a range of columns."""
        top = Cell(self.f, self.f.zeros()[1])

        def body(at: Int, mask: Bool | None) -> None:
            value = self.quantized(self.h_again(row, at, mask), rs, row, at, mask)
            if mask is not None and self.spec.centered:  # there h is minus the mean
                value = bits.lane_mask(mask, self.paired).where(value, 0.0)
            top.set(top.get().max(magnitude(value)))

        each_block(self.f, begin, end, body)
        found: Int = top.get().max_lane()
        return found

    def scale(self, row: Row, top: Int, rs: Float, group: Int | None = None) -> Float:
        """Compute and store the scale of the row or of one group; returns what it stands for."""
        scale = self.make_scale(top, rs)
        self.store_scale(row, scale, group)
        return bits.applied_scale(scale, self.overall)

    def make_scale(self, top: Int, rs: Float) -> Float:
        """The scale of a row or group whose largest magnitude has the bits ``top``."""
        rule, fmt = self.spec.scale, self.spec.fp8
        assert rule is not None
        assert fmt is not None
        amax = top.float() if self.spec.quantizes_norm else top.float() * rs
        unit = fmt.largest_power if rule.floor else self.spec.fp8_max
        return bits.make_scale(rule, unit, amax, self.bound, self.least, self.overall)

    def store_scale(self, row: Row, scale: Float, group: Int | None) -> None:
        """Store the scale of the row or of one group."""
        rule = self.spec.scale
        assert rule is not None
        bits.store_scalar(self.f, rule.dtype, scale, self.scale_address(row, group))

    def scale_address(self, row: Row, group: Int | None) -> Int:
        """Where the scale of the row or of one group is."""
        rule, address = self.spec.scale, row.scale
        assert rule is not None
        assert address is not None
        if group is None or self.group_stride is None:
            return address
        if rule.packing:
            return address + group // TILE_GROUPS * self.group_stride + (group & (TILE_GROUPS - 1))
        return address + group * self.group_stride * rule.dtype.itemsize

    def pad_scales(self, row: Row, groups: Int) -> None:
        """Zeros for the groups that a row lacks to a multiple of four."""
        end = (groups + (TILE_GROUPS - 1)) & -TILE_GROUPS
        with self.f.loop(groups, end) as group:
            self.f.store(ir.Constant(I8, 0), self.scale_address(row, group))

    def factor(self, rs: Float, scale: Float | None) -> Float:
        """What values are multiplied by (with division: divided by) to become codes."""
        rule = self.spec.scale
        if scale is None or rule is None:
            return rs
        if rule.divides:
            return bits.divisor(scale)
        return bits.multiplier(1.0 if self.spec.quantizes_norm else rs, scale)

    def encoded(self, h: Float, rs: Float, k: Float, row: Row, at: Int, mask: Bool | None) -> None:
        """Quantize a block and store its codes."""
        spec, fmt = self.spec, self.spec.fp8
        assert fmt is not None
        value = self.quantized(h, rs, row, at, mask)
        value = value / k if spec.scale is not None and spec.scale.divides else value * k
        # A row or group with its own scale is NaN as a whole: then `write` replaces the codes.
        codes = bits.encode(fmt, spec.fp8_max, value, may_be_nan=self.static is not None or bool(k.lanes))
        store = bits.store_codes if fmt.bits == 8 else bits.store_nibbles
        store(self.f, codes, self.code_address(row, at), mask, self.paired)

    def code_address(self, row: Row, at: Int) -> Int:
        """Where the code of a column is."""
        fmt = self.spec.fp8
        return row.at["codes"] + (at if fmt is None or fmt.bits == 8 else at // 2)

    def outputs(self, row: Row, following: Row | None, h: Float, rs: Float, at: Int, mask: Bool | None) -> None:
        """Store a block's sum and norm, and collect the same columns of the following row."""
        spec = self.spec
        if following is not None:
            if mask is None:
                self.fetch(following, at)
            self.collect(following, at, mask)
        if not self.stores_early:
            self.store_residual(row, h, at, mask)
        if spec.norm is not None:
            exact = spec.rounding == "hf" and spec.norm == spec.x
            self.store(spec.norm, self.normed(h, rs, row, at, mask), row, "norm", at, mask, exact)

    def write(self, row: Row, following: Row | None, begin: Int, end: Int, rs: Float, scale: Float | None) -> None:
        """Store every output of a range of columns, and collect the same columns of the following row."""
        f, fmt = self.f, self.spec.fp8
        k = self.factor(rs, scale)

        def body(at: Int, mask: Bool | None) -> None:
            h = self.h_again(row, at, mask)
            self.outputs(row, following, h, rs, at, mask)
            if fmt is not None:
                self.encoded(h, rs, k, row, at, mask)

        each_block(f, begin, end, body)
        if fmt is not None and self.static is None and scale is not None:
            # A row or group with its own scale is NaN as a whole. That is rare: rewrite it rather than test every value.
            with f.when(scale.is_nan()):
                each_block(f, begin, end, lambda at, mask: bits.fill_nan(f, fmt, self.code_address(row, at), mask))

    def write_halves(self, row: Row, following: Row | None, rs: Float) -> None:
        """The same for a row whose groups are half a block: each block has two scales."""
        f = self.f
        half = LANES // 2

        def body(at: Int, mask: Bool | None) -> None:
            h = self.h_again(row, at, mask)
            sizes = magnitude(self.quantized(h, rs, row, at, mask))
            if mask is not None and self.spec.centered:
                sizes = bits.lane_mask(mask, self.paired).where(sizes, 0)
            if self.paired:
                sizes = sizes.shuffle(sizes, bits.INTERLEAVED)
            scales = [self.make_scale(part.max_lane(), rs) for part in sizes.halves()]
            self.store_scale(row, scales[0], at // half)
            with f.when((at + half) < self.n):
                self.store_scale(row, scales[1], at // half + 1)
            first, second = (self.factor(rs, bits.applied_scale(s, self.overall)).splat(half) for s in scales)
            k = first.shuffle(second, range(LANES))
            self.outputs(row, following, h, rs, at, mask)
            self.encoded(h, rs, k.shuffle(k, bits.EVEN_ODD) if self.paired else k, row, at, mask)

        each_block(f, f.index(0), self.n, body)

    def finish(self, row: Row, following: Row | None, rs: Float, top: Int) -> None:
        """Store the scales and outputs of a row whose statistics are known."""
        self.choose_caches(row)
        rule = self.spec.scale
        zero = self.f.index(0)
        if rule is None or rule.kind == "static":
            self.write(row, following, zero, self.n, rs, self.static)
        elif rule.kind == "row":
            if not self.collects_top:
                top = self.largest(row, zero, self.n, rs)
            self.write(row, following, zero, self.n, rs, self.scale(row, top, rs))
        else:
            groups = (self.n + (rule.group - 1)) // rule.group
            if rule.packing:
                self.pad_scales(row, groups)
            if rule.group < LANES:
                self.write_halves(row, following, rs)
                return
            with self.f.loop(zero, groups) as group:
                begin = group * rule.group
                end = (begin + rule.group).min(self.n)
                scale = self.scale(row, self.largest(row, begin, end, rs), rs, group)
                self.write(row, following, begin, end, rs, scale)

    def choose_caches(self, row: Row) -> None:
        """Let outputs bypass the caches as the call asks, where the row begins at a cache line."""
        if self.far is None:
            return
        names = [name for name in FAR if name in row.at and not (name == "new_residual" and self.stores_early)]
        self.bypass = {name: ((self.far & FAR[name]) > 0) & (row.at[name] & (LINE - 1)).eq(0) for name in names}

    def fence(self) -> None:
        """Let other threads see what bypassed the caches."""
        if self.far is not None:
            with self.f.when(self.far > 0):
                self.f.builder.call(declare(self.f.builder, "llvm.x86.sse.sfence", ir.VoidType(), []), [])

    def run(self, cursor: Cursor, begin: Int, end: Int) -> None:
        """Process a range of rows."""
        first = self.begin(self.row(cursor))
        each_block(self.f, self.f.index(0), self.n, lambda at, mask: self.collect(first, at, mask))
        with self.f.loop(begin, end) as index:
            row = self.row(cursor)
            rs, top = self.statistics(row)
            if self.spec.rstd:
                bits.store_scalar(self.f, torch.float32, rs, row.at["rstd"])
            with self.f.choice((index + 1).eq(end)) as (last, other):
                with last:
                    self.finish(row, None, rs, top)
                with other:
                    cursor.advance()
                    self.finish(row, self.begin(self.row(cursor)), rs, top)


# --- where rows are ------------------------------------------------------------------------------------------------


class Cursor:
    """Walks over a range of rows: the current row's address in each tensor."""

    def __init__(self, f: Function, spec: RowSpec, args: Arguments, first: Int) -> None:
        self.f = f
        self.sizes = {"x": spec.x.itemsize, "codes": 1}
        for name, dtype in (("residual", spec.residual), ("new_residual", spec.residual), ("norm", spec.norm)):
            if dtype is not None:
                self.sizes[name] = dtype.itemsize
        if spec.per_row and spec.gamma is not None:
            self.sizes["row_gamma"] = spec.gamma.itemsize
        self.sizes["rstd"] = 4
        if spec.scale is not None:
            self.sizes["scale"] = spec.scale.dtype.itemsize
        self.sizes |= {f"operand{i}": operand.dtype.itemsize for i, operand in enumerate(spec.operands)}
        self.names = [name for name in self.sizes if name in args]
        self.base = {name: args.integer(name) for name in self.names}
        self.strides = {name: [args.integer(f"{name}.strides", i) for i in range(LEVELS)] for name in self.names}
        self.n1, self.n2 = args.integer("n1"), args.integer("n2")
        pair, inner = first // self.n2, first // self.n2 // self.n1
        self.indices = [Cell(f, inner), Cell(f, pair - inner * self.n1), Cell(f, first - pair * self.n2)]

    def address(self, name: str) -> Int:
        """Where the current row of a tensor begins."""
        offset = self.f.index(0)
        for cell, stride in zip(self.indices, self.strides[name], strict=True):
            offset = offset + cell.get() * stride
        return self.base[name] + offset * self.sizes[name]

    def number(self) -> Int:
        """The number of the current row."""
        i0, i1, i2 = (cell.get() for cell in self.indices)
        number: Int = (i0 * self.n1 + i1) * self.n2 + i2
        return number

    def advance(self) -> None:
        """Go to the next row: count up the innermost index and carry."""
        i0, i1, i2 = (cell.get() for cell in self.indices)
        wrap2 = (i2 + 1).eq(self.n2)
        wrap1 = wrap2 & (i1 + 1).eq(self.n1)
        zero, one = self.f.index(0), self.f.index(1)
        self.indices[2].set(wrap2.where(zero, i2 + 1))
        self.indices[1].set(wrap1.where(zero, i1 + wrap2.where(one, zero)))
        self.indices[0].set(i0 + wrap1.where(one, zero))


class Row(NamedTuple):
    """One row: its address in each tensor, and its values of the prologue's row operands.

    ``scale`` is the address of its first scale, if it has any.
    """

    at: dict[str, Int]
    scalars: dict[int, Float]
    scale: Int | None = None


# --- gamma + weight_offset ------------------------------------------------------------------------------------------


def is_paired(spec: RowSpec) -> bool:
    """Whether the kernel holds columns in paired order."""
    return spec.x == torch.bfloat16


def prepare_gamma(module: Module, spec: RowSpec, offsets: dict[str, int]) -> Function:
    """Write ``gamma + weight_offset`` as float32, in the order of the lanes, to scratch memory in whole blocks.

    Nothing is written if gamma is 1, if each row has its own, or if rows read it themselves.
    """
    f = Function(module, "prepare", 1)
    args, dtype = Arguments(f, offsets), spec.gamma
    if dtype is None or spec.per_row or reads_gamma(spec):
        f.builder.ret_void()
        return f
    gamma, weights, offset = args.integer("gamma"), args.integer("scratch"), args.number("weight_offset")

    def body(at: Int, mask: Bool | None) -> None:
        g = load_row(f, dtype, gamma + at * dtype.itemsize, mask, is_paired(spec)) + offset
        f.store(g.ir, weights + at * 4)

    each_block(f, f.index(0), args.integer("n"), body)
    f.builder.ret_void()
    return f


def reads_gamma(spec: RowSpec) -> bool:
    """Whether rows read a gamma of all rows itself: half the bytes, for an addition. Codes need it twice and gain nothing."""
    return spec.gamma == torch.bfloat16 and spec.fp8 is None and not spec.per_row
