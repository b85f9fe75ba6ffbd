"""Norms of q and k, RoPE, and the write of k and v into a cache, assembled for one `QkCacheSpec`.

A thread takes tokens. A token's cosines and sines are converted to float32 once, for all of its heads. A normed head is
first assembled in float32, then rotated and stored; other heads are rotated as they are read. A pair of columns is read
before either is written, so q may be rotated in place. No step depends on another token. Statistics and norms are those
of `qk_norm_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ...cpu.llvm.bits import load_row, load_scalar, round_to, store_row, store_scalar
from ...cpu.llvm.emit import I32, I64, LANES, Arguments, Bool, Cell, Float, Function, Int, Module
from ...cpu.llvm.loops import each_block, entry_points
from ..qk_norm.cpu_kernel import Peak, SideKernel
from ..qk_norm.launch import qk_spec
from .launch import MAX_HEAD, QkCacheRows, QkCacheSpec, Scaling

Read = Callable[[Int, "Bool | None", bool], Float]
"""A block of a head: its first column, its mask, and whether the values come paired (see `bits`)."""


def build(spec: QkCacheSpec, offsets: dict[str, int], features: str) -> str:
    """The LLVM module of ``spec``."""
    module = Module(features)
    worker = Function(module, "tokens_", 3, private=True)
    _, begin, end = worker.parameters
    TokenKernel(worker, spec, Arguments(worker, offsets)).run(begin, end)
    worker.builder.ret_void()
    entry_points(module, offsets, worker, "tokens")
    return str(module)


class NormKernel(SideKernel):
    """The norm of rows of q, k or v, whose number of columns is ``n``. v has no weight."""

    def __init__(self, f: Function, spec: QkCacheSpec, args: Arguments, side: str, n: Int) -> None:
        gammas = (None, None) if side == "v" else (spec.gamma_q, spec.gamma_k)
        rounding = "hf" if spec.rounding == "hf" else "once"
        norm = qk_spec("fused", spec.x, gammas[0], spec.q_out, rounding, gamma_k=gammas[1])
        super().__init__(f, norm, args, side, f.index(0), n)
        self.rounds_once = spec.rounding != "once" if side == "v" else spec.rounding == "hf_rope"

    def normed(self, x: Int, at: Int, mask: Bool | None, rs: Float) -> Float:
        """A block of the norm, rounded as the rotation needs it."""
        y = super().normed(x, at, mask, rs)
        return round_to(self.spec.x, y) if self.rounds_once else y


class Target(NamedTuple):
    """Where heads are stored: the token's place, the stride between heads, the dtype, and what values are divided by."""

    at: Int
    step: Int
    dtype: torch.dtype
    scale: Float | None = None

    def store(self, f: Function, head: Int, at: Int, value: Float, mask: Bool | None, paired: bool) -> None:
        """Divide and store a block of a head."""
        if self.scale is not None:  # a quotient beyond float32 saturates like the largest number
            zero = self.scale.eq(0.0) & value.eq(value)
            value = zero.where(value.number(0.0), value / self.scale)
        store_row(f, self.dtype, value, self.at + (head * self.step + at) * self.dtype.itemsize, mask, paired)


class Seen(NamedTuple):
    """Takes the blocks of a head as a `Target` does, and only looks at them."""

    peak: Peak

    def store(self, f: Function, head: Int, at: Int, value: Float, mask: Bool | None, paired: bool) -> None:
        """Consider a block of a head."""
        self.peak.add(value, mask, paired)


class TokenKernel:
    """Emits the work on tokens. ``n`` holds sizes and strides, by their names in `QkCacheRows`."""

    def __init__(self, f: Function, spec: QkCacheSpec, args: Arguments) -> None:
        self.f, self.spec, self.args = f, spec, args
        self.n = {name: args.integer("rows", i) for i, name in enumerate(QkCacheRows._fields)}
        self.paired = spec.x == torch.bfloat16
        self.dim = f.index(0)
        if spec.turn is not None:
            self.dim = args.integer("dim")
            self.cosines, self.sines = (f.allocate(4 * (MAX_HEAD // 2 + LANES)) for _ in range(2))
        self.norms: dict[str, NormKernel] = {}
        if spec.norm != "none":
            self.head = f.allocate(4 * (MAX_HEAD + LANES))
            for side in ("q", "k"):
                columns = self.n["head"]
                whole = columns * self.n[f"{side}_heads"]
                self.norms[side] = NormKernel(f, spec, args, side, columns if spec.norm == "head" else whole)
        if spec.norm_v:
            self.norms["v"] = NormKernel(f, spec, args, "v", self.n["value"])
        self.peak = Peak(f)
        self.page, self.entry, self.has_entry = (Cell(f, f.index(0)) for _ in range(3))

    def run(self, begin: Int, end: Int) -> None:
        """Process a range of tokens."""
        f, spec, n = self.f, self.spec, self.n
        with f.loop(begin, end) as token:
            self.outer = token // n["sequence"]
            self.index = token - self.outer * n["sequence"]
            if spec.turn is not None:
                self.load_angles(token)
            q = Target(self.place("q_out", token, spec.q_out), n["q_out_head"], spec.q_out)
            self.write_heads("q", token, q)
            if spec.placing == "none":
                k = Target(self.place("k_out", token, spec.k_out), n["k_out_head"], spec.k_out)
                self.write_heads("k", token, k)
            else:
                self.find_entry(token)
                with f.when(self.has_entry.get().eq(1)):
                    self.write_heads("k", token, self.cache("k"))
                    if spec.values:
                        self.write_values(token, self.cache("v"))

    # --- places ---

    def place(self, name: str, token: Int, dtype: torch.dtype) -> Int:
        """The address of a token in a tensor."""
        outer, inner = self.n[f"{name}_outer"], self.n[f"{name}_token"]
        apart = self.outer * outer + self.index * inner
        offset = self.n["folded"].eq(1).where(token * inner, apart)
        return self.args.integer(name) + offset * dtype.itemsize

    def integer(self, address: Int, dtype: torch.dtype) -> Int:
        """An element of an index tensor."""
        narrow = dtype == torch.int32
        raw = self.f.load(address, I32 if narrow else I64, lanes=0)
        return Int(self.f.builder, self.f.builder.sext(raw, I64) if narrow else raw)

    def find_entry(self, token: Int) -> None:
        """Find the page and entry of a token, if it has one."""
        f, n, spec = self.f, self.n, self.spec
        self.has_entry.set(f.index(0))
        if spec.placing == "slots":
            assert spec.slots is not None
            slot = self.integer(self.place("slots", token, spec.slots), spec.slots)
            with f.when(slot < n["pages"] * n["entries"]):  # unsigned, so negative numbers fail too
                page = slot // n["entries"]
                self.set_entry(page, slot - page * n["entries"])
            return
        entry = self.index + n["first"]
        if spec.starts is not None:
            at = self.args.integer("starts") + self.outer * n["start_step"] * spec.starts.itemsize
            entry = entry + self.integer(at, spec.starts)
        with f.when(entry < n["entries"]):
            self.set_entry(self.outer, entry)

    def set_entry(self, page: Int, entry: Int) -> None:
        """The token is stored here."""
        self.has_entry.set(self.f.index(1))
        self.page.set(page)
        self.entry.set(entry)

    def cache(self, name: str) -> Target:
        """The token's entry in a cache."""
        n, dtype = self.n, self.spec.k_out
        offset = self.page.get() * n[f"{name}_page"] + self.entry.get() * n[f"{name}_entry"]
        one = self.scaling(name) == "tensor"
        scale = load_scalar(self.f, torch.float32, self.args.integer(f"{name}_scale")) if one else None
        return Target(self.args.integer(f"{name}_cache") + offset * dtype.itemsize, n[f"{name}_step"], dtype, scale)

    def scaling(self, name: str) -> Scaling:
        """What the values of a cache are divided by."""
        return self.spec.k_scale if name == "k" else self.spec.v_scale if name == "v" else "none"

    def put(self, name: str, head: Int, target: Target, write: Callable[[Target | Seen], None]) -> None:
        """Let ``write`` store a head, divided by its scale. If that is its own, it writes twice, first to be looked at."""
        f, n, scaling = self.f, self.n, self.scaling(name)
        by_head = head * n[f"{name}_scale_step"] if scaling in ("head", "own") else head
        if scaling == "head":
            given = load_scalar(f, torch.float32, self.args.integer(f"{name}_scale") + by_head * 4)
            target = target._replace(scale=given)
        elif scaling == "own":
            self.peak.clear()
            write(Seen(self.peak))
            scale = self.peak.scale(target.dtype)
            entry = self.page.get() * n[f"{name}_scale_page"] + self.entry.get() * n[f"{name}_scale_entry"]
            store_scalar(f, torch.float32, scale, self.args.integer(f"{name}_scale_out") + (entry + by_head) * 4)
            target = target._replace(scale=scale)
        write(target)

    # --- angles ---

    def load_angles(self, token: Int) -> None:
        """Convert the token's cosines and sines to float32, rounded first if the rotation rounds every step."""
        f, spec, turn = self.f, self.spec, self.spec.turn
        assert turn is not None
        dtype = turn.angles

        def rounded(value: Float) -> Float:
            return value if spec.rounding == "once" else round_to(spec.x, value)

        if turn.pair:
            for name, target in (("cos", self.cosines), ("sin", self.sines)):
                base = self.place(name, token, dtype)

                def body(at: Int, mask: Bool | None, base: Int = base, target: Int = target) -> None:
                    value = load_row(f, dtype, base + at * dtype.itemsize, mask, False)
                    f.store(rounded(value).ir, target + at * 4)

                each_block(f, f.index(0), self.dim >> 1, body)
            return
        base = self.table_row(self.index if turn.positions is None else self.position(token))

        def both(at: Int, mask: Bool | None) -> None:
            cosine, sine = rounded(load_row(f, dtype, base + at * dtype.itemsize, mask, True)).halves()
            f.store(cosine.ir, self.cosines + at * 2)
            f.store(sine.ir, self.sines + at * 2)

        each_block(f, f.index(0), self.dim, both)
        if turn.axes is not None:
            axes = turn.axes
            for axis, begin, end in ((1, axes.height, axes.height_end), (2, axes.width, axes.width_end)):
                base = self.table_row(self.position(token, axis))
                with f.loop(f.index(begin), f.index(end), axes.step) as pair:
                    for part, target in enumerate((self.cosines, self.sines)):
                        value = load_scalar(f, dtype, base + (pair * 2 + part) * dtype.itemsize)
                        store_scalar(f, torch.float32, rounded(value), target + pair * 4)

    def position(self, token: Int, axis: int = 0) -> Int:
        """One of a token's positions; 0 if it is negative."""
        assert self.spec.turn is not None and self.spec.turn.positions is not None
        dtype = self.spec.turn.positions
        at = self.place("positions", token, dtype)
        if axis:
            at = at + self.n["positions_axis"] * (axis * dtype.itemsize)
        position = self.integer(at, dtype)
        return (position >> 63).eq(1).where(self.f.index(0), position)

    def table_row(self, position: Int) -> Int:
        """The address of the angles of a position, or of the last row."""
        assert self.spec.turn is not None
        row = position.min(self.n["limit"] - 1)
        return self.args.integer("freqs") + row * self.n["freqs_row"] * self.spec.turn.angles.itemsize

    # --- heads ---

    def write_heads(self, side: str, token: Int, target: Target) -> None:
        """Norm, rotate and store the heads of q or k."""
        f, spec, n = self.f, self.spec, self.n
        x = self.place(side, token, spec.x)
        norm = self.norms.get(side)
        rs = norm.reciprocal_root(norm.mean(x) + norm.eps) if norm is not None and spec.norm == "whole" else None
        with f.loop(f.index(0), n[f"{side}_heads"]) as head:
            row = x + head * n[f"{side}_head"] * spec.x.itemsize
            read = self.reader(spec.x, row)
            if norm is not None:
                if rs is None:
                    self.save(norm, row, f.index(0), norm.reciprocal_root(norm.mean(row) + norm.eps))
                else:
                    self.save(norm, x, head * n["head"], rs)
                read = self.reader(torch.float32, self.head)
            self.put(side, head, target, partial(self.write_head, head, read))

    def save(self, norm: NormKernel, row: Int, first: Int, rs: Float) -> None:
        """Assemble the norm of a head, which begins at column ``first`` of a row."""

        def body(at: Int, mask: Bool | None) -> None:
            value = norm.normed(row, first + at, mask, rs)
            store_row(self.f, torch.float32, value, self.head + at * 4, mask, self.paired)

        each_block(self.f, self.f.index(0), self.n["head"], body)

    def reader(self, dtype: torch.dtype, row: Int) -> Read:
        """Reads blocks of a head in memory."""

        def read(at: Int, mask: Bool | None, paired: bool) -> Float:
            return load_row(self.f, dtype, row + at * dtype.itemsize, mask, paired)

        return read

    def write_head(self, head: Int, read: Read, target: Target | Seen) -> None:
        """Rotate and store one head."""
        f, dim, turn = self.f, self.dim, self.spec.turn
        half = dim >> 1

        def halves(at: Int, mask: Bool | None) -> None:
            a, b = read(at, mask, False), read(at + half, mask, False)
            a, b = self.turned(a, b, f.floats(self.cosines + at * 4), f.floats(self.sines + at * 4))
            target.store(f, head, at, a, mask, False)
            target.store(f, head, at + half, b, mask, False)

        def neighbours(at: Int, mask: Bool | None) -> None:
            a, b = read(at, mask, True).halves()
            cosine, sine = (f.floats(angles + at * 2, LANES // 2) for angles in (self.cosines, self.sines))
            a, b = self.turned(a, b, cosine, sine)
            target.store(f, head, at, a.shuffle(b, range(LANES)), mask, True)

        if turn is not None and turn.style == "half":
            each_block(f, f.index(0), half, halves)
        elif turn is not None:
            each_block(f, f.index(0), dim, neighbours)
        self.copy(head, read, dim, self.n["head"], target)

    def turned(self, a: Float, b: Float, cosine: Float, sine: Float) -> tuple[Float, Float]:
        """Rotated pairs, in float32 or rounded at every step."""
        if self.spec.rounding == "once":
            return a.fma(cosine, -(b * sine)), b.fma(cosine, a * sine)

        def rounded(value: Float) -> Float:
            return round_to(self.spec.x, value)

        left = rounded(a * cosine) - rounded(b * sine)
        return rounded(left), rounded(rounded(b * cosine) + rounded(a * sine))

    def write_values(self, token: Int, target: Target) -> None:
        """Store the heads of v."""
        f, spec, n = self.f, self.spec, self.n
        v = self.place("v", token, spec.x)
        norm = self.norms.get("v")
        with f.loop(f.index(0), n["k_heads"]) as head:
            row = v + head * n["v_head"] * spec.x.itemsize
            read = self.reader(spec.x, row) if norm is None else self.normed(norm, row)
            self.put("v", head, target, partial(self.copy, head, read, f.index(0), n["value"]))

    def normed(self, norm: NormKernel, row: Int) -> Read:
        """Reads blocks of the norm of a row."""
        rs = norm.reciprocal_root(norm.mean(row) + norm.eps)

        def read(at: Int, mask: Bool | None, paired: bool) -> Float:
            return norm.normed(row, at, mask, rs)  # they come paired as `copy` asks for them

        return read

    def copy(self, head: Int, read: Read, begin: Int, end: Int, target: Target | Seen) -> None:
        """Store columns of a head without rotation."""

        def body(at: Int, mask: Bool | None) -> None:
            target.store(self.f, head, at, read(at, mask, self.paired), mask, self.paired)

        each_block(self.f, begin, end, body)
