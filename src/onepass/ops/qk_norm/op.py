"""RMSNorm of a query and a key projection in one launch: statistics, application, or both, with optional RoPE.

For each row of q and, with its own gamma, of k::

    mean = sum(x^2) / N
    y    = (x * rsqrt(mean + eps)) * (gamma + weight_offset)

`qk_rms_norm` does everything in one launch. Under tensor parallelism, where a rank holds some of the
columns, the two halves are `row_sum_of_squares_qk` and `apply_qk_rms_norm`, with a reduction over the
ranks in between. `row_mean_of_squares_qk` followed by `apply_qk_rms_norm` gives exactly the bytes of
`qk_rms_norm`.

Everything is float32 until the single rounding at the store. ``rounding="hf"`` rounds
``x * rsqrt(...)`` and y to x's dtype. A rotation (`onepass.Rope`) reads y in float32, unrounded ("hf":
rounded), and its result is rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from ...core.backend import extension
from ...core.contract import Contract, describe
from ...core.op import Op, stands_in
from ...formats import FP8_FORMATS, Rounding
from ...rope import Rope
from .contract import APPLY_QK_RMS_NORM, QK_RMS_NORM, QK_RMS_NORM_HEADS, ROW_MEAN_OF_SQUARES_QK, ROW_SUM_OF_SQUARES_QK
from .launch import (
    ApplyArguments,
    FlatArguments,
    HeadsArguments,
    NormArguments,
    QkCall,
    QkScale,
    QkSpec,
    RopeRule,
    SquaresArguments,
    Stage,
    qk_spec,
    run_qk,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["APPLY_QK_RMS_NORM", "QK_RMS_NORM", "ROW_MEAN_OF_SQUARES_QK", "ROW_SUM_OF_SQUARES_QK"]
__all__ += ["apply_qk_rms_norm", "qk_rms_norm", "row_mean_of_squares_qk", "row_sum_of_squares_qk"]

_NEITHER = (None, None)
SpecCache = dict[object, QkSpec]
"""The specs of one combination of options, by the tensors' dtypes and the rotation."""


def _sums(spec_cache: SpecCache, a: SquaresArguments) -> None:
    run_qk(ROW_SUM_OF_SQUARES_QK, QkCall(qk_spec("sums", a.q.dtype), a.q, a.k, stats=a.out), 0)


def _means(spec_cache: SpecCache, a: SquaresArguments) -> None:
    run_qk(ROW_MEAN_OF_SQUARES_QK, QkCall(qk_spec("means", a.q.dtype), a.q, a.k, stats=a.out), 0)


def _apply(spec_cache: SpecCache, a: ApplyArguments) -> None:
    scale: QkScale = "none" if a.q_scale is None else "tensor"
    eps_k = a.epsilon if a.epsilon_k is None else a.epsilon_k
    two = eps_k != a.epsilon
    call = _call(spec_cache, a, "apply", a.head_dim or 0, a.epsilon, a.qk_var, scale=scale, two_eps=two)
    if two or a.q_scale is not None:
        call = call._replace(eps_k=eps_k, q_scale=a.q_scale, k_scale=a.k_scale)
    run_qk(APPLY_QK_RMS_NORM, call, 0)


def _flat(spec_cache: SpecCache, a: FlatArguments) -> None:
    head = a.gamma_q.shape[0] if a.per_head else 0
    run_qk(QK_RMS_NORM, _fused(spec_cache, a, a.head_dim or head, a.per_head), head)


def _heads(spec_cache: SpecCache, a: HeadsArguments) -> None:
    run_qk(QK_RMS_NORM_HEADS, _fused(spec_cache, a, a.q.shape[-1], True), -1)


def _fused(cache: SpecCache, a: HeadsArguments, head: int, per_head: bool) -> QkCall:
    """A call that computes its own statistics; results may be fp8, and k may have an eps of its own."""
    scale: QkScale = "tensor" if a.q_scale is not None else "row" if a.q_scale_out is not None else "none"
    eps_k = a.eps if a.eps_k is None else a.eps_k
    two = eps_k != a.eps
    call = _call(cache, a, "fused", head, a.eps, per_head=per_head, scale=scale, two_eps=two)
    if scale == "none" and not two:
        return call
    call = call._replace(eps_k=eps_k, q_scale=a.q_scale, k_scale=a.k_scale)
    return call._replace(q_scale_out=a.q_scale_out, k_scale_out=a.k_scale_out)


def _call(
    cache: SpecCache,
    a: NormArguments,
    stage: Stage,
    head: int,
    eps: float,
    stats: Tensor | None = None,
    per_head: bool = False,
    scale: QkScale = "none",
    two_eps: bool = False,
) -> QkCall:
    rope = None
    if a.freqs is not None:
        rope = RopeRule(a.style, head, a.dim or a.freqs.shape[1], None if a.positions is None else a.positions.dtype)
    key = (a.q.dtype, a.gamma_q.dtype, a.q_out.dtype, a.gamma_k.dtype, rope, scale)
    spec = cache.get(key)
    if spec is None:
        spec = cache[key] = qk_spec(stage, *key[:3], a.rounding, per_head, rope, a.gamma_k.dtype, scale, two_eps)
    outs = (a.q_out, a.k_out)
    return QkCall(spec, a.q, a.k, a.gamma_q, a.gamma_k, *outs, stats, a.freqs, a.positions, eps, a.weight_offset)


_row_sum_of_squares_qk = Op(ROW_SUM_OF_SQUARES_QK, _sums)
_row_mean_of_squares_qk = Op(ROW_MEAN_OF_SQUARES_QK, _means)
_apply_qk_rms_norm = Op(APPLY_QK_RMS_NORM, _apply)
_qk_rms_norm = Op(QK_RMS_NORM, _flat)
_qk_rms_norm_heads = Op(QK_RMS_NORM_HEADS, _heads)


def row_sum_of_squares_qk(q: Tensor, k: Tensor, out: Tensor | None = None) -> Tensor:
    """Sums of squares of the rows of q and k in one launch: float32 [..., 2], q in column 0 and k in column 1.

    ``q`` [..., Nq] and ``k`` [..., Nk] have the same dtype and leading shape. For statistics of rows
    whose columns are spread over devices, add these sums and divide by the total number of columns.
    The order of summation depends only on the number of columns.

    >>> import torch, onepass
    >>> onepass.row_sum_of_squares_qk(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0, 2.0]]))
    tensor([[25.,  9.]])
    """
    return cast(Tensor, _row_sum_of_squares_qk(q, k, out)[0])


def row_mean_of_squares_qk(q: Tensor, k: Tensor, out: Tensor | None = None) -> Tensor:
    """Means of squares of the rows of q and k in one launch: float32 [..., 2], q in column 0 and k in column 1.

    The statistics that `apply_qk_rms_norm` needs: `row_sum_of_squares_qk` divided by the number of
    columns, correctly rounded.

    >>> import torch, onepass
    >>> onepass.row_mean_of_squares_qk(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0, 2.0]]))
    tensor([[12.5000,  3.0000]])
    """
    return cast(Tensor, _row_mean_of_squares_qk(q, k, out)[0])


def _unpacked(contract: Contract, rope: Rope | None) -> tuple[Any, ...]:
    """freqs, positions, style, dim and head_dim."""
    if rope is None:
        return None, None, "half", None, None
    if not isinstance(rope, Rope):
        contract.fail("rope", "be a Rope or None", describe(rope))
    if rope.freqs is None:
        contract.fail("rope", "have freqs", "None")
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
    epsilon_k: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> None:
    """RMSNorm of q and k from given statistics, in one launch: ``(x * rsqrt(qk_var + epsilon)) * (gamma + weight_offset)``.

    ``qk_var`` [..., 2] has the mean of squares of q's row in column 0 and of k's in column 1, as
    `row_mean_of_squares_qk` returns it. The results go to ``q_out`` and ``k_out``, of any float dtype,
    which may be q and k themselves. Operations are grouped as written and rounded once, at the store
    ("hf": ``x * rsqrt(...)`` and the product are rounded to q's dtype). If a mean is NaN or infinite its
    row is NaN; if mean and epsilon are 0 the row is 0. ``epsilon_k`` is k's epsilon, if it differs from q's.

    With ``q_scale`` and ``k_scale``, one float32 each, ``q_out`` and ``k_out`` are fp8: ``code = saturate(y / scale)``.
    There are no scales of rows: here a row is one rank's part of a longer one.

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
    freqs, positions, *turn = _unpacked(APPLY_QK_RMS_NORM, rope)
    tensors = (q, k, gamma_q, gamma_k, qk_var, freqs, positions, q_scale, k_scale)
    _apply_qk_rms_norm(*tensors, epsilon, weight_offset, rounding, epsilon_k, *turn, q_out, k_out)


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
    eps_k: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    scale_out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """RMSNorm of q and k, each over its whole row or ``per_head``, in one launch: ``(x * rs) * (gamma + weight_offset)``.

    ``q`` [..., Nq] and ``k`` [..., Nk] may be slices of one packed projection. With ``per_head`` the
    gammas have the D columns of one head, and every D columns form a row. q and k may then also be
    [..., Hq, D] and [..., Hk, D] with arbitrarily strided heads. If both last dimensions are D, the
    second-to-last one counts heads, unless rope's positions have it too, or neither q nor k has a
    dimension before it: [tokens, D] is one head per token. ``rope`` rotates the result in the same launch. ``out``
    is a pair of tensors for the results, of any float dtype, which may be q and k themselves. Otherwise
    they have ``out_dtype``, or q's dtype. ``eps_k`` is k's epsilon, if it differs from q's.

    Results may be fp8: ``code = saturate(y / scale)``. With ``q_scale`` and ``k_scale``, one float32 each, the scales
    are given. Otherwise each row, or with ``per_head`` each head, has its own, ``amax(|y|) / fp8_max``, and
    the call returns (q_out, k_out, q_scales, k_scales). The scales are float32 [..., 1], [..., H] for heads within
    a row, or [..., H, 1]; ``scale_out`` is a pair of tensors for them.

    ``group``: q and k are this rank's columns of rows that are sharded over a process group (`onepass.dist`). The scales
    of fp8 results have to be given then.

    Rounding: "once" rounds at the store and nowhere else; "hf" rounds ``x * rs`` to q's dtype, then the
    product with gamma, then the rotated value. Statistics are float32, summed in an order that depends
    only on the number of columns.

    >>> import torch, onepass
    >>> q, k = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0, 2.0, 0.0]])
    >>> onepass.qk_rms_norm(q, k, torch.ones(2), torch.ones(4), eps=0.0)
    (tensor([[0.8485, 1.1314]]), tensor([[0.0000, 1.4142, 1.4142, 0.0000]]))
    """
    if group is not None:
        if scale_out is not None:
            QK_RMS_NORM.fail("scale_out", "be None with group", describe(scale_out))
        options: dict[str, Any] = {"weight_offset": weight_offset, "rounding": rounding, "rope": rope}
        options |= {"per_head": per_head, "eps_k": eps_k, "q_scale": q_scale, "k_scale": k_scale}
        over_group = extension("dist").qk_rms_norm
        results = over_group(q, k, gamma_q, gamma_k, eps, group=group, out_dtype=out_dtype, out=out, **options)
        return cast(tuple[Tensor, Tensor], results)
    for name, pair in (("out", out), ("scale_out", scale_out)):
        if pair is not None and not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            QK_RMS_NORM.fail(name, "be a pair of tensors", repr(type(pair).__name__))
    if out_dtype is None and out is not None and isinstance(out[0], Tensor) and out[0].dtype in FP8_FORMATS:
        out_dtype = out[0].dtype
    given = (*(out or _NEITHER), *(scale_out or _NEITHER))
    freqs, positions, *turn = _unpacked(QK_RMS_NORM, rope)
    tensors = (q, k, gamma_q, gamma_k, freqs, positions, q_scale, k_scale)
    common = (*tensors, eps, weight_offset, rounding, out_dtype, eps_k)
    if per_head is True and stands_in(q):
        # torch.fx knows whether there is a dimension of heads when its graph runs
        options = {"weight_offset": weight_offset, "rounding": rounding, "rope": rope, "per_head": True, "eps_k": eps_k}
        options |= {"out_dtype": out_dtype, "out": out, "q_scale": q_scale, "k_scale": k_scale, "scale_out": scale_out}
        traced: tuple[Tensor, ...] = handle_torch_function(qk_rms_norm, (q, k), q, k, gamma_q, gamma_k, eps, **options)
        return traced
    if per_head is True and _has_heads(q, k, gamma_q, positions):
        op, arguments = _qk_rms_norm_heads, (*common, *turn, *given)
    else:
        op, arguments = _qk_rms_norm, (*common, per_head, *turn, *given)
    repeated = None if is_compiling() else op.repeat(*arguments)
    results = repeated or op(*arguments)
    return cast(tuple[Tensor, ...], results[:2] if results[2] is None else results)


def _has_heads(q: object, k: object, gamma_q: object, positions: object) -> bool:
    """Whether the second-to-last dimension counts heads: rows have gamma's length, and positions lack that dimension."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(gamma_q, Tensor)):
        return False
    if gamma_q.dim() != 1 or q.dim() < 2 or k.dim() < 2 or not q.shape[-1] == k.shape[-1] == gamma_q.shape[0]:
        return False
    if isinstance(positions, Tensor):
        return positions.dim() == q.dim() - 2
    return q.dim() > 2 or q.shape != k.shape
