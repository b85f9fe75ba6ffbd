"""MLA's cache write: find the token's slot, rotate its heads, normalize its latent, write its entry; for one `MlaSpec`.

A thread takes tokens. A token's cosines and sines are converted to float32 once, for all of its heads. Its entry is
first assembled in float32, because its scale may depend on all of it. A pair of columns is read before either is
written, so the output of q may be q itself. No step depends on another token.

Index tensors do not affect the code: it checks which ones exist and how wide they are, once per token, so that one
kernel serves them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from ...cpu.llvm import bits
from ...cpu.llvm.bits import load_row, round_to, store_row
from ...cpu.llvm.emit import I32, I64, LANES, Arguments, Bool, Cell, Float, Function, Int, Module
from ...cpu.llvm.loops import LINE, each_block, entry_points
from ...formats import FP8_FORMATS, SMALLEST_SCALE, ScaleRule
from .launch import MAX_LATENT, MAX_ROPE, TILE, MlaRows, MlaSpec

_AHEAD: Final = 16
"""Heads between one that is read and one that is prefetched: 2 KiB with 64 columns of bfloat16."""
_USUAL: Final = 64
"""Columns that are rotated in DeepSeek's and Kimi's models."""

_SCALE: Final = ScaleRule("row", torch.float32)

Angles = tuple[Float, Float]
"""Cosines and sines."""
Emit = Callable[[Int, Float, "Bool | None", bool], None]
"""Takes the values of a block: its first column, values, mask, and whether the values are paired (see `bits`)."""


def build(spec: MlaSpec, offsets: dict[str, int], features: str) -> str:
    """The LLVM module of ``spec``."""
    module = Module(features)
    worker = Function(module, "tokens_", 3, private=True)
    _, begin, end = worker.parameters
    TokenKernel(worker, spec, Arguments(worker, offsets)).run(begin, end)
    worker.builder.ret_void()
    entry_points(module, offsets, worker, "rows")
    return str(module)


class Source(NamedTuple):
    """A row of columns to be rotated; blocks ``ahead`` bytes further are prefetched."""

    row: Int
    dtype: torch.dtype
    ahead: Int | None = None

    def load(self, f: Function, at: Int, mask: Bool | None, paired: bool) -> Float:
        """A block of the row."""
        address = self.row + at * self.dtype.itemsize
        if self.ahead is not None and mask is None:
            for line in range(0, LANES * self.dtype.itemsize, LINE):
                f.prefetch(address + self.ahead + line)
        return load_row(f, self.dtype, address, mask, paired)


class TokenKernel:
    """Emits the work on tokens. ``n`` holds sizes and strides, by their names in `MlaRows`."""

    def __init__(self, f: Function, spec: MlaSpec, args: Arguments) -> None:
        self.f, self.spec, self.args = f, spec, args
        self.half = spec.style == "half"
        self.n = {name: args.integer("rows", i) for i, name in enumerate(MlaRows._fields)}
        self.columns = self.n["latent"] + self.n["rope"]
        self.cosines = f.allocate(4 * (MAX_ROPE // 2 + LANES))
        self.sines = f.allocate(4 * (MAX_ROPE // 2 + LANES))
        self.entry = f.allocate(4 * (MAX_LATENT + MAX_ROPE + LANES))
        zero = f.index(0)
        self.low, self.high, self.position, self.has_entry, self.page, self.slot = (Cell(f, zero) for _ in range(6))
        self.total, self.top = (Cell(f, value) for value in f.zeros())

    def run(self, begin: Int, end: Int) -> None:
        """Process a range of tokens."""
        f, spec, n = self.f, self.spec, self.n
        with f.loop(begin, end) as token:
            self.find(token)
            self.load_angles()
            self.rotate_heads(token)
            with f.when(self.has_entry.get().eq(1)):
                kv = self.address("kv", token * n["kv_token"], spec.kv)
                self.norm_latent(kv)
                self.rotate_kv(kv)
                self.write_entry()

    def address(self, name: str, offset: Int, dtype: torch.dtype) -> Int:
        """The address of a tensor's element."""
        return self.args.integer(f"{name}.at") + offset * dtype.itemsize

    # --- positions and slots ---

    def index(self, name: str, at: Int) -> Int:
        """An element of an index tensor of any dtype."""
        f, builder = self.f, self.f.builder
        base, width = self.args.integer(f"{name}.at"), self.args.integer(f"{name}.width")
        value_cell = Cell(f, f.index(0))
        with f.choice(width.eq(0)) as (wide, narrow):
            with wide:
                value_cell.set(Int(builder, f.load(base + at * 8, I64, lanes=0)))
            with narrow:
                raw = f.load(base + at * 4, I32, lanes=0)
                signed, unsigned = Int(builder, builder.sext(raw, I64)), Int(builder, builder.zext(raw, I64))
                value_cell.set(width.eq(1).where(signed, unsigned))
        value: Int = value_cell.get()
        return value

    def at_most(self, a: Int, b: Int) -> Bool:
        """``a <= b``, signed."""
        return Bool(self.f.builder, self.f.builder.icmp_signed("<=", a.ir, b.ir))

    def given(self, name: str) -> Bool:
        """Whether the call has such a tensor."""
        return ~self.args.integer(f"{name}.at").eq(0)

    def find(self, token: Int) -> None:
        """Find the token's position, and the page and slot of its entry if it has one."""
        f, n = self.f, self.n
        self.position.set(f.index(0))
        self.has_entry.set(f.index(0))
        with f.when(self.given("offsets")):
            self.find_request(token)
        with f.when(self.given("slots")):
            slot = self.index("slots", token)
            with f.when(slot < n["pages"] * n["page_size"]):  # unsigned, so negative numbers fail too
                self.set_entry(slot // n["page_size"], slot)
        with f.when(self.given("positions")):
            self.position.set(self.index("positions", token))

    def set_entry(self, page: Int, index: Int) -> None:
        """The entry is in this page, in slot ``index`` modulo the page size."""
        size = self.n["page_size"]
        self.has_entry.set(self.f.index(1))
        self.page.set(page)
        self.slot.set(index - index // size * size)

    def find_request(self, token: Int) -> None:
        """Find the first request that ends after the token, by bisection; the token may lie before it."""
        f, n = self.f, self.n
        requests = n["requests"]
        self.low.set(f.index(0))
        self.high.set(requests)
        with f.loop(f.index(0), self.args.integer("steps")):
            low, high = self.low.get(), self.high.get()
            middle = (low + high) >> 1
            past = self.at_most(self.index("offsets", (middle + 1).min(requests)), token)
            searching = low < high
            self.low.set((past & searching).where(middle + 1, low))
            self.high.set((~past & searching).where(middle, high))
        request = self.low.get()
        with f.when(request < requests):
            first = self.index("offsets", request)
            with f.when(self.at_most(first, token)):
                position = self.index("lengths", request) + (token - first)
                self.position.set(position)
                column = position // n["page_size"]
                inside = (position >> 63).eq(0) & (column < n["table_width"])
                with f.when(self.given("table") & inside):
                    page = self.index("table", request * n["table_row"] + column)
                    with f.when(page < n["pages"]):
                        self.set_entry(page, position)

    # --- rotation ---

    def load_angles(self) -> None:
        """Convert the cosines and sines of the position, which is clamped to the rows of freqs."""
        f, n, dtype = self.f, self.n, self.spec.freqs
        assert dtype is not None
        position = self.position.get()
        row = (position >> 63).eq(1).where(f.index(0), position).min(n["limit"] - 1)
        base = self.address("freqs", row * n["freqs_row"], dtype)

        def body(at: Int, mask: Bool | None) -> None:
            cosine, sine = load_row(f, dtype, base + at * dtype.itemsize, mask, True).halves()
            f.store(cosine.ir, self.cosines + at * 2)
            f.store(sine.ir, self.sines + at * 2)

        each_block(f, f.index(0), n["turned"], body)

    def angles(self, pair: Int) -> Angles:
        """Cosines and sines of a block of columns; with "half" of the first columns of a block of pairs."""
        lanes = LANES if self.half else LANES // 2
        return self.f.floats(self.cosines + pair * 4, lanes), self.f.floats(self.sines + pair * 4, lanes)

    def rotate(self, source: Source, at: Int, mask: Bool | None, angles: Angles, turned: Int, emit: Emit) -> None:
        """Emit the block at column ``at``; with "half" also the block of the other columns of its pairs."""
        cosine, sine = angles
        if self.half:
            other = at + (turned >> 1)
            a, b = (source.load(self.f, first, mask, False) for first in (at, other))
            emit(at, a.fma(cosine, -(b * sine)), mask, False)
            emit(other, b.fma(cosine, a * sine), mask, False)
        else:
            a, b = source.load(self.f, at, mask, True).halves()
            rotated = a.fma(cosine, -(b * sine)).shuffle(b.fma(cosine, a * sine), range(LANES))
            emit(at, rotated, mask, True)

    def rotate_row(self, source: Source, emit: Emit) -> None:
        """Emit all columns of a row, the first of them rotated."""
        f, turned, half = self.f, self.n["turned"], self.half

        def rotate(at: Int, mask: Bool | None) -> None:
            self.rotate(source, at, mask, self.angles(at if half else at >> 1), turned, emit)

        def copy(at: Int, mask: Bool | None) -> None:
            emit(at, source.load(f, at, mask, False), mask, False)

        each_block(f, f.index(0), turned >> 1 if half else turned, rotate)
        each_block(f, turned, self.n["rope"], copy)

    def rotate_heads(self, token: Int) -> None:
        """Rotate the token's rows of q. The most common width is unrolled, with the angles in registers."""
        f, spec, n = self.f, self.spec, self.n
        q = self.address("q", token * n["q_token"], spec.q)
        out = self.address("q_out", token * n["out_token"], spec.q_out)
        step, out_step = n["q_head"] * spec.q.itemsize, n["out_head"] * spec.q_out.itemsize
        usual, ahead = f.index(_USUAL), step * _AHEAD

        def emit_to(row: Int) -> Emit:
            def emit(at: Int, value: Float, mask: Bool | None, paired: bool) -> None:
                if spec.rounding == "reference" and spec.q_out != spec.q:
                    value = round_to(spec.q, value)
                store_row(f, spec.q_out, value, row + at * spec.q_out.itemsize, mask, paired)

            return emit

        with f.choice(n["turned"].eq(_USUAL) & n["rope"].eq(_USUAL)) as (unrolled, any_width):
            with unrolled:
                columns = range(0, _USUAL // 2 if self.half else _USUAL, LANES)
                angles = [self.angles(f.index(at if self.half else at // 2)) for at in columns]
                with f.loop(f.index(0), n["heads"]) as head:
                    emit = emit_to(out + head * out_step)
                    for at, pairs in zip(columns, angles, strict=True):
                        source = Source(q + head * step, spec.q, ahead)
                        self.rotate(source, f.index(at), None, pairs, usual, emit)
            with any_width, f.loop(f.index(0), n["heads"]) as head:
                self.rotate_row(Source(q + head * step, spec.q, ahead), emit_to(out + head * out_step))

    # --- the entry, assembled in float32 ---

    def put(self, at: Int, value: Float, mask: Bool | None, paired: bool) -> None:
        """Put a block into the entry."""
        store_row(self.f, torch.float32, value, self.entry + at * 4, mask, paired)

    def get(self, at: Int, mask: Bool | None) -> Float:
        """A block of the entry."""
        return load_row(self.f, torch.float32, self.entry + at * 4, mask, False)

    def norm_latent(self, x: Int) -> None:
        """Put the latent into the entry. Its first ``normed`` columns are normalized."""
        f, spec, n = self.f, self.spec, self.n
        paired = spec.kv == torch.bfloat16
        gamma, offset = self.args.integer("gamma.at"), self.args.number("weight_offset")
        self.total.set(f.zeros()[0])

        def load(dtype: torch.dtype, base: Int, at: Int, mask: Bool | None) -> Float:
            return load_row(f, dtype, base + at * dtype.itemsize, mask, paired)

        def add(at: Int, mask: Bool | None) -> None:
            h = load(spec.kv, x, at, mask)
            self.total.set(h.fma(h, self.total.get()))

        def norm(at: Int, mask: Bool | None) -> None:
            h, g = load(spec.kv, x, at, mask), load(spec.gamma, gamma, at, mask) + offset
            y = h * rs * g
            if spec.rounding == "reference":
                y = round_to(spec.kv, round_to(spec.kv, h * rs) * g)
            self.put(at, y, mask, paired)

        def copy(at: Int, mask: Bool | None) -> None:
            self.put(at, load(spec.kv, x, at, mask), mask, paired)

        each_block(f, f.index(0), n["normed"], add)
        v = self.total.get().sum_lanes() / n["normed"].to_float() + self.args.number("eps")
        rs = bits.is_finite(v).where((v > 0.0).where(v.number(1.0) / v.sqrt(), 0.0), v.number(float("nan")))
        each_block(f, f.index(0), n["normed"], norm)
        each_block(f, n["normed"], n["latent"], copy)

    def rotate_kv(self, kv: Int) -> None:
        """Put the columns after the latent into the entry, rotated."""
        spec, latent = self.spec, self.n["latent"]

        def emit(at: Int, value: Float, mask: Bool | None, paired: bool) -> None:
            if spec.rounding == "reference":
                value = round_to(spec.kv, value)
            self.put(latent + at, value, mask, paired)

        self.rotate_row(Source(kv + latent * spec.kv.itemsize, spec.kv), emit)

    def write_entry(self) -> None:
        """Scale and store the entry."""
        f, spec, n = self.f, self.spec, self.n
        page, slot = self.page.get(), self.slot.get()
        out = self.address("blocks", page * n["block_page"] + slot * n["block_entry"], spec.cache)
        scale = None
        if spec.scale == "tile":
            self.write_tiles(out)
            return
        if spec.scale == "tensor":
            scale = bits.load_scalar(f, torch.float32, self.args.integer("kv_scale.at"))
        elif spec.scale == "token":
            scale = self.make_scale(f.index(0), self.columns)
            at = page * n["scale_page"] + slot * n["scale_entry"]
            bits.store_scalar(f, torch.float32, scale, self.address("token_scale", at, torch.float32))

        def body(at: Int, mask: Bool | None) -> None:
            value = self.get(at, mask)
            if scale is not None:
                value = bits.quotient(value, scale)
            store_row(f, spec.cache, value, out + at * spec.cache.itemsize, mask, False)

        each_block(f, f.index(0), self.columns, body)

    def write_tiles(self, out: Int) -> None:
        """Store the codes and scales of the latent's tiles, then the other columns in bfloat16."""
        f, dtype, latent = self.f, self.spec.cache, self.n["latent"]
        scales = out + latent
        rest = scales + latent // TILE * 4
        with f.loop(f.index(0), latent, TILE) as first:
            scale = self.make_scale(first, first + TILE, SMALLEST_SCALE)
            bits.store_scalar(f, torch.float32, scale, scales + first // TILE * 4)

            def encode(at: Int, mask: Bool | None) -> None:
                store_row(f, dtype, bits.quotient(self.get(at, mask), scale), out + at, mask, False)

            each_block(f, first, first + TILE, encode)

        def copy(at: Int, mask: Bool | None) -> None:
            store_row(f, torch.bfloat16, self.get(latent + at, mask), rest + at * 2, mask, False)

        each_block(f, f.index(0), self.n["rope"], copy)

    def make_scale(self, begin: Int, end: Int, least: float | None = None) -> Float:
        """The scale of some columns of the entry."""
        f = self.f
        self.top.set(f.zeros()[1])

        def body(at: Int, mask: Bool | None) -> None:
            self.top.set(self.top.get().max(bits.magnitude(self.get(at, mask))))

        each_block(f, begin, end, body)
        amax = self.top.get().max_lane().float()
        limits = amax.number(float("inf")), None if least is None else amax.number(least)
        return bits.make_scale(_SCALE, FP8_FORMATS[self.spec.cache].max, amax, *limits)
