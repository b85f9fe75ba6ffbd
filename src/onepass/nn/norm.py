"""`RMSNorm`, `GatedRMSNorm`, `LayerNorm`, `QKNorm`, and checks shared with the other modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..core.contract import describe, plain_number, require_bool
from ..errors import ContractError
from ..formats import FLOATS, Rounding
from ..ops.qk_norm.op import qk_rms_norm
from ..ops.rms_norm.launch import GateActivation, GateOrder
from ..ops.rms_norm.op import RMS_NORM, RMS_NORM_OP, layer_norm, rms_norm
from ..rope import Rope

_EPS_NAMES: Final = ("eps", "variance_epsilon")
_TORCHS_EPS: Final = torch.finfo(torch.float32).eps


def gamma_of(weight: Tensor) -> Tensor:
    """The weight in a dtype that the ops accept: its own if 16- or 32-bit float, else float32."""
    return weight if weight.dtype in FLOATS else weight.float()


def own(module: nn.Module, name: str, x: object) -> Any:
    """A module's parameter, not the proxy that torch.fx returns for it while x is a proxy too."""
    return getattr(module, name) if isinstance(x, Tensor) else module._parameters[name]


def eps_of(module: nn.Module) -> float | None:
    """A norm's epsilon, under one of the usual names; None is torch's default."""
    for name in _EPS_NAMES:
        if hasattr(module, name):
            eps: float | None = getattr(module, name)
            return eps
    raise ContractError(f"{type(module).__name__}: it must have an epsilon named {' or '.join(_EPS_NAMES)}")


def sizes_of(owner: type, name: str, value: object, many: bool = True) -> tuple[int, ...]:
    """One size, or several if ``many``."""
    sizes = tuple(value) if many and isinstance(value, (list, tuple)) else (value,)
    if not sizes or not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 2**31 for n in sizes):
        raise ContractError(
            f"{owner.__name__}: `{name}` must be a positive int{' or a list of them' * many}, got {describe(value)}"
        )
    return sizes


def check_options(owner: type, **values: object) -> None:
    """Reject at construction what the op would reject at every call."""
    for name, value in values.items():
        option = RMS_NORM.options[name]
        if not option.accepts(name, value):
            allowed = " or ".join(map(repr, option.choices)) or f"a number, {option.where}"
            raise ContractError(f"{owner.__name__}: `{name}` must be {allowed}, got {describe(value)}")


class RMSNorm(nn.Module):
    """`rms_norm` as a module: ``y = (h * rs) * (weight + weight_offset)``, ``h = x + residual``.

    A drop-in replacement for `torch.nn.RMSNorm`, with its first five parameters and its state dict.

    Args:
        normalized_shape: Size of the last dimension, or sizes of the last dimensions.
        eps: Added to the mean of squares. None is torch's default too: float32's epsilon, for every dtype.
        elementwise_affine: Whether there is a weight; without it the weight is 1.
        device: Device of the weight.
        dtype: Dtype of the weight.
        weight_offset: Added to the weight in float32: 1.0 for Gemma.
        rounding: "once" rounds like torch.nn.RMSNorm, Gemma and OLMo-2; "hf" like Llama, Mistral, Qwen, Phi-3, DeepSeek
            and GLM-4.

    >>> import torch
    >>> from onepass.nn import RMSNorm
    >>> theirs, ours = torch.nn.RMSNorm(64), RMSNorm(64)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> with torch.inference_mode():
    ...     torch.allclose(ours(torch.ones(2, 64)), theirs(torch.ones(2, 64)))
    True
    """

    weight: Tensor | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        rounding: Rounding = "once",
    ) -> None:
        super().__init__()
        shape = sizes_of(type(self), "normalized_shape", normalized_shape)
        check_options(type(self), weight_offset=weight_offset, rounding=rounding)
        if eps is not None:
            check_options(type(self), eps=eps)
        require_bool(type(self).__name__, "elementwise_affine", elementwise_affine)
        self.normalized_shape = shape
        self.eps: Any = plain_number(eps)  # C knows no other number than Python's
        self.elementwise_affine = elementwise_affine
        self.weight_offset = weight_offset
        self.rounding: Rounding = rounding
        if elementwise_affine:
            self.weight = nn.Parameter(torch.full(shape, 1.0 - weight_offset, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)

    @classmethod
    def from_module(cls, norm: nn.Module, *, weight_offset: float = 0.0, rounding: Rounding = "once") -> Self:
        """The norm of another module, sharing its weight and taking its epsilon.

        Args:
            norm: Module with a ``weight``, and an epsilon called ``eps`` or ``variance_epsilon``.
            weight_offset: Added to the weight in float32.
            rounding: "once" or "hf".

        Returns:
            The new module, in the mode (training or not) of the other.
        """
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, Tensor):
            raise ContractError(f"{cls.__name__}: `norm` must have a weight, got {describe(norm)}")
        options: dict[str, Any] = {"device": "meta", "dtype": weight.dtype, "weight_offset": weight_offset}
        module = cls(weight.shape, eps_of(norm), rounding=rounding, **options)
        module.weight = weight
        return module.train(norm.training)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Norm x, or its sum with the residual.

        Args:
            x: [..., normalized_shape].
            residual: Like x, in x's dtype or float32.

        Returns:
            y in x's dtype. With a residual ``(y, new_residual)``.
        """
        if not is_compiling():
            # a known call of the op, as below: joined dimensions, a converted weight and errors are not known by these tensors
            # (nor is one that a parametrization computes: the module itself is no tensor)
            gamma, eps = self._parameters.get("weight", self), self.eps
            options = (
                _TORCHS_EPS if eps is None else eps,
                self.weight_offset,
                self.rounding,
                None,
                "after",
                "silu",
                None,
                False,
            )
            outputs = RMS_NORM_OP.repeat(x, gamma, residual, None, None, None, *options, None, None, None)
            if outputs is not None:
                return outputs[0] if residual is None else outputs[:2]
        dims = len(self.normalized_shape)
        traced = not isinstance(x, Tensor)  # by torch.fx, which knows no sizes
        if dims == 1 and (traced or (x.dim() and (residual is None or residual.dim() == x.dim()))):
            # no dimensions to join
            return rms_norm(x, self._weight(x), self._eps(), residual=residual, **self._op_options())
        flat = x.flatten(-dims)
        if residual is None:
            return rms_norm(flat, self._weight(flat), self._eps(), **self._op_options()).view(x.shape)
        h = residual.view(flat.shape)
        y, h = rms_norm(flat, self._weight(flat), self._eps(), residual=h, **self._op_options())
        return y.view(x.shape), h.view(x.shape)

    def _eps(self) -> float:
        return _TORCHS_EPS if self.eps is None else self.eps

    def _options(self) -> dict[str, Any]:
        return {"weight_offset": self.weight_offset, "rounding": self.rounding}

    def _gamma(self, x: Tensor) -> Tensor:
        """The weight, also where there is none: for ops that need one."""
        weight = own(self, "weight", x)
        if weight is None:
            return torch.full((x.shape[-1],), 1.0 - self.weight_offset, dtype=x.dtype, device=x.device)
        return gamma_of(weight if weight.dim() == 1 else weight.view(-1))

    def _weight(self, x: Tensor) -> Tensor | None:
        """The weight, or None: for ops of rows, which then load none."""
        if self.weight is not None:
            return self._gamma(x)
        columns = math.prod(self.normalized_shape)
        if isinstance(x, Tensor) and x.shape[-1] != columns:
            raise ContractError(f"{type(self).__name__}: `x` must have {columns} columns, got {x.shape[-1]}")
        return None

    def _op_options(self) -> dict[str, Any]:
        """The options that go with `_weight`."""
        return self._options() if self.weight is not None else {"rounding": self.rounding}

    def extra_repr(self) -> str:
        """All parameters except the weight."""
        size = self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{size}, eps={self.eps}{offset}, rounding={self.rounding!r}"


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


class QKNorm(nn.Module):
    """`qk_rms_norm` as a module: ``(x * rs) * (weight + weight_offset)`` of queries and of keys, then RoPE, in one launch.

    Args:
        q_dim: Length of q's weight: its whole projection (OLMo-2, MiniMax-M2), or with ``per_head`` one head (Qwen3, Gemma 3).
        k_dim: Length of k's weight. May be None with ``per_head``.
        eps: Added to the mean of squares.
        per_head: Whether each head is normed by itself.
        weight_offset: Added to the weights in float32.
        rounding: "once" or "hf".
        device: Device of the weights.
        dtype: Dtype of the weights.

    >>> import torch
    >>> from onepass.nn import QKNorm
    >>> sorted(QKNorm(8, per_head=True).state_dict())
    ['k_norm.weight', 'q_norm.weight']
    """

    def __init__(
        self,
        q_dim: int,
        k_dim: int | None = None,
        eps: float = 1e-6,
        *,
        per_head: bool = False,
        weight_offset: float = 0.0,
        rounding: Rounding = "once",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_bool(type(self).__name__, "per_head", per_head)
        if k_dim is None and not per_head:
            raise ContractError("QKNorm: `k_dim` must be given unless `per_head`, got None")
        dims = {"q_dim": q_dim, "k_dim": q_dim if k_dim is None else k_dim}
        for name, dim in dims.items():
            sizes_of(type(self), name, dim, many=False)
        check_options(type(self), eps=eps, weight_offset=weight_offset, rounding=rounding)
        self.per_head = per_head
        options: dict[str, Any] = {"device": device, "dtype": dtype, "weight_offset": weight_offset}
        self.q_norm, self.k_norm = (RMSNorm(n, eps, rounding=rounding, **options) for n in dims.values())

    @classmethod
    def from_modules(
        cls,
        q_norm: nn.Module,
        k_norm: nn.Module,
        *,
        per_head: bool,
        weight_offset: float = 0.0,
        rounding: Rounding = "once",
    ) -> Self:
        """The norms of two modules with equal epsilons, sharing their weights.

        Args:
            q_norm: The norm of queries.
            k_norm: The norm of keys.
            per_head: Whether each head is normed by itself.
            weight_offset: Added to the weights in float32.
            rounding: "once" or "hf".

        Returns:
            The new module.
        """
        require_bool(cls.__name__, "per_head", per_head)
        if eps_of(q_norm) != eps_of(k_norm):
            raise ContractError(f"QKNorm: `k_norm` must have q_norm's epsilon, {eps_of(q_norm)}, got {eps_of(k_norm)}")
        module = cls(1, per_head=True, device="meta")
        module.per_head = per_head
        module.q_norm, module.k_norm = (
            RMSNorm.from_module(norm, weight_offset=weight_offset, rounding=rounding) for norm in (q_norm, k_norm)
        )
        return module

    def forward(self, q: Tensor, k: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        """Norm and rotate q and k.

        Args:
            q: [..., Nq], or with ``per_head`` also [..., heads, head_dim], strided as in a packed projection.
            k: The same with k's sizes.
            rope: Rotation of both; None: none.

        Returns:
            The normed (and rotated) q and k, as new tensors.
        """
        norm = self.q_norm
        gammas = norm._gamma(q), self.k_norm._gamma(k)
        q, k = qk_rms_norm(q, k, *gammas, norm._eps(), rope=rope, per_head=self.per_head, **norm._options())
        return q, k
