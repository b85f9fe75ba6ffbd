"""The calls: local sums of squares, one collective, the norm. See the package for equations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from ..core.contract import describe, require_bool
from ..errors import ContractError
from ..formats import FP8_FORMATS, Rounding
from ..ops.qk_norm.op import apply_qk_rms_norm, row_sum_of_squares_qk
from ..ops.qk_norm.op import qk_rms_norm as local_qk_rms_norm
from ..rope import Rope
from ._plan import (
    GROUP_KINDS,
    Group,
    QKNormPlan,
    compare_ranks,
    debugging,
    find_plan,
    named_errors,
    resolve,
    traced_plan,
)

_QK = "dist.qk_rms_norm"
_ONE = "dist.rms_norm"


class PendingStats:
    """Sums of squares that are being exchanged, as `start_qk_stats` returns them.

    `finish_qk_rms_norm` reads ``q`` and ``k`` again, so do not change them before then. Every rank must finish what it
    started, in the same order.
    """

    def __init__(self, plan: QKNormPlan, q: Tensor, k: Tensor, sent: Tensor, gathered: bool) -> None:
        self.plan, self.q, self.k = plan, q, k
        self._sent, self._gathered = sent, gathered
        self._means: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the sums.

        Returns:
            The means of squares for `onepass.apply_qk_rms_norm`, float32 [..., 2].
        """
        if self._means is None:
            self._means = _finish(_QK, self.plan, self._sent, self._gathered)
            del self._sent
        return self._means


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
    """Begin `qk_rms_norm`: sum the squares of this rank's columns and start the collective.

    Work between this call and ``finish_qk_rms_norm`` (the v projection, say) overlaps with the exchange. On CUDA the stream
    waits, not the host. The arguments are those of `qk_rms_norm`.

    Returns:
        The pending sums: ``s_r = [sum(q_r^2), sum(k_r^2)]``.

    >>> import torch, onepass
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> q, k = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    >>> pending = onepass.dist.start_qk_stats(q, k, group=torch.distributed.group.WORLD)
    >>> onepass.dist.finish_qk_rms_norm(pending, torch.ones(2), torch.ones(2), eps=0.0)
    (tensor([[0.8485, 1.1314]]), tensor([[0.0000, 1.4142]]))
    >>> torch.distributed.destroy_process_group()
    """
    require_bool(_QK, "reproducible", reproducible)
    plan = _plan(_QK, (q, k), group, plan, kv_replicas, counts)
    _compare(_QK, plan, {"q": q, "k": k}, reproducible)
    sums = row_sum_of_squares_qk(q, k)
    return PendingStats(plan, q, k, _start(_QK, plan, sums, reproducible), reproducible)


def finish_qk_rms_norm(
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
    eps_k: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Finish what `start_qk_stats` began: wait for the sums, then norm q and k. Nothing is written before then.

    Args:
        pending: What `start_qk_stats` returned.
        gamma_q: As in `qk_rms_norm`, like all other arguments.

    Returns:
        This rank's ``(q_out, k_out)``.
    """
    means = pending.wait()
    q_out, k_out = _outputs(_QK, pending.q, pending.k, out_dtype, out)
    options: dict[str, Any] = {"weight_offset": weight_offset, "rounding": rounding, "rope": rope}
    options |= {"epsilon_k": eps_k, "q_scale": q_scale, "k_scale": k_scale}
    apply_qk_rms_norm(q_out, k_out, gamma_q, gamma_k, means, pending.q, pending.k, eps, **options)
    return q_out, k_out


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
    eps_k: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of q and of k over the columns of all ranks. Returns this rank's (q_out, k_out).

    For q, and likewise for k::

        mean  = sum(q^2, over all ranks) / Nq
        q_out = (q * (1 / sqrt(mean + eps))) * (gamma_q + weight_offset)

    The total numbers of columns come from ``plan`` or ``counts``. Otherwise the first call with these widths determines them
    in one blocking exchange and caches them. Inside torch.compile, a plan must exist or ``plan`` or ``counts`` must be given.

    DTensors sharded on their last dimension are accepted, and DTensors are returned. They need no ``group``, ``counts`` or
    ``kv_replicas``.

    Args:
        q: This rank's columns [..., Nq_r]. Widths may differ between ranks; the leading shape, the options and the order of
            calls must not.
        k: This rank's columns [..., Nk_r].
        gamma_q: Their weights [Nq_r].
        gamma_k: Their weights [Nk_r].
        eps: Added to the mean of squares.
        group: The ranks. May be None with ``plan``.
        plan: What `onepass.dist.plan` returned.
        counts: ``(Nq, Nk)``, the columns of all ranks.
        kv_replicas: Number of consecutive ranks that hold the same k columns, which are counted once.
        reproducible: Gather the partial sums (8 bytes per row from each rank) and add them in a fixed tree over the ranks, so
            that results do not depend on the backend's algorithm. Otherwise the backend adds them.
        weight_offset: As in `onepass.qk_rms_norm`.
        rounding: As in `onepass.qk_rms_norm`.
        rope: As in `onepass.qk_rms_norm`.
        per_head: As in `onepass.qk_rms_norm`. Every head must be on one rank, so nothing is sent. DTensors are rejected.
        out_dtype: As in `onepass.qk_rms_norm`.
        out: Pair of tensors for the results, which may be q and k themselves.
        eps_k: k's epsilon; None: q's.
        q_scale: One float32, the scale of fp8 results; required for them.
        k_scale: The same for k.

    Returns:
        This rank's ``(q_out, k_out)``.

    Raises:
        RuntimeError: If the collective fails: its error, prefixed with this op and the group. Nothing is written
            before the sums of all ranks have arrived.

    ``ONEPASS_DEBUG=1`` first compares every call across ranks and names the rank that differs.

    >>> import torch, onepass
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> q, k = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    >>> onepass.dist.qk_rms_norm(q, k, torch.ones(2), torch.ones(2), eps=0.0, group=torch.distributed.group.WORLD)
    (tensor([[0.8485, 1.1314]]), tensor([[0.0000, 1.4142]]))
    >>> torch.distributed.destroy_process_group()
    """
    require_bool(_QK, "per_head", per_head)
    require_bool(_QK, "reproducible", reproducible)
    options: dict[str, Any] = {"weight_offset": weight_offset, "rounding": rounding, "rope": rope}
    options |= {"out_dtype": out_dtype, "eps_k": eps_k, "q_scale": q_scale, "k_scale": k_scale}
    if _distributed(q, k):
        from ._dtensor import shards_of  # here, because it imports all of DTensor

        refused: dict[str, object] = {"group": group, "plan": plan, "counts": counts, "out": out}
        refused |= {"per_head": per_head or None, "kv_replicas": None if kv_replicas == 1 else kv_replicas}
        local = shards_of(_QK, {"q": q, "k": k}, {"gamma_q": gamma_q, "gamma_k": gamma_k}, refused)
        options |= {"group": local.group, "counts": local.counts, "kv_replicas": local.replicas}
        (q, k), (gamma_q, gamma_k) = local.tensors, local.weights
        q_out, k_out = local.wrap(*qk_rms_norm(q, k, gamma_q, gamma_k, eps, reproducible=reproducible, **options))
        return q_out, k_out
    if q_scale is None:
        _refuse_codes(out_dtype, out)
    if per_head:
        q_out, k_out = local_qk_rms_norm(q, k, gamma_q, gamma_k, eps, per_head=True, out=out, **options)
        return q_out, k_out
    pending = start_qk_stats(
        q, k, group=group, plan=plan, counts=counts, kv_replicas=kv_replicas, reproducible=reproducible
    )
    return finish_qk_rms_norm(pending, gamma_q, gamma_k, eps, out=out, **options)


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
    """RMSNorm of one tensor over the columns of all ranks: ``(x * (1 / sqrt(mean + eps))) * (gamma + weight_offset)``.

    Norming two tensors this way costs two collectives; `qk_rms_norm` needs one.

    Args:
        x: This rank's columns [..., N_r], or a DTensor sharded on its last dimension.
        gamma: Their weights [N_r].
        eps: Added to the mean of squares.
        group: The ranks. May be None with ``plan``.
        plan: What `onepass.dist.plan` returned for one width.
        count: Columns of all ranks.
        replicas: Number of consecutive ranks that hold the same columns.
        reproducible: As in `qk_rms_norm`.
        weight_offset: As in `onepass.rms_norm`.
        rounding: As in `onepass.qk_rms_norm`.
        out: Receives the result.

    Returns:
        This rank's columns of the result.

    >>> import torch, onepass
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> onepass.dist.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0, group=torch.distributed.group.WORLD)
    tensor([[0.8485, 1.1314]])
    >>> torch.distributed.destroy_process_group()
    """
    require_bool(_ONE, "reproducible", reproducible)
    options: dict[str, Any] = {"weight_offset": weight_offset, "rounding": rounding}
    if _distributed(x):
        from ._dtensor import shards_of  # here, because it imports all of DTensor

        refused: dict[str, object] = {"group": group, "plan": plan, "count": count, "out": out}
        refused["replicas"] = None if replicas == 1 else replicas
        local = shards_of(_ONE, {"x": x}, {"gamma": gamma}, refused)
        options |= {"group": local.group, "count": local.counts[0], "reproducible": reproducible}
        return local.wrap(rms_norm(local.tensors[0], local.weights[0], eps, **options))[0]
    if not isinstance(gamma, Tensor) or gamma.dim() != 1:
        raise ContractError(f"{_ONE}: `gamma` must be a tensor [columns], got {describe(gamma)}")
    plan = _plan(_ONE, (x,), group, plan, replicas, None if count is None else (count,))
    _compare(_ONE, plan, {"x": x}, reproducible)
    # The kernels take two tensors. The second is one column here, and its results are dropped. Its sums are sent too,
    # 4 bytes more per row: removing and restoring them would take two launches.
    sums = row_sum_of_squares_qk(x, x[..., :1])
    means = _finish(_ONE, plan, _start(_ONE, plan, sums, reproducible), reproducible)
    dense = torch.contiguous_format
    y = torch.empty_like(x, memory_format=dense) if out is None else out
    column = torch.empty_like(x[..., :1], dtype=y.dtype if isinstance(y, Tensor) else None, memory_format=dense)
    apply_qk_rms_norm(y, column, gamma, gamma[:1], means, x, column.to(x.dtype), eps, **options)
    return y


def _plan(
    op: str,
    tensors: tuple[Tensor, ...],
    group: Group | None,
    plan: QKNormPlan | None,
    kv_replicas: int,
    counts: Sequence[int] | None,
) -> QKNormPlan:
    """The caller's plan, which is checked, or the group's."""
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
    """With ONEPASS_DEBUG=1, raise on all ranks if their calls differ."""
    if torch.compiler.is_compiling() or not debugging():
        return
    mine: dict[str, Any] = {"op": op}
    mine |= {f"{name}.shape[:-1]": list(tensor.shape[:-1]) for name, tensor in tensors.items()}
    mine |= {"counts": list(plan.totals), "kv_replicas": plan.kv_replicas, "reproducible": reproducible}
    compare_ranks(op, plan.group_name, mine)


def _start(op: str, plan: QKNormPlan, sums: Tensor, gather: bool) -> Tensor:
    """Start the collective, which may overwrite ``sums``."""
    for column, counted in enumerate(plan.counted):
        if not counted:
            sums[..., column].zero_()
    if plan.size == 1 or sums.numel() == 0:
        return sums
    functional = torch.ops._c10d_functional
    reduce = functional.all_reduce if torch.compiler.is_compiling() else functional.all_reduce_
    with _named_errors(op, plan):
        if gather and not _gathers_by_adding(plan, sums):
            return cast(Tensor, functional.all_gather_into_tensor(sums.unsqueeze(0), plan.size, plan.group_name))
        if gather:
            parts = sums.new_zeros((plan.size, *sums.shape))
            parts[plan.rank] = sums
            sums = parts
        return cast(Tensor, reduce(sums, "sum", plan.group_name))


def _named_errors(op: str, plan: QKNormPlan) -> AbstractContextManager[None]:
    return nullcontext() if torch.compiler.is_compiling() else named_errors(op, plan.where)


def _gathers_by_adding(plan: QKNormPlan, sums: Tensor) -> bool:
    """Whether to gather by an all-reduce of W parts, zero except each rank's own, which is exact.

    It sends twice the bytes, but Gloo's all-gather reads GPU memory as if it were host memory.
    """
    return plan.backend == "gloo" and sums.is_cuda


def _finish(op: str, plan: QKNormPlan, sent: Tensor, gathered: bool) -> Tensor:
    """Wait for the collective and return the means."""
    if plan.size == 1 or sent.numel() == 0:
        return plan.divide(sent)
    with _named_errors(op, plan):
        arrived: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return plan.divide(_tree(arrived) if gathered else arrived)


def _tree(parts: Tensor) -> Tensor:
    """The sum over the first dimension in pairs, then pairs of pairs; an odd last part is kept."""
    while parts.shape[0] > 1:
        even = parts.shape[0] - parts.shape[0] % 2
        paired = parts[0:even:2] + parts[1:even:2]
        parts = torch.cat((paired, parts[even:])) if even < parts.shape[0] else paired
    return parts[0]


def _outputs(
    op: str, q: Tensor, k: Tensor, dtype: torch.dtype | None, out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    if out is None:
        results = [torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format) for t in (q, k)]
        return results[0], results[1]
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise ContractError(f"{op}: `out` must be (q_out, k_out), got {describe(out)}")
    if dtype is not None and any(t.dtype != dtype for t in out):
        raise ContractError(f"{op}: `out_dtype` must be that of `out`, or None, got {describe(dtype)}")
    return out[0], out[1]


def _refuse_codes(dtype: torch.dtype | None, out: object) -> None:
    """Raise for fp8 results whose scales are not given: those of rows would be those of a rank's columns."""
    dtypes = [t.dtype for t in out if isinstance(t, Tensor)] if isinstance(out, (tuple, list)) else []
    if any(result in FP8_FORMATS for result in (dtype, *dtypes)):
        raise ContractError(f"{_QK}: `q_scale` must be given for fp8 results, got None")


def _distributed(*tensors: Tensor) -> bool:
    """Whether these are DTensors; a mixture is rejected."""
    if all(type(tensor) is Tensor or type(tensor) is Parameter for tensor in tensors):
        return False
    from torch.distributed.tensor import DTensor  # here, because it takes long to import

    which = [isinstance(tensor, DTensor) for tensor in tensors]
    if any(which) and not all(which):
        raise ContractError(f"{_QK}: `k` must be a DTensor if and only if `q` is, got a {type(tensors[1]).__name__}")
    return all(which)
