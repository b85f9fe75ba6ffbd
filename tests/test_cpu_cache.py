"""The CPU backend's kernels on disk: kept, found again, and never trusted blindly."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llvmlite")

from cpu_reference import SPECS, Case
from onepass.cpu import _args, _compile, rms_norm
from onepass.rows import RowSpec


def fresh(spec: RowSpec, monkeypatch: pytest.MonkeyPatch) -> list[RowSpec]:
    """Forget the kernel in memory; returns the list of specs that the compiler is then asked for."""
    compiled: list[RowSpec] = []
    original = _compile.compile_object

    def counting(wanted: RowSpec) -> bytes:
        compiled.append(wanted)
        return original(wanted)

    monkeypatch.setattr(_compile, "_kernels", {})
    monkeypatch.setattr(_compile, "compile_object", counting)
    return compiled


def test_cache_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["norm_bf16"]
    directory = tmp_path / "deep" / "cache"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(directory))
    compiled = fresh(spec, monkeypatch)
    rms_norm.precompile(spec)
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
    for place in ("off", "/proc/nowhere", str(tmp_path / "file")):
        monkeypatch.setenv("ONEPASS_CACHE_DIR", place)
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


def test_names_tell_specs_apart() -> None:
    names = [_compile.cache_file(spec) for spec in SPECS.values()]
    assert len(set(names)) == len(names) and None not in names
    assert all(_args.offsets(spec)["next"] == 0 for spec in SPECS.values())


def test_warm_start_needs_no_compiler(cache: Path) -> None:
    """A process that finds its kernel on disk does not import the code generator."""
    program = (
        "import sys, torch, onepass.cpu.rms_norm as r; from onepass.rows import row_spec;"
        "assert 'llvmlite' not in sys.modules;"
        "r.precompile(row_spec(torch.bfloat16, torch.bfloat16, None, torch.bfloat16, 'once'));"
        "print(sorted({'onepass.cpu._row', 'onepass.cpu._vec'} & set(sys.modules)))"
    )
    source = str(Path(rms_norm.__file__).parents[2])
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(cache), "PYTHONPATH": source}
    outputs = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert outputs[1].stdout.strip() == "[]"


def test_files_of_another_user_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["norm_bf16"]
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    rms_norm.precompile(spec)
    compiled = fresh(spec, monkeypatch)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    rms_norm.precompile(spec)
    assert compiled == [spec]
