"""Compiled kernels: one explicit source, signature and set of attributes, on a GPU or ahead of time without one.

The launch path and the ahead-of-time path build the same `Build` and so the same machine code; `machine_hash` names it.
"""

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..errors import Unsupported
from ..fastpath import replay
from ..fastpath.cuda_launch import Prepared, direct
from .config import Chip

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*u8",
    torch.float8_e4m3fnuz: "*u8",
    torch.float8_e8m0fnu: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint32: "*u32",
}

_lock = threading.RLock()
"""Held while a kernel is compiled or loaded, which one thread does for all."""


@dataclass(frozen=True)
class Build:
    """A kernel and everything its machine code depends on. ``arguments`` pairs each parameter with its type or constant."""

    name: str
    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[tuple[str, int], ...]
    warps: int
    pdl: bool
    registers: int = 0
    contracts: bool = True
    """Whether the compiler may make one fused operation of a product and a sum."""

    def source(self) -> ASTSource:
        """What Triton compiles."""
        names = self.kernel.arg_names
        attributes = {(names.index(name),): [["tt.divisibility", by]] for name, by in self.divisible}
        return ASTSource(self.kernel, dict(self.signature), dict(self.constants), attributes)


def setting(build: Build, chip: Chip) -> tuple[GPUTarget, dict[str, Any]]:
    """What Triton compiles a build for, and with which options."""
    options: dict[str, Any] = {"num_warps": build.warps, "enable_fp_fusion": build.contracts}
    if build.registers and chip.backend == "cuda":
        options["maxnreg"] = build.registers
    if build.pdl:
        options["launch_pdl"] = True
    return GPUTarget(chip.backend, chip.arch, chip.warp_size), options


def compile_build(build: Build, chip: Chip) -> Any:
    """Compile for ``chip``; needs no GPU. Line information is off, so that the code does not depend on file paths."""
    target, options = setting(build, chip)
    with _lock, triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        return triton.compile(build.source(), target=target, options=options)


def machine_hash(compiled: Any) -> str:
    """A hash of the PTX (or AMD assembly) of a compiled kernel."""
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def current_chip(device: int) -> Chip:
    """The chip of a torch CUDA (or ROCm) device."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Chip("hip", properties.gcnArchName.split(":")[0], 64)
    return Chip("cuda", properties.major * 10 + properties.minor, 32)


UNPROVEN: tuple[str, ...] = ()
"""How the names of configurations begin that may be merged before they ran on a GPU; on one they raise `Unsupported`.

No other configuration does. One that the evidence does not cover (CONTRIBUTING.md says which it does) compiles and runs.
"""


def is_unproven(build: Build) -> bool:
    """Whether a configuration is listed as never having run on a GPU."""
    return build.name.startswith(UNPROVEN) if UNPROVEN else False


class Launcher:
    """A loaded kernel on one device, called with a grid and the kernel's arguments in order."""

    def __init__(self, build: Build, device: int) -> None:
        if is_unproven(build) and os.environ.get("ONEPASS_UNPROVEN") != "1":
            raise Unsupported(
                f"{build.name}: this kernel has not run on a GPU yet; ONEPASS_UNPROVEN=1 runs it all the same"
            )
        with torch.cuda.device(device):
            compiled = compile_build(build, current_chip(device))
            run = compiled.run
        self._device = device
        self.addresses = [i for i, (_, kind) in enumerate(build.signature) if kind.startswith("*")]
        """Places of the arguments that are addresses."""
        # Triton's own launcher object only adds scratch buffers and hooks, which these kernels do not have.
        bare = getattr(run, "launch", None)
        scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
        self._run: Any = run
        fixed: tuple[Any, ...] = (compiled.function,)
        if bare is not None and not scratch and not torch.version.hip:
            self._run = bare
            fixed += (run.launch_cooperative_grid, run.launch_pdl, None, None)
        self._fixed = (*fixed, compiled.packed_metadata, None, None, None)
        self._runtime = [i for i, (_, kind) in enumerate(build.signature) if kind != "constexpr"]
        kinds = [build.signature[i][1] for i in self._runtime]
        self._direct = None if scratch else direct(compiled, kinds, build.warps, build.pdl, device)

    def prepare(self, grid: int, arguments: Sequence[Any], places: Sequence[int]) -> Prepared:
        """``launch(*addresses)``: the same launch with the arguments at ``places`` replaced by ``addresses``."""
        template = list(arguments)

        def launch(*addresses: int) -> None:
            arguments = template.copy()
            for place, address in zip(places, addresses, strict=True):
                arguments[place] = address
            self(grid, arguments)

        if self._direct is None:
            return launch
        slots = [self._runtime.index(place) for place in places]
        return self._direct.prepare(grid, [arguments[i] for i in self._runtime], slots, launch)

    def __call__(self, grid: int, arguments: Sequence[Any]) -> None:
        """Launch on the current stream."""
        device = self._device
        if replay.tape.on:
            replay.note(self, grid, arguments)
        stream = torch._C._cuda_getCurrentRawStream(device)
        if torch._C._cuda_getDevice() == device:
            self._run(grid, 1, 1, stream, *self._fixed, *arguments)
            return
        with torch.cuda.device(device):
            self._run(grid, 1, 1, stream, *self._fixed, *arguments)


_loaded: dict[tuple[Build, int], Launcher] = {}


def load(build: Build, device: int) -> Launcher:
    """The launcher of a configuration on a device; rows of different lengths share one."""
    with _lock:
        found = _loaded.get((build, device))
        if found is None:
            found = _loaded[build, device] = Launcher(build, device)
    return found
