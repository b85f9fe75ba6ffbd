"""Which tests are found, and which of them `make test` runs."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest

from tests.conftest import COLLECTED, NEED_ENGINES, NEED_SGLANG, left_out

ROOT = Path(__file__).parents[2]


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> dict[str, list[str]]:
    """The names of all tests by file, for the files that pytest was asked to collect."""
    found: dict[str, list[str]] = {}
    for name in pytestconfig.stash[COLLECTED]:
        found.setdefault(name.partition("::")[0], []).append(name)
    return found


def test_every_file_of_tests_is_found(pytestconfig: pytest.Config, collected: dict[str, list[str]]) -> None:
    """By default pytest does not look into folders with some names, such as "dist"."""
    if pytestconfig.args != pytestconfig.getini("testpaths"):
        pytest.skip("this run is about some of the tests")
    expected = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")}
    engines = {f"tests/{file}" for file in (*NEED_ENGINES, *NEED_SGLANG)}
    assert engines & expected and expected - engines - set(collected) == set()


def test_every_example_in_a_docstring_runs(pytestconfig: pytest.Config, collected: dict[str, list[str]]) -> None:
    """pytest runs the examples of functions and classes. This runs those of other objects: a function
    that a decorator turns into a `Prologue` is no longer a function.
    """
    if pytestconfig.args != pytestconfig.getini("testpaths"):
        pytest.skip("this run is about some of the tests")
    examples = 0
    for path in sorted(ROOT.glob("src/onepass/**/*.py")):
        file = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or ">>> " not in (ast.get_docstring(node) or ""):
                continue
            examples += 1
            if not any(name.endswith(f".{node.name}") for name in collected.get(file, ())):
                example = doctest.DocTestParser().get_doctest(ast.get_docstring(node) or "", {}, node.name, file, 0)
                assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example).failed == 0
    assert examples > 20


def test_one_case_of_each_group_stays() -> None:
    groups = [(f"a::cases[{group}: {index}]", 3) for group in ("short", "wide") for index in range(30)]
    plain = [(f"a::cases[{index}]", 3) for index in range(30)]
    for sampled in (groups, plain):
        rest = left_out(sampled)
        assert rest == left_out(sampled) and len(sampled) < 4 * (len(sampled) - len(rest)) < 2 * len(sampled)
        assert not rest & {"a::cases[short: 0]", "a::cases[wide: 0]", "a::cases[0]"}
