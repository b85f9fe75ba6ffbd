"""The import rules between the packages of `src/onepass`. Imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ops import FOLDERS

SOURCE = Path(__file__).resolve().parents[2] / "src"

FACE = {"errors", "formats", "rope", "prologues", "kvcache", "trace", "weights"}
LIBRARY = {*FACE, "core", "ops", "ops.launch", "nn", "dist", "engines", "models"}
MODELS = {"models.forwards", "models.patching", "models.generation"}
BACKENDS = {"cpu", "gpu", "ops.cpu", "ops.gpu"}
KERNELS = {"core", "errors", "formats", "prologues"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "formats": set(),
    "rope": set(),
    "core": {"errors", "formats"},
    "prologues": {"core", "errors"},
    "kvcache": {"core", "errors", "formats"},
    "trace": {"core", "errors"},
    "weights": {"core", "errors", "formats"},
    "cpu": KERNELS,
    "gpu": KERNELS,
    "ops.launch": {"core", "errors", "formats", "kvcache", "prologues", "rope"},
    "ops.cpu": {*KERNELS, "cpu", "ops.launch"},
    "ops.gpu": {*KERNELS, "gpu", "ops.launch"},
    "ops.reference": set(),
    "ops": {*FACE, "core", "ops.launch"},
    "nn": {*FACE, "core", "ops", "ops.launch"},
    "dist": {*FACE, "core", "ops", "ops.launch"},
    "models.forwards": {*FACE, "core", "ops", "ops.launch", "nn"},
    "models.patching": {"core", "errors", "formats", "rope", "weights", "ops.launch", "nn", "models.forwards"},
    "models.generation": {"core", "errors", "kvcache", "models.forwards"},
    "models": MODELS,
    "engines": {*FACE, "core", "ops", "ops.launch", "models.patching", "onepass"},
    "testing": {*LIBRARY, *BACKENDS, "ops.reference"},
    "cli": {*LIBRARY, *BACKENDS, "testing", "onepass"},
    "__main__": {"cli", "onepass"},
    "onepass": LIBRARY,
}
"""What each room of onepass may import. "onepass" is the package itself. An op's folder has five rooms: what a launch
needs (launch.py), the kernels for each backend (cpu*.py, gpu*.py), its formula (reference.py), and the rest; models has three folders."""

LAZY = {
    "__init__.py": "`import onepass` must not import what most programs do not use",
    "dist": "DTensor is slow to import",
    "core/build.py": "programs that only call ops compile nothing",
    "engines/__init__.py": "each module mirrors one library",
    "models/__init__.py": "transformers is optional",
    "engines/plugin.py": "vLLM is optional",
    "engines/plugin_product.py": "vLLM is optional",
    "engines/sglang_plugin.py": "SGLang is optional",
    "engines/fused.py": "transformers is optional",
    "engines/kernels.py": "Hugging Face kernels is optional",
    "trace/__init__.py": "programs that only record a trace need no page",
    "ops": "kernel generators and llvmlite load only when a kernel is not in the object cache",
    "cpu": "kernel generators and llvmlite load only when a kernel is not in the object cache",
    "gpu": "the interpreter is only needed without a GPU",
    "testing": "Triton is optional",
    "cli/invariance.py": "transformers is optional and slow to import",
    "cli/env.py": "backends that are not installed are reported",
}
"""Files and folders that may import inside functions, with the reasons. A cycle is not a reason."""

BY_NAME = {
    "__init__.py": "imported at first use",
    "engines/__init__.py": "imported at first use",
    "core/backend.py": "an op in the backend of a device",
    "testing/runner.py": "a family in the interpreter",
    "cpu/launch.py": "code generators, only where a kernel must be compiled",
    "gpu/chip.py": "one module per chip",
    "cli/source.py": "the backends that are installed",
}
"""Files that may import modules by a computed name, and why."""


class Import(NamedTuple):
    """One imported module: where, what, and whether inside a function."""

    file: str
    line: int
    importer: str
    target: str
    lazy: bool

    @property
    def where(self) -> str:
        return f"src/onepass/{self.file}:{self.line}"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package(module: str) -> str:
    """The room of a module: the package or module directly below onepass, a part of an op, or another root."""
    root, *rest = module.split(".")
    if root != "onepass" or not rest:
        return root
    if rest[0] == "ops" and len(rest) == 3:
        part = rest[2].split("_")[0]
        return f"ops.{part}" if part in ("launch", "cpu", "gpu", "reference") else "ops"
    if rest[0] == "models" and len(rest) > 1:
        return f"models.{rest[1]}"
    return rest[0]


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted((SOURCE / "onepass").rglob("*.py"))}


def targets(node: ast.Import | ast.ImportFrom, importer: str, is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parents = importer.split(".")
        parents = parents[: len(parents) - node.level + is_package]
        base = ".".join([*parents, base] if base else parents)
    for alias in node.names:
        submodule = f"{base}.{alias.name}"
        yield submodule if submodule in modules() else base


def walk(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import that runs: those under ``if TYPE_CHECKING`` are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, lazy
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from walk(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


@cache
def imports() -> tuple[Import, ...]:
    found = []
    for importer, path in modules().items():
        file = str(path.relative_to(SOURCE / "onepass"))
        for node, lazy in walk(ast.parse(path.read_text())):
            for target in targets(node, importer, path.name == "__init__.py"):
                found.append(Import(file, node.lineno, importer, target, lazy))
    return tuple(found)


def internal() -> Iterator[Import]:
    return (i for i in imports() if i.target.split(".")[0] in ("onepass", "tools", "tests", "benchmarks", "examples"))


def test_packages_import_only_what_the_table_allows() -> None:
    wrong = []
    for i in internal():
        source, target = package(i.importer), package(i.target)
        if source != target and target not in ALLOWED[source]:
            wrong.append(f"{i.where}: {source} must not import {i.target}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_table_lists_every_package() -> None:
    assert {package(name) for name in modules()} == set(ALLOWED)


def test_only_listed_files_import_inside_functions() -> None:
    def listed(file: str) -> bool:
        return any(file == path or file.startswith(f"{path}/") for path in LAZY)

    wrong = [f"{i.where}: import {i.target} at the top of the file" for i in imports() if i.lazy and not listed(i.file)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_only_listed_files_import_by_computed_name() -> None:
    wrong = []
    for path in modules().values():
        file = str(path.relative_to(SOURCE / "onepass"))
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            if ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__") and file not in BY_NAME:
                wrong.append(f"src/onepass/{file}:{call.lineno}: {ast.unparse(call)}")
    assert not wrong, "\n" + "\n".join(wrong)


def cycles(edges: dict[str, dict[str, str]]) -> Iterator[list[str]]:
    """One cycle per set of modules that import each other, as lines that name each import."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            ring = [*path[path.index(module) :], module]
            yield [f"{edges[a][b]}: {a} imports {b}" for a, b in pairwise(ring)]
        elif module not in done:
            for target in edges.get(module, {}):
                yield from visit(target, [*path, module])
            done.add(module)

    for module in edges:
        yield from visit(module, [])


def import_graph() -> dict[str, dict[str, str]]:
    """Importer -> imported module -> where."""
    edges: dict[str, dict[str, str]] = {}
    for i in internal():
        if i.target != i.importer and i.target in modules():
            edges.setdefault(i.importer, {}).setdefault(i.target, i.where)
    return edges


def test_there_are_no_import_cycles() -> None:
    found = ["\n".join(cycle) for cycle in cycles(import_graph())]
    assert not found, "\n" + "\n\n".join(found)


def test_tiles_need_no_triton() -> None:
    """Nor does anything that they import when they are imported."""
    edges: dict[str, set[str]] = {}
    for i in imports():
        if not i.lazy:
            edges.setdefault(i.importer, set()).add(i.target)
    reached = {name for name in modules() if name.endswith(".gpu_tile")}
    assert reached == {f"onepass.ops.{folder}.gpu_tile" for folder in FOLDERS}
    while further := {target for name in reached for target in edges.get(name, ())} - reached:
        reached |= further
    assert not [name for name in reached if name.split(".")[0] == "triton"]


@pytest.mark.parametrize(
    ("edges", "lines"),
    [
        ({"a": {"b": "1"}, "b": {"c": "2"}}, []),
        ({"a": {"b": "1"}, "b": {"c": "2"}, "c": {"b": "3"}}, ["2: b imports c", "3: c imports b"]),
    ],
)
def test_cycles_are_found(edges: dict[str, dict[str, str]], lines: list[str]) -> None:
    assert [line for cycle in cycles(edges) for line in cycle] == lines
