"""Running the kernels of all ops: argument blocks, compiled kernels, threads and scratch memory.

An op supplies the layout of its argument block and a function that packs a call into one, a function that decides on
threads and scratch memory, and a builder of LLVM modules. The spec's kernel runs on the block: serially when there is
little work, else on torch's threads.

An argument block is 64-bit integers (addresses, counts and strides in elements), then float64 numbers. It has only the
fields that the spec's kernel reads, which keeps packing cheap.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..core import recording
from ..core.backend import PACKAGE, SomeCall
from . import compile as compiler
from . import threads

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SERIAL_BELOW: Final = 131072
"""Elements below which waking other threads costs more than it saves: with two threads, 64 rows of 4096 gain a little
and 16 rows lose."""
CHUNK: Final = 16384
"""Minimum number of elements that a thread takes at a time: enough to be worth the synchronization."""
CHUNKS_PER_THREAD: Final = 16
"""Few chunks are fast, because the first row of a chunk is read while nothing is computed. More chunks let a delayed
thread leave its rows to the others."""

_ENTRY: Final = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def kernels_of(spec: object) -> CpuKernels[Any, Any, Any]:
    """The kernels of the op that ``spec`` belongs to."""
    package = type(spec).__module__.rpartition(".")[0]
    kernels: CpuKernels[Any, Any, Any] = import_module(f"{package}.cpu").KERNELS
    return kernels


def ir_of(spec: object, features: str | None = None) -> str:
    """The LLVM IR of ``spec`` for this CPU, or for one with the given LLVM feature list."""
    return kernels_of(spec).build(spec, compiler.host()[1] if features is None else features)


# --- argument blocks -----------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """An integer field: ``words`` under one name. ``address``: it is that of a tensor or of scratch memory."""

    name: str
    words: int = 1
    address: bool = False


def integers(*names: str) -> list[Field]:
    """Fields of one word each."""
    return [Field(name) for name in names]


def addresses(*names: str) -> list[Field]:
    """Fields of one address each."""
    return [Field(name, address=True) for name in names]


class Layout:
    """The argument block of a spec: its integer fields, then its float64 fields."""

    def __init__(self, fields: Sequence[Field], floats: Sequence[str]) -> None:
        self.offsets: dict[str, int] = {}
        """The byte offset of each field."""
        self.addresses: tuple[int, ...] = ()
        """The words that are addresses."""
        end = 0
        for field in fields:
            self.offsets[field.name] = 8 * end
            if field.address:
                self.addresses += (end,)
            end += field.words
        self.offsets |= {name: 8 * (end + i) for i, name in enumerate(floats)}
        self.struct = struct.Struct(f"={end}q{len(floats)}d")
        self.words = struct.Struct(f"={end + len(floats)}q")


def address(tensor: Tensor | None) -> int:
    """The address of a tensor; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()


# --- work for threads ----------------------------------------------------------------------------------------------


def share(rows: int, columns: int) -> tuple[int, int]:
    """The number of threads for these rows, and the number of rows that a thread takes at a time."""
    if rows <= 1 or rows * columns < SERIAL_BELOW:
        return 1, 1
    count = torch.get_num_threads()
    chunk = max(1, CHUNK // columns, rows // (count * CHUNKS_PER_THREAD))
    return min(count, -(-rows // chunk)), chunk


class Scratch(threading.local):
    """Float32 memory of the calling thread, aligned to a cache line. It never shrinks."""

    size = 0
    address = 0

    def grow(self, size: int) -> None:
        """Make room for ``size`` numbers. If interrupted, there is room for none."""
        self.size = 0
        self.memory = bytearray(4 * size + 64)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.address = (start + 63) & ~63
        self.size = size


scratch = Scratch()


# --- kernels -------------------------------------------------------------------------------------------------------


class SomeWork(Protocol):
    """How a call is carried out."""

    @property
    def threads(self) -> int:
        """The number of threads."""

    @property
    def size(self) -> int:
        """Scratch memory in float32 numbers."""


class Work(NamedTuple):
    """Work whose threads take ``chunk`` rows at a time."""

    threads: int
    size: int
    chunk: int


Spec = TypeVar("Spec", bound="DataclassInstance")
Call = TypeVar("Call", bound=SomeCall[Any])
WorkOfCall = TypeVar("WorkOfCall", bound=SomeWork)


class CpuKernels(Generic[Spec, Call, WorkOfCall]):
    """The kernels of an op, defined by functions of its module ``cpu``.

    ``layout(spec)`` declares the argument block of a spec's kernel. ``work(call)`` decides on threads and scratch memory,
    and ``pack(call, work, address of scratch memory)`` returns the values of all fields in order. ``build(spec, offsets,
    features)`` of the module ``cpu_kernel`` returns an LLVM module. It has two functions of an argument block: ``serial``
    does all the work; ``parallel`` is called on each thread of a team and shares it. With ``prepares`` a third,
    ``prepare``, must be called before ``parallel``. ``writes_block``: ``serial`` writes to the argument block, of which
    each call then needs a copy. ``canonical(spec)`` is the spec whose code a spec shares.
    """

    def __init__(
        self,
        op: str,
        layout: Callable[[Spec], Layout],
        work: Callable[[Call], WorkOfCall],
        pack: Callable[[Call, WorkOfCall, int], Sequence[float]],
        *,
        prepares: bool = False,
        writes_block: bool = False,
        canonical: Callable[[Spec], Spec] = lambda spec: spec,
    ) -> None:
        self.op, self.layout, self.work, self.pack, self.canonical = op, layout, work, pack, canonical
        self.prepares, self.writes_block = prepares, writes_block
        self.symbols = ("serial", "parallel", "prepare") if prepares else ("serial", "parallel")
        """The functions of a module."""
        self.loaded: dict[Spec, Kernel] = {}

    def build(self, spec: Spec, features: str) -> str:
        """The LLVM module of ``spec``. Its builder is imported only here: most processes find all kernels on disk."""
        spec = self.canonical(spec)
        build: Callable[[Spec, Mapping[str, int], str], str] = import_module(
            f"{PACKAGE}.ops.{self.op}.cpu_kernel"
        ).build
        return build(spec, self.layout(spec).offsets, features)

    def kernel(self, spec: Spec) -> Kernel:
        """The kernel of ``spec``, from memory, from the cache directory, or compiled into both."""
        with compiler.lock:
            if spec not in self.loaded:
                shared = self.canonical(spec)
                if shared not in self.loaded:
                    code = compiler.linked(shared, lambda features: self.build(shared, features), *self.symbols)
                    self.loaded[shared] = Kernel(self, shared, code)
                self.loaded[spec] = self.loaded[shared]
            return self.loaded[spec]

    def launch(self, call: Call) -> None:
        """Run the kernel of ``call.spec``, writing the outputs that the call has."""
        kernel = self.loaded.get(call.spec) or self.kernel(call.spec)
        work = self.work(call)
        team, size = work.threads, work.size
        if size and scratch.size < size:
            scratch.grow(size)
        block = kernel.layout.struct.pack(*self.pack(call, work, scratch.address))
        if recording.tape.on:
            repeat = Repeat(kernel, block, team, size, scratch.address)
            recording.note(repeat, 1, kernel.layout.words.unpack(block))
        if team == 1:
            kernel.serial(block)
        else:
            kernel.prepare(block)
            threads.run(kernel.parallel, block, team)


class Kernel:
    """Machine code of one spec and the layout of its argument block."""

    __slots__ = ("_code", "entries", "layout", "parallel", "prepare", "serial")

    def __init__(self, kernels: CpuKernels[Spec, Call, WorkOfCall], spec: Spec, code: compiler.Code) -> None:
        self._code = code
        self.layout = kernels.layout(spec)
        prepare = code["prepare"] if kernels.prepares else 0
        self.entries = (code["serial"], prepare, code["parallel"])
        self.parallel = code["parallel"]
        self.serial: Callable[[bytes], object] = _ENTRY(code["serial"])
        self.prepare: Callable[[bytes], object] = _ENTRY(prepare) if prepare else _nothing
        if kernels.writes_block:
            serial: Callable[..., object] = self.serial
            self.serial = lambda block: serial(ctypes.create_string_buffer(block, len(block)))


class Repeat(NamedTuple):
    """A launch that was recorded."""

    kernel: Kernel
    block: bytes
    threads: int
    size: int
    scratch: int

    @property
    def addresses(self) -> tuple[int, ...]:
        """The words of the block that are addresses."""
        return self.kernel.layout.addresses

    def step(self, grid: int, arguments: Sequence[int]) -> recording.Step | None:
        """The launch as the C path makes it. Only torch's own threads can be used from there."""
        team = threads.entry() if self.threads > 1 else 0
        if self.threads > 1 and not team:
            return None
        head = (*self.kernel.entries, team, self.threads, 4 * self.size)
        return recording.Step(False, head, self.block, None, self.scratch if self.size else 0)


def _nothing(block: bytes) -> None:
    """The ``prepare`` of kernels that need none."""


def describe() -> dict[str, str]:
    """The CPU, threads and cache that the backend uses."""
    cpu, features = compiler.host()
    enabled = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
    width = 512 if "avx512f" in enabled else 256 if "avx" in enabled else 128
    return {
        "cpu": cpu,
        "vector": f"{width} bit",
        "threads": f"{torch.get_num_threads()}, {threads.describe()}",
        "cache": str(compiler.cache_directory() or "off"),
    }
