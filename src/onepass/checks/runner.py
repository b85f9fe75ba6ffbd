"""Runs cases on a device and says which passed."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from . import rms_norm
from .case import Case

MODULES = {"rms_norm": rms_norm, "rms_norm_fused_fp8": rms_norm}
CASES: tuple[Case, ...] = rms_norm.CASES
DEVICES = ("cpu", "cuda", "interpreter")


@dataclass(frozen=True)
class Result:
    """The outcome of one case; ``message`` is empty when it passed."""

    op: str
    case: str
    device: str
    passed: bool
    message: str
    seconds: float

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def select(ops: Sequence[str] = (), match: str = "") -> list[Case]:
    """The cases of these ops (all when empty) whose name contains ``match``."""
    return [case for case in CASES if (not ops or case.op in ops) and match in case.name]


def run_case(case: Case, device: str) -> Result:
    """Run one case; an exception is a failure, not an end."""
    start = time.perf_counter()
    try:
        message = MODULES[case.op].run(case, "cpu" if device == "interpreter" else device) or ""
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''} ({place.name}:{place.lineno})"
    return Result(case.op, case.name, device, not message, message, time.perf_counter() - start)


def run_cases(cases: Iterable[Case], device: str, progress: Callable[[Result], None] | None = None) -> list[Result]:
    """Run all, reporting each as it ends."""
    results = []
    for case in cases:
        result = run_case(case, device)
        results.append(result)
        if progress is not None:
            progress(result)
    return results
