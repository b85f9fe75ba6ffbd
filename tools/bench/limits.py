"""Limits of time for what `tools.bench.models` does: an exception interrupts what takes too long."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

AGAIN: Final = 1.0
"""Seconds between interruptions, in case the interrupted code catches the first one."""


class OutOfTime(Exception):
    """The time that the program may take is over."""


def deadline_after(seconds: float | None) -> float | None:
    """The moment so many seconds from now, on the clock of `until`."""
    return None if seconds is None else time.monotonic() + seconds


def over(deadline: float | None) -> bool:
    """Whether this moment has passed."""
    return deadline is not None and time.monotonic() >= deadline


@contextmanager
def until(deadline: float | None) -> Iterator[None]:
    """Raise `OutOfTime` in the block once the deadline has passed; at once if it has. Main thread only."""
    if deadline is None:
        yield
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise OutOfTime("the time limit was reached before it was started")

    def interrupt(*_: Any) -> None:
        raise OutOfTime("the time limit was reached")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, left, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
