"""Runs cases on a device and says which passed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tools.evidence import families
from tools.promises import promises

from . import gemv_norm, mla_cache, qk_norm, rms_norm
from .case import Check

MODULES: dict[str, Any] = {
    "rms_norm": rms_norm,
    "rms_norm_fused_fp8": rms_norm,
    "gemv_and_partial_norm": gemv_norm,
    "row_sum_of_squares_qk": qk_norm,
    "row_mean_of_squares_qk": qk_norm,
    "apply_qk_rms_norm": qk_norm,
    "qk_rms_norm": qk_norm,
    mla_cache.OP: mla_cache,
}
CASES: tuple[Check, ...] = (*rms_norm.CASES, *gemv_norm.CASES, *qk_norm.CASES, *mla_cache.CASES)
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


def select(ops: Sequence[str] = (), match: str = "", published: bool = False) -> list[Check]:
    """The cases of these ops (all when empty) whose name contains ``match``, or one of the words between its bars.

    ``published``: also those of published models, which are about machine code that an H200 must have run. Needs Triton.
    """
    cases = CASES
    if published:
        from tools.evidence.records import H200

        cases += tuple(families.least_cases(H200))
    return [case for case in cases if (not ops or case.op in ops) and matches(case.name, match)]


def matches(name: str, match: str) -> bool:
    """Whether one of the words that ``|`` separates is in a name.

    >>> matches("lanes: 3x4096", "5x33|3x4096"), matches("lanes: 3x4096", "5x33|7168")
    (True, False)
    """
    return any(word in name for word in match.split("|"))


def _interpreted(family: str) -> Callable[..., None]:
    launch: Callable[..., None] = import_module(f"onepass.triton.{family}").launch
    return launch


@contextmanager
def _language_interpreted() -> Iterator[None]:
    """Triton's language made that of its interpreter once, not anew at every call of a device function: a third of the time."""
    import triton.language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        yield  # another version of Triton: as it does it
        return
    original, undo = interpreter._patch_lang, interpreter._LangPatchScope()
    seen_by_kernels = SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core})
    scope = original(seen_by_kernels)
    interpreter._patch_lang = lambda _: undo  # there is nothing to undo
    try:
        yield
    finally:
        interpreter._patch_lang = original
        scope.restore()


@contextmanager
def running_on(device: str) -> Iterator[None]:
    """Inference mode and, for ``interpreter``, the GPU kernels interpreted on the CPU (needs TRITON_INTERPRET=1)."""
    with torch.inference_mode():
        if device != "interpreter":
            yield
            return
        from ..ops.dispatch import launching_with

        with launching_with(_interpreted), _language_interpreted(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # 0/0 is meant
            yield


def run_case(case: Check, device: str) -> Result:
    """Run one case; an exception is a failure, not an end."""
    where = "cpu" if device == "interpreter" else device
    return _run(case.op, case.name, device, lambda: MODULES[case.op].run(case, where))


def _run(op: str, name: str, device: str, test: Callable[[], str | None]) -> Result:
    start = time.perf_counter()
    try:
        message = test() or ""
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {text[0] if text else ''} ({place.name}:{place.lineno})"
    return Result(op, name, device, not message, message, time.perf_counter() - start)


def run_promises(
    device: str,
    progress: Callable[[Result], None] | None = None,
    match: str = "",
    kept: Container[str] = (),
    share: int = 0,
    of: int = 1,
) -> list[Result]:
    """Put every ``of``-th promise whose name contains ``match`` to the test on a device, beginning with number ``share``.

    Those ``kept`` before are left out.
    """
    results = []
    with running_on(device):
        chosen = ((name, test) for name, test in promises(device) if matches(name, match) and name not in kept)
        for name, test in islice(chosen, share, None, of):
            result = _run("promises", name, device, test)
            results.append(result)
            if progress is not None:
                progress(result)
    return results


def run_promises_in_shares(
    device: str, jobs: int, progress: Callable[[Result], None], match: str = "", kept: Path | None = None
) -> list[Result]:
    """`run_promises` by ``jobs`` processes, each with a share; a process that ends early is a failure of its own."""
    command = [sys.executable, "-m", "tools.checks", f"--device={device}", "--promises", f"--match={match}"]
    command += [f"--resume={kept}"] if kept else []
    results: list[Result] = []
    lock = threading.Lock()

    def follow(share: int) -> None:
        with subprocess.Popen([*command, f"--share={share}/{jobs}"], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                with lock:
                    results.append(Result(**json.loads(line)))
                    progress(results[-1])
        if process.returncode:
            ended = Result("promises", f"share {share} of {jobs}", device, False, f"status {process.returncode}", 0.0)
            with lock:
                results.append(ended)
                progress(ended)

    followers = [threading.Thread(target=follow, args=(share,)) for share in range(jobs)]
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join()
    return results


def run_cases(cases: Iterable[Check], device: str, progress: Callable[[Result], None] | None = None) -> list[Result]:
    """Run all, reporting each as it ends."""
    results = []
    with running_on(device):
        for case in cases:
            result = run_case(case, device)
            results.append(result)
            if progress is not None:
                progress(result)
    return results
