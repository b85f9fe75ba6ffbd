"""Python operators and functions that emit LLVM instructions: the language that the kernels are written in.

A kernel is ordinary Python that runs once, when the kernel is built. `Float`, `Int` and `Bool` stand for values that
the kernel will compute: a scalar, or a vector of `LANES` lanes. Each operation on them appends one IEEE instruction to
the function being built, without fast-math flags, so a result depends only on the expression as written. LLVM splits
the wide vectors into the registers that the CPU has. A `Function` has arguments, control flow, local variables and
memory accesses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self, TypeVar

from llvmlite import ir

from ..sizes import BLOCK

LANES: Final = BLOCK
"""Lanes of a vector: two 512-bit or four 256-bit registers of float32."""

F32: Final = ir.FloatType()
F16: Final = ir.HalfType()
I1: Final = ir.IntType(1)
I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)

V = TypeVar("V", bound="Value")
Number = int | float


def type_of(element: ir.Type, lanes: int) -> Any:
    """The type of ``lanes`` elements; the element type itself for 0."""
    return ir.VectorType(element, lanes) if lanes else element


def constant(type_: ir.Type, value: Number) -> Any:
    """``value`` in ``type_``, in every lane of a vector."""
    element = type_.element if isinstance(type_, ir.VectorType) else type_
    if isinstance(element, ir.IntType):
        text = str(int(value))
    else:  # LLVM writes a float32 constant as the float64 bits of the same number
        single = struct.unpack("<f", struct.pack("<f", value))[0]
        text = f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016x}"
    constant = ir.FormattedConstant(element, f"splat ({element} {text})" if element is not type_ else text)
    constant.type = type_
    return constant


class Value:
    """A value of the kernel: its builder and its LLVM value."""

    __slots__ = ("builder", "ir")

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder = builder
        self.ir = value

    @property
    def lanes(self) -> int:
        """Lanes of a vector; 0 for a scalar."""
        return int(self.ir.type.count) if isinstance(self.ir.type, ir.VectorType) else 0

    @property
    def element(self) -> Any:
        """LLVM type of one lane."""
        return self.ir.type.element if self.lanes else self.ir.type

    def _new(self, value: ir.Value) -> Self:
        return type(self)(self.builder, value)

    def number(self, value: Number) -> Self:
        """The constant ``value`` in this value's type."""
        return self._new(constant(self.ir.type, value))

    def splat(self, lanes: int = LANES) -> Self:
        """This scalar in every lane of a vector."""
        if self.lanes:
            return self
        one = ir.Constant(type_of(self.element, lanes), ir.Undefined)
        one = self.builder.insert_element(one, self.ir, ir.Constant(I32, 0))
        return self._new(self.builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)))

    def shuffle(self, other: Self, lanes: Sequence[int]) -> Self:
        """The listed lanes of the concatenation of this vector and ``other``."""
        return self._new(
            self.builder.shuffle_vector(self.ir, other.ir, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))
        )

    def halves(self) -> tuple[Self, Self]:
        """The first and the second half of the lanes."""
        half = self.lanes // 2
        return self.shuffle(self, range(half)), self.shuffle(self, range(half, 2 * half))

    def lane(self, index: int) -> Self:
        """One lane as a scalar."""
        return self._new(self.builder.extract_element(self.ir, ir.Constant(I32, index)))

    def _match(self, other: Self | Number) -> tuple[Self, Self]:
        """Both operands in one shape: numbers become constants and scalars fill vectors."""
        right = other if isinstance(other, Value) else self.number(other)
        return (self, right) if self.lanes == right.lanes else (self.splat(), right.splat())

    def _call(self, intrinsic: str, *others: Self | Number) -> Self:
        """``llvm.<intrinsic>`` of values of this one type."""
        values = [self.ir, *(self._match(o)[1].ir for o in others)]
        suffix = f"v{self.lanes}" if self.lanes else ""
        kind = f"i{self.element.width}" if isinstance(self.element, ir.IntType) else "f32"
        function = declare(self.builder, f"llvm.{intrinsic}.{suffix}{kind}", self.ir.type, [v.type for v in values])
        return self._new(self.builder.call(function, values))


def _binary(instruction: str) -> Callable[[V, V | Number], V]:
    """A method that emits one instruction."""

    def emit(self: V, other: V | Number) -> V:
        left, right = self._match(other)
        return self._new(getattr(self.builder, instruction)(left.ir, right.ir))

    return emit


def _comparison(instruction: str, operator: str) -> Callable[[V, V | Number], Bool]:
    def emit(self: V, other: V | Number) -> Bool:
        left, right = self._match(other)
        return Bool(self.builder, getattr(self.builder, instruction)(operator, left.ir, right.ir))

    return emit


class Bool(Value):
    """A truth value or a mask."""

    __slots__ = ()
    __and__, __or__ = _binary("and_"), _binary("or_")

    def __invert__(self) -> Bool:
        return self._new(self.builder.not_(self.ir))

    def where(self, yes: V, no: V | Number) -> V:
        """``yes`` where true, else ``no``."""
        left, right = yes._match(no)
        mask = self.splat() if left.lanes and not self.lanes else self
        if mask.lanes and not left.lanes:
            left, right = left.splat(), right.splat()
        return left._new(self.builder.select(mask.ir, left.ir, right.ir))


class Int(Value):
    """Integers: 32-bit lanes, or a 64-bit scalar that is an index or an address.

    Comparisons, maximum, minimum, division and right shift are unsigned.
    """

    __slots__ = ()
    __add__, __sub__, __mul__, __floordiv__ = _binary("add"), _binary("sub"), _binary("mul"), _binary("udiv")
    __and__, __or__, __lshift__, __rshift__ = _binary("and_"), _binary("or_"), _binary("shl"), _binary("lshr")
    shift_signed = _binary("ashr")
    __lt__, __gt__ = _comparison("icmp_unsigned", "<"), _comparison("icmp_unsigned", ">")
    eq = _comparison("icmp_unsigned", "==")

    def max(self, other: Int | int) -> Int:
        """The larger."""
        return self._call("umax", other)

    def min(self, other: Int | int) -> Int:
        """The smaller."""
        return self._call("umin", other)

    def add_saturated(self, other: Int) -> Int:
        """The sum of signed integers, at most the largest."""
        return self._call("sadd.sat", other)

    def float(self) -> Float:
        """The float32 with these bits."""
        return Float(self.builder, self.builder.bitcast(self.ir, type_of(F32, self.lanes)))

    def to_float(self) -> Float:
        """The nearest float32 of a signed integer."""
        return Float(self.builder, self.builder.sitofp(self.ir, type_of(F32, self.lanes)))

    def max_lane(self) -> Int:
        """The largest lane."""
        value = self
        while value.lanes > 1:
            low, high = value.halves()
            value = low.max(high)
        return value.lane(0)


class Float(Value):
    """float32. Comparisons are false for NaN, except `ne`."""

    __slots__ = ()
    __add__, __sub__, __mul__, __truediv__ = _binary("fadd"), _binary("fsub"), _binary("fmul"), _binary("fdiv")
    __lt__, __le__ = _comparison("fcmp_ordered", "<"), _comparison("fcmp_ordered", "<=")
    __gt__, __ge__ = _comparison("fcmp_ordered", ">"), _comparison("fcmp_ordered", ">=")
    eq, ne = _comparison("fcmp_ordered", "=="), _comparison("fcmp_unordered", "!=")

    def __neg__(self) -> Float:
        return self._new(self.builder.fneg(self.ir))

    def __abs__(self) -> Float:
        return self._call("fabs")

    def fma(self, factor: Float | Number, addend: Float | Number) -> Float:
        """``self * factor + addend``, rounded once."""
        return self._call("fma", factor, addend)

    def sqrt(self) -> Float:
        """The correctly rounded square root."""
        return self._call("sqrt")

    def is_nan(self) -> Bool:
        """Whether it is NaN."""
        return self.ne(self)

    def bits(self) -> Int:
        """The 32 bits."""
        return Int(self.builder, self.builder.bitcast(self.ir, type_of(I32, self.lanes)))

    def sum_lanes(self) -> Float:
        """The sum of all lanes, always in the same order: second half onto first, until one is left."""
        value = self
        while value.lanes > 1:
            low, high = value.halves()
            value = low + high
        return value.lane(0)


def declare(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: Sequence[Any]) -> Any:
    """The declaration of an intrinsic or function, one per module."""
    module = builder.module
    if name not in module.globals:
        ir.Function(module, ir.FunctionType(result, list(arguments)), name)
    return module.globals[name]


# --- functions -------------------------------------------------------------------------------------------------------

_POINTER: Final = ir.PointerType()
_UNALIGNED: Final = ir.Constant(I32, 1)


class Module(ir.Module):  # type: ignore[misc]
    """A module under construction, and the features of the CPU that it is for."""

    def __init__(self, features: str) -> None:
        """``features`` is a list as LLVM writes it: ``+avx2,-avx512f``."""
        super().__init__(name="onepass")
        self.features = frozenset(word[1:] for word in features.split(",") if word.startswith("+"))


class Cell:
    """A local variable: set and read anywhere in the function; LLVM turns it into a register."""

    def __init__(self, function: Function, value: Value) -> None:
        self.function = function
        self.kind = type(value)
        with function.builder.goto_entry_block():
            self.slot = function.builder.alloca(value.ir.type)
        self.set(value)

    def set(self, value: Value) -> None:
        """Assign."""
        self.function.builder.store(value.ir, self.slot)

    def get(self) -> Any:
        """The current value."""
        return self.kind(self.function.builder, self.function.builder.load(self.slot, typ=self.slot.allocated_type))


class Function:
    """One function under construction: control flow, constants and memory."""

    def __init__(self, module: Module, name: str, parameters: int, private: bool = False) -> None:
        """A void function of ``parameters`` 64-bit integers or addresses."""
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * parameters), name)
        self.function.attributes.add("nounwind")
        if private:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.parameters = [Int(self.builder, a) for a in self.function.args]

    def index(self, value: int) -> Int:
        """A 64-bit constant."""
        return Int(self.builder, ir.Constant(I64, value))

    def zeros(self) -> tuple[Float, Int]:
        """A float and an integer vector of zeros."""
        numbers, integers = constant(type_of(F32, LANES), 0.0), constant(type_of(I32, LANES), 0)
        return Float(self.builder, numbers), Int(self.builder, integers)

    @contextmanager
    def loop(self, begin: Int, end: Int, step: int = 1) -> Iterator[Int]:
        """``for i in range(begin, end, step)``, signed."""
        builder = self.builder
        counter = Cell(self, begin)
        test, body, after = (builder.append_basic_block(n) for n in ("test", "body", "after"))
        builder.branch(test)
        builder.position_at_end(test)
        i: Int = counter.get()
        builder.cbranch(builder.icmp_signed("<", i.ir, end.ir), body, after)
        builder.position_at_end(body)
        yield i
        counter.set(i + step)
        builder.branch(test)
        builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Bool) -> Iterator[None]:
        """``if condition:``."""
        with self.builder.if_then(condition.ir):
            yield

    def choice(self, condition: Bool) -> Any:
        """``with f.choice(c) as (yes, no): with yes: ...; with no: ...``."""
        return self.builder.if_else(condition.ir)

    def first_lanes(self, count: Int, lanes: int = LANES) -> Bool:
        """A mask of the first ``count`` of ``lanes`` lanes, at most all of them."""
        ones = self.builder.not_(self.builder.shl(ir.Constant(I64, -1), count.ir))
        bits = self.builder.trunc(ones, ir.IntType(lanes))
        return Bool(self.builder, self.builder.bitcast(bits, ir.VectorType(I1, lanes)))

    def allocate(self, size: int) -> Int:
        """Stack memory of ``size`` bytes, aligned to a cache line."""
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(ir.ArrayType(I8, size))
            memory.align = 64
            return Int(self.builder, self.builder.ptrtoint(memory, I64))

    def call(self, function: Function, *arguments: Int) -> None:
        """Call another function of the module."""
        self.builder.call(function.function, [a.ir for a in arguments])

    def pointer(self, address: Int) -> Any:
        """An address as an LLVM pointer."""
        return self.builder.inttoptr(address.ir, _POINTER)

    def load(self, address: Int, element: ir.Type, mask: Bool | None = None, lanes: int = LANES) -> Any:
        """``lanes`` elements from an address of any alignment; lanes outside ``mask`` are zero and not touched."""
        type_ = type_of(element, lanes)
        if mask is None:
            return self.builder.load(self.pointer(address), align=1, typ=type_)
        name = f"llvm.masked.load.v{lanes}{_short(element)}.p0"
        function = declare(self.builder, name, type_, [_POINTER, I32, mask.ir.type, type_])
        return self.builder.call(function, [self.pointer(address), _UNALIGNED, mask.ir, constant(type_, 0)])

    def floats(self, address: Int, lanes: int = LANES) -> Float:
        """A vector of float32."""
        return Float(self.builder, self.load(address, F32, lanes=lanes))

    def store(self, value: ir.Value, address: Int, mask: Bool | None = None, bypass: Bool | None = None) -> None:
        """Write an LLVM value to an address of any alignment; lanes outside ``mask`` are not touched.

        Where ``bypass`` is true the address must be that of a cache line, and whole vectors bypass the caches.
        """
        if mask is None and bypass is not None:
            with self.choice(bypass) as (yes, no):
                with yes:
                    stored = self.builder.store(value, self.pointer(address), align=64)
                    stored.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(I32, 1)]))
                with no:
                    self.store(value, address)
            return
        if mask is None:
            self.builder.store(value, self.pointer(address), align=1)
            return
        name = f"llvm.masked.store.v{value.type.count}{_short(value.type.element)}.p0"
        function = declare(self.builder, name, ir.VoidType(), [value.type, _POINTER, I32, mask.ir.type])
        self.builder.call(function, [value, self.pointer(address), _UNALIGNED, mask.ir])

    def prefetch(self, address: Int, level: int = 1) -> None:
        """Prefetch the cache line at an address, which need not be valid, into cache ``level`` and those beyond it."""
        function = declare(self.builder, "llvm.prefetch.p0", ir.VoidType(), [_POINTER, I32, I32, I32])
        hint = [ir.Constant(I32, v) for v in (0, 4 - level, 1)]  # to read; the level; data
        self.builder.call(function, [self.pointer(address), *hint])


class Arguments:
    """The fields of the argument block, which is the function's first parameter."""

    def __init__(self, f: Function, offsets: dict[str, int]) -> None:
        self.f = f
        self.block = f.parameters[0]
        self.offsets = offsets

    def __contains__(self, name: str) -> bool:
        return name in self.offsets

    def integer(self, name: str, index: int = 0) -> Int:
        """A 64-bit field, or one of several under one name."""
        return Int(self.f.builder, self.f.load(self.block + (self.offsets[name] + 8 * index), I64, lanes=0))

    def number(self, name: str) -> Float:
        """A float64 field, rounded to float32."""
        raw = self.f.load(self.block + self.offsets[name], ir.DoubleType(), lanes=0)
        return Float(self.f.builder, self.f.builder.fptrunc(raw, F32))

    def fetch_add(self, name: str, by: Int) -> Int:
        """Add to a 64-bit field that threads share; returns the value before."""
        counter = self.f.pointer(self.block + self.offsets[name])
        return Int(self.f.builder, self.f.builder.atomic_rmw("add", counter, by.ir, "monotonic"))

    def counter(self, name: str, index: Int) -> Any:
        """The address of one of several 64-bit fields that threads share."""
        return self.f.pointer(self.block + self.offsets[name] + index * 8)

    def count(self, name: str, index: Int) -> None:
        """Count up one of several fields that threads share, after everything that was written before."""
        self.f.builder.atomic_rmw("add", self.counter(name, index), ir.Constant(I64, 1), "release")


def _short(element: ir.Type) -> str:
    """An element type as written in the names of intrinsics."""
    return f"i{element.width}" if isinstance(element, ir.IntType) else "f16" if element == F16 else "f32"
