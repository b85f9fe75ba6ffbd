"""Process groups: how to name and compare them, and what a group determines once about its shards.

A plan has total column counts, and which ranks' sums count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as c10d
from torch import Tensor
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


def compare_ranks(op: str, name: str, mine: dict[str, Any]) -> None:
    """Raise on every rank of the group of this name if their arguments differ; the message names the ranks that differ."""
    group: c10d.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
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


# --- plans ------------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., object])

MAX_COLUMNS: Final = 2**24
"""float32 represents every count up to this one exactly."""

_NAMES: Final = ("q", "k")


@dataclass(frozen=True)
class QKNormPlan:
    """The widths of a group's shards, as `plan` returns them, for any number of calls. It holds no model tensors."""

    group_name: str
    where: str
    """The group's description in messages."""
    rank: int
    size: int
    widths: tuple[int, ...]
    """Columns of this rank: (Nq_r, Nk_r), or one number for `onepass.dist.rms_norm`."""
    totals: tuple[int, ...]
    """Columns of all ranks, copies counted once."""
    counted: tuple[bool, ...]
    """Whether this rank's sum enters the total; of ranks with copies, only the first one's does."""
    kv_replicas: int = 1
    backend: str = ""
    """The name of the group's backend."""
    _divisors: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def divide(self, sums: Tensor) -> Tensor:
        """Divide sums by the totals, correctly rounded, compiled or not: ``sums / totals``.

        Eager calls divide by a tensor, because torch multiplies by the reciprocal of a Python number. Compiled calls divide in
        float64, because Triton's float32 division is approximate. Rounding a float64 quotient of float32 values to float32 is
        correctly rounded (53 >= 2 * 24 + 2 bits).

        Args:
            sums: float32 [..., 2].

        Returns:
            The means, float32 [..., 2].
        """
        if torch.compiler.is_compiling():
            columns = [
                sums[..., i].double() / torch.full_like(sums[..., i], total, dtype=torch.float64)
                for i, total in ((0, self.totals[0]), (1, self.totals[-1]))
            ]
            return torch.stack(columns, -1).float()
        return sums / self._divisor(sums.device)

    def _divisor(self, device: torch.device) -> Tensor:
        divisor = self._divisors.get(device)
        if divisor is None:
            # filled on the device: a copy from the host cannot be captured in a CUDA graph
            divisor = torch.empty(2, dtype=torch.float32, device=device)
            divisor[0].fill_(self.totals[0])
            divisor[1].fill_(self.totals[-1])
            if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self._divisors[device] = divisor
        return divisor


_known: WeakKeyDictionary[c10d.ProcessGroup, dict[tuple[object, ...], QKNormPlan]] = WeakKeyDictionary()


def plan(
    group: Group,
    nq: int,
    nk: int | None = None,
    *,
    kv_replicas: int = 1,
    counts: Sequence[int] | None = None,
) -> QKNormPlan:
    """The plan for this rank's columns of q and k.

    Without ``counts`` the ranks exchange their widths, so all of them must make the call. The result is cached per group
    and widths.

    Args:
        group: The ranks.
        nq: This rank's columns of q, or of the only tensor.
        nk: This rank's columns of k; None: for `rms_norm`.
        kv_replicas: r if ranks 0 to r-1 hold the same k columns, ranks r to 2r-1 the next ones, and so on.
        counts: ``(Nq, Nk)``, the columns of all ranks, counting copies once. Nothing is then sent.

    Returns:
        The plan.

    >>> import torch, onepass
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> onepass.dist.plan(torch.distributed.group.WORLD, 64, 16).totals
    (64, 16)
    >>> torch.distributed.destroy_process_group()
    """
    widths = (nq,) if nk is None else (nq, nk)
    return find_plan("dist.plan", resolve("dist.plan", group), widths, kv_replicas, counts)


def find_plan(
    op: str, group: c10d.ProcessGroup, widths: tuple[int, ...], kv_replicas: int, counts: Sequence[int] | None
) -> QKNormPlan:
    """The cached plan, or a new one."""
    plans = _known.setdefault(group, {})
    key = (widths, kv_replicas, None if counts is None else tuple(counts))
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = _make(op, group, widths, kv_replicas, counts)
    return plan


def traced_plan(
    op: str, group: Group, widths: tuple[int, ...], kv_replicas: int, counts: tuple[int, ...] | None
) -> QKNormPlan:
    """`find_plan` for a function that is being compiled: nothing is sent."""
    for candidate in _plans_of(op, group, kv_replicas, counts):
        if candidate[4] == widths:
            return QKNormPlan(*candidate)
    return QKNormPlan(*_from_counts(op, group, widths, kv_replicas, counts))


def _constant(function: F) -> F:
    """Let torch.compile run the function while it traces; the result is a constant of the graph.

    The same as torch.compiler.assume_constant_result, which imports all of the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _plans_of(op: str, group: Group, kv_replicas: int, counts: tuple[int, ...] | None) -> tuple[tuple[Any, ...], ...]:
    plans = _known.get(resolve(op, group), {})
    return tuple(
        _fields(p) for (_, r, c), p in plans.items() if r == kv_replicas and (counts is None or counts in (c, p.totals))
    )


@_constant
def _from_counts(
    op: str, group: Group, widths: tuple[int, ...], kv_replicas: int, counts: tuple[int, ...] | None
) -> tuple[Any, ...]:
    if counts is None:
        raise ContractError(
            f"{op}: `group` must have a plan for these widths before it is compiled (call onepass.dist.plan, or pass "
            "`plan` or `counts`), because making one exchanges messages, got none"
        )
    return _fields(find_plan(op, resolve(op, group), widths, kv_replicas, counts))


def _fields(p: QKNormPlan) -> tuple[Any, ...]:
    """A plan as plain data, which can be a constant of a graph."""
    return p.group_name, p.where, p.rank, p.size, p.widths, p.totals, p.counted, p.kv_replicas, p.backend


def _make(
    op: str, group: c10d.ProcessGroup, widths: tuple[int, ...], kv_replicas: int, counts: Sequence[int] | None
) -> QKNormPlan:
    size, rank = group.size(), group.rank()
    if isinstance(kv_replicas, bool) or not isinstance(kv_replicas, int) or kv_replicas < 1 or size % kv_replicas:
        raise ContractError(f"{op}: `kv_replicas` must divide the group's {size} ranks, got {describe(kv_replicas)}")
    if not all(isinstance(width, int) and width > 0 for width in widths):
        raise ContractError(f"{op}: widths must be positive, got {widths}")
    last = len(widths) - 1  # k, or the only tensor: ranks may hold copies of it
    if counts is None:
        table = exchange(op, group, (widths, kv_replicas))
        _check_table(op, table)
        columns = [[row[i] for row, _ in table] for i in range(len(widths))]
        totals = (*map(sum, columns[:last]), sum(columns[last][::kv_replicas]))
    else:
        totals = tuple(counts)
        enough = all(isinstance(t, int) and t >= w for t, w in zip(totals, widths, strict=False))
        if len(totals) != len(widths) or not enough:
            raise ContractError(
                f"{op}: `counts` must hold {len(widths)} column counts, each at least this rank's {widths}, got {counts}"
            )
    for tensor, total in zip(_NAMES, totals, strict=False):
        if total > MAX_COLUMNS:
            raise ContractError(f"{op}: `{tensor}` must have at most 2**24 columns in total, got {total}")
    counted = tuple(i != last or rank % kv_replicas == 0 for i in range(len(widths)))
    name: str = group.group_name
    backend: str = c10d.get_backend(group)
    return QKNormPlan(name, describe_group(group), rank, size, widths, totals, counted, kv_replicas, backend)


def _check_table(op: str, table: list[tuple[tuple[int, ...], int]]) -> None:
    """Compare the ranks' widths. All ranks see the same table, so all of them raise."""
    widths, replicas = table[0]
    last = _NAMES[len(widths) - 1]
    for rank, (row, other) in enumerate(table):
        first = rank - rank % replicas
        for rule, got, expected, reference in (
            ("`kv_replicas` must be the same on all ranks of the group", other, replicas, 0),
            ("all ranks of the group must norm the same number of tensors", len(row), len(widths), 0),
            (
                f"`{last}` must have the same number of columns on ranks that hold copies of it",
                row[-1],
                table[first][0][-1],
                first,
            ),
        ):
            if got != expected:
                raise ContractError(f"{op}: {rule}, got {got} on rank {rank} and {expected} on rank {reference}")
