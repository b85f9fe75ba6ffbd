"""Detects forked processes: a forked child has none of its parent's threads, so it must not use its thread pools."""

from __future__ import annotations

import os
from typing import Final

_HOME: Final = os.getpid()
"""The process that imported onepass."""


def forked() -> bool:
    """Whether this process was forked from the one that imported onepass."""
    return os.getpid() != _HOME
