"""The matrix: every case of every op. `onepass check` makes few calls (`onepass.testing.runner`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

from tests.linear import cases as linear
from tests.ops import GPU_FOLDERS, each
from tests.oracle.case import Check
from tests.oracle.runner import among

CASES: Final[tuple[Check, ...]] = tuple(chain(*each("cases", "CASES")))
"""Cases that every device runs."""
GPU_CASES: Final[tuple[Check, ...]] = (*chain(*each("cases", "CASES", GPU_FOLDERS)), *linear.GPU_CASES)
"""Cases of kernels that a CPU does not have, and of what a GPU does differently. The interpreter has the former."""


def select(ops: Sequence[str] = (), match: str = "", device: str = "cpu") -> list[Check]:
    """The device's cases of these ops (all when empty) whose name contains ``match``, or one of its alternatives separated by ``|``."""
    return among(CASES if device == "cpu" else (*CASES, *GPU_CASES), ops, match)
