"""What the plugins for engines share: one line that says what was registered, or why nothing was."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..models.patching.code import NotComparable, fingerprint_of

__all__ = ["NotSupported", "announced", "fingerprint"]


class NotSupported(Exception):
    """Why onepass cannot be registered with an engine. The engine keeps its own implementations."""


def announced(log: logging.Logger, register: Callable[[], str]) -> str:
    """The line that ``register`` returns, or why it could not; only the second is logged as a warning."""
    try:
        line = register()
    except NotSupported as why:
        line = f"onepass is not used: {why}"
        log.warning(line)
    else:
        log.debug(line)
    return line


def fingerprint(function: object) -> str:
    """The fingerprint of an engine's function; "" if its code cannot be read."""
    try:
        return fingerprint_of(function)
    except NotComparable:
        return ""
