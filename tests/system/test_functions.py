"""Functions outside kernels are short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 60
LONG = {
    "main": [62],
}
"""The functions with more lines, by name. They may shrink, not grow. One that is short enough must leave the list."""


def functions(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions with their qualified names, without jitted ones."""
    for child in ast.iter_child_nodes(node):
        name = scope
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{scope}.{child.name}".lstrip(".")
            if any("jit" in ast.unparse(decorator).split(".") for decorator in child.decorator_list):
                continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, child
        yield from functions(child, name)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, source: list[str]) -> int:
    """Lines of the body without its docstring, comments and empty lines."""
    body = function.body[ast.get_docstring(function) is not None :]
    if not body:
        return 0
    lines = (line.strip() for line in source[body[0].lineno - 1 : function.end_lineno])
    return sum(bool(line) and not line.startswith("#") for line in lines)


def is_kernel(path: Path) -> bool:
    """Files of kernels, and of what emits the instructions of CPU kernels."""
    return path.stem.endswith(("_kernel", "_kernels")) or bool({"emit", "llvm"} & {*path.parts})


def long_functions() -> dict[str, list[int]]:
    """Lines of all functions of one name, sorted. Names stay when files move."""
    lines: dict[str, list[int]] = {}
    for path in (path for folder in ("src", "tools", "tests", "benchmarks") for path in ROOT.glob(f"{folder}/**/*.py")):
        if not is_kernel(path.relative_to(ROOT)):
            source = path.read_text()
            for name, function in functions(ast.parse(source)):
                if (count := code_lines(function, source.splitlines())) > MOST:
                    lines[name] = sorted([*lines.get(name, ()), count])
    return lines


def test_functions_are_short() -> None:
    lines = long_functions()
    assert {name: len(counts) for name, counts in lines.items()} == {name: len(counts) for name, counts in LONG.items()}
    for name, counts in lines.items():
        assert all(count <= most for count, most in zip(counts, LONG[name], strict=True)), (name, counts)


def test_lines_of_code_are_counted() -> None:
    source = 'def f(a,\n b):\n    """Docs.\n\n    More."""\n    # no code\n\n    def g():\n        return [\n            a,\n        ]\n'
    tree = ast.parse(source + "@triton.jit\ndef h():\n    pass\nclass C:\n    def m(self): return 1\n")
    assert {n: code_lines(f, source.splitlines()) for n, f in functions(tree) if n[0] == "f"} == {"f": 4, "f.g": 3}
    assert {name for name, _ in functions(tree)} == {"f", "f.g", "C.m"}
