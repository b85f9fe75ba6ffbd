"""Norms with a bias or a gate, and LayerNorm: the same kernels with other operands, or another statistic.

With ``d = h``, or for LayerNorm ``d = h - mean(h)``::

    y = ((d * rs) * (gamma + weight_offset) + bias) * act(gate)

``act`` is silu or sigmoid. A gate before the norm is a prologue: ``h = x * act(gate)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast, overload

import torch
from torch import Tensor

from ..formats import Rounding
from ..prologues import sigmoid_and_mul, silu_and_mul
from ..specs.rms_norm import After, GateActivation, GateOrder, Operand, RowCall, RowSpec, row_spec
from .registration import Op
from .rms_norm_call import run_rows
from .rms_norm_contract import LAYER_NORM

__all__ = ["LAYER_NORM", "SpecCache", "finished_norm", "further", "layer_norm", "operand_of"]

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
    if head_gamma is not None:
        call = call._replace(row_gamma=head_gamma.expand(a.x.shape))
    if rstd is not None:
        call = call._replace(rstd=rstd.unsqueeze(-1))
    run_rows(call._replace(new_residual=a.residual_out))


def _centered_norm(spec_cache: SpecCache, a: Any) -> None:
    finished_norm(spec_cache, a, "once", centered=True)


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
    out: Tensor | None = ...,
    residual_out: None = ...,
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
    out: Tensor | None = ...,
    residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


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
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm of the last dimension: ``y = (d * rs) * (gamma + weight_offset) + bias``, ``d = h - mean(h)``, ``h = x + residual``.

    ``rs = 1 / sqrt(mean(d^2) + eps)``. The arguments, dtypes and results are those of `rms_norm`. Everything is float32
    until the rounding at the store. The row's mean is rounded to float32 before it is subtracted.
    ``gamma=None`` leaves out the product, as `rms_norm` does. `rms_norm_fused_quant` with ``statistic="layer"``
    quantizes the result.

    >>> import torch, onepass
    >>> onepass.layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.tensor([0.0, 0.5]), eps=0.0)
    tensor([[-1.0000,  1.5000]])
    """
    options = (eps, weight_offset, round_sum, out_dtype)
    y, h = _layer_norm.call(x, gamma, bias, residual, *options, out, residual_out)
    return cast(Tensor, y) if residual is None else (cast(Tensor, y), cast(Tensor, h))
