"""`RMSNorm`, `QKNorm`, and checks shared with the other modules."""

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
from ..ops.rms_norm.op import RMS_NORM, RMS_NORM_OP, rms_norm
from ..rope import Rope

_EPS_NAMES: Final = ("eps", "variance_epsilon")
_TORCHS_EPS: Final = torch.finfo(torch.float32).eps


def gamma_of(weight: Tensor) -> Tensor:
    """The weight in a dtype that the ops accept: its own if 16- or 32-bit float, else float32."""
    return weight if weight.dtype in FLOATS else weight.float()


def own(module: nn.Module, name: str, x: object) -> Any:
    """A module's parameter, not the proxy that torch.fx returns for it while x is a proxy too."""
    return getattr(module, name) if isinstance(x, Tensor) else module._parameters[name]


def eps_of(module: nn.Module, name: str = "") -> float | None:
    """A norm's epsilon, under this name or one of the usual ones; None is torch's default."""
    for candidate in (name,) if name else _EPS_NAMES:
        if hasattr(module, candidate):
            eps: float | None = getattr(module, candidate)
            return eps
    raise ContractError(f"{type(module).__name__}: it must have an epsilon named {name or ' or '.join(_EPS_NAMES)}")


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
            known = RMS_NORM_OP.repeat(x, gamma, residual, None, None, None, *options, None, None, None)
            if known is not None:
                return known[0] if residual is None else known[:2]
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
