"""Norms with a bias or a gate, and LayerNorm: the same kernels with other operands, or another statistic.

With ``d = h``, or for LayerNorm ``d = h - mean(h)``::

    y = ((d * rs) * (gamma + weight_offset) + bias) * act(gate)

``act`` is silu or sigmoid. A gate before the norm is a prologue: ``h = x * act(gate)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...core.op import Op
from ...formats import Rounding
from ...prologues import Operand, sigmoid_and_mul, silu_and_mul
from .call import run_rows
from .contract import LAYER_NORM
from .spec import After, GateActivation, GateOrder, RowCall, RowSpec, row_spec

__all__ = ["LAYER_NORM", "SpecCache", "either_gamma", "finished_norm", "further", "layer_norm", "operand_of"]

SpecCache = dict[tuple[object, ...], RowSpec]
"""The specs of one combination of options, by the tensors' dtypes and kinds."""
Gating = tuple[GateOrder, GateActivation]
_BEFORE: Final = {"silu": silu_and_mul.key, "sigmoid": sigmoid_and_mul.key}
"""The prologue of a gate before the norm, by its activation."""


def finished_norm(
    spec_cache: SpecCache,
    a: Any,
    rounding: Rounding,
    gate: Tensor | None = None,
    gating: Gating = ("after", "silu"),
    centered: bool = False,
    head_gamma: Tensor | None = None,
    rstd: Tensor | None = None,
) -> None:
    """A norm with a gate or a bias, or LayerNorm (``centered``)."""
    prologue, operands, kinds, after = further("", (), gate, gating, a.bias, a.x)
    gamma = a.gamma if head_gamma is None else head_gamma
    dtypes = (a.x.dtype, None if gamma is None else gamma.dtype, None if a.residual is None else a.residual.dtype)
    key = (*dtypes, kinds, head_gamma is None)
    spec = spec_cache.get(key)
    if spec is None:
        options: dict[str, Any] = {"round_sum": a.round_sum, "after": after, "centered": centered}
        options |= {"per_row": head_gamma is not None, "rstd": rstd is not None, "gate_activation": gating[1]}
        spec = spec_cache[key] = row_spec(*dtypes, a.out.dtype, rounding, prologue, kinds, **options)
    call = RowCall(spec, a.x, a.gamma, a.eps, a.weight_offset, a.residual, operands, norm=a.out)
    run_rows(with_rows(call._replace(new_residual=a.residual_out), head_gamma, rstd))


def with_rows(call: RowCall, head_gamma: Tensor | None, rstd: Tensor | None) -> RowCall:
    """The call with a gamma for each head, and a reciprocal RMS to store for each row, where they are given."""
    if head_gamma is not None:
        call = call._replace(row_gamma=head_gamma.expand(call.x.shape))
    return call if rstd is None else call._replace(rstd=rstd.unsqueeze(-1))


def _centered_norm(spec_cache: SpecCache, a: Any) -> None:
    finished_norm(spec_cache, a, "once", centered=True, head_gamma=a.head_gamma, rstd=a.rstd_out)


def either_gamma(gamma: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The contract's two arguments for the public functions' ``gamma``: that of heads has two dimensions."""
    return (None, gamma) if isinstance(gamma, Tensor) and gamma.dim() == 2 else (gamma, None)


def further(
    prologue: str, given: Sequence[Tensor], gate: Tensor | None, gating: Gating, bias: Tensor | None, x: Tensor
) -> tuple[str, list[Tensor], tuple[Operand, ...], After]:
    """A prologue's name, all operands and their kinds, and what follows gamma. A gate before the norm is a prologue."""
    order, activation = gating
    if gate is not None and order == "before":
        prologue, given, gate = _BEFORE[activation], (gate,), None
    operands = [*given, *(t for t in (gate, bias) if t is not None)]
    kinds = [operand_of(t, x) for t in given]
    kinds += [Operand("full", gate.dtype)] if gate is not None else []
    kinds += [Operand("column", bias.dtype)] if bias is not None else []
    return prologue, operands, tuple(kinds), After(gate is not None, bias is not None)


def operand_of(tensor: Tensor, x: Tensor) -> Operand:
    """What a prologue's tensor is to x."""
    if tensor.shape == x.shape:
        return Operand("full", tensor.dtype)
    n, last = x.shape[-1], tensor.shape[-1]
    if tensor.dim() == 1 and last == n:
        return Operand("column", tensor.dtype)
    return Operand("row", tensor.dtype) if last == 1 else Operand("group", tensor.dtype, n // last)


_layer_norm = Op(LAYER_NORM, _centered_norm)


@overload
def layer_norm(
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: None = ...,
    round_sum: bool | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_rstd: Literal[False] = ...,
    out: Tensor | None = ...,
    residual_out: None = ...,
    rstd_out: None = ...,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: Tensor,
    round_sum: bool | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_rstd: Literal[False] = ...,
    out: Tensor | None = ...,
    residual_out: Tensor | None = ...,
    rstd_out: None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def layer_norm(
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    residual: Tensor | None = ...,
    round_sum: bool | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_rstd: Literal[True],
    out: Tensor | None = ...,
    residual_out: Tensor | None = ...,
    rstd_out: Tensor | None = ...,
) -> tuple[Tensor, ...]: ...


def layer_norm(
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    round_sum: bool | None = None,
    out_dtype: torch.dtype | None = None,
    return_rstd: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    rstd_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """LayerNorm of the last dimension: ``y = (d * rs) * (gamma + weight_offset) + bias``, ``d = h - mean(h)``, ``h = x + residual``.

    ``rs = 1 / sqrt(mean(d^2) + eps)``. The arguments, dtypes and results are those of `rms_norm`. Everything is float32
    until the rounding at the store. The row's mean is rounded to float32 before it is subtracted.
    ``gamma=None`` leaves out the product, and ``gamma`` [H, N] has a weight for each head of x [..., H, N], as in
    `rms_norm`. ``return_rstd`` also returns ``rs`` as the last result. `rms_norm_fused_quant` with ``statistic="layer"``
    quantizes the result.

    >>> import torch, onepass
    >>> onepass.layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.tensor([0.0, 0.5]), eps=0.0)
    tensor([[-1.0000,  1.5000]])
    >>> heads, gamma = torch.tensor([[1.0, 3.0], [1.0, 5.0]]), torch.tensor([[1.0, 1.0], [2.0, 3.0]])
    >>> onepass.layer_norm(heads, gamma, eps=0.0, return_rstd=True)
    (tensor([[-1.,  1.],
            [-2.,  3.]]), tensor([1.0000, 0.5000]))
    """
    gamma, heads = either_gamma(gamma)
    options = (eps, weight_offset, round_sum, out_dtype, return_rstd)
    arguments = (x, gamma, bias, residual, heads, *options, out, residual_out, rstd_out)
    repeated = None if is_compiling() else _layer_norm.repeat(*arguments)
    y, h, rstd = repeated or _layer_norm(*arguments)
    if rstd is not None:
        return tuple([t for t in (y, h, rstd) if t is not None])
    return cast(Tensor, y) if residual is None else (cast(Tensor, y), cast(Tensor, h))
