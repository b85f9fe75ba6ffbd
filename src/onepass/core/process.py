"""What calls ask of their process: whether it was forked, and whether it is in debug mode.

A forked child has none of its parent's threads, so it must not use its thread pools. With ``ONEPASS_DEBUG=1`` in the
environment calls read values on the host to validate them.
"""

from __future__ import annotations

import os
from typing import Any, Final

_IMPORTER: Final = os.getpid()
"""The process that imported onepass."""

# Looking up an absent name in os.environ raises two exceptions: 1.5 us, or 40 us with cold caches. So we read
# the dictionary behind it, which holds names and values in the system's encoding.
ENVIRONMENT: Final[Any] = getattr(os.environ, "_data", os.environ)
DEBUG_NAME: Final = getattr(os.environ, "encodekey", str)("ONEPASS_DEBUG")
DEBUG_ON: Final = getattr(os.environ, "encodevalue", str)("1")


def forked() -> bool:
    """Whether this process was forked from the one that imported onepass."""
    return os.getpid() != _IMPORTER


def debugging() -> bool:
    """Whether debug mode is on now."""
    return bool(ENVIRONMENT.get(DEBUG_NAME) == DEBUG_ON)
