"""MLA's cache write: find the token's place, turn its heads, norm its latent, write its entry; for one `MlaSpec`.

A thread takes tokens. A token's cosines and sines are put aside as float32 once, for all of its heads; so is its entry,
whose scale may need all of it before anything is stored. A pair of columns is read before either is written, so the
output of q may be q itself. No step depends on another token.

Index tensors shape no code: it asks which there are and how wide, once a token, so that one kernel serves them all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import torch
from llvmlite import ir

from ..formats import FP8_FORMATS, ScaleRule
from ..specs.mla_cache import MAX_LATENT, MAX_ROPE, MlaCall, MlaRows, MlaSpec
from .emit.bits import (
    encode,
    is_finite,
    load_row,
    load_scalar,
    magnitude,
    make_scale,
    round_to,
    store_codes,
    store_row,
    store_scalar,
    with_nan,
)
from .emit.fields import Fields
from .emit.function import Cell, Function
from .emit.vec import F32, I32, I64, LANES, Bool, Float, Int
from .rms_norm_kernels import _LINE, each_block

INDICES: Final = ("offsets", "lengths", "table", "slots", "positions")
_TENSORS: Final = ("q", "kv", "gamma", "freqs", *INDICES, "kv_scale", "q_out", "blocks", "token_scale")
_ALWAYS: Final = ("q", "kv", "gamma", "q_out", "blocks")
_WIDTHS: Final = {torch.int64: 0, torch.int32: 1, torch.uint32: 2}
_NUMBERS: Final = ("eps", "weight_offset")
_HALF: Final = LANES // 2
_AHEAD: Final = 16
"""Heads between one that is read and one that is prefetched: of 64 columns of bfloat16, 2 KiB."""

_USUAL: Final = 64
"""Columns that turn in DeepSeek's and Kimi's models."""

Emit = Callable[[Int, Float, "Bool | None", bool], None]
"""Takes the values of a block: its first column, mask, and whether the values are paired (see `_bits`)."""


def _fields() -> dict[str, str]:
    """Each 64-bit field of the argument block and the Python expression over `launch`'s arguments that gives it."""
    fields = {"next": "0", "chunk": "chunk", "steps": "rows.requests.bit_length()"}
    fields |= dict.fromkeys(MlaRows._fields, "") | {MlaRows._fields[0]: "*rows"}
    for name in _TENSORS:
        fields[f"{name}.at"] = f"{name}.data_ptr()" if name in _ALWAYS else f"{name} is not None and {name}.data_ptr()"
    return fields | {f"{name}.width": f"{name} is not None and widths[{name}.dtype]" for name in INDICES}


_OFFSETS: Final = {name: 8 * at for at, name in enumerate((*_fields(), *_NUMBERS))}
"""Byte offset of each field."""


def packer() -> Callable[..., bytes]:
    """A function of the chunk size and `launch`'s arguments after the spec: the block."""
    pack = struct.Struct(f"={len(_fields())}q{len(_NUMBERS)}d").pack
    arguments = ", ".join([value for value in _fields().values() if value] + [*_NUMBERS])
    names = ", ".join(MlaCall._fields)
    lines = ("def packed(chunk, call):", f"    {names} = call", f"    return pack({arguments})")
    scope: dict[str, Any] = {"pack": pack, "widths": _WIDTHS}
    exec("\n".join(lines), scope)
    function: Callable[..., bytes] = scope["packed"]
    return function


class _Block(Fields):
    """The argument block, the same for every spec."""

    def __init__(self, f: Function, block: Int) -> None:
        self.f = f
        self.block = block
        self.offsets = _OFFSETS


class _Tokens:
    """Emits the work on tokens."""

    def __init__(self, f: Function, spec: MlaSpec, fields: _Block) -> None:
        self.f, self.spec, self.fields = f, spec, fields
        self.n = {name: fields.integer(name) for name in MlaRows._fields}
        self.columns = self.n["latent"] + self.n["rope"]
        self.cosines = f.room(4 * (MAX_ROPE // 2 + LANES))
        self.sines = f.room(4 * (MAX_ROPE // 2 + LANES))
        self.kept = f.room(4 * (MAX_LATENT + MAX_ROPE + LANES))
        zero = f.index(0)
        self.low, self.high, self.position, self.there, self.page, self.place = (Cell(f, zero) for _ in range(6))
        self.total, self.top = (Cell(f, value) for value in f.zeros())

    def run(self, begin: Int, end: Int) -> None:
        """All tokens of a range."""
        f, spec, n = self.f, self.spec, self.n
        with f.loop(begin, end) as token:
            self.find(token)
            self.keep_angles()
            self.turn_heads(token)
            with f.when(self.there.get().eq(1)):
                kv = self.address("kv", token * n["kv_token"], spec.kv)
                self.keep_latent(kv)
                self.keep_rope(kv)
                self.write_entry()

    def address(self, name: str, offset: Int, dtype: torch.dtype) -> Int:
        """Of an element."""
        return self.fields.integer(f"{name}.at") + offset * dtype.itemsize

    # --- places ---

    def index(self, name: str, at: Int) -> Int:
        """An element of an index tensor, whatever its dtype."""
        f, builder = self.f, self.f.builder
        base, width = self.fields.integer(f"{name}.at"), self.fields.integer(f"{name}.width")
        found = Cell(f, f.index(0))
        with f.choice(width.eq(0)) as (wide, narrow):
            with wide:
                found.set(Int(builder, f.load(base + at * 8, I64, lanes=0)))
            with narrow:
                raw = f.load(base + at * 4, I32, lanes=0)
                signed, plain = Int(builder, builder.sext(raw, I64)), Int(builder, builder.zext(raw, I64))
                found.set(width.eq(1).where(signed, plain))
        value: Int = found.get()
        return value

    def at_most(self, a: Int, b: Int) -> Bool:
        """``a <= b``, signed."""
        return Bool(self.f.builder, self.f.builder.icmp_signed("<=", a.ir, b.ir))

    def given(self, name: str) -> Bool:
        """Whether there is such a tensor."""
        return ~self.fields.integer(f"{name}.at").eq(0)

    def find(self, token: Int) -> None:
        """The token's position, and the page and place of its entry if it has one."""
        f, n = self.f, self.n
        self.position.set(f.index(0))
        self.there.set(f.index(0))
        with f.when(self.given("offsets")):
            self.find_request(token)
        with f.when(self.given("slots")):
            slot = self.index("slots", token)
            with f.when(slot < n["pages"] * n["page_size"]):  # unsigned: not negative either
                self.settle(slot // n["page_size"], slot)
        with f.when(self.given("positions")):
            self.position.set(self.index("positions", token))

    def settle(self, page: Int, within: Int) -> None:
        """The entry is in this page, at the place that ``within``, in entries, has there."""
        size = self.n["page_size"]
        self.there.set(self.f.index(1))
        self.page.set(page)
        self.place.set(within - within // size * size)

    def find_request(self, token: Int) -> None:
        """Of the requests that end after the token the first one, if the token is not before it."""
        f, n = self.f, self.n
        requests = n["requests"]
        self.low.set(f.index(0))
        self.high.set(requests)
        with f.loop(f.index(0), self.fields.integer("steps")):
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
                place = self.index("lengths", request) + (token - first)
                self.position.set(place)
                column = place // n["page_size"]
                inside = (place >> 63).eq(0) & (column < n["table_width"])
                with f.when(self.given("table") & inside):
                    page = self.index("table", request * n["table_row"] + column)
                    with f.when(page < n["pages"]):
                        self.settle(page, place)

    # --- rotation ---

    def keep_angles(self) -> None:
        """Put the cosines and sines of the position aside; positions outside take the nearest row."""
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

    def load(self, dtype: torch.dtype, row: Int, at: Int, mask: Bool | None, paired: bool, ahead: Int | None) -> Float:
        """A block of a row that may turn; what lies ``ahead`` bytes further is asked for."""
        address = row + at * dtype.itemsize
        if ahead is not None and mask is None:
            for line in range(0, LANES * dtype.itemsize, _LINE):
                self.f.prefetch(address + ahead + line)
        return load_row(self.f, dtype, address, mask, paired)

    def angles(self, pair: Int) -> tuple[Float, Float]:
        """Cosines and sines of the pairs that one block has the columns of, or with "half" the first columns."""
        lanes = LANES if self.spec.style == "half" else _HALF
        cosine, sine = (self.f.load(kept + pair * 4, F32, lanes=lanes) for kept in (self.cosines, self.sines))
        return Float(self.f.builder, cosine), Float(self.f.builder, sine)

    def rotate(
        self, row: Int, dtype: torch.dtype, at: Int, mask: Bool | None, angles: tuple[Float, Float], turned: Int,
        emit: Emit, ahead: Int | None,
    ) -> None:  # fmt: skip
        """Hand over a block of neighbouring pairs from column ``at`` on; with "half" of pairs, and their other columns."""
        cosine, sine = angles
        if self.spec.style == "half":
            other = at + (turned >> 1)
            a, b = (self.load(dtype, row, first, mask, False, ahead) for first in (at, other))
            emit(at, a.fma(cosine, -(b * sine)), mask, False)
            emit(other, b.fma(cosine, a * sine), mask, False)
        else:
            a, b = self.load(dtype, row, at, mask, True, ahead).halves()
            turn = a.fma(cosine, -(b * sine)).shuffle(b.fma(cosine, a * sine), range(LANES))
            emit(at, turn, mask, True)

    def turn(self, row: Int, dtype: torch.dtype, emit: Emit, ahead: Int | None = None) -> None:
        """Hand over a row of columns, the first of them rotated."""
        f, turned = self.f, self.n["turned"]
        half = self.spec.style == "half"

        def body(at: Int, mask: Bool | None) -> None:
            self.rotate(row, dtype, at, mask, self.angles(at if half else at >> 1), turned, emit, ahead)

        each_block(f, f.index(0), turned >> 1 if half else turned, body)
        each_block(
            f,
            turned,
            self.n["rope"],
            lambda at, mask: emit(at, self.load(dtype, row, at, mask, False, ahead), mask, False),
        )

    def turn_heads(self, token: Int) -> None:
        """The token's rows of q; of the commonest width in a straight line, with the angles in registers."""
        f, spec, n = self.f, self.spec, self.n
        source = self.address("q", token * n["q_token"], spec.q)
        target = self.address("q_out", token * n["out_token"], spec.q_out)
        step, out_step = n["q_head"] * spec.q.itemsize, n["out_head"] * spec.q_out.itemsize
        usual, ahead = f.index(_USUAL), step * _AHEAD
        half = spec.style == "half"

        def emitter(out: Int) -> Emit:
            def emit(at: Int, value: Float, mask: Bool | None, paired: bool) -> None:
                if spec.rounding == "reference" and spec.q_out != spec.q:
                    value = round_to(spec.q, value)
                self.store(spec.q_out, value, out + at * spec.q_out.itemsize, mask, paired)

            return emit

        with f.choice(n["turned"].eq(_USUAL) & n["rope"].eq(_USUAL)) as (straight, any_width):
            with straight:
                places = range(0, _USUAL // 2 if half else _USUAL, LANES)
                angles = [self.angles(f.index(at if half else at // 2)) for at in places]
                with f.loop(f.index(0), n["heads"]) as head:
                    emit = emitter(target + head * out_step)
                    for at, pairs in zip(places, angles, strict=True):
                        self.rotate(source + head * step, spec.q, f.index(at), None, pairs, usual, emit, ahead)
            with any_width, f.loop(f.index(0), n["heads"]) as head:
                self.turn(source + head * step, spec.q, emitter(target + head * out_step), ahead)

    def store(self, dtype: torch.dtype, value: Float, address: Int, mask: Bool | None, paired: bool) -> None:
        """A block of columns, rounded, or saturated to codes."""
        fmt = FP8_FORMATS.get(dtype)
        if fmt is None:
            store_row(self.f, dtype, value, address, mask, paired)
        else:
            store_codes(self.f, with_nan(fmt, encode(fmt, fmt.max, value), value), address, mask, paired)

    # --- the entry ---

    def keep(self, at: Int, value: Float, mask: Bool | None, paired: bool) -> None:
        """Put a block of the entry aside."""
        store_row(self.f, torch.float32, value, self.kept + at * 4, mask, paired)

    def keep_latent(self, x: Int) -> None:
        """Norm the latent, or the first ``normed`` columns of it: those behind them stay as they are."""
        f, spec, n = self.f, self.spec, self.n
        paired = spec.kv == torch.bfloat16
        gamma, offset = self.fields.integer("gamma.at"), self.fields.number("weight_offset")
        self.total.set(f.zeros()[0])

        def load(dtype: torch.dtype, base: Int, at: Int, mask: Bool | None) -> Float:
            return load_row(f, dtype, base + at * dtype.itemsize, mask, paired)

        def add(at: Int, mask: Bool | None) -> None:
            h = load(spec.kv, x, at, mask)
            self.total.set(h.fma(h, self.total.get()))

        each_block(f, f.index(0), n["normed"], add)
        v = self.total.get().sum_lanes() / n["normed"].to_float() + self.fields.number("eps")
        rs = is_finite(v).where((v > 0.0).where(v.number(1.0) / v.sqrt(), 0.0), v.number(float("nan")))

        def norm(at: Int, mask: Bool | None) -> None:
            h, g = load(spec.kv, x, at, mask), load(spec.gamma, gamma, at, mask) + offset
            y = h * rs * g
            if spec.rounding == "reference":
                y = round_to(spec.kv, round_to(spec.kv, h * rs) * g)
            self.keep(at, y, mask, paired)

        each_block(f, f.index(0), n["normed"], norm)
        each_block(
            f, n["normed"], n["latent"], lambda at, mask: self.keep(at, load(spec.kv, x, at, mask), mask, paired)
        )

    def keep_rope(self, kv: Int) -> None:
        """Turn the columns after the latent."""
        spec, latent = self.spec, self.n["latent"]

        def emit(at: Int, value: Float, mask: Bool | None, paired: bool) -> None:
            if spec.rounding == "reference":
                value = round_to(spec.kv, value)
            self.keep(latent + at, value, mask, paired)

        self.turn(kv + latent * spec.kv.itemsize, spec.kv, emit)

    def write_entry(self) -> None:
        """Scale and store what was kept."""
        f, spec, n = self.f, self.spec, self.n
        page, place = self.page.get(), self.place.get()
        out = self.address("blocks", page * n["block_page"] + place * n["block_entry"], spec.cache)
        scale = None
        if spec.scale == "tensor":
            scale = load_scalar(f, torch.float32, self.fields.integer("kv_scale.at"))
        elif spec.scale == "token":
            scale = self.make_scale()
            at = page * n["scale_page"] + place * n["scale_entry"]
            store_scalar(f, torch.float32, scale, self.address("token_scale", at, torch.float32))

        def body(at: Int, mask: Bool | None) -> None:
            value = self.kept_block(at, mask)
            if scale is not None:  # a quotient beyond float32 saturates as the largest does
                zero = scale.eq(0.0) & value.eq(value)
                value = zero.where(value.number(0.0), value / scale)
            self.store(spec.cache, value, out + at * spec.cache.itemsize, mask, False)

        each_block(f, f.index(0), self.columns, body)

    def kept_block(self, at: Int, mask: Bool | None) -> Float:
        """A block of what was kept."""
        return load_row(self.f, torch.float32, self.kept + at * 4, mask, False)

    def make_scale(self) -> Float:
        """The entry's own scale."""
        f = self.f
        self.top.set(f.zeros()[1])

        def body(at: Int, mask: Bool | None) -> None:
            self.top.set(self.top.get().max(magnitude(self.kept_block(at, mask))))

        each_block(f, f.index(0), self.columns, body)
        amax = self.top.get().max_lane().float()
        rule = ScaleRule("row", torch.float32)
        return make_scale(rule, FP8_FORMATS[self.spec.cache].max, amax, amax.number(float("inf")))


def build(spec: MlaSpec) -> str:
    """The LLVM module of ``spec``, two functions of the argument block: ``serial`` does everything, ``parallel`` is called
    on each thread of a team and takes chunks of tokens until none is left.
    """
    module = ir.Module(name="onepass")
    worker = Function(module, "tokens_", 3, private=True)
    block, begin, end = worker.parameters
    _Tokens(worker, spec, _Block(worker, block)).run(begin, end)
    worker.builder.ret_void()
    _serial(module, worker)
    _parallel(module, worker)
    return str(module)


def _serial(module: Any, worker: Function) -> None:
    f = Function(module, "serial", 1)
    block = f.parameters[0]
    f.call(worker, block, f.index(0), _Block(f, block).integer("tokens"))
    f.builder.ret_void()


def _parallel(module: Any, worker: Function) -> None:
    """Every thread of a team runs this on the same block, which counts the tokens already taken."""
    f = Function(module, "parallel", 1)
    block, builder = f.parameters[0], f.builder
    fields = _Block(f, block)
    tokens, chunk = fields.integer("tokens"), fields.integer("chunk")
    take, work, done = (builder.append_basic_block(name) for name in ("take", "work", "done"))
    builder.branch(take)
    builder.position_at_end(take)
    first = fields.count("next", chunk)
    builder.cbranch((first < tokens).ir, work, done)
    builder.position_at_end(work)
    f.call(worker, block, first, (first + chunk).min(tokens))
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
