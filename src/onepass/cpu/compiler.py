"""From a spec to callable machine code, kept in memory and on disk.

A compiled kernel is one relocatable object file. On disk it lies under a name that hashes everything it was made
from, behind a header with the digest of its name and content: a file that does not match is compiled again and replaced.
The directory is ``$ONEPASS_CACHE_DIR`` (``off`` for none), else ``onepass/cpu`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
"""

from __future__ import annotations

import ctypes
import hashlib
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
from typing import Any, Final

from ..errors import Unsupported
from ..specs.gemv_norm import GemvSpec
from ..specs.rms_norm import RowSpec
from . import arguments
from .arguments import Spec
from .emit import half

_MAGIC: Final = b"onepass object 2\n"
_UNFINISHED: Final = "unfinished-"
"""How the name of a file begins that is being written."""
_ABANDONED: Final = 3600.0
"""Seconds after which such a file's writer is dead: writing takes milliseconds."""
Block = bytes | ctypes.Array
"""An argument block; a kernel that counts in it wants memory of its own."""
_ENTRY: Final = ctypes.CFUNCTYPE(None, ctypes.c_char_p)

lock = threading.RLock()
"""Held while code is made or linked: by one thread for all kernels, since they share one linker."""
# A child must not inherit a lock that a thread which it does not inherit would have released.
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
_kernels: dict[Spec, Kernel] = {}


class Kernel:
    """Machine code of one spec: its three functions (see `_row.build`) and the packer of their argument block."""

    __slots__ = ("_code", "keeps_h", "pack", "parallel", "prepare", "serial")

    def __init__(self, spec: Spec, image: bytes) -> None:
        self._code = link(image, "serial", "prepare", "parallel")
        self.keeps_h = isinstance(spec, RowSpec) and arguments.keeps_h(spec)
        self.pack = arguments.packer(spec)
        self.serial: Callable[[Block], None] = _ENTRY(self._code["serial"])
        self.prepare: Callable[[Block], None] = _ENTRY(self._code["prepare"])
        self.parallel: int = self._code["parallel"]


def kernel(spec: Spec) -> Kernel:
    """The kernel of ``spec``, from memory, from disk or from the compiler."""
    found = _kernels.get(spec)
    if found is None:
        with lock:
            found = _kernels.get(spec)
            if found is None:
                found = _kernels[spec] = _find(spec)
    return found


def _find(spec: Spec) -> Kernel:
    file = cache_file(spec)
    image = _read(file)
    if image is not None:
        try:
            return Kernel(spec, image)
        except RuntimeError:  # a sound file that this LLVM does not link
            pass
    image = compile_object(spec)
    _write(file, image)
    return Kernel(spec, image)


# --- LLVM ----------------------------------------------------------------------------------------------------------


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
    """Name and feature list of this CPU."""
    llvm = _llvm()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _machine(cpu: str, features: str) -> Any:
    llvm = _llvm()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=cpu, features=features, opt=2, reloc="pic", codemodel="default", jit=True)


def compile_object(spec: Spec, cpu: str | None = None, features: str = "") -> bytes:
    """Compile for this CPU, or for a named one."""
    target = (cpu, features) if cpu is not None else host()
    return compile_ir(build(spec, target[1]), *target)


def build(spec: Spec, features: str) -> str:
    """The LLVM module of ``spec``; ``features`` of the CPU may shape its loops, never its results."""
    if isinstance(spec, GemvSpec):
        from . import gemv_norm_kernels

        return gemv_norm_kernels.build(spec, wide="+avx512f" in features)
    from . import rms_norm_kernels as _row

    return _row.build(spec)


@cache
def _converts_half(cpu: str, features: str) -> bool:
    """Whether LLVM has instructions for float16 on a CPU, or would call a library that the process need not have."""
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


def link(image: bytes, *symbols: str) -> Any:
    """Make an object file executable; the result maps ``symbols`` to addresses and keeps the code alive."""
    with lock:
        library = _llvm().JITLibraryBuilder().add_object_img(image).add_current_process()
        for symbol in symbols:
            library.export_symbol(symbol)
        return library.link(_jit(), f"onepass{next(_numbers)}")


_numbers = iter(range(2**62))


# --- the cache on disk ---------------------------------------------------------------------------------------------


def cache_directory() -> Path | None:
    """Where object files are kept; None if nowhere."""
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


def cache_file(spec: Any) -> Path | None:
    """The file for ``spec`` on this machine."""
    directory = cache_directory()
    if directory is None:
        return None
    try:
        sources = _source_digest()
    except OSError:  # imported from an archive
        return None
    import llvmlite

    parts = (describe_spec(spec), sources, llvmlite.__version__, *host())
    return directory / (hashlib.sha256(repr(parts).encode()).hexdigest()[:40] + ".o")


def describe_spec(spec: Any) -> str:
    """Everything about ``spec`` that shapes its code, the prologue program."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if isinstance(spec, RowSpec) and spec.prologue is not None:
        values["prologue"] = (spec.prologue.parameters, spec.prologue.program, spec.prologue.result)
    return repr((type(spec).__name__, values))


SHARED: Final = ("formats.py", "prologues/*.py", "specs/*.py")
"""The modules outside this package that code generation depends on."""


@cache
def _source_digest() -> str:
    """A digest of the source files that code generation depends on."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    shared = (path for pattern in SHARED for path in sorted(here.parent.glob(pattern)))
    for path in (*sorted(here.rglob("*.py")), *shared):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path | None) -> bytes | None:
    """The object in a cache file; None if there is none, it is damaged, or another user could have put it there."""
    if path is None:
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe may lie there
        try:
            found = os.fstat(handle)
            mine = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not mine or not stat.S_ISREG(found.st_mode):
                return None
            with open(handle, "rb", closefd=False) as stream:
                content = stream.read()
        finally:
            os.close(handle)
    except OSError:
        return None
    image = content[len(_MAGIC) + 32 :]
    return image if content == _sealed(path, image) else None


def _sealed(path: Path, image: bytes) -> bytes:
    """What a cache file holds. The digest is of its name too: the object of another kernel is no less wrong than damage."""
    return _MAGIC + hashlib.sha256(path.name.encode() + image).digest() + image


def _write(path: Path | None, image: bytes) -> None:
    """Put an object into the cache in one step; a cache that cannot be written is no cache."""
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        handle, temporary = tempfile.mkstemp(prefix=_UNFINISHED, dir=path.parent)
        try:
            with open(handle, "wb") as stream:
                stream.write(_sealed(path, image))
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError:
        return


def _remove_abandoned(directory: Path) -> None:
    """Remove what writers that were killed left behind."""
    oldest = time.time() - _ABANDONED
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(_UNFINISHED):
                with suppress(OSError):  # finished meanwhile, or another user's
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)


def linked(spec: Any, text: Callable[[], str], *symbols: str) -> Any:
    """Linked code of ``spec``: the object file that was kept, or ``text()`` compiled, which is then kept."""
    with lock:
        file = cache_file(spec)
        image = _read(file)
        if image is not None:
            try:
                return link(image, *symbols)
            except RuntimeError:  # a sound file that this LLVM does not link
                pass
        image = compile_ir(text(), *host())
        _write(file, image)
        return link(image, *symbols)
