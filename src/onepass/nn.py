"""Modules whose state dicts are those of the modules they replace.

| here | replaces | state dict |
|---|---|---|
| `RMSNorm` | `torch.nn.RMSNorm`; the RMSNorms of Hugging Face's Llama, Qwen, Gemma, ... | ``weight`` |
| `QKNorm` | an attention's ``q_norm`` and ``k_norm`` | ``q_norm.weight``, ``k_norm.weight`` |
| `RMSNormFP8` | an RMSNorm whose result goes to fp8 linear layers | ``weight`` |
| `LinearFP8` | `torch.nn.Linear` behind it | ``weight``, ``weight_scale``, ``bias``; loads a Linear's too |

With ``h = x + residual`` (where given) and ``rs = 1 / sqrt(mean(h^2) + eps)``::

    RMSNorm       y            = (h * rs) * (weight + weight_offset)
    RMSNormFP8    codes, scale = y / scale as fp8, max |y| / 448 of each row
    LinearFP8     out          = (codes @ weight.T) * scale * weight_scale + bias

There is no backward: call these under ``torch.inference_mode()`` or ``torch.no_grad()``. A weight that has neither x's
dtype nor float32 (float32 activations in a bfloat16 model) is converted to float32, which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from tools.contract_oracle import option_is_legal

from .contract.declaration import describe, require_bool
from .errors import ContractError
from .formats import FLOATS, FP8_FORMATS, Rounding
from .ops.qk_norm import qk_rms_norm
from .ops.registration import write_eager_entries
from .ops.rms_norm import RMS_NORM, rms_norm, rms_norm_fused_fp8
from .rope import Rope

__all__ = ["LinearFP8", "QKNorm", "RMSNorm", "RMSNormFP8", "quantize_rows"]

write_eager_entries()  # modules are what gets compiled
_EPS_NAMES: Final = ("eps", "variance_epsilon")
_FP8: Final = torch.float8_e4m3fn


def gamma_of(weight: Tensor) -> Tensor:
    """The weight in a dtype that the ops take: its own where that is a float of 16 or 32 bits, else float32."""
    return weight if weight.dtype in FLOATS else weight.float()


def eps_of(module: nn.Module, name: str = "") -> float | None:
    """A norm's epsilon, under the given name or one of the usual ones; None is torch's default."""
    for candidate in (name,) if name else _EPS_NAMES:
        if hasattr(module, candidate):
            eps: float | None = getattr(module, candidate)
            return eps
    raise ContractError(f"{type(module).__name__}: has no epsilon called {name or ' or '.join(_EPS_NAMES)}")


def _sizes(owner: type, name: str, value: object, many: bool = True) -> tuple[int, ...]:
    """One size, or a list of them where there may be ``many``."""
    sizes = tuple(value) if many and isinstance(value, (list, tuple)) else (value,)
    if not sizes or not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 2**31 for n in sizes):
        raise ContractError(
            f"{owner.__name__}: `{name}` must be a positive int{' or a list of them' * many}, got {describe(value)}"
        )
    return sizes


def _check_options(owner: type, **values: object) -> None:
    """What the op would refuse at every call is refused when the module is made."""
    for name, value in values.items():
        option = RMS_NORM.options[name]
        if not option_is_legal(option, name, value):
            allowed = " or ".join(map(repr, option.choices)) or f"a number, {option.where}"
            raise ContractError(f"{owner.__name__}: `{name}` must be {allowed}, got {describe(value)}")


class RMSNorm(nn.Module):
    """`rms_norm` as a module: ``y = (h * rs) * (weight + weight_offset)``, ``h = x + residual``.

    The first five parameters are `torch.nn.RMSNorm`'s; ``eps=None`` is its default too, float32's epsilon for every
    dtype here. ``weight_offset=1.0`` is Gemma's norm. ``rounding="once"`` is where torch.nn.RMSNorm, Gemma and OLMo-2
    round, "hf" where Llama, Mistral, Qwen, Phi-3, DeepSeek and GLM-4 do. Without ``elementwise_affine`` the weight is 1.

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
        _check_options(
            type(self), weight_offset=weight_offset, rounding=rounding, **({} if eps is None else {"eps": eps})
        )
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
        """The same norm as another module's, with its very weight (not a copy)."""
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, Tensor):
            raise ContractError(f"{cls.__name__}: `norm` must have a weight, got {describe(norm)}")
        made = cls(
            weight.shape,
            eps_of(norm),
            device="meta",
            dtype=weight.dtype,
            weight_offset=weight_offset,
            rounding=rounding,
        )
        made.weight = weight
        return made.train(norm.training)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Y, or (y, new_residual)."""
        lead = x.shape[: x.dim() - len(self.normalized_shape)]
        flat = x.view(*lead, -1)
        gamma = self._gamma(flat)
        if residual is None:
            return rms_norm(
                flat, gamma, self._eps(), weight_offset=self.weight_offset, rounding=self.rounding
            ).view(x.shape)  # fmt: skip
        y, h = rms_norm(
            flat,
            gamma,
            self._eps(),
            weight_offset=self.weight_offset,
            residual=residual.view(*lead, -1),
            rounding=self.rounding,
        )
        return y.view(x.shape), h.view(x.shape)

    def _eps(self) -> float:
        return torch.finfo(torch.float32).eps if self.eps is None else self.eps

    def _gamma(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return torch.full((x.shape[-1],), 1.0 - self.weight_offset, dtype=x.dtype, device=x.device)
        return gamma_of(self.weight.view(-1))

    def extra_repr(self) -> str:
        """Everything but the weight's values."""
        size = self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{size}, eps={self.eps}{offset}, rounding={self.rounding!r}"


class QKNorm(nn.Module):
    """`qk_rms_norm` as a module: the norms of queries and keys in one launch, RoPE behind them if given.

    ``q_dim`` and ``k_dim`` are the weights' lengths: whole projections (OLMo-2, MiniMax-M2), or with ``per_head`` one head
    (Qwen3, Gemma 3), where ``k_dim`` may be left out. ``forward(q, k, rope=None)`` takes q [..., Nq] and k [..., Nk], or
    with ``per_head`` also [..., heads, head_dim], strided as they come out of a packed projection.

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
            raise ContractError("QKNorm: `k_dim` must be given unless per_head")
        _sizes(type(self), "q_dim", q_dim, many=False)
        _sizes(type(self), "k_dim", q_dim if k_dim is None else k_dim, many=False)
        _check_options(type(self), eps=eps, weight_offset=weight_offset, rounding=rounding)
        self.per_head = per_head
        dims = (q_dim, q_dim if k_dim is None else k_dim)
        self.q_norm, self.k_norm = (
            RMSNorm(n, eps, device=device, dtype=dtype, weight_offset=weight_offset, rounding=rounding) for n in dims
        )

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
        """The same norms as two other modules', with their very weights; both must have one epsilon."""
        require_bool(cls.__name__, "per_head", per_head)
        if eps_of(q_norm) != eps_of(k_norm):
            raise ContractError(
                f"QKNorm: `k_norm` must have q_norm's epsilon, {eps_of(q_norm)}, got {eps_of(k_norm)}"
            )  # fmt: skip
        made = cls(1, per_head=True, device="meta")
        made.per_head = per_head
        made.q_norm, made.k_norm = (
            RMSNorm.from_module(norm, weight_offset=weight_offset, rounding=rounding) for norm in (q_norm, k_norm)
        )
        return made

    def forward(self, q: Tensor, k: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        """q and k, normed (and rotated), as new tensors."""
        norm = self.q_norm
        return qk_rms_norm(
            q,
            k,
            norm._gamma(q),
            self.k_norm._gamma(k),
            norm._eps(),
            weight_offset=norm.weight_offset,
            rounding=norm.rounding,
            rope=rope,
            per_head=self.per_head,
        )


class RMSNormFP8(RMSNorm):
    """`rms_norm_fused_fp8` as a module: norm and quantization in one read, for `LinearFP8` layers to take.

    ``forward(x)`` returns (codes, scale), codes in float8_e4m3fn and scale float32 [..., 1]; ``forward(x, residual)`` returns
    (codes, scale, new_residual). Several layers that read one norm (q, k and v; gate and up) share the result.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """(codes, scale), or (codes, scale, new_residual)."""
        if len(self.normalized_shape) != 1:
            raise ContractError(
                f"RMSNormFP8: `normalized_shape` must be the last dimension, got {list(self.normalized_shape)}"
            )
        return rms_norm_fused_fp8(
            x,
            self._gamma(x),
            self._eps(),
            weight_offset=self.weight_offset,
            residual=residual,
            rounding=self.rounding,
        )


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` [N, K] as float8_e4m3fn and a float32 scale [N, 1] a row: ``scale = max |row| / 448``; 0 for a row of zeros."""
    rows = weight.detach().float()
    scale = rows.abs().amax(-1, keepdim=True) / FP8_FORMATS[_FP8].max
    limit = FP8_FORMATS[_FP8].max
    return (rows / torch.where(scale > 0, scale, 1.0)).clamp(-limit, limit).to(_FP8), scale


class LinearFP8(nn.Module):
    """A linear layer with fp8 weights and fp8 inputs, each row of both with a scale of its own.

    ``forward((codes, scale))`` takes what `RMSNormFP8` returns and gives::

        out = (codes @ weight.T) * scale * weight_scale + bias          in ``dtype``

    Where the GPU has it (compute capability 8.9 and up, sizes that are multiples of 16, a bfloat16 result) that is one
    `torch._scaled_mm`; elsewhere the same formula in float32 from codes decoded on the fly, which takes memory and time
    but rounds once, at the end. `kernel` says which one a call would take.

    `LinearFP8.from_linear` quantizes a layer; so does loading a state dict in which ``weight`` is no fp8 tensor.
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
        self.weight = nn.Parameter(
            torch.zeros(out_features, in_features, device=device).to(_FP8), requires_grad=False
        )  # fmt: skip
        self.weight_scale = nn.Parameter(torch.zeros(out_features, 1, device=device), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: torch.dtype | None = None) -> Self:
        """The same layer, its weights rounded to fp8; ``dtype`` of results, or the layer's."""
        weight = linear.weight
        made = cls(
            linear.in_features, linear.out_features, linear.bias is not None, weight.device, dtype or weight.dtype
        )
        made.load_state_dict(linear.state_dict())
        return made.train(linear.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and weight.dtype is not _FP8 and f"{prefix}weight_scale" not in state_dict:
            codes, scale = quantize_rows(weight)
            state_dict = {**state_dict, f"{prefix}weight": codes, f"{prefix}weight_scale": scale}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def kernel(self, codes: Tensor) -> str:
        """``"_scaled_mm"`` or ``"decoded"``: how a call with such codes is computed."""
        sizes = self.in_features % 16 == 0 and self.out_features % 16 == 0
        if not (codes.is_cuda and sizes and self.dtype is torch.bfloat16 and torch.version.cuda):
            return "decoded"
        return "_scaled_mm" if torch.cuda.get_device_capability(codes.device) >= (8, 9) else "decoded"

    def forward(self, quantized: tuple[Tensor, Tensor]) -> Tensor:
        """``(codes @ weight.T) * scale * weight_scale + bias``."""
        codes, scale, *_ = quantized
        if codes.dtype is not _FP8 or scale.shape != (*codes.shape[:-1], 1):
            raise ContractError(
                f"LinearFP8: `quantized` must be float8_e4m3fn codes with a scale a row, as RMSNormFP8 returns them, "
                f"got {codes.dtype} {list(codes.shape)} and {list(scale.shape)}"
            )
        rows, scales = codes.reshape(-1, self.in_features), scale.reshape(-1, 1)
        if self.kernel(codes) == "_scaled_mm":
            bias = None if self.bias is None else self.bias.to(self.dtype)
            y = torch._scaled_mm(
                rows, self.weight.t(), scales, self.weight_scale.t(), bias=bias, out_dtype=self.dtype
            )  # fmt: skip
        else:
            y = (rows.float() @ self.weight.float().t()) * scales * self.weight_scale.t()
            y = (y if self.bias is None else y + self.bias.float()).to(self.dtype)
        return y.view(*codes.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As torch.nn.Linear has it, and the dtype of results."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, dtype={self.dtype}"
