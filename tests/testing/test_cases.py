"""The few cases that `onepass check` runs have everything that the matrix has, and notice what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass.core.backend import launching_with
from onepass.prologues import Prologue
from onepass.testing import runner
from onepass.testing.call import Case, Random
from tests import matrix, ops
from tests.oracle.case import Check
from tests.oracle.runner import MODULES
from tools.evidence import proof

ROOT = Path(__file__).parents[2]
GROUPS = "group"
"""A number that is an option. Of other numbers it matters only that there is one."""


def specs(run: Callable[[], object]) -> Iterator[tuple[str, Any]]:
    """The families that a call launches, and the specs, which have all that shapes machine code."""
    seen: list[tuple[str, Any]] = []
    with torch.inference_mode(), launching_with(lambda family: lambda call: seen.append((family, call.spec))):
        run()
    return iter(seen)


def traits(family: str, name: str, value: Any) -> Iterator[tuple[str, str, str]]:
    """The family, a field and its value: dtypes, formats and options, also those inside a field."""
    if isinstance(value, Prologue):
        yield from ((family, "prologue", step.op) for step in value.program)
    elif is_dataclass(value):
        for each in fields(value):
            yield from traits(family, each.name, getattr(value, each.name))
    elif hasattr(value, "_fields"):
        for field, inner in zip(value._fields, value, strict=True):
            yield from traits(family, field, inner)
    elif isinstance(value, tuple):
        for inner in value:
            yield from traits(family, name, inner)
    else:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and name != GROUPS
        yield family, name, "a number" if number else str(value)


def traits_of(launched: Iterable[tuple[str, Any]]) -> set[tuple[str, str, str]]:
    return {trait for family, spec in launched for trait in traits(family, "spec", spec)}


def few_traits(cases: Iterable[Case]) -> set[tuple[str, str, str]]:
    found = set()
    for case in cases:
        found |= traits_of(specs(partial(runner.call, case, case.draw("cpu"))))
    return found


@cache
def matrix_traits() -> set[tuple[str, str, str]]:
    found = set()
    for case in (*matrix.CASES, *matrix.GPU_CASES):
        module = MODULES[case.op]
        with proof.Undrawn():
            arguments = module.inputs(case, "cpu")
        found |= traits_of(specs(partial(module.call, case, arguments)))
    return found


def test_few_cases_have_every_op() -> None:
    assert set(runner.OPS) == {case.op for case in matrix.CASES}
    assert set(runner.ALL_OPS) == set(MODULES)
    cases = runner.select(device="cuda")
    assert len({(case.op, case.name) for case in cases}) == len(cases) < len(matrix.select(device="cuda")) / 13


def test_few_cases_have_every_trait_of_the_matrix() -> None:
    """Every dtype, format and option that shapes machine code."""
    few = few_traits((*runner.CASES, *runner.GPU_CASES))
    missing = matrix_traits() - few
    assert missing == UNUSUAL, sorted(missing)
    assert len(few) > 200


UNUSUAL = {("gemv_norm", "traced", "True")}
"""What `onepass trace` shows, and not `onepass check`."""


def test_few_cases_have_every_layout() -> None:
    layouts = {value.layout for case in runner.CASES for value in case.arguments.values() if isinstance(value, Random)}
    assert layouts == {"contiguous", "sliced", "misaligned", "expanded", "transposed", "reversed"}


def test_few_cases_launch_every_gpu_kernel() -> None:
    pytest.importorskip("triton")
    from tools.evidence.chips import MACHINES

    chip = MACHINES["h200"].chip
    builds = []
    for case in runner.select(device="cuda"):
        builds += proof.builds_of_call(partial(runner.call, case, case.draw("cpu")), chip)
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert {b.kernel.__name__ for b in builds} == set(re.findall(r"^def (_\w+_kernel)\(", sources, re.MULTILINE))
    assert len({build.name for build in builds}) < 220, "each is compiled"


@pytest.mark.parametrize("case", runner.CASES, ids=lambda case: f"{case.op} {case.name}")
def test_wrong_results_are_noticed(case: Case) -> None:
    """Zeros instead of any result; and of 16-bit floats each a step off."""
    with torch.inference_mode():
        arguments = case.draw("cpu")
        results = runner.call(case, arguments)
        assert runner.verify(case, arguments, results) is None
        for index, right in enumerate(results):
            wrong = [torch.zeros_like(right)]
            if right.dtype in (torch.bfloat16, torch.float16) and right.is_contiguous():
                wrong.append((right.view(torch.int16) + 1).view(right.dtype))
            for other in wrong:
                changed = (*results[:index], other, *results[index + 1 :])
                assert runner.verify(case, arguments, changed) is not None, index


def test_results_that_change_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two calls differs in a float32 value by a step, which the oracle does not notice."""
    case = next(case for case in runner.CASES if case.group == "out dtype" and "out_dtype=f32" in case.name)
    calls = iter([0, 1])

    def call(case: Case, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        (y,) = own(case, arguments)
        y.view(torch.int32)[0, 0] += next(calls)
        return (y,)

    own = runner.call
    monkeypatch.setattr(runner, "call", call)
    assert runner.run_case(case, "cpu").message == "a second call gave other results"


def test_every_op_is_listed() -> None:
    public, gpu = (
        {path.parent.name for path in (ROOT / "src/onepass/ops").glob(f"*/{name}.py")} for name in ("contract", "gpu")
    )
    assert set(ops.FOLDERS) == public
    assert set(ops.GPU_FOLDERS) == gpu - public


def test_what_an_op_lacks_is_named() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"^the op sequence_attention needs tests/sequence_attention/cases\.py"
    ):
        ops.parts("cases", ["sequence_attention"])
    with pytest.raises(AttributeError, match=r"^tests/rms_norm/cases\.py must define ROWS: see "):
        ops.each("cases", "ROWS")


def test_cases_of_the_matrix_have_unique_names() -> None:
    cases: list[Check] = matrix.select(device="cuda")
    assert len({(case.op, case.name) for case in cases}) == len(cases)
