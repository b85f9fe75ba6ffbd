"""`Linear` and `MergedLinear`: `onepass.linear` as modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import dlpack

from ..core.contract import describe, require_bool
from ..errors import ContractError
from ..formats import FLOATS, SCALE_BLOCK, Rounding
from ..ops.linear.launch import ACTIVATIONS, Activation
from ..ops.linear.op import linear
from ..weights import BLOCK_SCHEMES, Scheme, check_scheme, codes_dtype, scale_dtype, scale_shape
from .codes import INTEGERS, CodesModule, Taken, loadable, taken_from
from .norm import RMSNorm, check_options, own, sizes_of


class _Layer(CodesModule):
    """A weight [N, K], its scale and bias: parameters, state dicts and the call of the op."""

    weight: Tensor
    weight_scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        rows: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        scheme: Scheme | None,
        rounding: Rounding,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        (k,) = sizes_of(type(self), "in_features", in_features, many=False)
        require_bool(owner, "bias", bias)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
            raise ContractError(f"{owner}: `dtype` must be bfloat16, float16 or float32, got {describe(dtype)}")
        check_options(type(self), rounding=rounding)
        if scheme is not None:
            check_scheme(owner, scheme)
        self.in_features = k
        self.scheme: Scheme | None = scheme
        self.rounding: Rounding = rounding
        if scheme is None:
            self.weight = nn.Parameter(torch.empty(rows, k, device=device, dtype=dtype))
            self.register_parameter("weight_scale", None)
        else:  # what quantize_weight returns for zeros
            codes = torch.zeros(rows, k, dtype=torch.uint8, device=device).view(codes_dtype(scheme))
            dtype_of_scale = scale_dtype(scheme)
            integer = INTEGERS[dtype_of_scale.itemsize]
            scale = torch.zeros(scale_shape(scheme, rows, k), dtype=integer, device=device).view(dtype_of_scale)
            self.weight = nn.Parameter(codes, requires_grad=False)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        if bias:
            zeros = torch.zeros(rows, device=device, dtype=dtype)
            self.bias = nn.Parameter(zeros, requires_grad=scheme is None)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw float weights as `torch.nn.Linear` does. Codes stay as they are."""
        if self.scheme is not None:
            return
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
        entries = loadable(type(self).__name__, state_dict, prefix, self.weight_scale, self.scheme)
        super()._load_from_state_dict(entries, prefix, *rest)

    def _hold(self, weight: Tensor | None, scale: Tensor | None, bias: Tensor | None) -> None:
        """Replace the parameters by these tensors, without copies. Codes have no gradients."""
        keep = self.scheme is None
        for name, tensor in (("weight", weight), ("weight_scale", scale), ("bias", bias)):
            if isinstance(tensor, nn.Parameter) and keep:
                setattr(self, name, tensor)
            elif tensor is not None:
                setattr(self, name, nn.Parameter(tensor.detach(), requires_grad=keep and tensor.requires_grad))

    def _call(self, x: Tensor, norm: RMSNorm | None, activation: Activation | None, **options: Any) -> Any:
        weight, bias, scale = (own(self, name, x) for name in ("weight", "bias", "weight_scale"))
        fixed: dict[str, Any] = {"bias": bias, "weight_scale": scale, "rounding": self.rounding}
        if norm is not None:
            self._check_norm(norm, activation is not None or options["add"] is not None)
            fixed |= {"gamma": norm._gamma(x), "eps": norm._eps(), **norm._options()}
        static = type(weight) is nn.Parameter  # a parametrization computes it right before
        return linear(x, weight, activation=activation, static_weight=static, **fixed, **options)

    def _check_norm(self, norm: RMSNorm, rounds_after: bool) -> None:
        owner = type(self).__name__
        if not isinstance(norm, RMSNorm) or type(norm).forward is not RMSNorm.forward:
            raise ContractError(
                f"{owner}: `norm` must be an onepass.nn.RMSNorm (RMSNorm.from_module makes one of another module), "
                f"got {type(norm).__name__}"
            )
        if norm.normalized_shape != (self.in_features,):
            raise ContractError(
                f"{owner}: `norm` must normalize the {self.in_features} columns of x, got {list(norm.normalized_shape)}"
            )
        if rounds_after and norm.rounding != self.rounding:
            raise ContractError(
                f"{owner}: `norm` must have the rounding of the layer, {self.rounding!r}, which has an activation or "
                f"adds, got {norm.rounding!r}"
            )

    def _repr(self, out_features: object) -> str:
        scheme = f", scheme={self.scheme!r}" if self.scheme else ""
        rounding = f", rounding={self.rounding!r}" if self.rounding != "once" else ""
        sizes = f"in_features={self.in_features}, out_features={out_features}"
        return f"{sizes}, bias={self.bias is not None}{scheme}{rounding}"


class Linear(_Layer):
    """`torch.nn.Linear` as one call of `linear`, with the norm before it and the addition after it::

        out = (norm(x + residual) @ weight.T) * weight_scale + bias + add

    Without a ``scheme`` it has the parameters and the state dict of torch.nn.Linear, and x must have the weight's dtype.

    With one, ``weight`` holds codes and ``weight_scale`` their scales, as `quantize_weight` returns them, both without
    gradients; new codes are 0. x is then bfloat16, float16 or float32 and is not quantized. Converting the module to
    another dtype leaves codes and scales alone. Such a layer loads its own state dict, quantizes a float ``weight`` without
    scales, and loads codes with scales called ``weight_scale``, ``weight_scale_inv`` (DeepSeek-V3, Hugging Face) or
    ``scale`` (DeepSeek's own layout): per row also [N, 1], of any float dtype. Scales per block may be float32 or
    float8_e8m0fnu in either of the two schemes. "fp8_block_ue8m0" rejects float32 scales that are not powers of two, which
    some layers of DeepSeek-V3.1 have.

    Args:
        in_features: Columns of x.
        out_features: Columns of the result.
        bias: Whether there is a bias.
        device: Device of the parameters.
        dtype: Dtype of the weight, or with a scheme of the bias.
        scheme: Scheme of `quantize_weight`; None: float weights.
        rounding: "hf" rounds before the addition of ``add``. Without ``add`` it changes nothing.

    >>> import torch
    >>> from onepass.nn import Linear
    >>> theirs = torch.nn.Linear(64, 32)
    >>> ours = Linear(64, 32, scheme="fp8_row")
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> ours.weight.dtype, ours.weight_scale.shape
    (torch.float8_e4m3fn, torch.Size([32]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scheme: Scheme | None = None,
        rounding: Rounding = "once",
    ) -> None:
        (rows,) = sizes_of(type(self), "out_features", out_features, many=False)
        super().__init__(in_features, rows, bias, device, dtype, scheme, rounding)
        self.out_features = rows

    @classmethod
    def from_linear(cls, linear: nn.Module, scheme: Scheme | None = None, *, rounding: Rounding = "once") -> Self:
        """The layer of a `torch.nn.Linear`, sharing its weight and bias.

        A layer that is quantized already (transformers' FP8Linear, `LinearFP8`, this class) keeps its scheme, and its codes and
        scales are shared.

        Args:
            linear: The layer.
            scheme: Scheme in which to quantize the weight, which is then not shared. None: the layer's own.
            rounding: As in `Linear`.

        Returns:
            The new module, in the mode (training or not) of the layer.
        """
        if scheme is not None:
            check_scheme(cls.__name__, scheme)
        layer = taken_from(cls.__name__, "linear", linear).quantized(cls.__name__, scheme)
        n, k = layer.weight.shape
        dtype = layer.float_dtype
        module = cls(k, n, layer.bias is not None, "meta", dtype, scheme=layer.scheme, rounding=rounding)
        module._hold(layer.weight, layer.scale, layer.bias)
        return module.train(linear.training)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        add: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        residual_out: Tensor | None = None,
    ) -> Any:
        """One call of `linear`.

        Args:
            x: [..., in_features].
            residual: [..., in_features], added to x.
            norm: An `RMSNorm` that this layer computes itself, without calling it or its hooks. With ``add`` it must have the
                layer's rounding.
            add: [..., out_features], added to the result.
            out_dtype: Dtype of the result: x's, which None means, or float32.
            out: Receives the result.
            residual_out: Receives ``x + residual``.

        Returns:
            out, or with a residual ``(out, x + residual)``.
        """
        tensors = {"residual": residual, "add": add, "out": out, "residual_out": residual_out}
        return self._call(x, norm, None, out_dtype=out_dtype, **tensors)

    def extra_repr(self) -> str:
        """Like torch.nn.Linear's, plus what it does not have."""
        return self._repr(self.out_features)


class MergedLinear(_Layer):
    """Several linear layers with the same input as one call: q, k and v, or gate and up.

    With ``y = (norm(x + residual) @ weight.T) * weight_scale + bias``, where ``weight`` has the rows of all layers in order::

        out = split(y + add)                      without an activation
        out = act(gate) * up + add                with one, for gate, up = split(y)

    Parameters and state dicts are those of `Linear` with ``sum(out_features)`` rows.

    Args:
        in_features: Columns of x.
        out_features: Columns of each layer. With a scale per block every size but the last must be a multiple of 128,
            because a block may not span two layers.
        bias: Whether there is a bias.
        device: Device of the parameters.
        dtype: Dtype of the weight, or with a scheme of the bias.
        scheme: Scheme of `quantize_weight`; None: float weights.
        activation: "silu_mul", "gelu_tanh_mul" or "gelu_mul", for two layers of the same size, the gate first.
        rounding: As in `linear`.

    >>> import torch
    >>> from onepass.nn import MergedLinear
    >>> q, k = torch.nn.Linear(64, 32), torch.nn.Linear(64, 16)
    >>> qk = MergedLinear.from_linears([q, k])
    >>> with torch.inference_mode():
    ...     [list(y.shape) for y in qk(torch.ones(2, 64))]
    [[2, 32], [2, 16]]
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scheme: Scheme | None = None,
        activation: Activation | None = None,
        rounding: Rounding = "once",
    ) -> None:
        owner = type(self).__name__
        sizes = sizes_of(type(self), "out_features", out_features)
        if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
            choices = " or ".join(map(repr, ACTIVATIONS))
            raise ContractError(f"{owner}: `activation` must be {choices}, got {describe(activation)}")
        if activation is not None and (len(sizes) != 2 or sizes[0] != sizes[1]):
            raise ContractError(
                f"{owner}: `out_features` must be two equal sizes with an activation, got {describe(out_features)}"
            )
        if isinstance(scheme, str) and scheme in BLOCK_SCHEMES and any(n % SCALE_BLOCK for n in sizes[:-1]):
            raise ContractError(
                f"{owner}: `out_features` must be multiples of {SCALE_BLOCK}, except the last, with scheme={scheme!r}: "
                f"otherwise a block would span two layers, got {list(sizes)}"
            )
        super().__init__(in_features, sum(sizes), bias, device, dtype, scheme, rounding)
        self.out_features = sizes
        self.activation: Activation | None = activation

    @classmethod
    def from_linears(
        cls,
        linears: Sequence[nn.Module],
        scheme: Scheme | None = None,
        *,
        share: bool = True,
        activation: Activation | None = None,
        rounding: Rounding = "once",
    ) -> Self:
        """Merge layers that `Linear.from_linear` takes. The weights are copied once.

        Layers that are quantized already must have the same scheme, and keep their codes and scales. Those with one scale each
        ("fp8_tensor", also if passed here) become one layer with the scheme "fp8_row", and their scales are not shared.

        Args:
            linears: Layers with the same input.
            scheme: Scheme in which to quantize each layer first. None: their own.
            share: Whether to move the parameters of the layers into the memory of the merged ones. The layers then work as
            before without memory of their own, and weights loaded into them are loaded here too. Parameters stay the same
            objects. Each has its own storage over its rows, so it is saved and copied like any other. Nothing is
                shared with float layers that a scheme quantizes.
            activation: As in `MergedLinear`.
            rounding: As in `linear`.

        Returns:
            The merged layer, in the mode (training or not) of the first.

        Moving or converting either side ends the sharing: the moved side is a copy. So move and convert the model first, then
        merge, or merge again. A ``copy.deepcopy`` of both copies both. If the merged layer becomes a submodule, the model's
        state dict gains its keys.
        """
        owner = cls.__name__
        require_bool(owner, "share", share)
        if scheme is not None:
            check_scheme(owner, scheme)
        if not isinstance(linears, (list, tuple)) or not linears or len(set(map(id, linears))) < len(linears):
            raise ContractError(f"{owner}: `linears` must be a list of different layers, got {describe(linears)}")
        taken = [taken_from(owner, "linears", layer) for layer in linears]
        layers = [layer.quantized(owner, scheme) for layer in taken]
        _check_alike(owner, layers)
        merged, sizes = _merge_schemes(layers[0].scheme), [len(layer.weight) for layer in layers]
        first = layers[0]
        options: dict[str, Any] = {"scheme": merged, "activation": activation, "rounding": rounding}
        bias = first.bias is not None
        module = cls(first.weight.shape[1], sizes, bias, "meta", first.float_dtype, **options)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        scales = [layer.scale for layer in layers if layer.scale is not None]
        if merged != first.scheme:
            scales = [scale.expand(n) for scale, n in zip(scales, sizes, strict=True)]
        module._hold(*map(_cat, ([layer.weight for layer in layers], scales, biases)))
        if share:
            _share(taken, module, first.scheme)
        return module.train(linears[0].training)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        add: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        residual_out: Tensor | None = None,
    ) -> Any:
        """One call of `linear` for all layers.

        Args:
            x: [..., in_features].
            residual: [..., in_features], added to x.
            norm: An `RMSNorm` that this layer computes itself, without calling it or its hooks. With ``add`` or an activation
                it must have the layer's rounding.
            add: Added to the result. Without an activation it has the columns of all layers.
            out_dtype: Dtype of the result: x's, which None means, or float32.
            out: Receives the result. Without an activation it has the columns of all layers.
            residual_out: Receives ``x + residual``.

        Returns:
            A tuple of views, one per layer, or with an activation the gated product. With a residual a pair of that and
                ``x + residual``.
        """
        tensors = {"residual": residual, "add": add, "out": out, "residual_out": residual_out}
        y = self._call(x, norm, self.activation, out_dtype=out_dtype, **tensors)
        if self.activation is not None:
            return y
        if residual is None:
            return y.split(self.out_features, -1)
        return y[0].split(self.out_features, -1), y[1]

    def extra_repr(self) -> str:
        """Like torch.nn.Linear's, plus what it does not have."""
        activation = f", activation={self.activation!r}" if self.activation else ""
        return f"{self._repr(list(self.out_features))}{activation}"


def _cat(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts in one tensor, which belongs to inference mode if they do."""
    if not parts:
        return None
    with torch.inference_mode(parts[0].is_inference()), torch.no_grad():
        return torch.cat(list(parts)).requires_grad_(parts[0].requires_grad)


def _merge_schemes(scheme: Scheme | None) -> Scheme | None:
    """Layers with one scale each need a scale per row when merged."""
    return "fp8_row" if scheme == "fp8_tensor" else scheme


def _check_alike(owner: str, layers: Sequence[Taken]) -> None:
    first, *others = ([*layer.traits] for layer in layers)
    for other in others:
        for (what, wanted), (_, got) in zip(first, other, strict=True):
            if got != wanted:
                raise ContractError(f"{owner}: `linears` must have the same {what}, got {wanted} and {got}")


def _share(layers: Sequence[Taken], merged: MergedLinear, scheme: Scheme | None) -> None:
    """Move the parameters of the given layers into the merged ones, except for weights that a scheme quantized."""
    start = block = 0
    for layer in layers:
        stop, last = start + len(layer.weight), block - (-len(layer.weight) // SCALE_BLOCK)
        if layer.scheme == scheme:
            layer.weight.data = _rows_of(merged.weight, slice(start, stop))
            if layer.bias is not None and merged.bias is not None:
                layer.bias.data = _rows_of(merged.bias, slice(start, stop))
            if layer.owned_scale is not None and merged.weight_scale is not None and merged.scheme == scheme:
                rows = slice(block, last) if scheme in BLOCK_SCHEMES else slice(start, stop)
                layer.owned_scale.data = _rows_of(merged.weight_scale, rows).view(layer.owned_scale.shape)
        start, block = stop, last


def _rows_of(merged: Tensor, rows: slice) -> Tensor:
    """Rows in the memory of a merged tensor, as a storage of their own that keeps this memory alive.

    What saves models takes tensors with the same storage for duplicates, and drops or refuses them.
    """
    view = merged.data[rows]
    if type(view) is not Tensor or view.device.type not in ("cpu", "cuda"):  # fake and meta tensors have no memory
        return view
    with torch.inference_mode(merged.is_inference()):
        # as bytes, because not every torch exports 8-bit floats; the capsule is bound to no device or stream
        return dlpack.from_dlpack(dlpack.to_dlpack(view.view(torch.uint8))).view(view.dtype)  # type: ignore[attr-defined]
