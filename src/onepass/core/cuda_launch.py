"""A CUDA kernel as C launches it: its parameters as 64-bit words, without Triton's launcher.

Triton's launcher parses every argument of every call. `cuLaunchKernelEx` takes prepared words, of which
only addresses change between calls that are alike.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch

SIZES: Final = {"i32": ".u32", "i64": ".u64", "fp32": ".f32"}
SCRATCH: Final = 2
"""Triton appends two addresses of scratch memory to every kernel's arguments."""


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


def fail(error: int) -> None:
    """Raise for a launch that CUDA rejected."""
    raise RuntimeError(f"a kernel could not be launched: CUDA error {error}, {_message(error)}")


def _word(kind: str, value: float | None) -> int:
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
    parameters = re.findall(r"\.param\s+(\.\w+)", entry[1]) if entry is not None else None
    plain = compiled.metadata.num_ctas == 1 and not compiled.metadata.launch_cooperative_grid
    if parameters != expected or not plain or torch.version.hip or driver() is None:
        return None
    return Direct(compiled.function, kinds, warps, compiled.metadata.shared, pdl, device)
