"""Process groups: how to specify them, name them in errors, and compare calls across ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from ..core.contract import describe
from ..errors import ContractError

Group: TypeAlias = "c10d.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str]"
"""A process group, a one-dimensional device mesh, or a mesh and one of its dimensions."""

GROUP_KINDS = "be a ProcessGroup that this rank belongs to, a 1-D DeviceMesh or (mesh, dimension)"


def resolve(op: str, group: object) -> c10d.ProcessGroup:
    """The process group that ``group`` specifies."""
    mesh, dimension = group if isinstance(group, tuple) and len(group) == 2 else (group, None)
    if isinstance(mesh, DeviceMesh):
        if dimension is None and mesh.ndim != 1:
            raise ContractError(f"{op}: `group` must {GROUP_KINDS}, got a mesh of {mesh.ndim} dimensions")
        return mesh.get_group(dimension)
    if isinstance(group, c10d.ProcessGroup):
        return group
    raise ContractError(f"{op}: `group` must {GROUP_KINDS}, got {describe(group)}")


def group_named(name: str) -> c10d.ProcessGroup:
    """The group of a plan."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def describe_group(group: c10d.ProcessGroup) -> str:
    """The group's name, backend and ranks, for messages."""
    ranks = c10d.get_process_group_ranks(group)
    listed = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return f"group {group.group_name!r} ({c10d.get_backend(group)}, ranks {listed})"


@contextmanager
def named_errors(op: str, group: str) -> Iterator[None]:
    """Add the names of the op and its group to a collective's error, which keeps its type."""
    try:
        yield
    except RuntimeError as error:
        kind = type(error) if isinstance(error, c10d.DistError) else RuntimeError
        raise kind(f"onepass.{op}: the collective over {group} failed: {error}") from error


def exchange(op: str, group: c10d.ProcessGroup, mine: object) -> list[Any]:
    """Every rank's object, in rank order. Blocks, so it must not be part of every call."""
    table: list[Any] = [None] * group.size()
    with named_errors(op, describe_group(group)):
        c10d.all_gather_object(table, mine, group=group)
    return table


def debugging() -> bool:
    """Whether ONEPASS_DEBUG asks for calls to be compared across ranks."""
    return os.environ.get("ONEPASS_DEBUG") == "1"


def compare_ranks(op: str, group: c10d.ProcessGroup, mine: dict[str, Any]) -> None:
    """Raise on every rank if their arguments differ; the message names the ranks that differ."""
    table = exchange(op, group, mine)
    ranks = c10d.get_process_group_ranks(group)
    for key, expected in table[0].items():
        odd = [rank for rank, row in enumerate(table) if row.get(key) != expected]
        if odd:
            got = ", ".join(f"{table[rank].get(key)} on rank {_rank(rank, ranks)}" for rank in odd)
            raise ContractError(
                f"{op}: `{key}` must be the same on all ranks of the group, "
                f"got {got} and {expected} on rank {_rank(0, ranks)}"
            )


def _rank(rank: int, ranks: Sequence[int]) -> str:
    return str(rank) if ranks[rank] == rank else f"{rank} (global rank {ranks[rank]})"
