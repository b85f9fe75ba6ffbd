"""From a spec to callable machine code: from the cache on disk, or compiled from LLVM IR.

The cache has one object file per kernel. A file's name hashes everything that the object was made from. Its header holds
a digest of the name and the content: files that do not match are ignored and rebuilt. The directory is
``$ONEPASS_CACHE_DIR`` (``off`` disables the cache), else ``onepass/cpu`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

llvmlite is imported at first use, to keep imports light.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..errors import Unsupported
from ..prologues import Prologue

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


# --- the cache on disk -----------------------------------------------------------------------------------------------

MAGIC: Final = b"onepass object 2\n"
UNFINISHED: Final = "unfinished-"
"""Prefix of the names of files that are being written."""
_ABANDONED: Final = 3600.0
"""Seconds after which the writer of such a file must be dead: writing takes milliseconds."""
SHARED: Final = ("core/layout.py", "formats.py", "prologues/*.py", "ops/*/cpu*.py", "ops/*/launch.py")
"""The modules outside this folder that generated code depends on."""


def cache_directory() -> Path | None:
    """The directory of object files; None if the cache is off."""
    chosen = os.environ.get("ONEPASS_CACHE_DIR", "")
    if chosen.lower() == "off":
        return None
    if chosen:
        return Path(chosen)
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (shared if shared.is_absolute() else Path.home() / ".cache") / "onepass" / "cpu"
    except RuntimeError:  # no home directory
        return None


def cache_file(spec: DataclassInstance) -> Path | None:
    """The file of ``spec``, as this LLVM compiles it for this CPU; None if the cache is off."""
    folder, target = cache_directory(), host()
    if folder is None:
        return None
    import llvmlite

    try:
        parts = (_description(spec), _source_digest(), llvmlite.__version__, *target)
    except OSError:  # imported from an archive
        return None
    return folder / (hashlib.sha256(repr(parts).encode()).hexdigest()[:40] + ".o")


def _description(spec: DataclassInstance) -> str:
    """Everything about ``spec`` that affects its code. For a prologue that is its program, not its name."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    for name, value in values.items():
        if isinstance(value, Prologue):
            values[name] = (value.parameters, value.program, value.result)
    return repr((type(spec).__name__, values))


@cache
def _source_digest() -> str:
    """A digest of the source files that generated code depends on."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    shared = (path for pattern in SHARED for path in sorted(here.parent.glob(pattern)))
    for path in (*sorted(here.rglob("*.py")), *shared):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_object(path: Path | None) -> bytes | None:
    """The object in a cache file; None if it is missing, damaged, or writable by another user."""
    if path is None:
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not block if it is a pipe
        try:
            status = os.fstat(handle)
            mine = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not mine or not stat.S_ISREG(status.st_mode):
                return None
            with open(handle, "rb", closefd=False) as stream:
                content = stream.read()
        finally:
            os.close(handle)
    except OSError:
        return None
    image = content[len(MAGIC) + 32 :]
    return image if content == _sealed(path, image) else None


def _sealed(path: Path, image: bytes) -> bytes:
    """The content of a cache file. Its digest covers the name, so that no object is mistaken for another kernel's."""
    return MAGIC + hashlib.sha256(path.name.encode() + image).digest() + image


def write_object(path: Path | None, image: bytes) -> None:
    """Put an object into the cache atomically. Errors of the file system are ignored: the cache is optional."""
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        handle, temporary = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
        try:
            with open(handle, "wb") as stream:
                stream.write(_sealed(path, image))
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


def _remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files of writers that were killed."""
    oldest = time.time() - _ABANDONED
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(UNFINISHED):
                with suppress(OSError):  # finished in the meantime, or owned by another user
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)


# --- kernels ---------------------------------------------------------------------------------------------------------


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
        image = read_object(file)
        if image is not None:
            try:
                return link(image, *symbols)
            except RuntimeError:  # intact, but this LLVM cannot link it
                pass
        image = compile_ir(build(host()[1]), *host())
        write_object(file, image)
        return link(image, *symbols)
