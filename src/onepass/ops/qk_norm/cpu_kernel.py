"""The rows of q and k: statistics, norm and rotation, assembled for one `QkSpec`.

A thread takes tokens and processes their rows of q, then their rows of k. A row is read once for its statistics and
again, from the cache, to be written. Heads to be rotated go through scratch memory, one at a time. All writes of an
element follow all reads of it, so an output may overwrite its input, and no step depends on another row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from ...cpu.llvm import bits
from ...cpu.llvm.bits import is_finite, load_row, load_scalar, round_to, store_row, store_scalar
from ...cpu.llvm.emit import I32, I64, LANES, Arguments, Bool, Cell, Float, Function, Int, Module
from ...cpu.llvm.loops import SumOfSquares, each_block, entry_points, prefetch
from ...formats import FP8_FORMATS, ScaleRule
from .launch import QkSpec

_SCALE: Final = ScaleRule("row", torch.float32)
Emit = Callable[[Int, Float, "Bool | None", bool], None]
"""Takes the values of a block: its first column, values, mask, and whether the values are paired (see `bits`)."""
SIDES: Final = ("q", "k")
_EVEN, _ODD = list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2))
_LOW: Final = [lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
_HIGH: Final = [lane + LANES // 2 for lane in _LOW]


def build(spec: QkSpec, offsets: dict[str, int], features: str) -> str:
    """The LLVM module of ``spec``."""
    module = Module(features)
    worker = Function(module, "tokens_", 4, private=True)
    _, begin, end, head = worker.parameters
    for side in SIDES:
        SideKernel(worker, spec, Arguments(worker, offsets), side, head).run(begin, end)
    worker.builder.ret_void()
    entry_points(module, offsets, worker, "tokens", _head)
    return str(module)


def _head(args: Arguments, thread: Int) -> Int:
    """Where a thread stores the head that it rotates."""
    return args.integer("scratch") + thread * args.integer("room") * 4 if "scratch" in args else thread


class Peak:
    """The largest magnitude of some values, and the scale that makes it the largest code."""

    def __init__(self, f: Function) -> None:
        self.f, self.top = f, Cell(f, f.zeros()[1])

    def clear(self) -> None:
        """Start over."""
        self.top.set(self.f.zeros()[1])

    def add(self, value: Float, mask: Bool | None, paired: bool) -> None:
        """Consider a block."""
        sizes = bits.magnitude(value)
        if mask is not None:
            sizes = bits.lane_mask(mask, paired).where(sizes, 0)
        self.top.set(self.top.get().max(sizes))

    def scale(self, dtype: torch.dtype) -> Float:
        """The scale of these values in an fp8 format; NaN if one is not finite."""
        amax = self.top.get().max_lane().float()
        return bits.make_scale(_SCALE, FP8_FORMATS[dtype].max, amax, amax.number(float("inf")))


class SideKernel:
    """Emits the work on the rows of q or of k, of ``n`` columns; ``head`` is the address of a head in scratch memory."""

    def __init__(self, f: Function, spec: QkSpec, args: Arguments, side: str, head: Int, n: Int | None = None) -> None:
        self.f, self.spec, self.args, self.head = f, spec, args, head
        self.side = side
        self.paired = spec.x == torch.bfloat16
        self.n = args.integer(f"{side}.n") if n is None else n
        self.count = self.n.to_float()
        self.eps = args.number("eps_k" if spec.two_eps and side == "k" else "eps")
        self.offset = args.number("weight_offset")
        self.squares = SumOfSquares(Cell(f, f.zeros()[0]), Cell(f, f.zeros()[0]))
        self.peak = Peak(f)

    def token(self, name: str, token: Int, size: int) -> Int:
        """The address of a token in a tensor whose elements have ``size`` bytes."""
        args = self.args
        n1, n2 = args.integer("n1"), args.integer("n2")
        pair = token // n2
        outer = pair // n1
        offset = self.f.index(0)
        for level, index in enumerate((outer, pair - outer * n1, token - pair * n2)):
            offset = offset + index * args.integer(f"{name}.strides", level)
        return args.integer(name) + offset * size

    def run(self, begin: Int, end: Int) -> None:
        """Process all rows of a range of tokens."""
        f, args, spec = self.f, self.args, self.spec
        heads = args.integer(f"{self.side}.heads")
        with f.loop(begin, end) as token:
            source = self.token(self.side, token, spec.x.itemsize)
            target = None if spec.out is None else self.token(f"{self.side}_out", token, spec.out.itemsize)
            stats = self.token("stats", token, 4) + 4 * SIDES.index(self.side) if "stats" in args else None
            angles = self.angles(token) if spec.rope is not None else None
            with f.loop(f.index(0), heads) as head:
                x = source + head * args.integer(f"{self.side}.step") * spec.x.itemsize
                sums = stats if spec.stage == "apply" else None
                v = self.mean(x) if sums is None else load_scalar(f, torch.float32, sums)
                if stats is not None and target is None:
                    store_scalar(f, torch.float32, v, stats)
                elif target is not None and spec.out is not None:
                    out = target + head * args.integer(f"{self.side}_out.step") * spec.out.itemsize
                    rs = self.reciprocal_root(v + self.eps)
                    if spec.scale == "none":
                        self.write(x, out, rs, angles)
                    else:
                        self.write_codes(x, out, rs, angles, self.scale(token, head, x, rs, angles))

    def mean(self, x: Int) -> Float:
        """The mean of a row's squares, or their sum if that is the stage."""
        self.squares.clear()

        def body(at: Int, mask: Bool | None) -> None:
            if mask is None:
                prefetch(self.f, self.spec.x, x, at)
            self.squares.add(self.load(self.spec.x, x, at, mask))
            self.squares.settle(at)

        each_block(self.f, self.f.index(0), self.n, body)
        total = self.squares.get().sum_lanes()
        return total if self.spec.stage == "sums" else total / self.count

    def reciprocal_root(self, v: Float) -> Float:
        """``1/sqrt(v)``; NaN if v is not finite, 0 if it is not positive."""
        rs = (v > 0.0).where(v.number(1.0) / v.sqrt(), 0.0)
        return is_finite(v).where(rs, v.number(float("nan")))

    def load(self, dtype: torch.dtype, base: Int, at: Int, mask: Bool | None) -> Float:
        """A block of columns."""
        return load_row(self.f, dtype, base + at * dtype.itemsize, mask, self.paired)

    def normed(self, x: Int, at: Int, mask: Bool | None, rs: Float) -> Float:
        """A block of the norm, before rotation and store."""
        spec = self.spec
        gamma = spec.gamma if self.side == "q" else spec.gamma_k
        h = self.load(spec.x, x, at, mask)
        if gamma is None:
            return h * rs
        g = self.load(gamma, self.args.integer(f"gamma_{self.side}"), at, mask) + self.offset
        if spec.rounding == "once":
            return h * rs * g
        return round_to(spec.x, round_to(spec.x, h * rs) * g)

    def write(self, x: Int, out: Int, rs: Float, angles: Int | None) -> None:
        """Store a row: directly, or head by head through scratch memory if heads are rotated."""
        f, dtype = self.f, self.spec.out
        assert dtype is not None
        if angles is None or self.spec.rope is None:

            def body(at: Int, mask: Bool | None) -> None:
                store_row(f, dtype, self.normed(x, at, mask, rs), out + at * dtype.itemsize, mask, self.paired)

            each_block(f, f.index(0), self.n, body)
            return
        head_dim, dim = self.spec.rope.head_dim, self.spec.rope.dim
        with f.loop(f.index(0), self.n, head_dim) as begin:

            def save(at: Int, mask: Bool | None) -> None:
                value = self.normed(x, begin + at, mask, rs)
                store_row(f, torch.float32, value, self.head + at * 4, mask, self.paired)

            def copy(at: Int, mask: Bool | None) -> None:
                value = load_row(f, torch.float32, self.head + at * 4, mask, False)
                store_row(f, dtype, value, out + (begin + at) * dtype.itemsize, mask, False)

            each_block(f, f.index(0), f.index(head_dim), save)
            self.rotate(angles, out + begin * dtype.itemsize, dtype)
            each_block(f, f.index(dim), f.index(head_dim), copy)

    # --- codes ---

    def finished(self, x: Int, rs: Float, angles: Int | None, emit: Emit) -> None:
        """Emit the blocks of a row as they are before the division by a scale: normed, rotated, and rounded if "hf"."""
        f, rope = self.f, self.spec.rope
        if angles is None or rope is None:
            each_block(
                f, f.index(0), self.n, lambda at, mask: emit(at, self.normed(x, at, mask, rs), mask, self.paired)
            )
            return
        with f.loop(f.index(0), self.n, rope.head_dim) as begin:

            def save(at: Int, mask: Bool | None) -> None:
                value = self.normed(x, begin + at, mask, rs)
                store_row(f, torch.float32, value, self.head + at * 4, mask, self.paired)

            def take(at: Int, mask: Bool | None) -> None:
                value = load_row(f, torch.float32, self.head + at * 4, mask, False)
                emit(begin + at, round_to(self.spec.x, value) if self.spec.rounding == "hf" else value, mask, False)

            each_block(f, f.index(0), f.index(rope.head_dim), save)
            self.rotate(angles, self.head, torch.float32)
            each_block(f, f.index(0), f.index(rope.head_dim), take)

    def scale(self, token: Int, head: Int, x: Int, rs: Float, angles: Int | None) -> Float:
        """What a row is divided by: the given scale, or its own, which is stored."""
        f, args, dtype = self.f, self.args, self.spec.out
        if self.spec.scale == "tensor":
            return load_scalar(f, torch.float32, args.integer(f"{self.side}_scale"))
        assert dtype is not None
        name = f"{self.side}_scale_out"
        self.peak.clear()
        self.finished(x, rs, angles, lambda _, value, mask, paired: self.peak.add(value, mask, paired))
        scale = self.peak.scale(dtype)
        at = self.token(name, token, 4) + head * args.integer(f"{name}.step") * 4
        store_scalar(f, torch.float32, scale, at)
        return scale

    def write_codes(self, x: Int, out: Int, rs: Float, angles: Int | None, scale: Float) -> None:
        """Store the codes of a row."""
        f, dtype = self.f, self.spec.out
        assert dtype is not None

        def emit(at: Int, value: Float, mask: Bool | None, paired: bool) -> None:
            store_row(f, dtype, bits.quotient(value, scale), out + at, mask, paired)

        self.finished(x, rs, angles, emit)

    # --- rotation ---

    def angles(self, token: Int) -> Int:
        """The address of the cosines and sines of a token's position, which is clamped to the rows of freqs."""
        f, args, rope = self.f, self.args, self.spec.rope
        dtype = rope.positions if rope is not None else None
        if dtype is None:
            sequence = args.integer("sequence")
            position = token - token // sequence * sequence
        else:
            narrow = dtype == torch.int32
            raw = f.load(self.token("positions", token, dtype.itemsize), I32 if narrow else I64, lanes=0)
            position = Int(f.builder, f.builder.sext(raw, I64) if narrow else raw)
            position = (position >> 63).eq(1).where(f.index(0), position)
        limit: Int = position.min(args.integer("limit") - 1)
        return args.integer("freqs") + limit * args.integer("freqs.stride") * 4

    def rotate(self, angles: Int, out: Int, dtype: torch.dtype) -> None:
        """Rotate the pairs of the head in scratch memory, 32 at a time and the rest one by one; ``out`` may be the same."""
        rope, f = self.spec.rope, self.f
        assert rope is not None
        pairs = rope.dim // 2
        half = rope.style == "half"
        whole = pairs - pairs % LANES

        def vector(address: Int) -> Float:
            return f.floats(address)

        def two(address: Int) -> tuple[Float, Float]:
            """The even and the odd elements of 64 numbers."""
            low, high = vector(address), vector(address + 4 * LANES)
            return low.shuffle(high, _EVEN), low.shuffle(high, _ODD)

        with f.loop(f.index(0), f.index(whole), LANES) as i:
            cosine, sine = two(angles + i * 8)
            a, b = (vector(self.head + i * 4), vector(self.head + (i + pairs) * 4)) if half else two(self.head + i * 8)
            a, b = a.fma(cosine, -(b * sine)), b.fma(cosine, a * sine)
            first, second = (i, i + pairs) if half else (i * 2, i * 2 + LANES)
            if not half:
                a, b = a.shuffle(b, _LOW), a.shuffle(b, _HIGH)
            store_row(f, dtype, a, out + first * dtype.itemsize, None, False)
            store_row(f, dtype, b, out + second * dtype.itemsize, None, False)
        with f.loop(f.index(whole), f.index(pairs)) as i:
            cosine, sine = (load_scalar(f, torch.float32, angles + i * 8 + 4 * part) for part in (0, 1))
            first, second = (i, i + pairs) if half else (i * 2, i * 2 + 1)
            a, b = (load_scalar(f, torch.float32, self.head + at * 4) for at in (first, second))
            a, b = a.fma(cosine, -(b * sine)), b.fma(cosine, a * sine)
            store_scalar(f, dtype, a, out + first * dtype.itemsize)
            store_scalar(f, dtype, b, out + second * dtype.itemsize)
