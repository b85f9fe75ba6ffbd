"""What an installed onepass does unasked: nothing on the network, no process, no file outside its cache."""

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

HERE = Path(__file__).parent
ROOT = HERE.parent


def watched(tmp_path: Path, *words: str) -> tuple[dict[str, Any], list[str]]:
    """What `watched.py` told, run in fresh directories, and the files that it left in them."""
    places = {name: tmp_path / name.lower() for name in ("HOME", "TMPDIR", "WORK")}
    for place in places.values():
        place.mkdir()
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "watched.py"), *words],
        env={**given, "HOME": str(places["HOME"]), "TMPDIR": str(places["TMPDIR"])},
        cwd=places["WORK"], capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    return json.loads(done.stdout.splitlines()[-1]), files


def test_nothing_is_touched_but_the_cache(tmp_path: Path) -> None:
    """From the import on: no socket, no file opened to be written outside the cache, no process of ours."""
    told, files = watched(tmp_path)
    cache = tmp_path / "home" / ".cache" / "onepass" / "cpu"
    assert told["network"] == []
    assert set(told["started"]) <= {"subprocess.Popen ('uname',)"}, "Python's own question for the platform's name"
    assert told["env"] == str(cache)
    parents = {"/dev/null", *(str(path) for path in (cache, *cache.parents))}
    assert [path for path in told["written"] if path not in parents and not path.startswith(f"{cache}/")] == []
    assert len(files) == 5 and all(f.startswith("home/.cache/onepass/cpu/") and f.endswith(".o") for f in files)


def test_the_watch_sees_what_it_watches(tmp_path: Path) -> None:
    told, files = watched(tmp_path, "misbehave")
    assert "socket.__new__" in told["network"] and len(told["started"]) == 1
    assert told["written"][-2:] == ["here", "there"] and files == ["work/here"]


def test_lower_bounds_are_those_that_were_run() -> None:
    """`make bounds` installs these; a bound that is lowered must be run again."""
    parsed = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, tested = parsed["project"], parsed["tool"]["onepass"]["tested"]
    extras = project["optional-dependencies"]
    assert [*project["dependencies"], *extras["models"]] == [
        "torch>=2.11",
        "llvmlite>=0.45",
        "numpy>=1.26",
        "rich>=13",
        "typer>=0.16",
        "transformers>=5.17,<6",
    ]
    assert set(extras) == {"models", "dev"}, "a range of Triton's versions could only make pip choose an older torch"
    for line in (*project["dependencies"], *extras["models"], f"python{project['requires-python']}"):
        name, lowest = line.split(",")[0].split(">=")
        assert f"{tested[name][0]}.".startswith(f"{lowest}."), name
    minors = [int(version.split(".")[1]) for version in tested["python"]]
    named = {
        c.rsplit(" ", 1)[1] for c in project["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    }
    assert named == {f"3.{minor}" for minor in range(minors[0], minors[1] + 1)}


def test_tested_versions_are_told() -> None:
    """docs/reliability.md names both ends of every range; README the ones that a user chooses."""
    tested = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["onepass"]["tested"]
    reliability, readme = ((ROOT / name).read_text() for name in ("docs/reliability.md", "README.md"))
    for name, ends in tested.items():
        for version in ends:
            assert re.search(rf"(?i){name} {re.escape(version)}\b", reliability), (name, version)
    for name in ("Python", "torch", "Triton"):
        ends = [".".join(version.split(".")[:2]) for version in tested[name.lower()]]
        assert f"{name} {ends[0]} to {ends[1]}" in readme


def test_plain_install_has_what_torch_warns_about() -> None:
    """`import torch` warns where numpy is missing, so onepass must bring it: there is nothing to silence in onepass itself."""
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
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program, *absent],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]


def test_bounds_says_what_it_did_not_run() -> None:
    """A Python that cannot be had is named, and the exit status tells."""
    done = subprocess.run([ROOT / ".ci" / "bounds", "newest-3.99"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "NOT RUN: newest-3.99 (no Python 3.99)\n"), done.stderr
