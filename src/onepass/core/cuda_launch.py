"""A recorded launch without Triton's launcher, which parses every argument of every call.

It calls CUDA's own function on prepared arguments, of which only addresses change. CUDA reads the
arguments before the call returns, but other Python threads may run meanwhile. So each launch borrows
a set of arguments that is not in use and then returns it.
"""

from __future__ import annotations

import ctypes
import linecache
import re
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import torch

SIZES: Final = {"i32": ".u32", "i64": ".u64", "fp32": ".f32"}
SCRATCH: Final = 2
"""Triton appends two addresses of scratch memory to every kernel's arguments."""
_SERIALIZATION: Final = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"""

_NO_CONTEXT: Final = 201
"""CUDA_ERROR_INVALID_CONTEXT"""

Prepared = Callable[..., None]
"""``launch(*addresses)``"""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def driver() -> Any:
    """The CUDA driver that torch has loaded; None if there is none, or if it lacks this launch function."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        _ = library.cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    return library


class Direct:
    """A loaded CUDA kernel whose runtime arguments have these ``kinds``, in order."""

    def __init__(self, function: int, kinds: Sequence[str], warps: int, shared: int, pdl: bool, device: int) -> None:
        self._function = ctypes.c_void_p(function)
        self._kinds = tuple(kinds)
        self._shape = (32 * warps, shared, pdl)
        self._device = device

    def step(self, grid: int, values: Sequence[Any]) -> tuple[tuple[Any, ...], bytes]:
        """The launch as the C path makes it: function, grid and configuration, and the words of its arguments."""
        words = [_word(kind, value) for kind, value in zip(self._kinds, values, strict=True)] + [0] * SCRATCH
        head = (self._function.value, grid, *self._shape, self._device)
        return head, struct.pack(f"<{len(words)}Q", *words)

    def prepare(self, grid: int, values: Sequence[Any], changing: Sequence[int], otherwise: Prepared) -> Prepared:
        """Return ``launch(*addresses)``: the kernel on ``values``, with those at indices ``changing`` replaced.

        In a thread that has not used CUDA yet the launch fails, because there is no context. Then
        ``otherwise``, Triton's launcher, creates one and launches.
        """
        words = [_word(kind, value) for kind, value in zip(self._kinds, values, strict=True)] + [0] * SCRATCH
        launch = driver().cuLaunchKernelEx
        device = self._device

        def elsewhere(*arguments: Any) -> int:
            with torch.cuda.device(device):
                return int(launch(*arguments))

        lay_out = partial(self._lay_out, grid, words)
        return _writer(tuple(changing))(launch, elsewhere, otherwise, self._function, device, lay_out)

    def _lay_out(self, grid: int, words: Sequence[int]) -> tuple[Any, ...]:
        """Arguments of one launch: their 64-bit words, the stream's word, what CUDA receives, and
        objects to keep alive.
        """
        slots = (ctypes.c_uint64 * len(words))(*words)
        first = ctypes.addressof(slots)
        pointers = (ctypes.c_void_p * len(words))(*(first + 8 * i for i in range(len(words))))
        threads, shared, pdl = self._shape
        attribute = _Attribute(id=_SERIALIZATION, value=1)
        config = _Config(
            grid, 1, 1, threads, 1, 1, shared, None, ctypes.pointer(attribute) if pdl else None, 1 if pdl else 0
        )
        stream = memoryview(config).cast("B")[_Config.stream.offset :][:8].cast("Q")
        return memoryview(slots).cast("B").cast("Q"), stream, ctypes.byref(config), pointers, (slots, config, attribute)


@cache
def _writer(changing: tuple[int, ...]) -> Callable[..., Prepared]:
    """Straight-line code of a launch in which the arguments at these indices change."""
    names = [f"a{i}" for i in range(len(changing))]
    code = f"""
def make(launch, elsewhere, otherwise, function, device, lay_out):
    free = []
    def run({", ".join(names)}):
        try:
            arguments = free.pop()
        except IndexError:
            arguments = lay_out()
        words, stream, config, pointers, _ = arguments
        {"; ".join(f"words[{index}] = {name}" for index, name in zip(changing, names, strict=True)) or "pass"}
        stream[0] = current_stream(device)
        error = (launch if current_device() == device else elsewhere)(config, function, pointers, None)
        free.append(arguments)
        if error == {_NO_CONTEXT}:
            otherwise({", ".join(names)})
        elif error:
            fail(error)
    return run
"""
    scope: dict[str, Any] = {
        "current_stream": torch._C._cuda_getCurrentRawStream,
        "current_device": torch._C._cuda_getDevice,
        "fail": fail,
    }
    filename = f"<onepass cuda launch {changing}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(True), filename)
    exec(compile(code, filename, "exec"), scope)
    make: Callable[..., Prepared] = scope["make"]
    return make


def fail(error: int) -> None:
    """Raise for a launch that CUDA rejected."""
    raise RuntimeError(f"a kernel could not be launched: CUDA error {error}, {_message(error)}")


def _word(kind: str, value: Any) -> int:
    """An argument as the eight bytes that CUDA reads."""
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value or 0) & (0xFFFFFFFF if kind == "i32" else 0xFFFFFFFFFFFFFFFF)


def _message(error: int) -> str:
    text = ctypes.c_char_p()
    driver().cuGetErrorString(error, ctypes.byref(text))
    return (text.value or b"unknown").decode()


def direct(compiled: Any, kinds: Sequence[str], warps: int, pdl: bool, device: int) -> Direct | None:
    """The kernel for direct launches, if its parameters are the expected ones; otherwise None."""
    ptx = compiled.asm.get("ptx", "")
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)
    expected = [".u64" if kind.startswith("*") else SIZES.get(kind, "?") for kind in kinds] + [".u64"] * SCRATCH
    found = re.findall(r"\.param\s+(\.\w+)", entry[1]) if entry is not None else None
    plain = compiled.metadata.num_ctas == 1 and not compiled.metadata.launch_cooperative_grid
    if found != expected or not plain or torch.version.hip or driver() is None:
        return None
    return Direct(compiled.function, kinds, warps, compiled.metadata.shared, pdl, device)
