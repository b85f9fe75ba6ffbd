"""Runs a command line in this process."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """What a command printed, and its exit status."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(main: Callable[[Sequence[str]], int], *arguments: str) -> Result:
    """Call ``main`` with the arguments of a command line. Other exceptions than its exit are the test's."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as ended:
            assert isinstance(ended.code, int), ended.code
            status = ended.code
    return Result(status, out.getvalue(), err.getvalue())
