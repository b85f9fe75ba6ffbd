"""Runs cases on a device: what `onepass check` calls."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch

from . import attention, gemv_norm, head_product, latent_attention, linear, mla_cache, qk_cache, qk_norm, rms_norm
from .case import Check, same_bytes
from .interpreter import quick_interpreter

_FAMILIES = (rms_norm, gemv_norm, linear, qk_norm, mla_cache, qk_cache)
_OF_GPUS = (attention, latent_attention, head_product)
MODULES: dict[str, Any] = {case.op: module for module in (*_FAMILIES, *_OF_GPUS) for case in module.CASES}
"""The module of each op, which defines CASES, inputs, call, variants, verify and zeroable."""
CASES: tuple[Check, ...] = tuple(case for module in _FAMILIES for case in module.CASES)
"""Cases that every device runs."""
OPS: tuple[str, ...] = tuple(dict.fromkeys(case.op for case in CASES))
"""The ops of these."""
_ON_GPUS = tuple(case for module in _OF_GPUS for case in module.CASES)
GPU_CASES: tuple[Check, ...] = (*_ON_GPUS, *linear.GPU_CASES)
"""Cases of kernels that a CPU does not have, and of what a GPU does differently. The interpreter has the former."""
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
        """As plain data."""
        return asdict(self)


def select(ops: Sequence[str] = (), match: str = "", device: str = "cpu") -> list[Check]:
    """The device's cases of these ops (all when empty) whose name contains ``match``, or one of its alternatives separated by ``|``."""
    return among(CASES if device == "cpu" else (*CASES, *GPU_CASES), ops, match)


def among(cases: Iterable[Check], ops: Sequence[str], match: str) -> list[Check]:
    """The cases of these ops whose name contains ``match``, as for `select`."""
    return [case for case in cases if (not ops or case.op in ops) and matches(case.name, match)]


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

        with launching_with(_interpreted), quick_interpreter(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # 0/0 is intended
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
