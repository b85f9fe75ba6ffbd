"""Modules with the state dicts of the modules they replace.

| here | replaces | state dict |
|---|---|---|
| `RMSNorm` | `torch.nn.RMSNorm`; the RMSNorms of Hugging Face's Llama, Qwen, Gemma, ... | ``weight`` |
| `QKNorm` | an attention's ``q_norm`` and ``k_norm`` | ``q_norm.weight``, ``k_norm.weight`` |
| `RMSNormFP8` | an RMSNorm whose result goes to fp8 linear layers | ``weight`` |
| `LinearFP8` | `torch.nn.Linear` after it | ``weight``, ``weight_scale``, ``bias``; also loads a Linear's |

With ``h = x + residual`` (if given) and ``rs = 1 / sqrt(mean(h^2) + eps)``::

    RMSNorm       y            = (h * rs) * (weight + weight_offset)
    RMSNormFP8    codes, scale = y / scale as fp8, max |y| / 448 per row
    LinearFP8     out          = (codes @ weight.T) * scale * weight_scale + bias

There is no backward: call these under ``torch.inference_mode()`` or ``torch.no_grad()``. A weight
in neither x's dtype nor float32 (float32 activations in a bfloat16 model) is converted to float32,
which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from .contract.declaration import describe, require_bool
from .errors import ContractError
from .formats import FLOATS, FP8_FORMATS, Rounding
from .ops.qk_norm import qk_rms_norm
from .ops.registration import write_eager_entries
from .ops.rms_norm import RMS_NORM, rms_norm, rms_norm_fused_fp8
from .rope import Rope

__all__ = ["LinearFP8", "QKNorm", "RMSNorm", "RMSNormFP8", "quantize_rows"]

write_eager_entries()  # before modules are compiled
_EPS_NAMES: Final = ("eps", "variance_epsilon")
_FP8: Final = torch.float8_e4m3fn


def gamma_of(weight: Tensor) -> Tensor:
    """The weight in a dtype that the ops accept: its own if 16- or 32-bit float, else float32."""
    return weight if weight.dtype in FLOATS else weight.float()


def eps_of(module: nn.Module, name: str = "") -> float | None:
    """A norm's epsilon, under this name or one of the usual ones; None is torch's default."""
    for candidate in (name,) if name else _EPS_NAMES:
        if hasattr(module, candidate):
            eps: float | None = getattr(module, candidate)
            return eps
    raise ContractError(f"{type(module).__name__}: it must have an epsilon named {name or ' or '.join(_EPS_NAMES)}")


def _sizes(owner: type, name: str, value: object, many: bool = True) -> tuple[int, ...]:
    """One size, or several if ``many``."""
    sizes = tuple(value) if many and isinstance(value, (list, tuple)) else (value,)
    if not sizes or not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 2**31 for n in sizes):
        raise ContractError(
            f"{owner.__name__}: `{name}` must be a positive int{' or a list of them' * many}, got {describe(value)}"
        )
    return sizes


def _check_options(owner: type, **values: object) -> None:
    """Reject at construction what the op would reject at every call."""
    for name, value in values.items():
        option = RMS_NORM.options[name]
        if not option.accepts(name, value):
            allowed = " or ".join(map(repr, option.choices)) or f"a number, {option.where}"
            raise ContractError(f"{owner.__name__}: `{name}` must be {allowed}, got {describe(value)}")


class RMSNorm(nn.Module):
    """`rms_norm` as a module: ``y = (h * rs) * (weight + weight_offset)``, ``h = x + residual``.

    The first five parameters are those of `torch.nn.RMSNorm`. ``eps=None`` is its default too and means
    float32's epsilon for every dtype. ``weight_offset=1.0`` is Gemma's norm. ``rounding="once"``
    rounds like torch.nn.RMSNorm, Gemma and OLMo-2, "hf" like Llama, Mistral, Qwen, Phi-3, DeepSeek
    and GLM-4. Without ``elementwise_affine`` the weight is 1.

    ``forward(x)`` returns y in x's dtype; ``forward(x, residual)`` returns (y, new_residual).

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
        shape = _sizes(type(self), "normalized_shape", normalized_shape)
        _check_options(type(self), weight_offset=weight_offset, rounding=rounding)
        if eps is not None:
            _check_options(type(self), eps=eps)
        require_bool(type(self).__name__, "elementwise_affine", elementwise_affine)
        self.normalized_shape = shape
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.weight_offset = weight_offset
        self.rounding: Rounding = rounding
        if elementwise_affine:
            self.weight = nn.Parameter(torch.full(shape, 1.0 - weight_offset, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)

    @classmethod
    def from_module(cls, norm: nn.Module, *, weight_offset: float = 0.0, rounding: Rounding = "once") -> Self:
        """The norm of another module, sharing its weight."""
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, Tensor):
            raise ContractError(f"{cls.__name__}: `norm` must have a weight, got {describe(norm)}")
        options: dict[str, Any] = {"device": "meta", "dtype": weight.dtype, "weight_offset": weight_offset}
        made = cls(weight.shape, eps_of(norm), rounding=rounding, **options)
        made.weight = weight
        return made.train(norm.training)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Y, or (y, new_residual)."""
        lead = x.shape[: x.dim() - len(self.normalized_shape)]
        flat = x.view(*lead, -1)
        if residual is None:
            return rms_norm(flat, self._gamma(flat), self._eps(), **self._options()).view(x.shape)
        h = residual.view(*lead, -1)
        y, h = rms_norm(flat, self._gamma(flat), self._eps(), residual=h, **self._options())
        return y.view(x.shape), h.view(x.shape)

    def _eps(self) -> float:
        return torch.finfo(torch.float32).eps if self.eps is None else self.eps

    def _options(self) -> dict[str, Any]:
        return {"weight_offset": self.weight_offset, "rounding": self.rounding}

    def _gamma(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return torch.full((x.shape[-1],), 1.0 - self.weight_offset, dtype=x.dtype, device=x.device)
        return gamma_of(self.weight.view(-1))

    def extra_repr(self) -> str:
        """All parameters except the weight."""
        size = self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{size}, eps={self.eps}{offset}, rounding={self.rounding!r}"


class QKNorm(nn.Module):
    """`qk_rms_norm` as a module: the norms of queries and keys, then RoPE if given, in one launch.

    ``q_dim`` and ``k_dim`` are the lengths of the weights: whole projections (OLMo-2, MiniMax-M2),
    or with ``per_head`` one head (Qwen3, Gemma 3), where ``k_dim`` may be omitted. ``forward`` takes
    q [..., Nq] and k [..., Nk], or with ``per_head`` also [..., heads, head_dim], strided as in a
    packed projection.

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
            _sizes(type(self), name, dim, many=False)
        _check_options(type(self), eps=eps, weight_offset=weight_offset, rounding=rounding)
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
        """The norms of two modules with equal epsilons, sharing their weights."""
        require_bool(cls.__name__, "per_head", per_head)
        if eps_of(q_norm) != eps_of(k_norm):
            raise ContractError(f"QKNorm: `k_norm` must have q_norm's epsilon, {eps_of(q_norm)}, got {eps_of(k_norm)}")
        made = cls(1, per_head=True, device="meta")
        made.per_head = per_head
        made.q_norm, made.k_norm = (
            RMSNorm.from_module(norm, weight_offset=weight_offset, rounding=rounding) for norm in (q_norm, k_norm)
        )
        return made

    def forward(self, q: Tensor, k: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        """The normed (and rotated) q and k, as new tensors."""
        norm = self.q_norm
        gammas = norm._gamma(q), self.k_norm._gamma(k)
        return qk_rms_norm(q, k, *gammas, norm._eps(), rope=rope, per_head=self.per_head, **norm._options())


class RMSNormFP8(RMSNorm):
    """`rms_norm_fused_fp8` as a module: norm and quantization in one pass, for `LinearFP8` layers.

    ``forward(x)`` returns (codes, scale), codes in float8_e4m3fn and scale float32 [..., 1].
    ``forward(x, residual)`` returns (codes, scale, new_residual). Layers with the same input (q, k
    and v; gate and up) can share the result.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """(codes, scale), or (codes, scale, new_residual)."""
        if len(self.normalized_shape) != 1:
            raise ContractError(
                f"RMSNormFP8: `normalized_shape` must be the last dimension, got {list(self.normalized_shape)}"
            )
        return rms_norm_fused_fp8(x, self._gamma(x), self._eps(), residual=residual, **self._options())


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` [N, K] as float8_e4m3fn, and float32 scales [N, 1]: ``max |row| / 448``."""
    rows = weight.detach().float()
    limit = FP8_FORMATS[_FP8].max
    scale = rows.abs().amax(-1, keepdim=True) / limit
    # the scale of a row of zeros is 0
    return (rows / torch.where(scale > 0, scale, 1.0)).clamp(-limit, limit).to(_FP8), scale


class LinearFP8(nn.Module):
    """A linear layer with fp8 weights and fp8 inputs, both with one scale per row.

    ``forward((codes, scale))`` takes what `RMSNormFP8` returns::

        out = (codes @ weight.T) * scale * weight_scale + bias          in ``dtype``

    On GPUs with compute capability 8.9 or higher, for sizes that are multiples of 16 and a bfloat16
    result, that is one `torch._scaled_mm`. Otherwise codes are decoded on the fly and multiplied in
    float32, which takes memory and time but rounds once, at the end. `kernel` returns which of them
    a call would use.

    `LinearFP8.from_linear` quantizes a layer; so does loading a state dict whose ``weight`` is not
    an fp8 tensor.
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        _sizes(type(self), "in_features", in_features, many=False)
        _sizes(type(self), "out_features", out_features, many=False)
        require_bool(type(self).__name__, "bias", bias)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ContractError(f"{type(self).__name__}: `dtype` must be a floating dtype, got {describe(dtype)}")
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        codes = torch.zeros(out_features, in_features, device=device).to(_FP8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(torch.zeros(out_features, 1, device=device), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: torch.dtype | None = None) -> Self:
        """The same layer with its weights rounded to fp8; results have ``dtype``, by default the layer's."""
        weight, bias = linear.weight, linear.bias is not None
        made = cls(linear.in_features, linear.out_features, bias, weight.device, dtype or weight.dtype)
        made.load_state_dict(linear.state_dict())
        return made.train(linear.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and weight.dtype is not _FP8 and f"{prefix}weight_scale" not in state_dict:
            codes, scale = quantize_rows(weight)
            state_dict = {**state_dict, f"{prefix}weight": codes, f"{prefix}weight_scale": scale}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def kernel(self, codes: Tensor) -> str:
        """``"_scaled_mm"`` or ``"decoded"``: how a call with these codes is computed."""
        sizes = self.in_features % 16 == 0 and self.out_features % 16 == 0
        if not (codes.is_cuda and sizes and self.dtype is torch.bfloat16 and torch.version.cuda):
            return "decoded"
        return "_scaled_mm" if torch.cuda.get_device_capability(codes.device) >= (8, 9) else "decoded"

    def forward(self, quantized: tuple[Tensor, Tensor]) -> Tensor:
        """``(codes @ weight.T) * scale * weight_scale + bias``."""
        codes, scale, *_ = quantized
        if codes.dtype is not _FP8 or scale.shape != (*codes.shape[:-1], 1):
            raise ContractError(
                f"LinearFP8: `quantized` must be float8_e4m3fn codes with one scale per row, as RMSNormFP8 returns them, "
                f"got {codes.dtype} {list(codes.shape)} and {list(scale.shape)}"
            )
        rows, scales = codes.reshape(-1, self.in_features), scale.reshape(-1, 1)
        if self.kernel(codes) == "_scaled_mm":
            bias = None if self.bias is None else self.bias.to(self.dtype)
            weight, weight_scale = self.weight.t(), self.weight_scale.t()
            y = torch._scaled_mm(rows, weight, scales, weight_scale, bias=bias, out_dtype=self.dtype)
        else:
            y = (rows.float() @ self.weight.float().t()) * scales * self.weight_scale.t()
            y = (y if self.bias is None else y + self.bias.float()).to(self.dtype)
        return y.view(*codes.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Like torch.nn.Linear's, plus the dtype of results."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, dtype={self.dtype}"
