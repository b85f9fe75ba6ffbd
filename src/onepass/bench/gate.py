"""No speed without correctness: a few cases of an op run first, and an op that fails one is not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..testing.case import Check
from ..testing.runner import Result, run_cases, select

MOST = 10
"""Cases an op, one a group; a full check is `onepass check`."""


def cases(op: str) -> list[Check]:
    """The first case of each group, without the large ones."""
    groups: dict[str, Check] = {}
    for case in select([op]):
        groups.setdefault(case.group, case)
    return [case for name, case in groups.items() if name not in ("large", "empty")][:MOST]


def check(ops: Iterable[str], device: str, progress: Callable[[Result], None] | None = None) -> dict[str, list[Result]]:
    """The results of each op's cases on a device."""
    return {op: run_cases(cases(op), device, progress) for op in ops}


def refusals(results: dict[str, list[Result]]) -> dict[str, str]:
    """For each op with a red case, which one and what is wrong."""
    return {
        op: f"{failed[0].case}: {failed[0].message}"
        for op, members in results.items()
        if (failed := [result for result in members if not result.passed])
    }
