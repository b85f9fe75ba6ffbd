"""Write MLA's cache with other tiles than the usual ones, which must not change results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

from onepass.core import recording

if TYPE_CHECKING:
    from onepass.ops.mla_cache.gpu_tile import MlaCut


@contextmanager
def cut_as(cut: MlaCut) -> Iterator[None]:
    """Divide every call as ``cut`` says. Replay is off, because its keys do not have the cut."""
    from onepass.ops.mla_cache import gpu

    replays, recording.switch.on = recording.switch.on, False
    try:
        with mock.patch.object(gpu, "mla_cut", lambda *sizes: cut):
            yield
    finally:
        recording.switch.on = replays
