"""`tools.walk` counts what is planted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tools import walk

LAYERS = {f"{layer}/{name}.py": "" for layer in ("ops", "specs", "gpu", "cpu") for name in ("norm", "product")}
LAYERS |= {"gpu/norm_kernels.py": "", "cpu/launcher.py": "", "gpu/launcher.py": "", "ops/normal.py": ""}
FOLDERS = {"ops/norm/op.py": "", "ops/norm/gpu.py": "", "ops/product/op.py": "", "nn/norm.py": "", "core/op.py": ""}


def plant(folder: Path, files: Mapping[str, str]) -> Path:
    """A package of these files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def function(name: str, statements: int, before: str = "", docstring: int = 0) -> str:
    """A function of so many lines, its docstring apart."""
    words = ['    """', *["    word"] * (docstring - 2), '    """'] if docstring else []
    return "\n".join([f"{before}def {name}(x):", *words, *["    x += 1"] * (statements - 1)]) + "\n"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ModuleType]:
    """A package in which a.first() calls itself, b twice, and b calls c, which is imported late."""
    package = plant(
        tmp_path / "planted_walk",
        {
            "__init__.py": "",
            "a.py": "from . import b\ndef own(): pass\ndef first():\n    own()\n    b.one()\n    return [b.two(i) for i in (1,)]\n",
            "b.py": "def one(): two(0)\ndef two(i):\n    from .room import c\n    return list(map(c.three, [i]))\n",
            "room/__init__.py": "",
            "room/c.py": "from . import d\ndef three(i): return d.FOUR + eval('i')\n",
            "room/d.py": "def four(): return 4\nFOUR = four()\n",
        },
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return package, import_module("planted_walk.a")


def test_a_walk_has_files_hops_and_imports(planted: tuple[Path, ModuleType]) -> None:
    package, module = planted
    try:
        first, later = walk.walk(module.first, package), walk.walk(module.first, package)
        assert first == walk.Walk(["a.py", "b.py", "room/c.py"], 5, ["room/__init__.py", "room/d.py"])
        assert later == walk.Walk(["a.py", "b.py", "room/c.py"], 5, [])
        assert walk.walk(module.own, package) == walk.Walk(["a.py"], 1, [])
        assert walk.walk(module.first, package, package / "room") == walk.Walk(["a.py", "b.py"], 3, [])
        assert walk.walk(module.first, package, package / "b.py") == walk.Walk(["a.py", "room/c.py"], 3, [])
        assert walk.walk(module.first, package / "room") == walk.Walk(["c.py"], 2, [])
        assert walk.walk(module.first, package.parent / "elsewhere") == walk.Walk([], 0, [])
        assert sys.getprofile() is None
    finally:
        for name in [name for name in sys.modules if name.startswith("planted_walk")]:
            del sys.modules[name]


def test_rooms_have_lines_and_files(tmp_path: Path) -> None:
    files = {"top.py": "a\nb\n", "x/one.py": "a\n", "x/deep/two.py": "a\nb\nc\n", "y/__init__.py": "", "y/z.c": "a\n"}
    package = plant(tmp_path, files)
    assert walk.rooms(package) == {".": (2, 1), "x": (4, 2), "y": (0, 1)}
    assert walk.rooms(package, (".c", ".h")) == {"y": (1, 1)}


def test_exec_and_any_are_counted(tmp_path: Path) -> None:
    text = 'def f(a: Any, b: "Any", *c:Any, d: Anything) -> Any:\n    """exec(this) is text"""\n    exec("a")\n    x.exec(b)\n'
    package = plant(tmp_path, {"a.py": text, "b/c.py": 'exec(compile("x: Any", "", "exec"))\n'})
    assert walk.exec_sites(package) == ["a.py:3", "b/c.py:1"]
    assert walk.any_annotations(package) == 3


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (LAYERS, {"norm": 5, "product": 4}),
        (FOLDERS, {"norm": 3, "product": 1}),
        ({"a/norm.py": "", "b/norm.py": "", "c/norm.py": ""}, {}),
    ],
)
def test_an_op_is_a_folder_or_a_basename(files: dict[str, str], expected: dict[str, int], tmp_path: Path) -> None:
    counts = {name: len(paths) for name, paths in walk.op_files(plant(tmp_path, files)).items()}
    assert counts == expected


def test_long_functions_are_those_outside_of_kernels(tmp_path: Path) -> None:
    files = {
        "a.py": function("fits", 61) + function("long", 62) + function("told", 61, docstring=20),
        "b.py": function("jitted", 90, "@triton.jit\n") + function("more", 71, docstring=5),
        "c_kernels.py": function("emitted", 90),
    }
    assert walk.long_functions(plant(tmp_path, files)) == {"a.py:long": 61, "b.py:more": 70}


def test_json_is_counted_where_git_knows_it(tmp_path: Path) -> None:
    plant(tmp_path, {"a.json": "1\n2\n", "deep/b.jsonl": "1\n", "c.py": "1\n"})
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    plant(tmp_path, {"not-added.json": "1\n"})
    assert walk.json_lines(tmp_path) == 3


def test_the_command_measures_this_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A later call repeats less than the first one, and the table has what the file has."""
    calls = walk.walked("cpu, no C")
    assert {"first", "later"} == set(calls) and 0 < calls["later"].hops < calls["first"].hops
    assert set(calls["later"].files) - set(calls["first"].files) != set(calls["later"].files)
    walk.main(["--no-calls", f"--json={tmp_path / 'walk.json'}"])
    out, report = capsys.readouterr().out, json.loads((tmp_path / "walk.json").read_text())
    lines = sum(lines for lines, _ in report["rooms"].values())
    assert f"{lines:,} lines" in out and lines > 1000
    assert f"{len(report['exec'])} sites" in out and f"{report['json']:,} lines" in out
    assert all(f"op {name} " in out for name in report["ops"]) and "rms_norm" in report["ops"]
