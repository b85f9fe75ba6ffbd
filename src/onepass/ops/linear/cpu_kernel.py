"""The linear routine: rows of x as float32, then tiles of ``y`` with everything that follows the product.

Rows of x are divided into panels of up to eight blocks. A panel's work is a list of items: first its rows, normalized
and copied to a slot of scratch memory; then its tiles of columns. Threads take items in order. A tile waits until all
rows of its panel are prepared. A row waits until all tiles of the panel that had its slot before are done. An item
waits only for items that were taken earlier, so other threads work on these.

The sums of a tile are the same for any number of rows, because each row has its own. A gate's columns are complete
before the same item walks over the weights of the other half, so that one set of sums serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch

from ...cpu.llvm import dot
from ...cpu.llvm.bits import load_row, round_to, store_row
from ...cpu.llvm.dot import VECTOR
from ...cpu.llvm.emit import Arguments, Bool, Cell, Float, Function, Int, Module
from ...cpu.llvm.loops import SumOfSquares, each_block, reciprocal_root, take, wait
from ...cpu.llvm.math_functions import erf, exp, tanh
from ...cpu.sizes import CHUNK, MAX_BLOCKS, PREPARED_ROWS, ROW_BLOCKS, SUM, TILE
from .launch import LinearSpec

_MAX_ROWS: Final = MAX_BLOCKS * ROW_BLOCKS[-1]
"""Rows of a panel."""


def build(spec: LinearSpec, offsets: dict[str, int], features: str) -> str:
    """The LLVM module of ``spec``. The CPU's features affect loops, never results."""
    module = Module(features)
    product = dot.Product(spec.x, spec.weight, spec.weight_scale)
    prepare = _prepare(module, spec, product, offsets)
    tile = _Tile(module, spec, offsets).emit(dot.walks(module, product, wide="+avx512f" in features))
    item = _item(module, offsets, prepare, tile)
    for name in ("serial", "parallel"):
        _take_items(Function(module, name, 1), offsets, item)
    return str(module)


def _take_items(f: Function, offsets: dict[str, int], item: Function) -> None:
    """All items, or this thread's share of them. A thread's sums follow the slots in scratch memory."""
    args, one = Arguments(f, offsets), f.index(1)
    total = args.integer("panels") * (args.integer("preparations") + args.integer("tiles"))
    rows = args.integer("block") * args.integer("blocks")
    slots = args.integer("slots") * rows * _padded(args) * 4
    own = args.fetch_add("threads", one) * rows * (TILE * VECTOR)
    sums = args.integer("scratch") + slots + own
    take(f, args, total, one, lambda index: f.call(item, args.block, index, sums))


def _padded(args: Arguments) -> Int:
    """Columns of a row in scratch memory."""
    return (args.integer("k") + (CHUNK - 1)) & -CHUNK


def _item(module: Module, offsets: dict[str, int], prepare: Function, tile: Function) -> Function:
    """``item(block, index, sums)``: one item of the list."""
    f = Function(module, "item", 3, private=True)
    args, (_, index, sums) = Arguments(f, offsets), f.parameters
    preparations, tiles, slots = (args.integer(name) for name in ("preparations", "tiles", "slots"))
    items = preparations + tiles
    panel = index // items
    number = index - panel * items
    turn = panel // slots  # of the slot
    slot = panel - turn * slots
    size = args.integer("block")
    capacity = size * args.integer("blocks")
    first = panel * capacity
    rows = (args.integer("m") - first).min(capacity)
    blocks = (rows + size - 1) // size
    act = args.integer("scratch") + slot * capacity * _padded(args) * 4
    with f.choice(number < preparations) as (early, late):
        with early:
            wait(f, args, "done", slot, turn * tiles)
            f.call(prepare, args.block, first, rows, blocks * size, act, number * PREPARED_ROWS)
            args.count("prepared", slot)
        with late:
            wait(f, args, "prepared", slot, (turn + 1) * preparations)
            f.call(tile, args.block, first, rows, blocks, act, number - preparations, sums)
            args.count("done", slot)
    f.builder.ret_void()
    return f


# --- rows of x -----------------------------------------------------------------------------------------------------


def _prepare(module: Module, spec: LinearSpec, product: dot.Product, offsets: dict[str, int]) -> Function:
    """``prepare(block, first, rows, padded, act, begin)``: copy some of the panel's rows, with norm and residual.

    The panel has ``rows`` rows of x from ``first`` on. The rest of its ``padded`` rows is never written: what they hold
    affects only sums that nobody reads.
    """
    f = Function(module, "prepare", 6, private=True)
    _, first, rows, padded, act, begin = f.parameters
    args = Arguments(f, offsets)
    with f.loop(begin, (begin + PREPARED_ROWS).min(rows)) as m:
        _Row(f, spec, product, args, first + m).copy(args.integer("k"), act, padded, m)
    f.builder.ret_void()
    return f


class _Row:
    """Emits the work on one row of x. The norm is bit-identical to the row kernel's."""

    def __init__(self, f: Function, spec: LinearSpec, product: dot.Product, args: Arguments, index: Int) -> None:
        self.f, self.spec, self.product, self.args = f, spec, product, args
        self.at = {"x": args.integer("x") + index * args.integer("x.stride") * spec.x.itemsize}
        if spec.residual is not None:
            for name in ("residual", "residual_out"):
                stride = args.integer(f"{name}.stride") * spec.residual.itemsize
                self.at[name] = args.integer(name) + index * stride

    def h(self, at: Int, mask: Bool | None, paired: bool) -> Float:
        """``x + residual``; 0 beyond the row's end."""
        f, spec = self.f, self.spec
        value = load_row(f, spec.x, self.at["x"] + at * spec.x.itemsize, mask, paired)
        if spec.residual is not None:
            value = value + load_row(f, spec.residual, self.at["residual"] + at * spec.residual.itemsize, mask, paired)
            if spec.rounding == "hf":
                value = round_to(spec.residual, value)
        return value

    def root(self, k: Int) -> Float:
        """``rs``. Lanes and additions are those of the row kernel."""
        zero = self.f.zeros()[0]
        squares = SumOfSquares(Cell(self.f, zero), Cell(self.f, zero))

        def collect(at: Int, mask: Bool | None) -> None:
            squares.add(self.h(at, mask, self.spec.x == torch.bfloat16))
            squares.settle(at)

        each_block(self.f, self.f.index(0), k, collect)
        return reciprocal_root(squares.get(), k.to_float(), self.args.number("eps"))

    def copy(self, k: Int, act: Int, padded: Int, m: Int) -> None:
        """Write ``a`` as float32 and, with a residual, the new residual."""
        f, spec, paired = self.f, self.spec, self.product.is_paired
        rs = self.root(k).splat() if spec.gamma is not None else None
        offset = self.args.number("weight_offset")

        def value(at: Int, mask: Bool | None) -> Float:
            h = self.h(at, mask, paired)
            if spec.residual is not None:
                store_row(f, spec.residual, h, self.at["residual_out"] + at * spec.residual.itemsize, mask, paired)
            if spec.gamma is None or rs is None:
                return round_to(spec.x, h)
            g = load_row(f, spec.gamma, self.args.integer("gamma") + at * spec.gamma.itemsize, mask, paired) + offset
            normed = h * rs
            if spec.rounding == "hf":
                normed = round_to(spec.x, normed)
            return round_to(spec.x, normed * g)

        dot.copy_row(f, k, act, padded, m, value)


# --- tiles of y ----------------------------------------------------------------------------------------------------


def _silu(g: Float) -> Float:
    return g / (exp(-g) + 1.0)


def _gelu_tanh(g: Float) -> Float:
    inner = (g + g * g * g * 0.044715) * math.sqrt(2 / math.pi)
    return g * 0.5 * (tanh(inner) + 1.0)


def _gelu(g: Float) -> Float:
    return g * 0.5 * (erf(g * math.sqrt(0.5)) + 1.0)


_ACTIVATIONS: Final = {"silu_mul": _silu, "gelu_tanh_mul": _gelu_tanh, "gelu_mul": _gelu}


class _Tile:
    """Emits ``tile(block, first, rows, blocks, act, index, sums)``: one tile of a panel, from beginning to end."""

    def __init__(self, module: Module, spec: LinearSpec, offsets: dict[str, int]) -> None:
        self.f = Function(module, "tile", 7, private=True)
        self.spec, self.args = spec, Arguments(self.f, offsets)
        _, self.first, self.rows, self.blocks, self.act, self.index, self.sums = self.f.parameters
        self.n = self.args.integer("n")
        self.column = self.index * TILE
        self.width = (self.n - self.column).min(TILE)

    def emit(self, walks: dict[int, Function]) -> Function:
        """The function."""
        f, spec, args = self.f, self.spec, self.args
        following = self.column + args.integer("team") * TILE  # this thread's next tile, likely
        if spec.activation is None:
            self.walk(walks, self.column, following)
            self.each_vector(self.column, self.store)
        else:
            gates = f.allocate(_MAX_ROWS * TILE * 4)

            def keep(m: Int, first: int, lanes: Bool, y: Float) -> None:
                f.store(y.ir, gates + (m * TILE + first) * 4, lanes)

            def combine(m: Int, first: int, lanes: Bool, y: Float) -> None:
                g = load_row(f, torch.float32, gates + (m * TILE + first) * 4, lanes, False, SUM)
                g = self.rounded(_ACTIVATIONS[spec.activation or ""](g))
                self.store(m, first, lanes, self.rounded(g * y))

            self.walk(walks, self.column, self.column + self.n)
            self.each_vector(self.column, keep)
            self.walk(walks, self.column + self.n, following)
            self.each_vector(self.column + self.n, combine)
        f.builder.ret_void()
        return f

    def rounded(self, value: Float) -> Float:
        """What transformers computes with."""
        return round_to(self.spec.x, value) if self.spec.rounding == "hf" else value

    def walk(self, walks: dict[int, Function], row: Int, following: Int) -> None:
        """The sums of the tile whose first weight row is ``row``."""
        f, args = self.f, self.args
        size = args.integer("block")
        weight, stride = args.integer("weight"), args.integer("weight.stride") * self.spec.weight.itemsize
        scaled = "weight_scale" in args
        scales = [args.integer(name) if scaled else f.index(0) for name in ("weight_scale", "weight_scale.stride")]
        place = (self.act, self.blocks, args.integer("k"), self.sums)
        for block, walk in walks.items():
            with f.when(size.eq(block)):
                start, after = weight + row * stride, weight + following * stride
                f.call(walk, start, stride, self.width, *place, after, *scales, row)

    def each_vector(self, row: Int, use: Callable[[Int, int, Bool, Float], None]) -> None:
        """``use(m, first, lanes, y)`` of `SUM` columns at a time: sums with scale and bias."""
        f, spec, args = self.f, self.spec, self.args
        scales = args.integer("weight_scale") if spec.weight_scale != "none" else f.index(0)
        for first in range(0, TILE, SUM):
            with f.when(self.width > first):
                lanes = f.first_lanes((self.width - first).min(SUM), SUM)
                scale = dot.column_scale(f, spec.weight_scale, scales, row + first, lanes)
                bias = None
                if spec.bias is not None:
                    address = args.integer("bias") + (row + first) * spec.bias.itemsize
                    bias = load_row(f, spec.bias, address, lanes, False, SUM)
                with f.loop(f.index(0), self.rows) as m:
                    y = dot.tile_sums(f, self.sums, m, first)
                    y = y if scale is None else y * scale
                    y = y if bias is None else y + bias
                    use(m, first, lanes, self.rounded(y))

    def store(self, m: Int, first: int, lanes: Bool, y: Float) -> None:
        """Add what is to be added, round and store."""
        f, spec, args = self.f, self.spec, self.args
        column, m = self.column + first, self.first + m
        if spec.add is not None:
            address = args.integer("add") + (m * args.integer("add.stride") + column) * spec.add.itemsize
            y = y + load_row(f, spec.add, address, lanes, False, SUM)
        address = args.integer("out") + (m * args.integer("out.stride") + column) * spec.out.itemsize
        store_row(f, spec.out, y, address, lanes, False)
