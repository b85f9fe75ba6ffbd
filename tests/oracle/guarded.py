"""Calls into guarded memory: a cache write must not change a byte beside its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from onepass.testing.tensors import memory_of, moved
from tests.oracle.memory import fetched

GUARD: Final = 4096
"""Bytes of a pattern around every buffer; a multiple of every alignment."""

Results = tuple[Tensor, ...]


def run_guarded(
    arguments: dict[str, Any], call: Callable[[dict[str, Any]], Results], guard: int = GUARD
) -> tuple[Results, Results, str | None]:
    """The results of ``call`` with guarded copies of ``arguments``, the same on the CPU, and what else was written.

    Results must lie in the memory of the arguments.
    """
    given = moved(arguments, guard=guard)
    memory = {t.untyped_storage().data_ptr(): memory_of(t) for t in given.values() if isinstance(t, Tensor)}
    before = [t.clone() for t in memory.values()]
    results = call(given)
    was, now, stored = fetched(results[0].device.type, before, memory.values(), results)
    ours = {t.untyped_storage().data_ptr(): torch.zeros_like(t) for t in now}
    for t in stored:
        storage = ours[t.untyped_storage().data_ptr()].untyped_storage()
        mine = torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())
        mine.unsqueeze(-1).view(torch.uint8).fill_(1)
    for old, new in zip(was, now, strict=True):
        outside = (new != old) & (ours[new.untyped_storage().data_ptr()] == 0)
        if outside.any():
            return results, stored, f"{int(outside.sum())} bytes beside the outputs were written"
    return results, stored, None
