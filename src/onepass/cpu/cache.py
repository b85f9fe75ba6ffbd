"""The cache of compiled kernels on disk: one object file per kernel.

A file's name hashes everything that the object was made from. Its header holds a digest of the name and the content:
files that do not match are ignored and rebuilt. The directory is ``$ONEPASS_CACHE_DIR`` (``off`` disables the cache),
else ``onepass/cpu`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..prologues import Prologue

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAGIC: Final = b"onepass object 2\n"
UNFINISHED: Final = "unfinished-"
"""Prefix of the names of files that are being written."""
_ABANDONED: Final = 3600.0
"""Seconds after which the writer of such a file must be dead: writing takes milliseconds."""
SHARED: Final = ("core/layout.py", "formats.py", "prologues/*.py", "ops/*/cpu*.py", "ops/*/launch.py")
"""The modules outside this package that generated code depends on."""


def directory() -> Path | None:
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


def file_of(spec: DataclassInstance, target: tuple[str, ...]) -> Path | None:
    """The file of ``spec`` compiled by and for ``target``; None if the cache is off."""
    folder = directory()
    if folder is None:
        return None
    try:
        parts = (_description(spec), _source_digest(), *target)
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


def read(path: Path | None) -> bytes | None:
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


def write(path: Path | None, image: bytes) -> None:
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
