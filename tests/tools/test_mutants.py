"""The mutation tool: what it changes, what it does not, and which tests it runs for a change."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tools.mutation.campaign import EXPLAINED, Measured, Outcome, decide, summary
from tools.mutation.mutants import Mutant, mutants

PACKAGE = Path(__file__).parents[2] / "src" / "onepass"

SOURCE = b'''"""Doc: 1 < 2."""
from math import inf
__all__ = ["f"]
Kind = Literal["row", "column"]

@overload
def f(x: int = 1) -> int: ...

def f(x: "A < B", y: int = 3) -> "A == B":
    """Doc: 1 + 1."""
    if x < 0 and not y:
        raise ValueError(f"negative: {x + 1}")
    g(x)
    x += 1
    return x[1:]

R = Rule("0 < n", "n", "be 1 or 2")
'''

EXPECTED = [
    ("3", "4"),
    ("x < 0 and not y", "True"),
    ("x < 0 and not y", "False"),
    ("x < 0 and not y", "(not (x < 0 and (not y)))"),
    ("x < 0 and not y", "(x < 0 or not y)"),
    ("x < 0 and not y", "(not y)"),
    ("x < 0 and not y", "(x < 0)"),
    ("x < 0", "(x <= 0)"),
    ("0", "1"),
    ("not y", "y"),
    ('raise ValueError(f"negative: {x + 1}")', "pass"),
    ("g(x)", "pass"),
    ("x += 1", "pass"),
    ("x += 1", "x -= 1"),
    ("1", "0"),
    ("return x[1:]", "return None"),
    ("1:", "1 + 1:"),
    ("1", "0"),
    ('"0 < n"', "'0 <= n'"),
    ('"0 < n"', "'1 < n'"),
    ('"n"', "'nx'"),
]


def test_what_is_changed_and_what_is_not() -> None:
    found = mutants("f.py", SOURCE)
    assert [(m.before, m.after) for m in found] == EXPECTED
    for mutant in found:
        assert mutant.valid(SOURCE)
        assert SOURCE[mutant.start : mutant.end].decode() == mutant.before
        assert SOURCE.splitlines()[mutant.line - 1].find(mutant.before.splitlines()[0].encode()) >= 0


def test_a_change_in_an_f_string_rewrites_the_f_string() -> None:
    found = mutants("f.py", b'def f(n):\n    write(f"if {n + 1} != m:")\n')
    changes = {m.after for m in found if m.operator != "statement deleted"}
    assert changes == {"f'if {n - 1} != m:'", "f'if {n + 0} != m:'", "f'if {n + 1} == m:'"}


@pytest.mark.parametrize("file", ["core/memory.py", "core/op.py", "cpu/llvm/bits.py", "ops/rms_norm/op.py"])
def test_mutants_of_the_library_compile(file: str) -> None:
    source = (PACKAGE / file).read_bytes()
    found = mutants(file, source)
    assert len(found) > 100
    for mutant in found[::9]:
        ast.parse(mutant.apply(source))


def test_explained_mutants_exist() -> None:
    keys = {each["mutant"] for each in json.loads(EXPLAINED.read_text())}
    files = {key.partition(":")[0] for key in keys}
    assert keys <= {m.key for file in files for m in mutants(file, (PACKAGE / file).read_bytes())}


def measured() -> Measured:
    lines = {
        "a.py::slow[1]": {"f.py": {11}},
        "a.py::slow[0]": {"f.py": {11}},
        "a.py::quick": {"f.py": {11, 13}},
        "b.py::beside": {"f.py": {13}},
        "c.py::other": {"g.py": {1}},
    }
    seconds = {"a.py::slow[1]": 3.0, "a.py::slow[0]": 2.0, "a.py::quick": 1.0, "b.py::beside": 0.1, "c.py::other": 0.1}
    return Measured(seconds, lines)


def at(before: str) -> Mutant:
    return next(m for m in mutants("f.py", SOURCE) if m.before == before)


def test_tests_that_run_the_line_come_first() -> None:
    order, covered = measured().order(at("x < 0"), SOURCE)
    assert covered
    assert order == ["a.py::quick", "a.py::slow[0]", "a.py::slow[1]", "b.py::beside"]


def test_a_line_that_no_test_runs_is_not_covered() -> None:
    order, covered = measured().order(at("x += 1"), SOURCE)
    assert not covered and set(order) == {t for t in measured().lines if not t.startswith("c.py")}


def test_lines_that_run_at_import_select_all_tests() -> None:
    order, covered = measured().order(at('"0 < n"'), SOURCE)
    assert covered and set(order) == set(measured().lines)


@pytest.mark.parametrize(
    ("status", "events", "hung", "expected"),
    [
        (0, [{"running": "a"}, {"ran": "1"}], False, ("survived", "")),
        (512, [{"running": "a"}, {"failed": "a"}, {"ran": "1"}], False, ("killed", "a")),
        (512, [{"running": "a"}, {"ran": "1"}, {"stopped": "out of time"}], False, ("survived", "")),
        (512, [], False, ("killed at import", "")),
        (11, [{"running": "a"}, {"ran": "1"}, {"running": "b"}], False, ("killed by a crash", "b")),
        (256, [{"running": "a"}], True, ("killed by a hang", "a")),
    ],
)
def test_verdicts(status: int, events: list[dict[str, str]], hung: bool, expected: tuple[str, str]) -> None:
    assert decide(status, events, hung) == expected


def test_the_score_excludes_explained_mutants_and_includes_uncovered_ones() -> None:
    one, *_ = mutants("f.py", SOURCE)
    verdicts = ["killed", "killed by a hang", "killed at import", "survived", "not covered"]
    outcomes = [Outcome(one, verdict) for verdict in verdicts] + [Outcome(one, "survived", reason="equivalent")]
    row = summary(outcomes, {"f.py": 21})["f.py"]
    assert (row["killed"], row["explained"], row["score"]) == (3, 1, 0.6)
    low, high = row["interval"]
    assert 0.2 < low < 0.6 < high < 0.9
