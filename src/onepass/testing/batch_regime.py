"""The tile of a row kernel follows the number of rows, and its results do not: here a check's few rows are taken for more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ..fastpath import replay

if TYPE_CHECKING:
    from ..triton.config import Crowd

CROWDS: Final[tuple[Crowd, ...]] = ("few", "many", "flood")


@contextmanager
def assuming(crowd: Crowd) -> Iterator[None]:
    """Take every call for one of so many rows. Calls are not remembered meanwhile: that would be by the rows they have."""
    from ..triton.config import assumed

    before, replay.switch.on = replay.switch.on, False
    assumed.append(crowd)
    try:
        yield
    finally:
        assumed.pop()
        replay.switch.on = before


def others(rows: int, row_bytes: int) -> list[Crowd]:
    """What so many rows are not, but may be taken for, with another tile: a flood has that of many but for rows of these bytes."""
    from ..triton.config import crowd_of

    own = crowd_of(rows, row_bytes)
    return [crowd for crowd in CROWDS if crowd != own and (crowd != "flood" or 8192 < row_bytes <= 16384)]
