"""``y = x @ weight.T`` with what surrounds it in a transformer: norm and residual before, activation and addition after.

A scale per block of 128 x 128 weights multiplies the partial sum of its 128 columns, and blocks are added from the left:
``total = fma(partial, scale, total)``, starting from 0. A CPU has one total per lane, a GPU one per piece of K
(docs/numerics.md).
"""

from __future__ import annotations

from typing import cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...core.op import Op
from ...formats import Rounding
from .contract import LINEAR
from .launch import Activation, LinearArguments, LinearCall, LinearSpec, linear_spec, run_linear
from .weight_scale import kind_of, split

__all__ = ["LINEAR", "linear"]

SpecCache = dict[tuple[object, ...], LinearSpec]
"""The specs of one combination of options, by the tensors' dtypes and the kind of scale."""


def _linear(spec_cache: SpecCache, a: LinearArguments) -> None:
    kind = kind_of(a.weight, a.weight_scale, a.block_scale)
    optional = [None if t is None else t.dtype for t in (a.gamma, a.residual, a.bias, a.add)]
    key = (a.x.dtype, a.weight.dtype, kind, *optional)
    spec = spec_cache.get(key)
    if spec is None:
        gamma, residual, bias, add = optional
        dtypes = (a.x.dtype, a.weight.dtype, kind, gamma, residual, bias)
        end = (a.activation, add, a.out.dtype, a.rounding, a.static_weight)
        spec = spec_cache[key] = linear_spec(*dtypes, *end)
    scale = a.block_scale if a.weight_scale is None else a.weight_scale
    tensors = (a.x, a.weight, a.out, scale, a.gamma, a.residual, a.bias, a.add, a.residual_out)
    run_linear(LinearCall(spec, *tensors, eps=a.eps, weight_offset=a.weight_offset))


_op = Op(LINEAR, _linear)


@overload
def linear(
    x: Tensor,
    weight: Tensor,
    *,
    gamma: Tensor | None = ...,
    eps: float = ...,
    weight_offset: float = ...,
    residual: None = ...,
    bias: Tensor | None = ...,
    weight_scale: Tensor | None = ...,
    activation: Activation | None = ...,
    add: Tensor | None = ...,
    rounding: Rounding = ...,
    out_dtype: torch.dtype | None = ...,
    static_weight: bool = ...,
    out: Tensor | None = ...,
    residual_out: None = ...,
) -> Tensor: ...


@overload
def linear(
    x: Tensor,
    weight: Tensor,
    *,
    gamma: Tensor | None = ...,
    eps: float = ...,
    weight_offset: float = ...,
    residual: Tensor,
    bias: Tensor | None = ...,
    weight_scale: Tensor | None = ...,
    activation: Activation | None = ...,
    add: Tensor | None = ...,
    rounding: Rounding = ...,
    out_dtype: torch.dtype | None = ...,
    static_weight: bool = ...,
    out: Tensor | None = ...,
    residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    gamma: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    activation: Activation | None = None,
    add: Tensor | None = None,
    rounding: Rounding = "once",
    out_dtype: torch.dtype | None = None,
    static_weight: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``y = act((norm(x + residual) @ weight.T) * weight_scale + bias) + add``, each part optional.

    Step by step::

        h = x + residual                                    float32
        a = round((h * rs) * (gamma + weight_offset))       what `rms_norm` stores; without gamma: round(h)
        y = (a @ weight.T) * weight_scale + bias
        y = act(y[..., :I]) * y[..., I:]                    with an activation; weight is [2 * I, K], the gate's rows first
        y = y + add

    Args:
        x: [..., K], bfloat16, float16 or float32. The last dimension is contiguous, all others may have any stride.
        weight: [N, K] in x's dtype, float8_e4m3fn or int8, with any row stride.
        gamma: Weight [K] of the norm, of any float dtype. None: no norm.
        eps: Added to the mean of squares.
        weight_offset: Added to gamma in float32.
        residual: [..., K] in x's dtype or float32.
        bias: [N] of any float dtype.
        weight_scale: float32 with one element or one per row, [N] or [N, 1]. For float8_e4m3fn weights also one per block,
            [ceil(N / 128), ceil(K / 128)], float32 or float8_e8m0fnu.
        activation: "silu_mul", "gelu_tanh_mul" or "gelu_mul": the activation of the first half of y times the second half.
        add: [..., I], without an activation [..., N], in x's dtype or float32.
        rounding: "once" or "hf", see below.
        out_dtype: Dtype of y: None (x's) or float32.
        static_weight: Lets a GPU (Hopper and later) read 16-bit and 8-bit weights and their scales, for up to 16 rows, before
            the preceding kernel has ended. Set it for weights that no onepass call, and no other kernel with programmatic
            launch, writes right before, such as a model's. float32 weights are always read this way. Results are the same.
        out: Receives y; may be ``add`` itself.
        residual_out: Receives h; may be the residual itself.

    Returns:
        y, or with a residual ``(y, new_residual)``, where new_residual is h in the residual's dtype.

    Rounding:
        a is rounded to x's dtype. "once" computes everything after it in float32 and rounds at the store. "hf" rounds where
        Hugging Face's modules do: y, the activation, the product of the halves and the sum with ``add``, each to x's dtype.
        The order of each sum depends on N, K, the dtypes and the kind of scale, never on the number of rows, so each row is
        bit-identical to running it alone. The product is bit-identical to ``unnormed`` of `gemv_and_partial_norm`, except for
        16-bit weights on a GPU.

    It is one launch, with two exceptions on a GPU, neither of which changes a bit. Norm and residual run first where that
    is faster (16-bit weights, or more than 4 rows) and if ``residual_out`` is ``residual``. For more than 64 rows, 8-bit
    weights may be decoded first, into memory that is freed after the call.

    >>> import torch, onepass
    >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> onepass.linear(x, weight, bias=torch.tensor([0.5, 0.0]))
    tensor([[3.5000, 8.0000]])
    >>> onepass.linear(x, weight, gamma=torch.ones(2), eps=0.0, activation="silu_mul", add=torch.ones(1, 1))
    tensor([[2.3445]])
    """
    row_scale, block_scale = split(weight, weight_scale)
    tensors = (x, weight, gamma, residual, bias, row_scale, block_scale, add)
    arguments = (*tensors, eps, weight_offset, activation, rounding, out_dtype, static_weight, out, residual_out)
    repeated = None if is_compiling() else _op.repeat(*arguments)
    y, h = repeated or _op(*arguments)
    return cast(Tensor, y) if residual is None else (cast(Tensor, y), cast(Tensor, h))
