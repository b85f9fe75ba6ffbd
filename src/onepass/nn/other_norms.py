"""`GatedRMSNorm` and `LayerNorm`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..core.contract import describe, require_bool
from ..errors import ContractError
from ..formats import Rounding
from ..ops.rms_norm.launch import GateActivation, GateOrder
from ..ops.rms_norm.op import layer_norm, rms_norm
from .norm import RMSNorm, check_options, eps_of, gamma_of, own, sizes_of


class GatedRMSNorm(RMSNorm):
    """`rms_norm` with a gate as a module: ``norm(x) * act(gate)``, or with ``gate_order="before"`` ``norm(x * act(gate))``.

    Args:
        size: Columns of x.
        eps: Added to the mean of squares.
        gate_order: With ``rounding="hf"``, "after" is the norm of Qwen3-Next and OLMo-Hybrid, "before" that of Mamba-2 and
            Zamba2.
        gate_activation: "silu", or "sigmoid", with which "once" and "after" are the norm of Kimi Linear.
        groups: Number of groups of columns that are normed separately.
        rounding: "once" or "hf".
        device: Device of the weight.
        dtype: Dtype of the weight.

    >>> import torch
    >>> from onepass.nn import GatedRMSNorm
    >>> norm = GatedRMSNorm(4, 0.0, groups=2)
    >>> with torch.inference_mode():
    ...     norm(torch.tensor([[3.0, 4.0, 0.0, 2.0]]))
    tensor([[0.8485, 1.1314, 0.0000, 1.4142]])
    """

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        *,
        gate_order: GateOrder = "after",
        gate_activation: GateActivation = "silu",
        groups: int = 1,
        rounding: Rounding = "once",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes_of(type(self), "size", size, many=False)
        sizes_of(type(self), "groups", groups, many=False)
        super().__init__(size, eps, True, device, dtype, rounding=rounding)
        check_options(type(self), gate_order=gate_order, gate_activation=gate_activation)
        if size % groups:
            raise ContractError(f"{type(self).__name__}: `groups` must divide size, {size}, got {groups}")
        self.gate_order: GateOrder = gate_order
        self.gate_activation: GateActivation = gate_activation
        self.groups = groups

    @classmethod
    def from_module(  # type: ignore[override]
        cls,
        norm: nn.Module,
        *,
        gate_order: GateOrder,
        gate_activation: GateActivation = "silu",
        groups: int = 1,
        rounding: Rounding = "hf",
    ) -> Self:
        """The norm of another module, sharing its weight and taking its epsilon.

        Args:
            norm: Module with a one-dimensional ``weight``.
            gate_order: "after" or "before".
            gate_activation: "silu" or "sigmoid".
            groups: Number of groups of columns that are normed separately.
            rounding: "once" or "hf".

        Returns:
            The new module, in the mode (training or not) of the other.
        """
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 1:
            raise ContractError(f"{cls.__name__}: `norm` must have a weight of one dimension, got {describe(norm)}")
        eps = eps_of(norm)
        options: dict[str, Any] = {"gate_order": gate_order, "gate_activation": gate_activation, "groups": groups}
        options |= {"rounding": rounding, "device": "meta"}
        module = cls(weight.numel(), 1e-6 if eps is None else eps, **options)
        module.weight = weight
        return module.train(norm.training)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Any:
        """Norm and gate x.

        Args:
            x: [..., size].
            gate: [..., size]; None: no gate.

        Returns:
            The gated norm, or the norm.
        """
        gamma = self._gamma(x)
        options: dict[str, Any] = {"rounding": self.rounding, "gate_order": self.gate_order}
        options["gate_activation"] = self.gate_activation
        if self.groups == 1:
            return rms_norm(x, gamma, self._eps(), gate=gate, **options)
        parts = (self.groups, -1)
        gate = None if gate is None else gate.unflatten(-1, parts)
        y = rms_norm(x.unflatten(-1, parts), gamma.view(parts), self._eps(), gate=gate, **options)
        return y.flatten(-2)

    def extra_repr(self) -> str:
        """All parameters except the weight."""
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        activation = f", gate_activation={self.gate_activation!r}" if self.gate_activation != "silu" else ""
        return f"{super().extra_repr()}, gate_order={self.gate_order!r}{activation}{groups}"


class LayerNorm(nn.Module):
    """`layer_norm` as a module: ``(h - mean(h)) * rs * weight + bias``, ``h = x + residual``.

    A drop-in replacement for `torch.nn.LayerNorm`, with its parameters and its state dict. It rounds once, like torch's and
    Cohere's (``bias=False``).

    Args:
        normalized_shape: Size of the last dimension, or sizes of the last dimensions; (H, N) with ``per_head``.
        eps: Added to the mean of squares.
        elementwise_affine: Whether there are a weight and a bias.
        bias: Whether there is a bias. Must be False with ``per_head``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        per_head: Whether each head of x [..., H, N] is normed over its N columns and has its own weight, as Cohere's
            queries and keys do.

    >>> import torch
    >>> from onepass.nn import LayerNorm
    >>> theirs, ours = torch.nn.LayerNorm(64), LayerNorm(64)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        per_head: bool = False,
    ) -> None:
        super().__init__()
        shape = sizes_of(type(self), "normalized_shape", normalized_shape)
        require_bool(type(self).__name__, "per_head", per_head)
        if per_head and len(shape) != 2:
            raise ContractError(f"{type(self).__name__}: `normalized_shape` must be (H, N) with per_head, got {shape}")
        if per_head and bias:
            raise ContractError(f"{type(self).__name__}: `bias` must be False with per_head, got {describe(bias)}")
        check_options(type(self), eps=eps)
        require_bool(type(self).__name__, "elementwise_affine", elementwise_affine)
        require_bool(type(self).__name__, "bias", bias)
        self.normalized_shape = shape
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.per_head = per_head
        for name, wanted, value in (("weight", True, 1.0), ("bias", bias, 0.0)):
            initial = torch.full(shape, value, device=device, dtype=dtype) if elementwise_affine and wanted else None
            self.register_parameter(name, None if initial is None else nn.Parameter(initial))

    @classmethod
    def from_module(cls, norm: nn.Module) -> Self:
        """The norm of another module, sharing its weight and bias and taking its epsilon.

        Args:
            norm: Module with a ``weight``. A weight [H, N] of a module without ``normalized_shape`` is one for each head.

        Returns:
            The new module, in the mode (training or not) of the other.
        """
        weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
        if not isinstance(weight, Tensor):
            raise ContractError(f"{cls.__name__}: `norm` must have a weight, got {describe(norm)}")
        eps = eps_of(norm)
        per_head = getattr(norm, "per_head", weight.dim() == 2 and not hasattr(norm, "normalized_shape"))
        options: dict[str, Any] = {"bias": isinstance(bias, Tensor), "device": "meta", "per_head": per_head}
        module = cls(weight.shape, 1e-5 if eps is None else eps, **options)
        module.weight = weight
        module.bias = bias if isinstance(bias, Tensor) else None
        return module.train(norm.training)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Norm x, or its sum with the residual.

        Args:
            x: [..., normalized_shape].
            residual: Like x, in x's dtype or float32.

        Returns:
            y in x's dtype. With a residual ``(y, new_residual)``.
        """
        if self.per_head:
            heads = None if self.weight is None else gamma_of(own(self, "weight", x))
            if isinstance(x, Tensor) and x.shape[-2:] != self.normalized_shape:
                heads_and_columns = ", ".join(map(str, self.normalized_shape))
                raise ContractError(
                    f"{type(self).__name__}: `x` must be [..., {heads_and_columns}], got {list(x.shape)}"
                )
            return layer_norm(x, heads, eps=self.eps, residual=residual)
        columns = math.prod(self.normalized_shape)
        flat = x if len(self.normalized_shape) == 1 else x.flatten(-len(self.normalized_shape))
        if isinstance(x, Tensor) and flat.shape[-1] != columns:
            raise ContractError(f"{type(self).__name__}: `x` must have {columns} columns, got {flat.shape[-1]}")
        parameters = (own(self, name, x) for name in ("weight", "bias"))
        weight, bias = (None if t is None else gamma_of(t).flatten() for t in parameters)
        if residual is None:
            return layer_norm(flat, weight, bias, self.eps).view(x.shape)
        y, h = layer_norm(flat, weight, bias, self.eps, residual=residual.view(flat.shape))
        return y.view(x.shape), h.view(x.shape)

    def extra_repr(self) -> str:
        """All parameters except the weights."""
        size = self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape
        options = f"{size}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, bias={self.bias is not None}"
        return f"{options}, per_head=True" if self.per_head else options
