"""Compiles kernels from an explicit source, signature and attributes, with or without a GPU, and
loads them.

The launch path and the ahead-of-time path use the same `Build` and therefore the same machine code,
which `machine_hash` identifies.
"""

import hashlib
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import triton
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from ..core import native, recording
from ..errors import Unsupported
from .chip import Chip, current_chip

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*u8",
    torch.float8_e4m3fnuz: "*u8",
    torch.float8_e5m2: "*u8",
    torch.uint8: "*u8",
    torch.float8_e8m0fnu: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint32: "*u32",
}

Kinds = str | tuple["Kinds", ...]
"""The type of an argument, "constexpr", or a (named) tuple of these."""
T = TypeVar("T")

_lock = threading.RLock()
"""Held while a kernel is compiled or loaded, so that each is compiled once."""


def leaves(value: Kinds, prefix: str = "", path: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, path and value of all leaves: ``x.s0`` is field ``s0`` of parameter ``x``."""
    if not isinstance(value, tuple):
        yield prefix, path, value
        return
    names = getattr(value, "_fields", range(len(value)))
    for i, (name, item) in enumerate(zip(names, value, strict=True)):
        yield from leaves(item, f"{prefix}.{name}" if prefix else str(name), (*path, i))


def nested(shape: Kinds, values: Iterator[Any]) -> Any:
    """``values`` in the nesting of ``shape``."""
    return tuple(nested(item, values) for item in shape) if isinstance(shape, tuple) else next(values)


def flat(shape: Kinds, value: object) -> Iterator[object]:
    """The inverse of `nested`: the items of ``value`` at the leaves of ``shape``."""
    if not isinstance(shape, tuple):
        yield value
        return
    assert isinstance(value, tuple)
    for item, part in zip(shape, value, strict=True):
        yield from flat(item, part)


@dataclass(frozen=True)
class Build:
    """A kernel and everything its machine code depends on.

    ``signature`` has the `Kinds` of each parameter. ``constants`` and ``divisible`` name their leaves.
    """

    name: str
    kernel: JITFunction
    signature: tuple[tuple[str, Kinds], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[tuple[str, int], ...]
    warps: int
    pdl: bool
    registers: int = 0
    contracts: bool = True
    """Whether the compiler may fuse a product and a sum into one operation."""

    @property
    def shape(self) -> tuple[Kinds, ...]:
        """The types of all parameters, nested like the kernel's arguments."""
        return tuple(kind for _, kind in self.signature)

    def leaves(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, path and type of every argument, in order."""
        parts = (leaves(kind, name, (i,)) for i, (name, kind) in enumerate(self.signature))
        return [leaf for each in parts for leaf in each]

    def source(self) -> ASTSource:
        """What Triton compiles."""
        paths = {name: path for name, path, _ in self.leaves()}
        attributes = {paths[name]: [["tt.divisibility", by]] for name, by in self.divisible}
        constants = {paths[name]: value for name, value in self.constants}
        return ASTSource(self.kernel, dict(self.signature), constants, attributes)


def setting(build: Build, chip: Chip) -> tuple[GPUTarget, dict[str, Any]]:
    """The target and options that Triton compiles a build with."""
    options: dict[str, Any] = {"num_warps": build.warps, "enable_fp_fusion": build.contracts}
    if build.registers and chip.backend == "cuda":
        options["maxnreg"] = build.registers
    if build.pdl:
        options["launch_pdl"] = True
    return GPUTarget(chip.backend, chip.arch, chip.warp_size), options


def compile_build(build: Build, chip: Chip) -> CompiledKernel:
    """Compile without a GPU, and without line information, which contains file paths."""
    target, options = setting(build, chip)
    with _lock, triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        return triton.compile(build.source(), target=target, options=options)


def machine_hash(compiled: CompiledKernel) -> str:
    """A hash of the PTX (or AMD assembly) of a compiled kernel."""
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    return hashlib.sha256(text.encode()).hexdigest()[:24]


UNPROVEN: tuple[str, ...] = (
    "rms_norm_row post=",
    "rms_norm_long post=",
    "rms_norm_row unnormed",
    "rms_norm_long unnormed",
    "qk_cache axes=",
    "qk_cache vnorm",
    "qk_cache keys",
    "qk_cache scales=",
)
"""Name prefixes of configurations that were merged before they ran on a GPU. On a GPU they raise
`Unsupported`.

All others compile and run, even without evidence (see CONTRIBUTING.md).
"""


def is_unproven(build: Build) -> bool:
    """Whether a configuration is listed in `UNPROVEN`."""
    return build.name.startswith(UNPROVEN) if UNPROVEN else False


# --- launches in C: Triton's launcher parses every argument of every call, `cuLaunchKernelEx` takes prepared words ----

SIZES: Final = {"i32": ".u32", "i64": ".u64", "fp32": ".f32"}
SCRATCH: Final = 2
"""Triton appends two addresses of scratch memory to every kernel's arguments."""


def direct(
    compiled: CompiledKernel, kinds: Sequence[str], warps: int, pdl: bool, device: int
) -> tuple[int, int, int, bool, int] | None:
    """How C launches a kernel with these parameters: function, threads, shared memory, whether dependent, device.

    None if the parameters are not the expected ones.
    """
    ptx = compiled.asm.get("ptx", "")
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)
    expected = [".u64" if kind.startswith("*") else SIZES.get(kind, "?") for kind in kinds] + [".u64"] * SCRATCH
    parameters = re.findall(r"\.param\s+(\.\w+)", entry[1]) if entry is not None else None
    plain = compiled.metadata.num_ctas == 1 and not compiled.metadata.launch_cooperative_grid
    if parameters != expected or not plain or torch.version.hip or native.driver() is None:
        return None
    return compiled.function, 32 * warps, compiled.metadata.shared, pdl, device


def words(kinds: Sequence[str], values: Sequence[Any]) -> bytes:
    """Runtime arguments of these kinds as the eight bytes each that CUDA reads."""
    numbers = [_word(kind, value) for kind, value in zip(kinds, values, strict=True)] + [0] * SCRATCH
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _word(kind: str, value: float | None) -> int:
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value or 0) & (0xFFFFFFFF if kind == "i32" else 0xFFFFFFFFFFFFFFFF)


class Launcher:
    """A loaded kernel on one device, called with a grid and nested arguments."""

    def __init__(self, build: Build, device: int) -> None:
        if is_unproven(build) and os.environ.get("ONEPASS_UNPROVEN") != "1":
            raise Unsupported(f"{build.name}: this kernel has not run on a GPU yet; ONEPASS_UNPROVEN=1 runs it anyway")
        with torch.cuda.device(device):
            compiled = compile_build(build, current_chip(device))
            run = compiled.run
        self._device = device
        self._shape = build.shape
        kinds = [kind for _, _, kind in build.leaves()]
        self.addresses = [i for i, kind in enumerate(kinds) if kind.startswith("*")]
        """Indices of the flattened arguments that are addresses."""
        # A descriptor holds an address that a replay could not replace.
        self._recorder = None if any(kind.startswith("tensordesc") for kind in kinds) else self
        # Triton's own launcher object only adds scratch buffers and hooks, which these kernels do
        # not use.
        bare = getattr(run, "launch", None)
        scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
        self._run: Callable[..., object] = run
        fixed: tuple[Any, ...] = (compiled.function,)
        if bare is not None and not scratch and not torch.version.hip:
            self._run = bare
            fixed += (run.launch_cooperative_grid, run.launch_pdl, None, None)
        self._fixed = (*fixed, compiled.packed_metadata, None, None, None)
        self._runtime = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
        self._kinds = [kinds[i] for i in self._runtime]
        self._head = None if scratch else direct(compiled, self._kinds, build.warps, build.pdl, device)

    def step(self, grid: int, arguments: Sequence[Any]) -> recording.Step | None:
        """The launch as the C path makes it, or None if only Triton's launcher can."""
        if self._head is None:
            return None
        function, *others = self._head
        places = {index: place for place, index in enumerate(self._runtime)}
        return recording.Step(
            True, (function, grid, *others), words(self._kinds, [arguments[i] for i in places]), places
        )

    def __call__(self, grid: int, arguments: Sequence[Any]) -> None:
        """Launch on the current stream."""
        device = self._device
        if recording.tape.on:
            recording.note(self._recorder, grid, list(flat(self._shape, tuple(arguments))))
        stream = torch._C._cuda_getCurrentRawStream(device)
        if torch._C._cuda_getDevice() == device:
            self._run(grid, 1, 1, stream, *self._fixed, *arguments)
            return
        with torch.cuda.device(device):
            self._run(grid, 1, 1, stream, *self._fixed, *arguments)


_loaded: dict[tuple[Build, int], Launcher] = {}


def load(build: Build, device: int) -> Launcher:
    """The launcher of a configuration on a device; rows of different lengths may share it."""
    with _lock:
        launcher = _loaded.get((build, device))
        if launcher is None:
            launcher = _loaded[build, device] = Launcher(build, device)
    return launcher
