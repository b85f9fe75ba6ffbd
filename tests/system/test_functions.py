"""Functions outside kernels are short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import walk

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["src", "tools", "tests", "benchmarks", "examples"])
def test_functions_are_short(folder: str) -> None:
    assert walk.python_files(ROOT / folder)
    assert walk.long_functions(ROOT / folder) == {}


def test_lines_of_code_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'def f(a,\n b):\n    """Docs.\n\n    More."""\n    # no code\n\n    def g():\n        return [\n            a,\n        ]\n'
    f = ast.parse(source).body[0]
    assert isinstance(f, ast.FunctionDef) and walk.code_lines(f, source.splitlines()) == 4
    (tmp_path / "file.py").write_text(source + "@triton.jit\ndef h():\n    pass\nclass C:\n    def m(self): return 1\n")
    (tmp_path / "a_kernel.py").write_text(source)
    monkeypatch.setattr(walk, "LONGEST", 0)
    assert walk.long_functions(tmp_path) == {"file.py:f": 4, "file.py:f.g": 3, "file.py:C.m": 1}
