"""Which process this is: a forked child has none of its parent's threads, so it must not count on the pools they made."""

from __future__ import annotations

import os
from typing import Final

_HOME: Final = os.getpid()
"""The process that imported onepass."""


def forked() -> bool:
    """Whether this process was forked from the one that imported onepass."""
    return os.getpid() != _HOME
