"""Memory of results: poisoned before a call, copied to the CPU after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from onepass.testing.tensors import memory_of


def poison(tensor: Tensor) -> Tensor:
    """Fill with bytes that no correct output consists of."""
    memory_of(tensor).fill_(0xFF)
    return tensor


def poisoned_like(tensor: Tensor) -> Tensor:
    """Poisoned memory with a tensor's shape, strides and dtype."""
    return poison(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device))


def fetched(device: str, *groups: Iterable[Tensor]) -> list[tuple[Tensor, ...]]:
    """The tensors of each group on the CPU, with all memory that they lie in, in one transfer.

    There is one wait instead of one per comparison. A wait is slow when several processes share a GPU.
    """
    wanted = [tuple(group) for group in groups]
    if device == "cpu":
        return wanted
    memory = {t.untyped_storage().data_ptr(): memory_of(t) for group in wanted for t in group}
    whole = torch.cat(list(memory.values())).cpu() if memory else torch.empty(0, dtype=torch.uint8)
    parts = whole.split([t.numel() for t in memory.values()])
    copies = {at: part.clone().untyped_storage() for at, part in zip(memory, parts, strict=True)}

    def copied(t: Tensor) -> Tensor:
        storage = copies[t.untyped_storage().data_ptr()]
        return torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())

    return [tuple(map(copied, group)) for group in wanted]


def to_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with their tensors, also those in lists, on the CPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(v) for v in value]
        return value.cpu() if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in arguments.items()}
