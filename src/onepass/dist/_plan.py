"""What has to be known once about a group and its shards: how many columns there are in all, and who counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as c10d
from torch import Tensor

from ..contract.declaration import describe
from ..errors import ContractError
from ._groups import (Group, describe_group, exchange, resolve)

F = TypeVar("F", bound=Callable[..., object])

MAX_COLUMNS: Final = 2**24
"""Up to here every count is a float32."""

_NAMES: Final = ("q", "k")


@dataclass(frozen=True)
class QKNormPlan:
    """Widths of a group's shards; make one with `plan`. It holds no tensors of the model and may serve any number of calls."""

    group_name: str
    where: str
    """The group, as messages name it."""
    rank: int
    size: int
    widths: tuple[int, ...]
    """Columns of this rank: (Nq_r, Nk_r), or one number for `onepass.dist.rms_norm`."""
    totals: tuple[int, ...]
    """Columns of all ranks together, copies counted once."""
    counted: tuple[bool, ...]
    """Whether this rank's sum enters the total: False on all but the first of the ranks that hold a copy."""
    kv_replicas: int = 1
    backend: str = ""
    """The group's, as torch names it."""
    _divisors: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def divide(self, sums: Tensor) -> Tensor:
        """``sums`` [..., 2] by totals, correctly rounded, on every device and compiled or not.

        Eagerly one division by a tensor: torch multiplies by the reciprocal of a plain number. Compiled, float64:
        Triton's float32 division is an approximation, and rounding a float64 quotient of float32 values to float32 gives
        the correctly rounded one (53 >= 2 * 24 + 2 bits).
        """
        if torch.compiler.is_compiling():
            columns = [
                sums[..., i].double() / torch.full_like(sums[..., i], total, dtype=torch.float64)
                for i, total in ((0, self.totals[0]), (1, self.totals[-1]))
            ]
            return torch.stack(columns, -1).float()
        return sums / self._divisor(sums.device)

    def _divisor(self, device: torch.device) -> Tensor:
        found = self._divisors.get(device)
        if found is None:
            # filled on the device: a copy from the host could not be captured in a CUDA graph
            found = torch.empty(2, dtype=torch.float32, device=device)
            found[0].fill_(self.totals[0])
            found[1].fill_(self.totals[-1])
            if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self._divisors[device] = found
        return found


_known: WeakKeyDictionary[c10d.ProcessGroup, dict[tuple[object, ...], QKNormPlan]] = WeakKeyDictionary()


def plan(
    group: Group,
    nq: int,
    nk: int | None = None,
    *,
    kv_replicas: int = 1,
    counts: Sequence[int] | None = None,
) -> QKNormPlan:
    """The plan for this rank's ``nq`` columns of q and ``nk`` of k (None: one tensor, for `onepass.dist.rms_norm`).

    With ``counts`` = (Nq, Nk), the columns of all ranks together, copies counted once, nothing is sent. Without, the ranks
    tell one another their widths, so all of them must make the call; the answer is remembered for the group and
    widths. ``kv_replicas`` = r says that ranks 0 to r-1 hold the same k columns, r to 2r-1 the next, and so on.
    """
    widths = (nq,) if nk is None else (nq, nk)
    return find_plan("dist.plan", resolve("dist.plan", group), widths, kv_replicas, counts)


def find_plan(
    op: str, group: c10d.ProcessGroup, widths: tuple[int, ...], kv_replicas: int, counts: Sequence[int] | None
) -> QKNormPlan:
    """The remembered plan, or a new one."""
    made = _known.setdefault(group, {})
    key = (widths, kv_replicas, None if counts is None else tuple(counts))
    found = made.get(key)
    if found is None:
        found = made[key] = _make(op, group, widths, kv_replicas, counts)
    return found


def _constant(function: F) -> F:
    """Run while torch.compile traces, its result a constant of the graph.

    What torch.compiler.assume_constant_result does, which imports all of the compiler first.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _plans_of(op: str, group: Group, kv_replicas: int, counts: tuple[int, ...] | None) -> tuple[_Fields, ...]:
    made = _known.get(resolve(op, group), {})
    return tuple(
        _fields(p) for (_, r, c), p in made.items() if r == kv_replicas and (counts is None or counts in (c, p.totals))
    )


@_constant
def _from_counts(
    op: str, group: Group, widths: tuple[int, ...], kv_replicas: int, counts: tuple[int, ...] | None
) -> _Fields:
    if counts is None:
        raise ContractError(
            f"{op}: `group` must have a plan for these widths before it is compiled (call onepass.dist.plan, or pass "
            "`plan` or `counts`): finding one exchanges messages, which a trace must not do, got none"
        )
    return _fields(find_plan(op, resolve(op, group), widths, kv_replicas, counts))


_Fields = tuple[str, str, int, int, tuple[int, ...], tuple[int, ...], tuple[bool, ...], int, str]
"""A plan as plain data: what a trace can hold as a constant."""


def _fields(p: QKNormPlan) -> _Fields:
    return p.group_name, p.where, p.rank, p.size, p.widths, p.totals, p.counted, p.kv_replicas, p.backend


def traced_plan(
    op: str, group: Group, widths: tuple[int, ...], kv_replicas: int, counts: tuple[int, ...] | None
) -> QKNormPlan:
    """`find_plan` for a function that is being compiled: nothing is sent."""
    for candidate in _plans_of(op, group, kv_replicas, counts):
        if candidate[4] == widths:
            return QKNormPlan(*candidate)
    return QKNormPlan(*_from_counts(op, group, widths, kv_replicas, counts))


def _make(
    op: str, group: c10d.ProcessGroup, widths: tuple[int, ...], kv_replicas: int, counts: Sequence[int] | None
) -> QKNormPlan:
    size, rank = group.size(), group.rank()
    if isinstance(kv_replicas, bool) or not isinstance(kv_replicas, int) or kv_replicas < 1 or size % kv_replicas:
        raise ContractError(f"{op}: `kv_replicas` must divide the group's {size} ranks, got {describe(kv_replicas)}")
    if not all(isinstance(width, int) and width > 0 for width in widths):
        raise ContractError(f"{op}: widths must be positive, got {widths}")
    # the last tensor is the one of which there may be copies: k, or the only one
    last = len(widths) - 1
    if counts is None:
        table = exchange(op, group, (widths, kv_replicas))
        _check_table(op, table)
        totals = tuple(
            sum(row[i] for row, _ in (table[::kv_replicas] if i == last else table)) for i in range(len(widths))
        )
    else:
        totals = tuple(counts)
        if len(totals) != len(widths) or not all(
            isinstance(t, int) and t >= w for t, w in zip(totals, widths, strict=True)
        ):
            raise ContractError(
                f"{op}: `counts` must hold {len(widths)} column counts, none below this rank's {widths}, got {counts}"
            )
    for tensor, total in zip(_NAMES, totals, strict=False):
        if total > MAX_COLUMNS:
            raise ContractError(f"{op}: `{tensor}` must have at most 2**24 columns in all, got {total}")
    counted = tuple(i != last or rank % kv_replicas == 0 for i in range(len(widths)))
    name: str = group.group_name
    backend: str = c10d.get_backend(group)
    return QKNormPlan(name, describe_group(group), rank, size, widths, totals, counted, kv_replicas, backend)


def _check_table(op: str, table: list[tuple[tuple[int, ...], int]]) -> None:
    """All ranks see the same table, so all of them refuse it."""
    replicas = table[0][1]
    for rank, (widths, other) in enumerate(table):
        if other != replicas:
            raise ContractError(
                f"{op}: `kv_replicas` must be the same on all ranks of the group, "
                f"got {other} on rank {rank} against {replicas} on rank 0"
            )
        if len(widths) != len(table[0][0]):
            raise ContractError(
                f"{op}: all ranks of the group must norm as many tensors, "
                f"got {len(widths)} on rank {rank} against {len(table[0][0])} on rank 0"
            )
        first = rank - rank % replicas
        if widths[-1] != table[first][0][-1]:
            raise ContractError(
                f"{op}: `{_NAMES[len(widths) - 1]}` must have as many columns on ranks that hold copies of it, "
                f"got {widths[-1]} on rank {rank} against {table[first][0][-1]} on rank {first}"
            )
