"""Run code in a process whose Triton kernels are interpreted. Triton decides that when it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def interpret(*arguments: str) -> str:
    """What ``python arguments`` prints with interpreted kernels."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def passed_checks(*ops: str, match: str = "") -> int:
    """How many cases of ``ops`` passed in the interpreter, in one process. A failing case fails the calling test."""
    chosen = [f"--op={op}" for op in ops]
    printed = interpret("-m", "tools.checks", "--device", "interpreter", *chosen, "--match", match)
    found = re.search(r"(\d+) passed, 0 failed on interpreter", printed)
    assert found is not None, printed
    return int(found[1])


def broken_promise(op: str, function: str) -> str:
    """What a promise of tests/<op>/promises.py finds wrong in the interpreter; ``None`` as text if it holds."""
    code = (
        f"from tests.{op}.promises import {function}\n"
        "from tests.oracle.runner import running_on\n"
        "with running_on('interpreter'):\n"
        f"    print({function}('cpu'))\n"
    )
    return interpret("-c", code).strip()
