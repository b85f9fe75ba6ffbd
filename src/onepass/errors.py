"""The two exceptions that a rejected call raises."""

from __future__ import annotations


class ContractError(ValueError):
    """An argument violates the op's contract. The message names the op, the argument, what it must be and what was passed."""


class Unsupported(NotImplementedError):
    """A legal call that this build, device or installation cannot run. The message names an alternative."""
