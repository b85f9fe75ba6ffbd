"""The CPU backend's cache on disk: kernels are written, found again, and verified before they run."""

from __future__ import annotations

import ast
import ctypes
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llvmlite")

from onepass.cpu import compile as compiler
from onepass.cpu import launch as launcher
from onepass.ops.rms_norm import cpu as rms_norm
from onepass.ops.rms_norm import cpu_kernel as rms_norm_kernels
from onepass.ops.rms_norm.launch import RowSpec
from tests.cpu.reference import SPECS, Case


def fresh(spec: RowSpec, monkeypatch: pytest.MonkeyPatch) -> list[RowSpec]:
    """Remove the kernel from memory; returns a list that records the specs compiled from then on."""
    compiled: list[RowSpec] = []
    original = rms_norm_kernels.build

    def counting(wanted: RowSpec, *rest: Any) -> str:
        compiled.append(wanted)
        return original(wanted, *rest)

    monkeypatch.delitem(rms_norm.KERNELS.loaded, spec, raising=False)
    monkeypatch.setattr(rms_norm_kernels, "build", counting)
    return compiled


def test_cache_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["norm_bf16"]
    directory = tmp_path / "deep" / "cache"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(directory))
    compiled = fresh(spec, monkeypatch)
    rms_norm.KERNELS.kernel(spec)
    assert compiled == [spec]
    (file,) = directory.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    fresh(spec, monkeypatch)
    Case(spec, 2, 77).run().check()
    assert compiled == [spec]

    good = file.read_bytes()
    for bad in (good[:-1], good[:200] + b"?" + good[201:], b"", b"junk" * 100):
        file.write_bytes(bad)
        compiled = fresh(spec, monkeypatch)
        Case(spec, 2, 77).run().check()
        assert compiled[:1] == [spec] and file.read_bytes() == good
    assert [file] == list(directory.iterdir())


def test_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["norm_bf16"]
    (tmp_path / "file").write_text("in the way")
    for directory in ("off", "/proc/nowhere", str(tmp_path / "file")):
        monkeypatch.setenv("ONEPASS_CACHE_DIR", directory)
        compiled = fresh(spec, monkeypatch)
        Case(spec, 2, 77).run().check()
        assert compiled[:1] == [spec]


def test_read_only_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:  # what mkstemp does in a read-only directory; root may write to any real one
        raise PermissionError("read-only")

    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    compiled = fresh(SPECS["norm_bf16"], monkeypatch)
    Case(SPECS["norm_bf16"], 2, 77).run().check()
    assert compiled == [SPECS["norm_bf16"]] and not list(tmp_path.iterdir())


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The intact file of one kernel, alone in its directory."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    fresh(SPECS["norm_bf16"], monkeypatch)
    rms_norm.KERNELS.kernel(SPECS["norm_bf16"])
    (file,) = tmp_path.iterdir()
    assert compiler.read_object(file)
    return file


def damaged(good: bytes) -> Iterator[bytes]:
    """Every bit of the header flipped, and some of the code; truncation to every length of the header, and some beyond."""
    head, draw = len(compiler.MAGIC) + 32, random.Random(0)
    for bit in (*range(8 * head), *(draw.randrange(8 * head, 8 * len(good)) for _ in range(1000))):
        yield good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :]
    for length in (*range(head + 1), *(draw.randrange(head, len(good)) for _ in range(200))):
        yield good[:length]
    yield good + b"\0"
    yield good[:head] + bytes(len(good) - head)
    yield good[:head]


def test_damage_is_always_detected(cached: Path) -> None:
    good = cached.read_bytes()
    count = 0
    for bad in damaged(good):
        cached.write_bytes(bad)
        assert compiler.read_object(cached) is None
        count += 1
    assert count > 1600
    cached.write_bytes(good)
    assert compiler.read_object(cached) is not None


def test_an_intact_file_under_another_name_is_not_run(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest of the content alone would let one kernel's code run instead of another's."""
    other = SPECS["fp8"]
    name = compiler.cache_file(other)
    assert name is not None and name != cached
    shutil.copyfile(cached, name)
    name.chmod(0o600)
    compiled = fresh(other, monkeypatch)
    Case(other, 2, 77).run().check()
    assert compiled[:1] == [other] and compiler.read_object(name)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_run(cached: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cached.chmod(mode)
    compiled = fresh(SPECS["norm_bf16"], monkeypatch)
    rms_norm.KERNELS.kernel(SPECS["norm_bf16"])
    assert compiled == [SPECS["norm_bf16"]]
    assert stat.S_IMODE(cached.stat().st_mode) == 0o600, "replaced by a private one"


@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a link to itself", "a link to nowhere"])
def test_something_else_under_the_files_name(cached: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither blocks the call nor makes it fail."""
    cached.unlink()
    match kind:
        case "a pipe":
            os.mkfifo(cached)
        case "a directory":
            cached.mkdir()
        case "a link to itself":
            cached.symlink_to(cached)
        case _:
            cached.symlink_to(cached.with_name("nothing"))
    compiled = fresh(SPECS["norm_bf16"], monkeypatch)
    Case(SPECS["norm_bf16"], 2, 77).run().check()
    assert compiled[:1] == [SPECS["norm_bf16"]]
    assert cached.is_dir() if kind == "a directory" else compiler.read_object(cached)
    assert list(cached.parent.iterdir()) == [cached]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write fails with ENOSPC, as /dev/full does: no error, no file left, a correct result."""
    original = tempfile.mkstemp

    def on_full_disk(**options: Any) -> tuple[int, str]:
        handle, name = original(**options)
        os.close(handle)
        return os.open("/dev/full", os.O_WRONLY), name

    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkstemp", on_full_disk)
    compiled = fresh(SPECS["norm_bf16"], monkeypatch)
    Case(SPECS["norm_bf16"], 2, 77).run().check()
    assert compiled[:1] == [SPECS["norm_bf16"]] and not list(tmp_path.iterdir())


def test_a_directory_that_disappears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed, and then replaced by a file, between two kernels and while one is written."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(directory))
    spec = SPECS["norm_bf16"]
    for moment in ("before", "while"):
        fresh(spec, monkeypatch)
        rms_norm.KERNELS.kernel(spec)
        assert len(list(directory.iterdir())) == 1
        shutil.rmtree(directory)
        if moment == "before":
            directory.write_text("in the way")
        else:
            monkeypatch.setattr(compiler, "_remove_abandoned", shutil.rmtree)
        fresh(spec, monkeypatch)
        Case(spec, 2, 77).run().check()
        assert not directory.is_dir()
        directory.unlink(missing_ok=True)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    compiled = fresh(SPECS["norm_bf16"], monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rms_norm.KERNELS.kernel(SPECS["norm_bf16"])
    assert not list(tmp_path.iterdir())
    Case(SPECS["norm_bf16"], 2, 77).run().check()
    assert compiled == [SPECS["norm_bf16"]] * 2


def test_only_files_of_dead_writers_are_removed(cached: Path) -> None:
    """Finished kernels never expire; unfinished files do."""
    dead, alive, new = (cached.with_name(name) for name in ("unfinished-dead", "unfinished-alive", "0" * 40 + ".o"))
    for file in (dead, alive):
        file.write_bytes(b"half")
    for file in (cached, dead):
        os.utime(file, (time.time() - 7200,) * 2)
    compiler.write_object(new, b"image")
    assert set(cached.parent.iterdir()) == {cached, alive, new}


def test_a_process_may_link_many_kernels(cached: Path) -> None:
    image = compiler.read_object(cached)
    assert image is not None
    linked = [compiler.link(image, "serial") for _ in range(200)]
    assert len({code["serial"] for code in linked}) == 200


def test_interrupted_growth_of_scratch_memory_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old memory is gone, so its address must not be used again."""
    scratch = launcher.Scratch()
    scratch.grow(100)
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "addressof", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scratch.grow(200)
    assert scratch.size == 0
    scratch.grow(50)
    assert scratch.size == 50 and scratch.address % 64 == 0


@pytest.mark.parametrize(
    ("chosen", "shared", "expected"),
    [
        ("/one", "/two", "/one"),
        ("", "/two", "/two/onepass/cpu"),
        ("", "", "/home/me/.cache/onepass/cpu"),
        ("", "relative", "/home/me/.cache/onepass/cpu"),
        ("OFF", "/two", "None"),
    ],
)
def test_cache_directory(chosen: str, shared: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ONEPASS_CACHE_DIR", chosen), ("XDG_CACHE_HOME", shared), ("HOME", "/home/me")):
        monkeypatch.setenv(name, value)
    assert str(compiler.cache_directory()) == expected


def test_file_names_depend_on_every_source_that_shapes_code() -> None:
    """All modules outside the package that code generators import are in the digest of a file's name."""
    package = Path(compiler.__file__).parent
    root = package.parent
    host_only = ("cache.py", "compile.py", "launch.py", "threads.py")
    generators = [path for path in package.rglob("*.py") if path.name not in host_only]
    kernels = sorted(root.glob("ops/*/cpu_kernel.py"))
    assert len(kernels) == 7
    imported = {
        (path.parents[node.level - 1] / node.module.replace(".", "/")).relative_to(root)
        for path in (*generators, *kernels)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level and node.module
    }
    outside = {root / module for module in imported if module.parts[0] != "cpu"}
    assert root / "ops/rms_norm/launch" in outside and root / "formats" in outside
    shared = {path for pattern in compiler.SHARED for path in root.glob(pattern)}
    assert {*kernels} <= shared
    for module in outside:
        assert (module / "__init__.py" if module.is_dir() else module.with_suffix(".py")) in shared, module


def test_different_specs_have_different_files() -> None:
    names = [compiler.cache_file(spec) for spec in SPECS.values()]
    assert len(set(names)) == len(names) and None not in names
    assert all(rms_norm.layout(spec).offsets["next"] == 0 for spec in SPECS.values())


def test_warm_start_does_not_import_the_code_generator(cache: Path) -> None:
    """A process that finds its kernel on disk does not need it."""
    program = (
        "import sys, torch, onepass.ops.rms_norm.cpu as r; from onepass.ops.rms_norm.launch import row_spec;"
        "assert 'llvmlite' not in sys.modules;"
        "r.KERNELS.kernel(row_spec(torch.bfloat16, torch.bfloat16, None, torch.bfloat16, 'once'));"
        "print(sorted({'onepass.ops.rms_norm.cpu_kernel', 'onepass.cpu.llvm.emit'} & set(sys.modules)))"
    )
    source = str(Path(rms_norm.__file__).parents[3])
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(cache), "PYTHONPATH": source}

    def imported() -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert imported() == "[]" or imported() == "[]", "the first process may have to compile"


def test_files_of_another_user_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["norm_bf16"]
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    rms_norm.KERNELS.kernel(spec)
    compiled = fresh(spec, monkeypatch)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    rms_norm.KERNELS.kernel(spec)
    assert compiled == [spec]
