"""The two exceptions that a rejected call raises."""

from __future__ import annotations

import re
from collections.abc import Mapping


class ContractError(ValueError):
    """An argument violates the op's contract. The message names the op, the argument, what it must be and what was passed."""


class Unsupported(NotImplementedError):
    """A legal call that this build, device or installation cannot run. The message names an alternative."""


def renamed(error: ContractError | Unsupported, function: str, names: Mapping[str, str]) -> ContractError | Unsupported:
    """An op's error as one of ``function``, whose arguments ``names`` lists by the op's names for them."""
    message = re.sub(r"`(\w+)`", lambda match: f"`{names.get(match[1], match[1])}`", str(error))
    return type(error)(re.sub(r"^\w+: ", f"{function}: ", message))
