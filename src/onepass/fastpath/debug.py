"""Whether calls read values on the host to check them: ``ONEPASS_DEBUG=1`` in the environment."""

from __future__ import annotations

import os
from typing import Any, Final

_NAME: Final = "ONEPASS_DEBUG"
# A name that is not there costs os.environ two exceptions: 1.5 us, and 40 us when the caches are cold. So the dictionary
# behind it is asked, which holds names and values as the system encodes them.
_environment: Any = getattr(os.environ, "_data", os.environ)
_encode: Any = getattr(os.environ, "encodekey", str)
_KEY: Final = _encode(_NAME)
_ON: Final = getattr(os.environ, "encodevalue", str)("1")


def debugging() -> bool:
    """Whether it is on now."""
    return bool(_environment.get(_KEY) == _ON)
