"""What an installed onepass does unasked: nothing on the network, no process, no file outside its cache."""

from __future__ import annotations

import json
import os
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
        cwd=places["WORK"], capture_output=True, text=True, timeout=180, check=False,
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    bounds = (*project["dependencies"], *extras["gpu"], *extras["models"])
    assert bounds == (
        "torch>=2.11",
        "llvmlite>=0.45",
        "rich>=13",
        "typer>=0.16",
        "triton>=3.6,<3.8",
        "transformers>=5.17,<6",
    )
