"""RMSNorm of a query and a key projection together, in one launch: statistics, application, both, with RoPE behind.

For each row of q and, with its own gamma, of k::

    mean = sum(x^2) / N
    y    = (x * rsqrt(mean + eps)) * (gamma + weight_offset)

`qk_rms_norm` does it all in one launch. Under tensor parallelism, where a rank holds some of the columns, the two halves
are `row_sum_of_squares_qk` and `apply_qk_rms_norm`, with a reduction over the ranks in between; `row_mean_of_squares_qk`
followed by `apply_qk_rms_norm` gives the very bytes of `qk_rms_norm`.

Everything is float32 until the one rounding at the store. ``rounding="hf"`` rounds ``x * rsqrt(...)`` and y to x's
dtype. A rotation (`onepass.Rope`) takes y in float32, unrounded ("hf": as rounded), and its result is rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..contract.declaration import Contract, describe
from ..formats import Rounding
from ..rope import Rope, RopeStyle
from ..specs.qk_norm import QkCall, QkSpec, RopeRule, qk_spec
from .qk_norm_call import run_qk
from .qk_norm_contract import APPLY_QK_RMS_NORM, QK_RMS_NORM, ROW_MEAN_OF_SQUARES_QK, ROW_SUM_OF_SQUARES_QK
from .qk_norm_contract import QK_RMS_NORM_HEADS as _QK_RMS_NORM_HEADS
from .registration import Op

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "APPLY_QK_RMS_NORM",
    "QK_RMS_NORM",
    "ROW_MEAN_OF_SQUARES_QK",
    "ROW_SUM_OF_SQUARES_QK",
    "apply_qk_rms_norm",
    "qk_rms_norm",
    "row_mean_of_squares_qk",
    "row_sum_of_squares_qk",
]

Notes = dict[object, QkSpec]
"""Kernels of one combination of options, by the tensors' dtypes."""


def _sums_kernel(notes: Notes, q: Tensor, k: Tensor, sums: Tensor) -> None:
    spec = qk_spec("sums", q.dtype)
    run_qk(ROW_SUM_OF_SQUARES_QK, QkCall(spec, q, k, stats=sums), 0)


def _means_kernel(notes: Notes, q: Tensor, k: Tensor, means: Tensor) -> None:
    spec = qk_spec("means", q.dtype)
    run_qk(ROW_MEAN_OF_SQUARES_QK, QkCall(spec, q, k, stats=means), 0)


def _rule(
    freqs: Tensor | None, positions: Tensor | None, style: RopeStyle, dim: int | None, head: int
) -> RopeRule | None:
    if freqs is None:
        return None
    return RopeRule(style, head, dim or freqs.shape[1], None if positions is None else positions.dtype)


def _apply_kernel(
    notes: Notes, q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor, qk_var: Tensor, freqs: Tensor | None, positions: Tensor | None,
    epsilon: float, weight_offset: float, rounding: Rounding, style: RopeStyle, dim: int | None, head_dim: int | None,
    q_out: Tensor, k_out: Tensor,
) -> None:  # fmt: skip
    rope = _rule(freqs, positions, style, dim, head_dim or 0)
    key = (q.dtype, gamma_q.dtype, gamma_k.dtype, q_out.dtype, rope)
    spec = notes.get(key)
    if spec is None:
        spec = notes[key] = qk_spec(
            "apply", q.dtype, gamma_q.dtype, q_out.dtype, rounding, False, rope, gamma_k.dtype
        )  # fmt: skip
    call = QkCall(
        spec, q, k, gamma_q, gamma_k, q_out, k_out, qk_var, freqs, positions, epsilon, weight_offset
    )  # fmt: skip
    run_qk(APPLY_QK_RMS_NORM, call, 0)


def _flat_kernel(
    notes: Notes, q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor, freqs: Tensor | None, positions: Tensor | None,
    eps: float, weight_offset: float, rounding: Rounding, out_dtype: torch.dtype | None, per_head: bool,
    style: RopeStyle, dim: int | None, head_dim: int | None, q_out: Tensor, k_out: Tensor,
) -> None:  # fmt: skip
    head = gamma_q.shape[0] if per_head else 0
    rope = _rule(freqs, positions, style, dim, head_dim or head)
    key = (q.dtype, gamma_q.dtype, gamma_k.dtype, q_out.dtype, rope)
    spec = notes.get(key)
    if spec is None:
        spec = notes[key] = qk_spec(
            "fused", q.dtype, gamma_q.dtype, q_out.dtype, rounding, per_head, rope, gamma_k.dtype
        )  # fmt: skip
    call = QkCall(spec, q, k, gamma_q, gamma_k, q_out, k_out, None, freqs, positions, eps, weight_offset)
    run_qk(QK_RMS_NORM, call, head)


def _heads_kernel(
    notes: Notes, q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor, freqs: Tensor | None, positions: Tensor | None,
    eps: float, weight_offset: float, rounding: Rounding, out_dtype: torch.dtype | None,
    style: RopeStyle, dim: int | None, head_dim: int | None, q_out: Tensor, k_out: Tensor,
) -> None:  # fmt: skip
    rope = _rule(freqs, positions, style, dim, q.shape[-1])
    spec = qk_spec("fused", q.dtype, gamma_q.dtype, q_out.dtype, rounding, True, rope, gamma_k.dtype)
    call = QkCall(spec, q, k, gamma_q, gamma_k, q_out, k_out, None, freqs, positions, eps, weight_offset)
    run_qk(_QK_RMS_NORM_HEADS, call, -1)


_sums = Op(ROW_SUM_OF_SQUARES_QK, _sums_kernel)
_means = Op(ROW_MEAN_OF_SQUARES_QK, _means_kernel)
_apply = Op(APPLY_QK_RMS_NORM, _apply_kernel)
_flat = Op(QK_RMS_NORM, _flat_kernel)
_heads = Op(_QK_RMS_NORM_HEADS, _heads_kernel)


def row_sum_of_squares_qk(q: Tensor, k: Tensor, out: Tensor | None = None) -> Tensor:
    """Sums of squares of the rows of q and k in one launch: float32 [..., 2], of q in column 0 and of k in column 1.

    ``q`` [..., Nq] and ``k`` [..., Nk] have one dtype and one leading shape. For statistics over several devices that
    hold columns of the same rows: add up these, then divide by the number of all columns. The order of summation
    depends on the number of columns alone.

    >>> import torch, onepass
    >>> onepass.row_sum_of_squares_qk(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0, 2.0]]))
    tensor([[25.,  9.]])
    """
    return cast(Tensor, _sums.call(q, k, out)[0])


def row_mean_of_squares_qk(q: Tensor, k: Tensor, out: Tensor | None = None) -> Tensor:
    """Means of squares of the rows of q and k in one launch: float32 [..., 2], of q in column 0 and of k in column 1.

    The statistics that `apply_qk_rms_norm` takes: `row_sum_of_squares_qk` divided by the number of columns, rounded
    correctly.

    >>> import torch, onepass
    >>> onepass.row_mean_of_squares_qk(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0, 2.0]]))
    tensor([[12.5000,  3.0000]])
    """
    return cast(Tensor, _means.call(q, k, out)[0])


_NO_ROPE: tuple[Any, ...] = (None, None, "half", None, None)


def _unpacked(contract: Contract, rope: Rope | None) -> tuple[Any, ...]:
    """freqs, positions, style, dim and head_dim."""
    if rope is None:
        return _NO_ROPE
    if not isinstance(rope, Rope):
        contract.fail("rope", "be a Rope or None", describe(rope))
    return rope.freqs, rope.positions, rope.style, rope.dim, rope.head_dim


def apply_qk_rms_norm(
    q_out: Tensor,
    k_out: Tensor,
    gamma_q: Tensor,
    gamma_k: Tensor,
    qk_var: Tensor,
    q: Tensor,
    k: Tensor,
    epsilon: float,
    *,
    weight_offset: float = 0.0,
    rounding: Rounding = "once",
    rope: Rope | None = None,
) -> None:
    """RMSNorm of q and k from given statistics, in one launch: ``(x * rsqrt(qk_var + epsilon)) * (gamma + weight_offset)``.

    ``qk_var`` [..., 2] has the mean of squares of q's row in column 0 and of k's in column 1, as
    `row_mean_of_squares_qk` returns it. The results go to ``q_out`` and ``k_out``, of any float dtype, which may be q
    and k themselves. Grouped as written and rounded once, at the store ("hf": ``x * rsqrt(...)`` and the product to
    q's dtype). A mean that is NaN or infinite makes its row NaN; where mean and epsilon are 0 the row is 0.

    >>> import torch, onepass
    >>> q, k = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    >>> var = onepass.row_mean_of_squares_qk(q, k)
    >>> onepass.apply_qk_rms_norm(q, k, torch.ones(2), torch.ones(2), var, q, k, 0.0)
    >>> q, k
    (tensor([[0.8485, 1.1314]]), tensor([[0.0000, 1.4142]]))
    """
    for name, given in (("q_out", q_out), ("k_out", k_out)):
        if given is None:
            APPLY_QK_RMS_NORM.fail(name, "be a tensor", "None")
    freqs, positions, *rest = _unpacked(APPLY_QK_RMS_NORM, rope)
    _apply.call(
        q, k, gamma_q, gamma_k, qk_var, freqs, positions, epsilon, weight_offset, rounding, *rest, q_out, k_out
    )  # fmt: skip


def qk_rms_norm(
    q: Tensor,
    k: Tensor,
    gamma_q: Tensor,
    gamma_k: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: Rounding = "once",
    rope: Rope | None = None,
    per_head: bool = False,
    group: ProcessGroup | None = None,
    out_dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of q and k, each over its whole row or ``per_head``, in one launch: ``(x * rs) * (gamma + weight_offset)``.

    ``q`` [..., Nq] and ``k`` [..., Nk] may be slices of one packed projection. With ``per_head`` the gammas have the
    columns of one head, D, and every D columns are a row of their own; q and k may then also be [..., Hq, D] and
    [..., Hk, D] with heads strided in any way. Where both last dimensions are D, the second last is the heads, unless
    rope's positions have it too, or there is nothing before it in q and k alike: [tokens, D] is one head a token.
    ``rope`` rotates the result in the same launch. ``out`` is a pair of tensors for the results, of any float dtype,
    which may be q and k themselves; else they have ``out_dtype``, or q's.

    ``group``: q and k are this rank's columns of rows that lie across a process group (`onepass.dist`).

    Rounding: "once" rounds at the store and nowhere else; "hf" rounds ``x * rs`` to q's dtype, then the product with
    gamma, then what is rotated. Statistics are float32, added in an order that depends on the number of columns alone.

    >>> import torch, onepass
    >>> q, k = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0, 2.0, 0.0]])
    >>> onepass.qk_rms_norm(q, k, torch.ones(2), torch.ones(4), eps=0.0)
    (tensor([[0.8485, 1.1314]]), tensor([[0.0000, 1.4142, 1.4142, 0.0000]]))
    """
    if group is not None:
        from .. import dist

        shared: tuple[Tensor, Tensor] = dist.qk_rms_norm(
            q, k, gamma_q, gamma_k, eps, group=group, weight_offset=weight_offset, rounding=rounding, rope=rope,
            per_head=per_head, out_dtype=out_dtype, out=out,
        )  # fmt: skip
        return shared
    if out is not None and not (isinstance(out, (tuple, list)) and len(out) == 2):
        QK_RMS_NORM.fail("out", "be a pair of tensors", repr(type(out).__name__))
    q_out, k_out = (None, None) if out is None else out
    freqs, positions, style, dim, head_dim = _unpacked(QK_RMS_NORM, rope)
    results: tuple[Tensor | None, ...]
    if per_head is True and _has_heads(q, k, gamma_q, positions):
        results = _heads.call(
            q, k, gamma_q, gamma_k, freqs, positions, eps, weight_offset, rounding, out_dtype, style, dim, head_dim,
            q_out, k_out,
        )  # fmt: skip
    else:
        results = _flat.call(
            q, k, gamma_q, gamma_k, freqs, positions, eps, weight_offset, rounding, out_dtype, per_head, style, dim,
            head_dim, q_out, k_out,
        )  # fmt: skip
    return cast(Tensor, results[0]), cast(Tensor, results[1])


def _has_heads(q: object, k: object, gamma_q: object, positions: object) -> bool:
    """Whether the second last dimension counts heads: rows are as long as gamma, and positions do not say otherwise."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(gamma_q, Tensor)):
        return False
    if gamma_q.dim() != 1 or q.dim() < 2 or k.dim() < 2 or not q.shape[-1] == k.shape[-1] == gamma_q.shape[0]:
        return False
    if isinstance(positions, Tensor):
        return positions.dim() == q.dim() - 2
    return q.dim() > 2 or q.shape != k.shape
