"""The rows of q and k: statistics, norm and rotation, assembled for one `QkSpec`.

A thread takes tokens and does their rows of q, then their rows of k. A row is read once for its statistics and again,
out of the cache, to be written; what is rotated is first put aside, head by head. All writes of an element follow all
reads of it, so an output may be its own input, and no step depends on another row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import torch
from llvmlite import ir

from ..specs.layout import LEVELS
from ..specs.qk_norm import TENSORS, QkCall, QkSpec
from .emit.bits import is_finite, load_row, load_scalar, round_to, store_row, store_scalar
from .emit.fields import Fields
from .emit.function import Cell, Function
from .emit.vec import F32, I32, I64, LANES, Bool, Float, Int
from .rms_norm_kernels import _AHEAD, _LINE, _SETTLE, each_block

SIDES: Final = ("q", "k")
_NUMBERS: Final = ("eps", "weight_offset")
_EVEN, _ODD = list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2))
_LOW: Final = [lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
_HIGH: Final = [lane + LANES // 2 for lane in _LOW]


def _fields(spec: QkSpec) -> dict[str, str]:
    """Each 64-bit field of the argument block and the Python expression over `launch`'s arguments that gives it."""
    fields = {
        "next": "0",
        "threads": "0",
        "chunk": "chunk",
        "tokens": "rows.geom[0]",
        "n1": "rows.geom[1]",
        "n2": "rows.geom[2]",
    }
    for i, side in enumerate(SIDES):
        fields |= {f"{side}.n": f"rows.widths[{i}]", f"{side}.heads": f"rows.heads[{i}]"}
        if spec.gamma is not None:
            fields[f"gamma_{side}"] = f"gamma_{side}.data_ptr()"
    present = ("q", "k", "q_out", "k_out") if spec.applies else SIDES
    for i, name in enumerate(TENSORS):
        wanted = (
            name in present if i < 4 else spec.stage != "fused" if name == "stats" else _positions(spec) is not None
        )
        if wanted:
            fields |= {name: f"{name}.data_ptr()", f"{name}.strides": f"*rows.strides[{i}]"}
            if i < 4:
                fields[f"{name}.step"] = f"rows.steps[{i}]"
    if spec.rope is not None:
        fields |= {"freqs": "freqs.data_ptr()", "freqs.stride": "freqs.stride(0)", "limit": "freqs.shape[0]"}
        fields |= {"sequence": "rows.sequence", "scratch": "scratch", "room": "room"}
    return fields


def _positions(spec: QkSpec) -> torch.dtype | None:
    return spec.rope.positions if spec.rope is not None else None


def offsets(spec: QkSpec) -> dict[str, int]:
    """Byte offset of each field; ``name.strides`` is three fields."""
    found: dict[str, int] = {}
    at = 0
    for name in (*_fields(spec), *_NUMBERS):
        found[name] = at
        at += 8 * LEVELS if name.endswith(".strides") else 8
    return found


def packer(spec: QkSpec) -> Callable[..., bytes]:
    """A function of scratch address and room a thread, chunk size and `launch`'s arguments after the spec: the block."""
    integers = offsets(spec)["eps"] // 8
    pack = struct.Struct(f"={integers}q{len(_NUMBERS)}d").pack
    arguments = ", ".join([*_fields(spec).values(), *_NUMBERS])
    names = ", ".join(QkCall._fields)
    lines = ("def packed(scratch, room, chunk, call):", f"    {names} = call", f"    return pack({arguments})")
    scope: dict[str, Any] = {"pack": pack}
    exec("\n".join(lines), scope)
    function: Callable[..., bytes] = scope["packed"]
    return function


class _Block(Fields):
    """The argument block of a `QkSpec`."""

    def __init__(self, f: Function, spec: QkSpec, block: Int) -> None:
        self.f = f
        self.block = block
        self.offsets = offsets(spec)

    def token(self, name: str, token: Int, size: int) -> Int:
        """Address of a token in a tensor of elements of ``size`` bytes."""
        n1, n2 = self.integer("n1"), self.integer("n2")
        pair = token // n2
        outer = pair // n1
        offset = self.f.index(0)
        for level, index in enumerate((outer, pair - outer * n1, token - pair * n2)):
            offset = offset + index * self.integer(f"{name}.strides", level)
        return self.integer(name) + offset * size


class _Side:
    """Emits the work on the rows of q or of k."""

    def __init__(self, f: Function, spec: QkSpec, fields: _Block, side: str, kept: Int) -> None:
        self.f, self.spec, self.fields, self.kept = f, spec, fields, kept
        self.side, self.column = side, SIDES.index(side)
        self.paired = spec.x == torch.bfloat16
        self.n = fields.integer(f"{side}.n")
        self.count = self.n.to_float()
        self.eps, self.offset = fields.number("eps"), fields.number("weight_offset")
        self.total, self.settled = Cell(f, f.zeros()[0]), Cell(f, f.zeros()[0])

    def run(self, begin: Int, end: Int) -> None:
        """All rows of a range of tokens."""
        f, fields, spec = self.f, self.fields, self.spec
        heads = fields.integer(f"{self.side}.heads")
        with f.loop(begin, end) as token:
            source = fields.token(self.side, token, spec.x.itemsize)
            target = None if spec.out is None else fields.token(f"{self.side}_out", token, spec.out.itemsize)
            stats = fields.token("stats", token, 4) + 4 * self.column if "stats" in fields else None
            angles = self.angles(token) if spec.rope is not None else None
            with f.loop(f.index(0), heads) as head:
                x = source + head * fields.integer(f"{self.side}.step") * spec.x.itemsize
                v = (
                    load_scalar(f, torch.float32, stats)
                    if spec.stage == "apply" and stats is not None
                    else self.mean(x)
                )
                if target is None:
                    assert stats is not None
                    store_scalar(f, torch.float32, v, stats)
                elif spec.out is not None:
                    out = target + head * fields.integer(f"{self.side}_out.step") * spec.out.itemsize
                    self.write(x, out, self.reciprocal_root(v + self.eps), angles)

    def mean(self, x: Int) -> Float:
        """The mean of a row's squares, or their sum where that is what is wanted."""
        f = self.f
        for cell in (self.total, self.settled):
            cell.set(f.zeros()[0])

        def body(at: Int, mask: Bool | None) -> None:
            if mask is None:
                for line in range(0, LANES * self.spec.x.itemsize, _LINE):
                    f.prefetch(x + at * self.spec.x.itemsize + (_AHEAD + line))
            h = self.load(self.spec.x, x, at, mask)
            self.total.set(h.fma(h, self.total.get()))
            with f.when(((at + LANES) & (_SETTLE - 1)).eq(0)):
                self.settled.set(self.settled.get() + self.total.get())
                self.total.set(f.zeros()[0])

        each_block(f, f.index(0), self.n, body)
        total: Float = (self.settled.get() + self.total.get()).sum_lanes()
        return total if self.spec.stage == "sums" else total / self.count

    def reciprocal_root(self, v: Float) -> Float:
        """``1/sqrt(v)``; NaN when v is not finite, 0 unless it is above 0."""
        rs = (v > 0.0).where(v.number(1.0) / v.sqrt(), 0.0)
        return is_finite(v).where(rs, v.number(float("nan")))

    def load(self, dtype: torch.dtype, base: Int, at: Int, mask: Bool | None) -> Float:
        """A block of columns."""
        return load_row(self.f, dtype, base + at * dtype.itemsize, mask, self.paired)

    def normed(self, x: Int, at: Int, mask: Bool | None, rs: Float) -> Float:
        """A block of the norm, before it is rotated and stored."""
        spec = self.spec
        gamma = spec.gamma if self.side == "q" else spec.gamma_k
        assert gamma is not None
        h = self.load(spec.x, x, at, mask)
        g = self.load(gamma, self.fields.integer(f"gamma_{self.side}"), at, mask) + self.offset
        if spec.rounding == "once":
            return h * rs * g
        return round_to(spec.x, round_to(spec.x, h * rs) * g)

    def write(self, x: Int, out: Int, rs: Float, angles: Int | None) -> None:
        """Store a row: as it is normed, or head by head through memory of the thread's own, rotated."""
        f, dtype = self.f, self.spec.out
        assert dtype is not None
        if angles is None or self.spec.rope is None:

            def body(at: Int, mask: Bool | None) -> None:
                store_row(f, dtype, self.normed(x, at, mask, rs), out + at * dtype.itemsize, mask, self.paired)

            each_block(f, f.index(0), self.n, body)
            return
        head_dim, dim = self.spec.rope.head_dim, self.spec.rope.dim
        with f.loop(f.index(0), self.n, head_dim) as begin:

            def keep(at: Int, mask: Bool | None) -> None:
                value = self.normed(x, begin + at, mask, rs)
                store_row(f, torch.float32, value, self.kept + at * 4, mask, self.paired)

            def copy(at: Int, mask: Bool | None) -> None:
                value = load_row(f, torch.float32, self.kept + at * 4, mask, False)
                store_row(f, dtype, value, out + (begin + at) * dtype.itemsize, mask, False)

            each_block(f, f.index(0), f.index(head_dim), keep)
            self.turn(angles, out + begin * dtype.itemsize)
            each_block(f, f.index(dim), f.index(head_dim), copy)

    # --- rotation ---

    def angles(self, token: Int) -> Int:
        """Where the cosines and sines of a token's position begin; positions outside take the nearest row."""
        f, fields, dtype = self.f, self.fields, _positions(self.spec)
        if dtype is None:
            sequence = fields.integer("sequence")
            position = token - token // sequence * sequence
        else:
            narrow = dtype == torch.int32
            raw = f.load(fields.token("positions", token, dtype.itemsize), I32 if narrow else I64, lanes=0)
            position = Int(f.builder, f.builder.sext(raw, I64) if narrow else raw)
            position = (position >> 63).eq(1).where(f.index(0), position)
        limit: Int = position.min(fields.integer("limit") - 1)
        return fields.integer("freqs") + limit * fields.integer("freqs.stride") * 4

    def turn(self, angles: Int, out: Int) -> None:
        """Rotate the pairs of the head that was kept, 32 at a time and the rest one by one."""
        rope, dtype, f = self.spec.rope, self.spec.out, self.f
        assert rope is not None and dtype is not None
        pairs = rope.dim // 2
        half = rope.style == "half"
        whole = pairs - pairs % LANES

        def vector(address: Int) -> Float:
            return Float(f.builder, f.load(address, F32))

        def two(address: Int) -> tuple[Float, Float]:
            """Every other number of 64, and those between."""
            low, high = vector(address), vector(address + 4 * LANES)
            return low.shuffle(high, _EVEN), low.shuffle(high, _ODD)

        with f.loop(f.index(0), f.index(whole), LANES) as i:
            cosine, sine = two(angles + i * 8)
            a, b = (vector(self.kept + i * 4), vector(self.kept + (i + pairs) * 4)) if half else two(self.kept + i * 8)
            a, b = a.fma(cosine, -(b * sine)), b.fma(cosine, a * sine)
            first, second = (i, i + pairs) if half else (i * 2, i * 2 + LANES)
            if not half:
                a, b = a.shuffle(b, _LOW), a.shuffle(b, _HIGH)
            store_row(f, dtype, a, out + first * dtype.itemsize, None, False)
            store_row(f, dtype, b, out + second * dtype.itemsize, None, False)
        with f.loop(f.index(whole), f.index(pairs)) as i:
            cosine, sine = (load_scalar(f, torch.float32, angles + i * 8 + 4 * part) for part in (0, 1))
            first, second = (i, i + pairs) if half else (i * 2, i * 2 + 1)
            a, b = (load_scalar(f, torch.float32, self.kept + at * 4) for at in (first, second))
            a, b = a.fma(cosine, -(b * sine)), b.fma(cosine, a * sine)
            store_scalar(f, dtype, a, out + first * dtype.itemsize)
            store_scalar(f, dtype, b, out + second * dtype.itemsize)


def build(spec: QkSpec) -> str:
    """The LLVM module of ``spec``, two functions of the argument block: ``serial`` does everything, ``parallel`` is called
    on each thread of a team and takes chunks of tokens until none is left.
    """
    module = ir.Module(name="onepass")
    worker = Function(module, "tokens_", 4, private=True)
    block, begin, end, kept = worker.parameters
    fields = _Block(worker, spec, block)
    for side in SIDES:
        _Side(worker, spec, fields, side, kept).run(begin, end)
    worker.builder.ret_void()
    _serial(module, spec, worker)
    _parallel(module, spec, worker)
    return str(module)


def _kept(fields: _Block, thread: Int) -> Int:
    """Where a thread keeps a head."""
    return fields.integer("scratch") + thread * fields.integer("room") * 4 if "scratch" in fields else thread


def _serial(module: Any, spec: QkSpec, worker: Function) -> None:
    f = Function(module, "serial", 1)
    block, zero = f.parameters[0], f.index(0)
    fields = _Block(f, spec, block)
    f.builder.call(worker.function, [block.ir, zero.ir, fields.integer("tokens").ir, _kept(fields, zero).ir])
    f.builder.ret_void()


def _parallel(module: Any, spec: QkSpec, worker: Function) -> None:
    """Every thread of a team runs this on the same block, which counts threads and the tokens already taken."""
    f = Function(module, "parallel", 1)
    block, builder = f.parameters[0], f.builder
    fields = _Block(f, spec, block)
    tokens, chunk = fields.integer("tokens"), fields.integer("chunk")
    kept = _kept(fields, fields.count("threads", f.index(1)))
    take, work, done = (builder.append_basic_block(name) for name in ("take", "work", "done"))
    builder.branch(take)
    builder.position_at_end(take)
    first = fields.count("next", chunk)
    builder.cbranch((first < tokens).ir, work, done)
    builder.position_at_end(work)
    builder.call(worker.function, [block.ir, first.ir, (first + chunk).min(tokens).ir, kept.ir])
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
