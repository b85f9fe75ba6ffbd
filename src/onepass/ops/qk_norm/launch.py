"""What one kernel over the rows of q and k computes (`QkSpec`) and where those rows are (`QkRows`).

A *token* is one index of the leading dimensions that q and k share. It has one row of q and one of k
or, if heads are normed separately, one row per head. One launch processes both tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ...core.backend import launch_for
from ...core.contract import Contract
from ...core.layout import Geometry, Strides, geometry, smallest_dimension
from ...core.process import debugging
from ...formats import SMALLEST_EPS, Rounding
from ...rope import RopeStyle

Stage = Literal["sums", "means", "apply", "fused"]
"""Store the sums or the means of squares; norm with given means; or do both at once, storing no statistics."""

TENSORS: Final = ("q", "k", "q_out", "k_out", "stats", "positions", "q_scale_out", "k_scale_out")
"""In the order of `QkRows.strides`."""
WITH_HEADS: Final = ("q", "k", "q_out", "k_out", "q_scale_out", "k_scale_out")
"""Tensors with heads, in the order of `QkRows.steps`."""
QkScale = Literal["none", "tensor", "row"]
"""What fp8 results are divided by: nothing, a given number, or one number per row, which is stored too."""
MAX_HEAD: Final = 4096
"""Maximum number of columns of a rotated head."""


class RopeRule(NamedTuple):
    """How heads are rotated: the first ``dim`` columns of every ``head_dim``; ``positions`` is a dtype, or None."""

    style: RopeStyle
    head_dim: int
    dim: int
    positions: torch.dtype | None


@dataclass(frozen=True, eq=False)
class QkSpec:
    """Everything except sizes that affects the machine code; interned by `qk_spec`, so identity is equality.

    ``gamma`` and ``gamma_k`` are the dtypes of q's weight and of k's. ``two_eps``: k has its own epsilon.
    """

    stage: Stage
    x: torch.dtype
    gamma: torch.dtype | None
    gamma_k: torch.dtype | None
    out: torch.dtype | None
    rounding: Rounding
    heads: bool
    rope: RopeRule | None
    scale: QkScale = "none"
    two_eps: bool = False

    @property
    def applies(self) -> bool:
        """Whether the norm is stored."""
        return self.out is not None


@cache
def qk_spec(
    stage: Stage,
    x: torch.dtype,
    gamma: torch.dtype | None = None,
    out: torch.dtype | None = None,
    rounding: Rounding = "once",
    heads: bool = False,
    rope: RopeRule | None = None,
    gamma_k: torch.dtype | None = None,
    scale: QkScale = "none",
    two_eps: bool = False,
) -> QkSpec:
    """The interned `QkSpec` with these properties. Without ``gamma_k``, k's weight has the dtype of q's."""
    if gamma_k is not None and gamma_k == gamma:
        return qk_spec(stage, x, gamma, out, rounding, heads, rope, None, scale, two_eps)
    gammas = (gamma, gamma if gamma_k is None else gamma_k)
    return QkSpec(stage, x, *gammas, out, rounding, heads, rope, scale, two_eps)


class QkRows(NamedTuple):
    """Where the rows are: ``geom`` counts tokens, ``heads`` and ``widths`` (columns per row) are those of q and of k.

    ``steps`` are the strides between heads. Without positions, token i has position ``i % sequence``.
    """

    geom: Geometry
    strides: Sequence[Strides]
    heads: tuple[int, int]
    widths: tuple[int, int]
    steps: tuple[int, ...]
    sequence: int


NO_ROWS: Final = QkRows(Geometry(0, 1, 1), (), (1, 1), (0, 0), (0,) * len(WITH_HEADS), 1)
"""The rows of a call whose layout is not known yet."""


class QkCall(NamedTuple):
    """One call of a kernel over q and k: its spec, tensors and numbers, all validated."""

    spec: QkSpec
    q: Tensor
    k: Tensor
    gamma_q: Tensor | None = None
    gamma_k: Tensor | None = None
    q_out: Tensor | None = None
    k_out: Tensor | None = None
    stats: Tensor | None = None
    freqs: Tensor | None = None
    positions: Tensor | None = None
    eps: float = 0.0
    weight_offset: float = 0.0
    rows: QkRows = NO_ROWS
    eps_k: float = 0.0
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    q_scale_out: Tensor | None = None
    k_scale_out: Tensor | None = None

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""
        return self.q.get_device()


_ONE: Final = (1, 1)
_NO_STEPS: Final[tuple[int, ...]] = (0,) * len(WITH_HEADS)


class SquaresArguments(Protocol):
    """Validated arguments of `row_sum_of_squares_qk` and `row_mean_of_squares_qk`."""

    q: Tensor
    k: Tensor
    out: Tensor


class NormArguments(Protocol):
    """Validated arguments that all norms of q and k have."""

    q: Tensor
    k: Tensor
    gamma_q: Tensor
    gamma_k: Tensor
    freqs: Tensor | None
    positions: Tensor | None
    style: RopeStyle
    dim: int | None
    rounding: Rounding
    weight_offset: float
    q_scale: Tensor | None
    k_scale: Tensor | None
    q_out: Tensor
    k_out: Tensor


class ApplyArguments(NormArguments, Protocol):
    """Validated arguments of `apply_qk_rms_norm`."""

    qk_var: Tensor
    head_dim: int | None
    epsilon: float
    epsilon_k: float | None


class HeadsArguments(NormArguments, Protocol):
    """Validated arguments of `qk_rms_norm` for q and k [..., H, D]."""

    eps: float
    eps_k: float | None
    q_scale_out: Tensor | None
    k_scale_out: Tensor | None


class FlatArguments(HeadsArguments, Protocol):
    """Validated arguments of `qk_rms_norm` for rows."""

    per_head: bool
    head_dim: int | None


def run_qk(contract: Contract, call: QkCall, head: int) -> None:
    """Run a kernel over q and k, in one launch if their rows allow it. Without tokens nothing is launched.

    ``head``: 0 for rows [..., N], the width of rows that are adjacent in [..., N], or -1 for rows of [..., H, D].
    """
    q, k, freqs, positions = call.q, call.k, call.freqs, call.positions
    launch = launch_for("qk_norm", q)
    if not q.numel():
        return
    call = call._replace(eps=max(call.eps, SMALLEST_EPS), eps_k=max(call.eps_k, SMALLEST_EPS))
    if freqs is not None and positions is not None and debugging():
        check_positions(contract, positions, "freqs", freqs.shape[0])
    with_heads: list[Tensor | None] = [q, k, call.q_out, call.k_out]
    scales: list[Tensor | None] = [call.q_scale_out, call.k_scale_out]
    if head >= 0 and q.dim() == 2:  # nothing to fold
        tensors = (*with_heads, call.stats, positions, *scales)
        strides = [(0, 0, 0) if t is None else (t.stride(0), 0, 0) for t in tensors]
        tokens, nq = q.shape
        nk = k.shape[1]
        adjacent = (head, head, head, head, 1, 1)
        per_head = ((nq // head, nk // head), (head, head), adjacent) if head else (_ONE, (nq, nk), _NO_STEPS)
        launch(call._replace(rows=QkRows(Geometry(tokens, 1, 1), strides, *per_head, tokens)))
        return
    heads, steps = _ONE, _NO_STEPS
    if head > 0:
        heads, steps = (q.shape[-1] // head, k.shape[-1] // head), (head, head, head, head, 1, 1)
    elif head < 0:
        heads = (q.shape[-2], k.shape[-2])
        steps = tuple([0 if t is None else t.stride(-2) for t in (*with_heads, *scales)])
        with_heads = [None if t is None else t.select(-2, 0) for t in with_heads]
        scales = [None if t is None else t.select(-2, 0) for t in scales]
    first, second, *_ = with_heads
    assert first is not None and second is not None
    widths = (head, head) if head > 0 else (first.shape[-1], second.shape[-1])
    sequence = first.shape[-2] if first.dim() > 1 else 1
    rows = [*with_heads, call.stats, None if positions is None else positions.unsqueeze(-1), *scales]
    if first.dim() == 1:
        rows = [None if t is None else t.unsqueeze(0) for t in rows]
    folded = geometry(rows)
    if folded is not None:
        launch(call._replace(rows=QkRows(*folded, heads, widths, steps, sequence)))
        return
    # the last leading dimension is kept: without positions its index is the token's position
    dim = smallest_dimension(first.shape[:-2])
    parted = {name: t for name in TENSORS if (t := getattr(call, name)) is not None}
    for i in range(first.shape[dim]):
        run_qk(contract, call._replace(**{name: t.select(dim, i) for name, t in parted.items()}), head)


def check_positions(contract: Contract, positions: Tensor, table: str, limit: int) -> None:
    """Read the positions on the host, which waits for the device; for debugging only."""
    least, most = (int(v) for v in positions.aminmax())
    if least < 0 or most >= limit:
        contract.fail("positions", f"lie within the {limit} rows of {table}", f"{least} to {most}")
