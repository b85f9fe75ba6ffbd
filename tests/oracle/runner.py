"""Runs cases on a device: `MODULES` calls and verifies them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from onepass.testing import runner as library
from onepass.testing.runner import Result, matches, timed
from onepass.testing.tensors import same_bytes
from tests.ops import FOLDERS, GPU_FOLDERS, parts
from tests.oracle.case import Check
from tests.oracle.interpreter import quick_interpreter

MODULES: dict[str, Any] = {op: module for module in parts("checks", (*FOLDERS, *GPU_FOLDERS)) for op in module.OPS}
"""The module of each op, which defines inputs, call, variants, verify and zeroable."""


def family(op: str) -> str:
    """The folder of an op's tests."""
    module: ModuleType = MODULES[op]
    return module.__name__.removesuffix(".checks").split(".")[-1]


def among(cases: Iterable[Check], ops: Sequence[str], match: str) -> list[Check]:
    """The cases of these ops (all when empty) whose name `matches`."""
    return [case for case in cases if (not ops or case.op in ops) and matches(case.name, match)]


@contextmanager
def running_on(device: str) -> Iterator[None]:
    """As in the library, with a quicker interpreter that poisons memory."""
    with library.running_on(device), quick_interpreter() if device == "interpreter" else nullcontext():
        yield


def run(case: Check, device: str, seed: int = 0) -> str | None:
    """Call, verify, and call in every other way that must give the same bytes; None, or what is wrong."""
    module = MODULES[case.op]
    arguments = module.inputs(case, device, seed)
    results = module.call(case, arguments)
    wrong: str | None = module.verify(case, arguments, results)
    if wrong is not None:
        return wrong
    for way, again in module.variants(case, arguments, results):
        for index, (first, second) in enumerate(zip(results, again, strict=True)):
            if not same_bytes(first, second):
                return f"result {index} differs {way}"
    return None


def run_case(case: Check, device: str) -> Result:
    """Run one case; an exception counts as a failure."""
    where = "cpu" if device == "interpreter" else device
    return timed(case.op, case.name, device, lambda: run(case, where))


def run_cases(cases: Iterable[Check], device: str, progress: Callable[[Result], None] | None = None) -> list[Result]:
    """Run all cases and report each result as it arrives."""
    results = []
    with running_on(device):
        for case in cases:
            result = run_case(case, device)
            results.append(result)
            if progress is not None:
                progress(result)
    return results
