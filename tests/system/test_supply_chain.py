"""An installed onepass does not access the network, start processes, or write outside its cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llvmlite")

ROOT = Path(__file__).parents[2]


def watched(tmp_path: Path, *words: str) -> tuple[dict[str, Any], list[str]]:
    """What `watched.py` reported in fresh directories, and the files it left there."""
    home, temporary, work = (tmp_path / name for name in ("home", "tmpdir", "work"))
    for directory in (home, temporary, work):
        directory.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
        "TMPDIR": str(temporary),
    }
    command = [sys.executable, str(ROOT / "tests/system/watched.py"), *words]
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    return json.loads(done.stdout.splitlines()[-1]), files


def test_only_the_cache_is_written(tmp_path: Path) -> None:
    """From the import on: no socket, no file opened for writing outside the cache, no process."""
    report, files = watched(tmp_path)
    cache = tmp_path / "home" / ".cache" / "onepass" / "cpu"
    assert report["network"] == []
    assert set(report["started"]) <= {"subprocess.Popen ('uname',)"}, (
        "Python's platform module asks for the system's name"
    )
    assert report["env"] == str(cache)
    parents = {"/dev/null", *(str(path) for path in (cache, *cache.parents))}
    assert [path for path in report["written"] if path not in parents and not path.startswith(f"{cache}/")] == []
    assert len(files) == 5 and all(f.startswith("home/.cache/onepass/cpu/") and f.endswith(".o") for f in files)


def test_watch_detects_violations(tmp_path: Path) -> None:
    report, files = watched(tmp_path, "misbehave")
    assert "socket.__new__" in report["network"] and len(report["started"]) == 1
    assert report["written"][-2:] == ["here", "there"] and files == ["work/here"]


def test_lower_bounds_are_tested_versions() -> None:
    """`make bounds` installs these. Run it again before you lower a bound."""
    parsed = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, tested = parsed["project"], parsed["tool"]["onepass"]["tested"]
    extras = project["optional-dependencies"]
    assert [*project["dependencies"], *extras["models"], *extras["bench"]] == [
        "torch>=2.11",
        "llvmlite>=0.45",
        "numpy>=1.26",
        "transformers>=5.17,<6",
        "rich>=13",
    ]
    assert set(extras) == {"models", "bench", "dev"}, (
        "a range of Triton's versions could only make pip choose an older torch"
    )
    for line in (*project["dependencies"], *extras["models"], *extras["bench"], f"python{project['requires-python']}"):
        name, lowest = line.split(",")[0].split(">=")
        assert f"{tested[name][0]}.".startswith(f"{lowest}."), name
    minors = [int(version.split(".")[1]) for version in tested["python"]]
    named = {
        c.rsplit(" ", 1)[1] for c in project["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    }
    assert named == {f"3.{minor}" for minor in range(minors[0], minors[1] + 1)}


def test_the_library_needs_three_packages() -> None:
    """And its sources import no other but Triton and transformers, which are optional."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line.split(">=")[0] for line in project["dependencies"]] == ["torch", "llvmlite", "numpy"]
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert not re.search(r"^\s*(import|from) (rich|typer|click)\b", sources, re.MULTILINE)


def test_tested_versions_are_documented() -> None:
    """docs/reliability.md names both ends of every range, README.md those that users choose."""
    tested = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["onepass"]["tested"]
    reliability, readme = ((ROOT / name).read_text() for name in ("docs/reliability.md", "README.md"))
    for name, ends in tested.items():
        for version in ends:
            assert re.search(rf"(?i){name} {re.escape(version)}\b", reliability), (name, version)
    for name in ("Python", "torch", "Triton"):
        ends = [".".join(version.split(".")[:2]) for version in tested[name.lower()]]
        assert f"{name} {ends[0]} to {ends[1]}" in readme


def test_import_does_not_warn_in_a_plain_install() -> None:
    """`import torch` warns if numpy is missing, so onepass depends on numpy."""
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in sys.argv[1:]: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import onepass\n"
    )
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    brought = {re.match(r"[\w-]+", line)[0] for line in required}  # type: ignore[index]
    absent = [name for name in ("numpy", "triton", "transformers") if name not in brought]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error::UserWarning", "-c", program, *absent]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


def test_bounds_names_what_it_did_not_run() -> None:
    """A Python that is not installed is named, and the exit status is 3."""
    done = subprocess.run([ROOT / ".ci" / "bounds", "newest-3.99"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "NOT RUN: newest-3.99 (no Python 3.99)\n"), done.stderr
