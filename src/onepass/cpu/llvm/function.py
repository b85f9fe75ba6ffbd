"""A function under construction: its arguments, control flow, local variables and memory accesses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

from .vec import F16, F32, I1, I8, I32, I64, LANES, Bool, Float, Int, Value, constant, declare, type_of

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
