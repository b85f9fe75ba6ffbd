"""RMSNorm of a query and a key projection in one launch: statistics, application, or both, with optional RoPE.

`qk_rms_norm` does everything in one launch. Under tensor parallelism, where a rank holds some of the columns, the two
halves are `row_sum_of_squares_qk` and `apply_qk_rms_norm`, with a reduction over the ranks in between.
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
    """Sums of squares of the rows of q and k in one launch: ``out[..., 0] = sum(q^2)``, ``out[..., 1] = sum(k^2)``.

    For rows whose columns are spread over devices, add these sums and divide by the total number of columns.

    Args:
        q: [..., Nq].
        k: [..., Nk], with q's dtype and leading shape.
        out: Receives the result.

    Returns:
        float32 [..., 2].

    Rounding:
        Sums are float32, in an order that depends only on the number of columns.

    >>> import torch, onepass
    >>> onepass.row_sum_of_squares_qk(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0, 2.0]]))
    tensor([[25.,  9.]])
    """
    return cast(Tensor, _row_sum_of_squares_qk(q, k, out)[0])


def row_mean_of_squares_qk(q: Tensor, k: Tensor, out: Tensor | None = None) -> Tensor:
    """Means of squares of the rows of q and k in one launch: ``out[..., 0] = mean(q^2)``, ``out[..., 1] = mean(k^2)``.

    These are the statistics that `apply_qk_rms_norm` needs. Together the two are bit-identical to `qk_rms_norm`.

    Args:
        q: [..., Nq].
        k: [..., Nk], with q's dtype and leading shape.
        out: Receives the result.

    Returns:
        float32 [..., 2].

    Rounding:
        The result of `row_sum_of_squares_qk` divided by the number of columns, correctly rounded.

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
    if rope.sections is not None:
        contract.fail("sections", "be None (qk_norm_rope_cache takes them)", describe(rope.sections))
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

    Args:
        q_out: Receives q's result: any float dtype, or fp8 with scales. May be q itself.
        k_out: Receives k's result. May be k itself.
        gamma_q: Weight [Nq] of q.
        gamma_k: Weight [Nk] of k.
        qk_var: [..., 2], the mean of squares of q's row in column 0 and of k's in column 1 (`row_mean_of_squares_qk`).
        q: [..., Nq].
        k: [..., Nk], with q's dtype and leading shape.
        epsilon: Added to the mean of squares.
        weight_offset: Added to gamma in float32.
        rounding: "once" or "hf", see below.
        rope: Rotation of the result; None: none.
        epsilon_k: k's epsilon; None: q's.
        q_scale: One float32. With it ``q_out`` is fp8: ``code = saturate(y / q_scale)``. There are no scales per row,
            because here a row is one rank's part of a longer one.
        k_scale: The same for k.

    Returns:
        None.

    Rounding:
        "once" groups operations as written and rounds at the store. "hf" rounds ``x * rsqrt(...)`` and its product with
        gamma to q's dtype. A row whose mean is NaN or infinite is NaN; if mean and epsilon are 0 the row is 0.

    >>> import torch, onepass
    >>> q, k = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    >>> var = onepass.row_mean_of_squares_qk(q, k)
    >>> onepass.apply_qk_rms_norm(q, k, torch.ones(2), torch.ones(2), var, q, k, 0.0)
    >>> q, k
    (tensor([[0.8485, 1.1314]]), tensor([[0.0000, 1.4142]]))
    """
    for name, output in (("q_out", q_out), ("k_out", k_out)):
        if output is None:
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

    Here ``rs = 1 / sqrt(mean(x^2) + eps)``, and ``rope`` rotates the result in the same launch.

    Args:
        q: [..., Nq]; may be a slice of a packed projection. With ``per_head`` also [..., Hq, D] with arbitrarily strided heads.
        k: [..., Nk], or with ``per_head`` [..., Hk, D], with q's dtype.
        gamma_q: Weight of q, of any float dtype: all its columns, or with ``per_head`` the D columns of one head.
        gamma_k: Weight of k, likewise.
        eps: Added to the mean of squares.
        weight_offset: Added to gamma in float32.
        rounding: "once" or "hf", see below.
        rope: Rotation of the result; None: none.
        per_head: Whether every D columns form a row. If the last dimension of q and k is D, the one before counts heads,
            unless rope's positions have it too, or neither q nor k has a dimension before it: [tokens, D] is one head per
            token.
        group: A process group, if q and k are this rank's columns of rows that are sharded over it (`onepass.dist`).
        out_dtype: Dtype of the results, also fp8; None: that of ``out``, or q's.
        out: Pair of tensors for the results, which may be q and k themselves.
        eps_k: k's epsilon; None: q's.
        q_scale: One float32, the scale of fp8 results. Required for fp8 with ``group``.
        k_scale: The same for k.
        scale_out: Pair of tensors for the scales of rows or heads.

    Returns:
        ``(q_out, k_out)``. fp8 results without given scales have one per row, or with ``per_head`` per head:
            ``(q_out, k_out, q_scales, k_scales)``, float32 [..., 1], [..., H] for heads within a row, or [..., H, 1].

    Rounding:
        "once" rounds at the store and nowhere else. "hf" rounds ``x * rs`` to q's dtype, then the product with gamma, then
        the rotated value. fp8 codes are ``saturate(y / scale)``; computed scales are ``amax(|y|) / fp8_max``. Statistics are
        float32, summed in an order that depends only on the number of columns.

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
