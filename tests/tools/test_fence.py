"""Memory safety on the CPU: kernels run between inaccessible pages, and touching one ends the process."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import onepass
from onepass.core.backend import launching_with
from onepass.ops.rms_norm import cpu as cpu_rms_norm
from onepass.ops.rms_norm.launch import RowCall
from tests.oracle import runner
from tools import fence


def ending(child: Callable[[], None]) -> int:
    """The signal that ends a child process running this, or 0."""
    process = os.fork()
    if process == 0:
        faulthandler.disable()
        child()
        os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


@pytest.mark.parametrize("how", ["read before", "read after", "write before", "write after"])
def test_one_byte_outside_is_fatal(how: str) -> None:
    assert ending(lambda: fence.trespass(how)) == signal.SIGSEGV


@pytest.mark.parametrize("how", ["read inside", "write inside"])
def test_the_last_byte_inside_is_not(how: str) -> None:
    assert ending(lambda: fence.trespass(how)) == 0


@pytest.mark.parametrize("columns", [0, 1])
def test_a_kernel_that_reads_past_its_rows_dies(columns: int) -> None:
    """Through a case: a kernel that gets one column too many reads past its tensors."""
    case = next(c for c in fence.fenced_cases(["rms_norm"], "short: 5x64 "))
    expected = runner.run_case(case, "cpu")  # compiles it, before there is a child
    assert expected.passed

    def launch(call: RowCall) -> None:
        cpu_rms_norm.launch(call._replace(n=call.n + columns))

    def child() -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(), launching_with(lambda family: launch):
            place = fence.Place("end")
            module = runner.MODULES[case.op]
            given = place.arguments(module.inputs(case, "cpu"))
            module.call(case, {**given, "out": place.output(given["x"])})

    assert ending(child) == (signal.SIGSEGV if columns else 0)


def test_bytes_written_beside_an_output_are_detected() -> None:
    place = fence.Place("end")
    x = place.arguments({"x": torch.randn(4, 8)})["x"]
    out = place.output(torch.empty(4, 8))
    assert out.stride() == (8 + fence.GAP, 1)
    onepass.rms_norm(x, torch.ones(8), out=out)
    assert place.written_beside([out]) == 0
    out.as_strided((1,), (1,), 8).zero_()  # between the first row and the second
    assert place.written_beside([out]) == 4
    x[0, 0] = 7.5
    assert place.written_beside([out]) > 4


@pytest.mark.full  # all cases of test_case, between guard pages
@pytest.mark.slow
def test_every_case_stays_within_its_memory() -> None:
    """In a separate process: if a kernel leaves its memory, the process dies and its last line names the case."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "tools.fence"]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    assert run.returncode >= 0, f"signal {-run.returncode} in {lines[-1]}\n{run.stderr}"
    assert not failed and run.returncode == 0, "\n".join(failed) or run.stderr
    summary = re.match(r"(\d+) passed, 0 failed", lines[-1])
    assert summary is not None and int(summary[1]) > 1600
