"""Debug mode: with ``ONEPASS_DEBUG=1`` in the environment, calls read values on the host to validate them."""

from __future__ import annotations

import os
from typing import Any, Final

_NAME: Final = "ONEPASS_DEBUG"
# Looking up an absent name in os.environ raises two exceptions: 1.5 us, or 40 us with cold caches. So we read
# the dictionary behind it, which holds names and values in the system's encoding.
_environment: Any = getattr(os.environ, "_data", os.environ)
_encode: Any = getattr(os.environ, "encodekey", str)
_KEY: Final = _encode(_NAME)
_ON: Final = getattr(os.environ, "encodevalue", str)("1")


def debugging() -> bool:
    """Whether debug mode is on now."""
    return bool(_environment.get(_KEY) == _ON)
