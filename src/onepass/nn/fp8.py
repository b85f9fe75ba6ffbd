"""`RMSNormFP8` and `LinearFP8`: fp8 weights times fp8 activations."""

from __future__ import annotations

from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from ..core.contract import describe, require_bool
from ..errors import ContractError
from ..ops.rms_norm.op import rms_norm_fused_fp8
from ..weights import quantize_weight
from .codes import CodesModule
from .norm import RMSNorm, gamma_of, own, sizes_of

_FP8: Final = torch.float8_e4m3fn


class RMSNormFP8(RMSNorm):
    """`rms_norm_fused_fp8` as a module: norm and quantization in one pass, for `LinearFP8` layers.

    With y as in `RMSNorm`, whose parameters it has, ``codes = saturate(y / scale)`` and ``scale = max |y| / 448`` per row.
    Layers with the same input (q, k and v; gate and up) can share the result.

    >>> import torch
    >>> from onepass.nn import LinearFP8, RMSNormFP8
    >>> norm, linear = RMSNormFP8(2, eps=0.0), LinearFP8.from_linear(torch.nn.Linear(2, 1, bias=False))
    >>> with torch.inference_mode():
    ...     codes, scale = norm(torch.tensor([[3.0, -4.0]]))
    ...     linear((codes, scale)).shape
    torch.Size([1, 1])
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Norm and quantize x, or its sum with the residual.

        Args:
            x: [..., N].
            residual: [..., N], in x's dtype or float32.

        Returns:
            ``(codes, scale)``: float8_e4m3fn [..., N] and float32 [..., 1]. With a residual ``(codes, scale, new_residual)``.
        """
        if len(self.normalized_shape) != 1:
            raise ContractError(
                f"RMSNormFP8: `normalized_shape` must be the last dimension, got {list(self.normalized_shape)}"
            )
        return rms_norm_fused_fp8(x, self._weight(x), self._eps(), residual=residual, **self._op_options())


class LinearFP8(CodesModule):
    """A linear layer with fp8 weights and fp8 inputs, both with one scale per row::

        out = (codes @ weight.T) * scale * weight_scale + bias

    On GPUs with compute capability 8.9 or higher, for sizes that are multiples of 16 and a bfloat16 result, that is one
    `torch._scaled_mm`. Otherwise codes are decoded on the fly and multiplied in float32, which takes memory and time but
    rounds once, at the end.

    `LinearFP8.from_linear` quantizes a layer; so does loading a state dict whose ``weight`` is not an fp8 tensor.

    Args:
        in_features: Columns of the input.
        out_features: Columns of the result.
        bias: Whether there is a bias.
        device: Device of the parameters.
        dtype: Dtype of the bias and of the result.

    >>> import torch
    >>> from onepass.nn import LinearFP8
    >>> LinearFP8.from_linear(torch.nn.Linear(64, 32), torch.bfloat16)
    LinearFP8(in_features=64, out_features=32, bias=True, dtype=torch.bfloat16)
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
        sizes_of(type(self), "in_features", in_features, many=False)
        sizes_of(type(self), "out_features", out_features, many=False)
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
        """The same layer with its weights rounded to fp8.

        Args:
            linear: The layer to quantize.
            dtype: Dtype of results; None: the layer's.

        Returns:
            The new module, in the mode (training or not) of the layer.
        """
        weight, bias = linear.weight, linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, bias, weight.device, dtype or weight.dtype)
        layer.load_state_dict(linear.state_dict())
        return layer.train(linear.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and weight.dtype is not _FP8 and f"{prefix}weight_scale" not in state_dict:
            codes, scale = quantize_weight(gamma_of(weight), "fp8_row")
            state_dict = {**state_dict, f"{prefix}weight": codes, f"{prefix}weight_scale": scale[:, None]}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def kernel(self, codes: Tensor) -> str:
        """How a call with these codes is computed.

        Args:
            codes: The codes of a call; only their device counts.

        Returns:
            ``"_scaled_mm"`` or ``"decoded"``.
        """
        sizes = self.in_features % 16 == 0 and self.out_features % 16 == 0
        if not (codes.is_cuda and sizes and self.dtype is torch.bfloat16 and torch.version.cuda):
            return "decoded"
        return "_scaled_mm" if torch.cuda.get_device_capability(codes.device) >= (8, 9) else "decoded"

    def forward(self, quantized: tuple[Tensor, Tensor]) -> Tensor:
        """``(codes @ weight.T) * scale * weight_scale + bias``.

        Args:
            quantized: ``(codes, scale)``, as `RMSNormFP8` returns them.

        Returns:
            [..., out_features] in ``dtype``.
        """
        codes, scale = quantized[0], quantized[1]
        if isinstance(codes, Tensor) and (codes.dtype is not _FP8 or scale.shape != (*codes.shape[:-1], 1)):
            raise ContractError(
                f"LinearFP8: `quantized` must be float8_e4m3fn codes with one scale per row, as RMSNormFP8 returns them, "
                f"got {codes.dtype} {list(codes.shape)} and {list(scale.shape)}"
            )
        rows, scales = codes.reshape(-1, self.in_features), scale.reshape(-1, 1)
        if self.kernel(own(self, "weight", codes)) == "_scaled_mm":
            bias = None if self.bias is None else self.bias.to(self.dtype)
            weight, weight_scale = self.weight.t(), self.weight_scale.t()
            y = torch._scaled_mm(rows, weight, scales, weight_scale, bias=bias, out_dtype=self.dtype)
        else:
            y = (rows.float() @ self.weight.float().t()) * scales * self.weight_scale.t()
            y = (y if self.bias is None else y + self.bias.float()).to(self.dtype)
        return y.view(codes.shape[:-1] + (self.out_features,))  # noqa: RUF005 (torch.fx cannot unpack a shape)

    def extra_repr(self) -> str:
        """Like torch.nn.Linear's, plus the dtype of results."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, dtype={self.dtype}"
