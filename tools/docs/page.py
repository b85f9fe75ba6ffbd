"""A page that a function writes, for modules that write more than one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Page:
    """A path in the repository, and the text that belongs there."""

    PATH: Path
    render: Callable[[], str]
