"""Attention to the keys that a query sees, assembled for one `SequenceSpec`.

A thread takes tokens of a head of keys. The entries that a token sees are listed first. All later loops go over this list, so
no sum depends on what is hidden. Queries that share the head follow one another: scores of sixteen keys at a time, their
largest, powers, and sums of values over some columns at a time. Each column has one sum, in the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from ...cpu.llvm.bits import load_row, load_scalar, store_row
from ...cpu.llvm.dot import fold
from ...cpu.llvm.emit import F32, I8, I64, Arguments, Bool, Cell, Float, Function, Int, Module, constant, type_of
from ...cpu.llvm.loops import each_block, entry_points
from ...cpu.llvm.math_functions import exp, tanh
from ...cpu.sizes import BLOCK, SUM
from .launch import SPLIT, SequenceRows, SequenceSpec

_WORD: Final = 8


def build(spec: SequenceSpec, offsets: dict[str, int], features: str) -> str:
    """The LLVM module of ``spec``. The CPU's features affect loops, never results."""
    module = Module(features)
    worker = Function(module, "tokens_", 4, private=True)
    _, begin, end, memory = worker.parameters
    _Token(worker, spec, Arguments(worker, offsets), memory, "avx512f" in module.features).run(begin, end)
    worker.builder.ret_void()
    entry_points(module, offsets, worker, "items", _own)
    return str(module)


def _own(args: Arguments, thread: Int) -> Int:
    """A thread's scratch memory."""
    return args.integer("scratch") + thread * args.integer("own") * 4


class _Token:
    """Emits the work on tokens. ``n`` holds sizes and strides, by their names in `SequenceRows`."""

    def __init__(self, f: Function, spec: SequenceSpec, args: Arguments, memory: Int, wide: bool) -> None:
        self.f, self.spec, self.args, self.wide = f, spec, args, wide
        self.n = {name: args.integer("rows", i) for i, name in enumerate(SequenceRows._fields)}
        room = (self.n["context"] // BLOCK + 2) * BLOCK
        self.listed, self.scores = memory, memory + room * _WORD
        self.query = self.scores + room * 4
        self.added = self.query + (self.n["columns"] // BLOCK + 1) * (BLOCK * 4)
        self.count = Cell(f, f.index(0))
        self.zero = Float(f.builder, constant(type_of(F32, SUM), 0.0))

    def run(self, begin: Int, end: Int) -> None:
        """Process tokens ``begin`` to ``end`` of all heads of keys of all sequences."""
        f, n, spec = self.f, self.n, self.spec
        with f.loop(begin, end) as item:
            outer = item // n["tokens"]
            token = item - outer * n["tokens"]
            batch = outer // n["heads"]
            head = outer - batch * n["heads"]
            self.list_entries(batch, token)
            self.k, self.v = (
                self.args.integer(name) + (batch * n[f"{name}_batch"] + head * n[f"{name}_head"]) * spec.kv.itemsize
                for name in ("k", "v")
            )
            with f.loop(f.index(0), n["groups"]) as group:
                own = head * n["groups"] + group
                place = batch * n["q_batch"] + own * n["q_head"] + token * n["q_token"]
                self.load_query(self.args.integer("q") + place * spec.x.itemsize)
                top = self.write_scores()
                total = self.write_powers(top)
                row = (batch * n["tokens"] + token) * (n["heads"] * n["groups"]) + own
                self.write_sums(total, self.args.integer("out") + row * n["values"] * spec.x.itemsize)

    # --- entries ---

    def list_entries(self, batch: Int, token: Int) -> None:
        """List the entries that a token sees, and repeat the last one behind them."""
        f, n, count, kind = self.f, self.n, self.count, self.spec.mask
        count.set(f.index(0))
        zero, every = f.index(0), n["context"]
        if kind == "none":
            every = (n["seen"] + token).min(every)
        else:
            size = 1 if kind == "allowed" else 4
            row = self.args.integer("mask") + (batch * n["mask_batch"] + token * n["mask_token"]) * size
        with f.loop(zero, every) as entry:
            at: Int = count.get()
            f.store(entry.ir, self.listed + at * _WORD)
            if kind == "none":
                count.set(at + 1)
            elif kind == "allowed":
                count.set(at + Int(f.builder, f.builder.zext(f.load(row + entry, I8, lanes=0), I64)))
            else:
                added = load_scalar(f, torch.float32, row + entry * 4)
                f.store(added.ir, self.added + at * 4)
                count.set(at + added.ne(-float("inf")).where(f.index(1), 0))
        self.seen: Int = count.get()
        with f.when(self.seen > 0):
            last = self.entry(self.seen - 1).splat(SUM)
            f.store(last.ir, self.listed + self.seen * _WORD)

    def entry(self, index: Int) -> Int:
        """An entry of the list."""
        return Int(self.f.builder, self.f.load(self.listed + index * _WORD, I64, lanes=0))

    def load_query(self, address: Int) -> None:
        """Copy a query to scratch memory, as float32 with zeros behind it."""
        f, dtype = self.f, self.spec.x

        def copy(at: Int, mask: Bool | None) -> None:
            f.store(load_row(f, dtype, address + at * dtype.itemsize, mask, False).ir, self.query + at * 4)

        each_block(f, f.index(0), self.n["columns"], copy)

    # --- scores ---

    def write_scores(self) -> Float:
        """Write the scores of all listed keys, -inf behind them; returns the largest."""
        f = self.f
        top = Cell(f, self.zero - float("inf"))
        with f.loop(f.index(0), self.seen, SUM) as first:
            score = fold(self.products(first)) * self.args.number("scale").splat(SUM)
            if self.spec.capped:
                cap = self.args.number("softcap").splat(SUM)
                score = tanh(score / cap) * cap
            if self.spec.mask == "added":
                score = score + f.floats(self.added + first * 4, SUM)
            lanes = f.first_lanes((self.seen - first).min(SUM), SUM)
            score = lanes.where(score, -float("inf"))
            f.store(score.ir, self.scores + first * 4)
            before: Float = top.get()
            top.set((score > before).where(score, before))
        value: Float = top.get()
        while value.lanes > 1:
            low, high = value.halves()
            value = (low > high).where(low, high)
        return value.lane(0)

    def products(self, first: Int) -> list[Float]:
        """The lanes of the products of the query and sixteen keys."""
        f, size = self.f, self.spec.kv.itemsize
        columns = self.n["columns"]
        whole = columns & -SUM
        scores: list[Float] = []
        step = SUM if self.wide else 4
        for begin in range(0, SUM, step):
            keys = [self.k + self.entry(first + begin + i) * self.n["k_entry"] * size for i in range(step)]
            cells = [Cell(f, self.zero) for _ in keys]

            def add(at: Int, mask: Bool | None, keys: list[Int] = keys, cells: list[Cell] = cells) -> None:
                query = f.floats(self.query + at * 4, SUM)
                for key, cell in zip(keys, cells, strict=True):
                    cell.set(load_row(f, self.spec.kv, key + at * size, mask, False, SUM).fma(query, cell.get()))

            with f.loop(f.index(0), whole, SUM) as at:
                add(at, None)
            with f.when(whole < columns):
                add(whole, f.first_lanes(columns - whole, SUM))
            scores += [cell.get() for cell in cells]
        return scores

    def write_powers(self, top: Float) -> Float:
        """Write powers over the scores; returns their sum."""
        f = self.f
        total = Cell(f, top.number(0.0))

        def split(begin: Int, end: Int) -> None:
            part = Cell(f, self.zero)
            with f.loop(begin, end, SUM) as at:
                power = exp(f.floats(self.scores + at * 4, SUM) - top.splat(SUM))
                f.store(power.ir, self.scores + at * 4)
                part.set(part.get() + power)
            total.set(total.get() + part.get().sum_lanes())

        self.each_split(split)
        result: Float = total.get()
        return result

    def each_split(self, body: Callable[[Int, Int], None]) -> None:
        """``body(begin, end)`` of the splits of the list."""
        with self.f.loop(self.f.index(0), self.seen, SPLIT) as begin:
            body(begin, (begin + SPLIT).min(self.seen))

    # --- values ---

    def write_sums(self, total: Float, out: Int) -> None:
        """Write the sums of values, divided: some columns at a time."""
        f, values = self.f, self.n["values"]
        start = f.index(0)
        for width in (128, 64, 32, 16) if self.wide else (64, 32, 16):
            stop = values & -width
            with f.loop(start, stop, width) as at:
                self.write_columns(total, out, at, width, None)
            start = stop
        with f.when(start < values):
            self.write_columns(total, out, start, SUM, f.first_lanes(values - start, SUM))

    def write_columns(self, total: Float, out: Int, at: Int, width: int, mask: Bool | None) -> None:
        """The columns from ``at`` on."""
        f, dtype, x = self.f, self.spec.kv, self.spec.x
        sums = [Cell(f, self.zero) for _ in range(0, width, SUM)]

        def split(begin: Int, end: Int) -> None:
            parts = [Cell(f, self.zero) for _ in sums]
            with f.loop(begin, end) as i:
                power = f.builder.load(f.pointer(self.scores + i * 4), typ=F32)
                share = Float(f.builder, power).splat(SUM)
                row = self.v + (self.entry(i) * self.n["v_entry"] + at) * dtype.itemsize
                for c, part in enumerate(parts):
                    value = load_row(f, dtype, row + c * SUM * dtype.itemsize, mask, False, SUM)
                    part.set(value.fma(share, part.get()))
            for whole, part in zip(sums, parts, strict=True):
                whole.set(whole.get() + part.get())

        self.each_split(split)
        divisor = total.splat(SUM)
        for c, whole in enumerate(sums):
            value = divisor.eq(0.0).where(self.zero, whole.get() / divisor)
            store_row(f, x, value, out + (at + c * SUM) * x.itemsize, mask, False)
