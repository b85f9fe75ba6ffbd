"""The two ways a call is refused."""

from __future__ import annotations


class ContractError(ValueError):
    """An argument breaks the op's contract; the message names op, argument, expectation and what came."""


class Unsupported(NotImplementedError):
    """A legal call that this build, device or installation cannot run; the message says what can."""
