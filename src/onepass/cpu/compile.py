"""From LLVM IR to callable machine code. llvmlite is imported at first use, to keep imports light."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..errors import Unsupported
from . import cache as object_cache

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

lock = threading.RLock()
"""Held while a kernel is compiled or linked: all kernels share one linker."""
# The thread that would release the lock may not exist in a forked child.
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
_numbers = iter(range(2**62))
MEMORY: Final = 32 * 2**20
"""Bytes that must be free to compile a kernel; the largest take 8 MiB."""


@cache
def _llvm() -> Any:
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise Unsupported("the CPU backend needs llvmlite: pip install llvmlite") from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@cache
def host() -> tuple[str, str]:
    """The name of this CPU and its feature list."""
    llvm = _llvm()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _machine(cpu: str, features: str) -> Any:
    llvm = _llvm()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=cpu, features=features, opt=2, reloc="pic", codemodel="default", jit=True)


@cache
def _converts_half(cpu: str, features: str) -> bool:
    """Whether the CPU has float16 conversions. Without them LLVM calls a library that the process may not have."""
    from .llvm import half

    machine = _machine(cpu, features)
    module = _llvm().parse_assembly(half.PROBE)
    module.triple = machine.triple
    assembly = machine.emit_assembly(module)
    return not any(name in assembly for name in half.LIBRARY)


def compile_ir(text: str, cpu: str, features: str) -> bytes:
    """The object file of an LLVM module."""
    llvm = _llvm()
    machine = _machine(cpu, features)
    if "half" in text and not _converts_half(cpu, features):
        from .llvm import half

        text = half.in_software(text)
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    image: bytes = machine.emit_object(module)
    return image


@cache
def _jit() -> Any:
    return _llvm().create_lljit_compiler(_machine(*host()))


class Code(Protocol):
    """Executable code: it maps symbols to addresses, and is freed with this object."""

    def __getitem__(self, symbol: str) -> int: ...


def link(image: bytes, *symbols: str) -> Code:
    """Make an object file executable, with these symbols."""
    with lock:
        library = _llvm().JITLibraryBuilder().add_object_img(image).add_current_process()
        for symbol in symbols:
            library.export_symbol(symbol)
        code: Code = library.link(_jit(), f"onepass{next(_numbers)}")
        return code


def cache_file(spec: DataclassInstance) -> Path | None:
    """The file of ``spec`` in the cache on disk, as this LLVM compiles it for this CPU."""
    target = host()
    import llvmlite

    return object_cache.file_of(spec, (llvmlite.__version__, *target))


def _check_memory() -> None:
    """Raise if there is little memory left: LLVM ends the process when an allocation fails."""
    try:
        mmap.mmap(-1, MEMORY).close()
    except OSError as error:
        raise MemoryError(
            f"onepass: compiling a kernel needs {MEMORY >> 20} MiB of memory, which are not free"
        ) from error


def linked(spec: DataclassInstance, build: Callable[[str], str], *symbols: str) -> Code:
    """The linked code of ``spec``, from the cache or from ``build(this CPU's features)``, which is then cached."""
    with lock:
        _check_memory()
        file = cache_file(spec)
        image = object_cache.read(file)
        if image is not None:
            try:
                return link(image, *symbols)
            except RuntimeError:  # intact, but this LLVM cannot link it
                pass
        image = compile_ir(build(host()[1]), *host())
        object_cache.write(file, image)
        return link(image, *symbols)
