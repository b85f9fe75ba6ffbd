"""The calls: local sums of squares, one collective, the norm. See the package's docstring for the maths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from ..contract.declaration import (describe, require_bool)
from ..errors import ContractError
from ..formats import Rounding
from ..ops.qk_norm import (APPLY_QK_RMS_NORM, apply_qk_rms_norm, row_sum_of_squares_qk)
from ..ops.qk_norm import qk_rms_norm as local_qk_rms_norm
from ..rope import Rope
from ._groups import (GROUP_KINDS, Group, compare_ranks, debugging, group_named, named_errors, resolve, rows_of)
from ._plan import (QKNormPlan, find_plan, traced_plan)

_QK = "dist.qk_rms_norm"
_ONE = "dist.rms_norm"

# made at first use otherwise, which must not be inside a trace
_ = APPLY_QK_RMS_NORM.prepare


class PendingStats:
    """Sums of squares on their way round the group; `apply` waits for them. Made by `start_qk_stats`.

    ``q`` and ``k`` are read again by `apply`: leave them as they are until then. What was started must be finished, on all
    ranks and in the same order.
    """

    def __init__(self, plan: QKNormPlan, q: Tensor, k: Tensor, moving: Tensor, gathered: bool) -> None:
        self.plan, self.q, self.k = plan, q, k
        self._moving: Tensor | None = moving
        self._gathered = gathered
        self._means: Tensor | None = None

    def wait(self) -> Tensor:
        """The means of squares over all ranks' columns, float32 [..., 2]: what `onepass.apply_qk_rms_norm` takes."""
        if self._means is None:
            self._means = _arrive(_QK, self.plan, cast(Tensor, self._moving), self._gathered)
            self._moving = None
        return self._means

    def apply(
        self,
        gamma_q: Tensor,
        gamma_k: Tensor,
        eps: float = 1e-6,
        *,
        weight_offset: float = 0.0,
        rounding: Rounding = "once",
        rope: Rope | None = None,
        out_dtype: torch.dtype | None = None,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Wait, then norm q and k; nothing is written before the sums have arrived. See `qk_rms_norm`."""
        means = self.wait()
        q_out, k_out = _outputs(_QK, self.q, self.k, out_dtype, out)
        apply_qk_rms_norm(
            q_out, k_out, gamma_q, gamma_k, means, self.q, self.k, eps,
            weight_offset=weight_offset, rounding=rounding, rope=rope,
        )  # fmt: skip
        return q_out, k_out


def start_qk_stats(
    q: Tensor,
    k: Tensor,
    *,
    group: Group | None = None,
    plan: QKNormPlan | None = None,
    counts: Sequence[int] | None = None,
    kv_replicas: int = 1,
    reproducible: bool = False,
) -> PendingStats:
    """Begin `qk_rms_norm`: sum the squares of this rank's columns and send them off, without waiting.

    What the caller does between this and ``finish`` (the v projection, say) runs while the sums travel. On CUDA the waiting
    is done by the stream, not by the host.
    """
    require_bool(_QK, "reproducible", reproducible)
    plan = _plan(_QK, (q, k), group, plan, kv_replicas, counts)
    _compare(_QK, plan, {"q": q, "k": k}, reproducible)
    sums = row_sum_of_squares_qk(q, k)
    return PendingStats(plan, q, k, _depart(_QK, plan, sums, reproducible), reproducible)


def finish(
    pending: PendingStats,
    gamma_q: Tensor,
    gamma_k: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: Rounding = "once",
    rope: Rope | None = None,
    out_dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """End what `start_qk_stats` began: wait for the sums and norm q and k."""
    return pending.apply(
        gamma_q, gamma_k, eps,
        weight_offset=weight_offset, rounding=rounding, rope=rope, out_dtype=out_dtype, out=out,
    )  # fmt: skip


def qk_rms_norm(
    q: Tensor,
    k: Tensor,
    gamma_q: Tensor,
    gamma_k: Tensor,
    eps: float = 1e-6,
    *,
    group: Group | None = None,
    plan: QKNormPlan | None = None,
    counts: Sequence[int] | None = None,
    kv_replicas: int = 1,
    reproducible: bool = False,
    weight_offset: float = 0.0,
    rounding: Rounding = "once",
    rope: Rope | None = None,
    per_head: bool = False,
    out_dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of q and of k over the columns of all ranks of ``group``. Returns this rank's (q_out, k_out).

    ``q`` [..., Nq_r] and ``k`` [..., Nk_r] are this rank's columns, ``gamma_q`` and ``gamma_k`` the weights of those columns.
    Widths may differ between ranks; the leading shape, the options and the order of calls may not. ``out`` may be
    (q, k) themselves: nothing is written before the sums of all ranks have arrived.

    How many columns there are in all comes from ``plan`` (see `onepass.dist.plan`), from ``counts`` = (Nq, Nk), or is
    found and remembered at the first call with these widths, which blocks for one exchange. ``kv_replicas`` = r: each r
    consecutive ranks hold the same k columns, which are counted once. Inside torch.compile a plan must exist, or
    ``plan`` or ``counts`` be given.

    ``reproducible`` gathers the partial sums (8 bytes a row from each rank) and adds them in a fixed tree over the ranks,
    so that no bit depends on the backend's choice of algorithm. Otherwise the backend adds them as it likes.

    DTensors that are sharded on their last dimension are taken as they are and DTensors returned; they need no ``group``,
    ``counts`` or ``kv_replicas``. ``weight_offset``, ``rounding``, ``rope``, ``out_dtype`` and ``per_head`` are those of
    `onepass.qk_rms_norm`; with ``per_head`` every head lies whole on a rank, so nothing is sent (and DTensors are refused:
    pass the local ones).

    If the collective fails, its error is raised with this op's and the group's name, and no output was touched.
    ``ONEPASS_DEBUG=1`` compares every call across ranks first and names the rank that differs.
    """
    require_bool(_QK, "per_head", per_head)
    require_bool(_QK, "reproducible", reproducible)
    if not (_plain(q) and _plain(k)) and _distributed(q, k):
        from ._dtensor import qk_rms_norm_of_dtensors

        given = (group, plan, counts, None if kv_replicas == 1 else kv_replicas, out, per_head or None)
        return qk_rms_norm_of_dtensors(
            q, k, gamma_q, gamma_k, eps, given,
            reproducible=reproducible, weight_offset=weight_offset, rounding=rounding, rope=rope, out_dtype=out_dtype,
        )  # fmt: skip
    if per_head:
        return local_qk_rms_norm(
            q, k, gamma_q, gamma_k, eps,
            weight_offset=weight_offset, rounding=rounding, rope=rope, per_head=True, out_dtype=out_dtype, out=out,
        )  # fmt: skip
    pending = start_qk_stats(
        q, k, group=group, plan=plan, counts=counts, kv_replicas=kv_replicas, reproducible=reproducible
    )
    return pending.apply(
        gamma_q, gamma_k, eps,
        weight_offset=weight_offset, rounding=rounding, rope=rope, out_dtype=out_dtype, out=out,
    )  # fmt: skip


def rms_norm(
    x: Tensor,
    gamma: Tensor,
    eps: float = 1e-6,
    *,
    group: Group | None = None,
    plan: QKNormPlan | None = None,
    count: int | None = None,
    replicas: int = 1,
    reproducible: bool = False,
    weight_offset: float = 0.0,
    rounding: Rounding = "once",
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm of one tensor over the columns of all ranks, by one all-reduce. Returns this rank's columns.

    Two tensors that are normed side by side cost two collectives this way and one with `qk_rms_norm`. ``count`` is the
    number of columns in all, ``replicas`` how many consecutive ranks hold the same ones.
    """
    require_bool(_ONE, "reproducible", reproducible)
    if not _plain(x) and _distributed(x):
        from ._dtensor import rms_norm_of_dtensor

        given = (group, plan, count, None if replicas == 1 else replicas, out)
        return rms_norm_of_dtensor(
            x, gamma, eps, given, reproducible=reproducible, weight_offset=weight_offset, rounding=rounding
        )
    if not isinstance(gamma, Tensor) or gamma.dim() != 1:
        raise ContractError(f"{_ONE}: `gamma` must be a tensor [columns], got {describe(gamma)}")
    plan = _plan(_ONE, (x,), group, plan, replicas, None if count is None else (count,))
    _compare(_ONE, plan, {"x": x}, reproducible)
    # The kernels take two tensors: the second is a column here and its results are dropped. Its sums travel along, 4
    # bytes a row more: cutting them off and putting them back would be two launches.
    sums = row_sum_of_squares_qk(x, x[..., :1])
    means = _arrive(_ONE, plan, _depart(_ONE, plan, sums, reproducible), reproducible)
    dense = torch.contiguous_format
    y = torch.empty_like(x, memory_format=dense) if out is None else out
    column = torch.empty_like(x[..., :1], dtype=y.dtype if isinstance(y, Tensor) else None, memory_format=dense)
    apply_qk_rms_norm(
        y, column, gamma, gamma[:1], means, x, column.to(x.dtype), eps, weight_offset=weight_offset, rounding=rounding
    )
    return y


def _plan(
    op: str,
    tensors: tuple[Tensor, ...],
    group: Group | None,
    plan: QKNormPlan | None,
    kv_replicas: int,
    counts: Sequence[int] | None,
) -> QKNormPlan:
    """The caller's plan if it fits, or the group's."""
    names = ("q", "k") if len(tensors) == 2 else ("x",)
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, Tensor) or tensor.dim() < 1:
            raise ContractError(f"{op}: `{name}` must be a tensor [..., columns], got {describe(tensor)}")
    widths = tuple([tensor.shape[-1] for tensor in tensors])
    if plan is None:
        if group is None:
            raise ContractError(f"{op}: `group` must {GROUP_KINDS}, unless `plan` is given, got None")
        chosen = None if counts is None else tuple(counts)
        if torch.compiler.is_compiling():
            return traced_plan(op, group, widths, kv_replicas, chosen)
        return find_plan(op, resolve(op, group), widths, kv_replicas, chosen)
    if widths != plan.widths:
        raise ContractError(f"{op}: `plan` must be for the widths {widths}, got one for {plan.widths}")
    if counts is not None or kv_replicas != 1:
        name = "counts" if counts is not None else "kv_replicas"
        raise ContractError(f"{op}: `{name}` must be left out with `plan`, got both")
    return plan


def _compare(op: str, plan: QKNormPlan, tensors: dict[str, Tensor], reproducible: bool) -> None:
    """With ONEPASS_DEBUG=1: refuse, on all ranks, what they do not agree on."""
    if torch.compiler.is_compiling() or not debugging():
        return
    mine: dict[str, Any] = {"op": op}
    for name, tensor in tensors.items():
        mine[f"{name}.shape[:-1]"] = rows_of(tensor)
    mine.update(counts=list(plan.totals), kv_replicas=plan.kv_replicas, reproducible=reproducible)
    compare_ranks(op, group_named(plan.group_name), mine)


def _depart(op: str, plan: QKNormPlan, sums: Tensor, gather: bool) -> Tensor:
    """Start the collective. ``sums`` is ours to overwrite."""
    for column, counted in enumerate(plan.counted):
        if not counted:
            sums[..., column].zero_()
    if plan.size == 1 or sums.numel() == 0:
        return sums
    if torch.compiler.is_compiling():
        return _launch(plan, sums, gather, in_place=False)
    with named_errors(op, plan.where):
        return _launch(plan, sums, gather, in_place=True)


def _launch(plan: QKNormPlan, sums: Tensor, gather: bool, in_place: bool) -> Tensor:
    functional = torch.ops._c10d_functional
    if gather:
        if not _gathers_by_adding(plan, sums):
            return cast(Tensor, functional.all_gather_into_tensor(sums.unsqueeze(0), plan.size, plan.group_name))
        places = sums.new_zeros((plan.size, *sums.shape))
        places[plan.rank] = sums
        sums = places
    reduce = functional.all_reduce_ if in_place else functional.all_reduce
    return cast(Tensor, reduce(sums, "sum", plan.group_name))


def _gathers_by_adding(plan: QKNormPlan, sums: Tensor) -> bool:
    """Whether to gather by an all-reduce of W places, each rank's own and zeros, which is exact and twice the bytes.

    Gloo's all-gather into a tensor reads GPU memory as if it were the host's.
    """
    return plan.backend == "gloo" and sums.is_cuda


def _arrive(op: str, plan: QKNormPlan, moving: Tensor, gathered: bool) -> Tensor:
    """Wait for the collective; the means."""
    if plan.size == 1 or moving.numel() == 0:
        return plan.divide(moving)
    wait = torch.ops._c10d_functional.wait_tensor
    if torch.compiler.is_compiling():
        arrived: Tensor = wait(moving)
    else:
        with named_errors(op, plan.where):
            arrived = wait(moving)
    return plan.divide(_tree(arrived) if gathered else arrived)


def _tree(parts: Tensor) -> Tensor:
    """The sum over the first dimension: neighbours in pairs, then pairs of pairs; an odd last one waits its turn."""
    while parts.shape[0] > 1:
        even = parts.shape[0] - parts.shape[0] % 2
        paired = parts[0:even:2] + parts[1:even:2]
        parts = torch.cat((paired, parts[even:])) if even < parts.shape[0] else paired
    return parts[0]


def _outputs(
    op: str, q: Tensor, k: Tensor, dtype: torch.dtype | None, out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    if out is None:
        made = [torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format) for t in (q, k)]
        return made[0], made[1]
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise ContractError(f"{op}: `out` must be (q_out, k_out), got {describe(out)}")
    if dtype is not None and any(t.dtype != dtype for t in out):
        raise ContractError(f"{op}: `out_dtype` must be that of `out`, or None, got {describe(dtype)}")
    return out[0], out[1]


def _plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor or type(tensor) is Parameter


def _distributed(*tensors: Tensor) -> bool:
    """Whether these are DTensors; some and others not is refused."""
    from torch.distributed.tensor import DTensor

    which = [isinstance(tensor, DTensor) for tensor in tensors]
    if any(which) and not all(which):
        raise ContractError(f"{_QK}: `k` must be a DTensor if and only if `q` is, got a {type(tensors[1]).__name__}")
    return all(which)
