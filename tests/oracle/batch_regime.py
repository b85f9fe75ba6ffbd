"""Run a small batch with the kernel configuration of a larger one: the tile depends on the batch, the results must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from onepass.core import recording

if TYPE_CHECKING:
    from onepass.gpu.tuning.table import Regime

REGIMES: Final[tuple[Regime, ...]] = ("small", "large", "streaming")


@contextmanager
def assuming(regime: Regime) -> Iterator[None]:
    """Configure every call for this regime. Replay is off, because it would key calls by their actual rows."""
    from onepass.ops.rms_norm.gpu_tile import assumed

    before, recording.switch.on = recording.switch.on, False
    assumed.append(regime)
    try:
        yield
    finally:
        assumed.pop()
        recording.switch.on = before


def others(rows: int, row_bytes: int) -> list[Regime]:
    """The regimes that give such a batch a different tile; "streaming" does so only for some row lengths."""
    from onepass.ops.rms_norm.gpu_tile import batch_regime

    own, (*_, streaming) = batch_regime(rows, row_bytes), REGIMES
    return [regime for regime in REGIMES if regime != own and (regime != streaming or 8192 < row_bytes <= 16384)]
