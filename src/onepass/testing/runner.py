"""Makes calls on a device and compares their results: what `onepass check` runs."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from . import attention, caches, products, qk_norm, rms_norm
from .call import Case, Verify
from .tensors import moved, same_bytes

_FAMILIES: tuple[Any, ...] = (rms_norm, products, qk_norm, caches, attention)
_FUNCTIONS: dict[str, tuple[Callable[..., Any], Verify]] = {
    op: (function, module.verify) for module in _FAMILIES for op, function in module.FUNCTIONS.items()
}
UNPROVEN: tuple[str, ...] = (
    "rms_norm_add_rms_norm",
    "rms_norm_add_rms_norm_quant",
    "quantize",
    *(f"qk_norm_rope_cache: {group}" for group in ("mrope", "norm of v", "scales", "keys alone")),
)
"""Ops, or groups of their cases, whose kernels are listed as not yet run on a GPU."""
CASES: tuple[Case, ...] = (*rms_norm.CASES, *products.CASES, *qk_norm.CASES, *caches.CASES)
"""Cases that every device runs."""
GPU_CASES: tuple[Case, ...] = (*attention.GPU_CASES, *products.GPU_CASES)
"""Cases of kernels that a CPU does not have, and of what a GPU does differently."""
OPS: tuple[str, ...] = tuple(dict.fromkeys(case.op for case in CASES))
"""The ops that every device has."""
ALL_OPS: tuple[str, ...] = tuple(_FUNCTIONS)


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
        """As plain data."""
        return asdict(self)


def select(ops: Sequence[str] = (), match: str = "", device: str = "cpu") -> list[Case]:
    """The device's cases of these ops (all when empty) whose name contains ``match``, or one of its alternatives separated by ``|``."""
    absent = left_out(device)
    cases = [case for case in (CASES if device == "cpu" else (*CASES, *GPU_CASES)) if case.op not in absent]
    cases = [case for case in cases if f"{case.op}: {case.group}" not in absent]
    return [case for case in cases if (not ops or case.op in ops) and matches(case.name, match)]


def left_out(device: str) -> tuple[str, ...]:
    """The ops, or groups of cases, that are not called on a device, because they would raise `Unsupported` there."""
    return UNPROVEN if device == "cuda" and os.environ.get("ONEPASS_UNPROVEN") != "1" else ()


def matches(name: str, match: str) -> bool:
    """Whether a name contains one of the alternatives separated by ``|``.

    >>> matches("lanes: 3x4096", "5x33|3x4096"), matches("lanes: 3x4096", "5x33|7168")
    (True, False)
    """
    return any(word in name for word in match.split("|"))


def _interpreted(family: str) -> Callable[..., None]:
    launch: Callable[..., None] = import_module(f"onepass.ops.{family}.gpu").launch
    return launch


@contextmanager
def running_on(device: str) -> Iterator[None]:
    """Inference mode and, for ``interpreter``, the GPU kernels interpreted on the CPU (needs TRITON_INTERPRET=1)."""
    with torch.inference_mode():
        if device != "interpreter":
            yield
            return
        from ..core.backend import launching_with

        with launching_with(_interpreted), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # 0/0 is intended
            yield


def call(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The results of a call with copies of these arguments."""
    results = _FUNCTIONS[case.op][0](**moved(arguments))
    return results if isinstance(results, tuple) else (results,)


def verify(case: Case, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results."""
    host = moved({**arguments, "results": list(results)}, "cpu")
    stored = tuple(host.pop("results"))
    for expected in _FUNCTIONS[case.op][1](case.op, host, stored):
        wrong = expected if isinstance(expected, str) else expected.fault()
        if wrong is not None:
            return wrong
    return None


def run_case(case: Case, device: str) -> Result:
    """Make a call, compare its results, and make it again; an exception counts as a failure."""

    def run() -> str | None:
        arguments = case.draw("cpu" if device == "interpreter" else device)
        results = call(case, arguments)
        wrong = verify(case, arguments, results)
        if wrong is None and device != "interpreter":
            again = call(case, arguments)
            if not all(same_bytes(one, two) for one, two in zip(results, again, strict=True)):
                wrong = "a second call gave other results"
        return wrong

    return timed(case.op, case.name, device, run)


def timed(op: str, name: str, device: str, test: Callable[[], str | None]) -> Result:
    """The outcome of a test that returns None, or what is wrong."""
    start = time.perf_counter()
    try:
        message = test() or ""
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {text[0] if text else ''} ({place.name}:{place.lineno})"
    return Result(op, name, device, not message, message, time.perf_counter() - start)


def run_cases(cases: Iterable[Case], device: str, progress: Callable[[Result], None] | None = None) -> list[Result]:
    """Run all cases and report each result as it arrives."""
    results = []
    with running_on(device):
        for case in cases:
            result = run_case(case, device)
            results.append(result)
            if progress is not None:
                progress(result)
    return results
