"""8-bit weights: modules that hold codes, and how other layers and state dicts become those of `Linear`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..core.contract import describe, short
from ..errors import ContractError
from ..formats import FLOATS, SCALE_BLOCK
from ..weights import Scheme, codes_dtype, match_scheme, quantize_weight

INTEGERS: Final = {1: torch.uint8, 4: torch.int32}
"""By size in bytes: integers, which ``Module.to(dtype)`` does not convert."""


class CodesModule(nn.Module):
    """A module whose codes survive ``to(dtype)``, ``half()`` and the like.

    These convert every floating-point parameter, which includes fp8 codes and scales. Here ``weight`` and
    ``weight_scale`` keep their dtypes and only move, as long as there is a ``weight_scale``. Pickles store them as integers,
    because torch cannot read pickled tensors of 8-bit floats.
    """

    def __getstate__(self) -> dict[str, Any]:
        parameters, dtypes = dict(self._parameters), {}
        for name, parameter in self._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.element_size() == 1:
                dtypes[name] = parameter.dtype
                parameters[name] = nn.Parameter(parameter.view(torch.uint8), requires_grad=False)
        return {**self.__dict__, "_parameters": parameters, "_float8": dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dtypes = state.pop("_float8", {})
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, dtype in dtypes.items():
            codes = self._parameters[name]
            assert codes is not None
            self._parameters[name] = nn.Parameter(codes.view(dtype), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scale = self._parameters.get("weight_scale")
        kept = () if scale is None else (self._parameters["weight"], scale)

        def moved(tensor: Tensor) -> Tensor:
            if not any(tensor is parameter for parameter in kept):
                return fn(tensor)
            integers = tensor.view(INTEGERS[tensor.element_size()])
            moved_codes = fn(integers)
            if moved_codes.dtype is not integers.dtype:  # Module.type converts integers too
                moved_codes = integers.to(moved_codes.device)
            return moved_codes.view(tensor.dtype)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


# --- other layers and state dicts -------------------------------------------------------------------------------------

SCALE_NAMES: Final = ("weight_scale", "weight_scale_inv", "scale")
"""What checkpoints call the scales: here and compressed-tensors, DeepSeek-V3 and Hugging Face, DeepSeek's own layout."""
CODES: Final = (torch.float8_e4m3fn, torch.int8)


class Taken(NamedTuple):
    """The tensors of a layer. ``owned_scale`` is the layer's own, ``scale`` has the shape and dtype of the scheme."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    scheme: Scheme | None
    owned_scale: Tensor | None

    @property
    def float_dtype(self) -> torch.dtype | None:
        """The dtype of what is not quantized: the weight, else the bias."""
        return self.weight.dtype if self.scheme is None else None if self.bias is None else self.bias.dtype

    def quantized(self, owner: str, scheme: Scheme | None) -> Taken:
        """The same layer in this scheme; None keeps its own."""
        if scheme is None or scheme == self.scheme:
            return self
        if self.scheme is not None:
            raise ContractError(f"{owner}: `scheme` must be None or that of the layer, {self.scheme!r}, got {scheme!r}")
        codes, scale = quantize_weight(self.weight, scheme)
        return Taken(codes, scale, self.bias, scheme, None)

    @property
    def traits(self) -> Iterator[tuple[str, object]]:
        """What layers must share to be merged."""
        yield "number of columns", self.weight.shape[1]
        yield "scheme", self.scheme
        yield "dtype", short(self.weight.dtype)
        yield "bias", None if self.bias is None else short(self.bias.dtype)
        yield "device", str(self.weight.device)
        tensors = (self.weight, self.scale, self.bias)
        # a tensor of inference mode and another one cannot be views of the same memory
        yield "torch.inference_mode", [tensor.is_inference() for tensor in tensors if tensor is not None]


def taken_from(owner: str, argument: str, layer: object) -> Taken:
    """The tensors of a linear layer, not copied unless scales have another dtype."""
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Module) or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ContractError(f"{owner}: `{argument}` must be a linear layer, got {type(layer).__name__}")
    bias = getattr(layer, "bias", None)
    if weight.dtype not in CODES:
        if weight.dtype not in FLOATS:
            dtypes = ", ".join(map(short, (*FLOATS, *CODES)))
            raise ContractError(f"{owner}: `{argument}` must have a weight of {dtypes}, got {describe(weight)}")
        return Taken(weight, None, bias, None, None)
    scales = [s for name in SCALE_NAMES if isinstance(s := getattr(layer, name, None), Tensor)]
    block = getattr(layer, "block_size", None)
    if not scales or (block is not None and tuple(block) != (SCALE_BLOCK, SCALE_BLOCK)):
        got = f"blocks of {tuple(block)}" if scales and block is not None else "no scales"
        raise ContractError(f"{owner}: `{argument}` must have scales, per block of 128 x 128 if per block, got {got}")
    scheme, scale = match_scheme(owner, argument, weight, float32_or_ue8m0(scales[0]))
    same = scale.dtype is scales[0].dtype and scale.numel() == scales[0].numel()
    return Taken(weight, scale, bias, scheme, scales[0] if same else None)


def float32_or_ue8m0(scale: Tensor) -> Tensor:
    """A scale of another float dtype as float32, which is exact."""
    return scale.float() if scale.dtype in FLOATS else scale


def loadable(
    owner: str,
    state_dict: dict[str, Any],
    prefix: str,
    scale: Tensor | None,
    scheme: Scheme | None,
) -> dict[str, Any]:
    """A state dict whose ``weight`` and ``weight_scale`` are those of the scheme and of the parameter ``scale``."""
    key = f"{prefix}weight"
    loaded = state_dict.get(key)
    if not isinstance(loaded, Tensor):
        return state_dict
    if scheme is None or scale is None:
        if loaded.element_size() == 1:
            wanted = "a float weight unless the layer has a scheme"
            raise ContractError(f"{owner}: `{key}` must be {wanted}, got {describe(loaded)}")
        return state_dict
    entries = dict(state_dict)
    named = next((f"{prefix}{name}" for name in SCALE_NAMES if f"{prefix}{name}" in state_dict), None)
    if loaded.dtype in FLOATS and named is None:
        entries[key], entries[f"{prefix}weight_scale"] = quantize_weight(loaded, scheme)
    elif loaded.dtype is not codes_dtype(scheme):
        wanted = f"{short(codes_dtype(scheme))} with scales, or a float weight without"
        raise ContractError(f"{owner}: `{key}` must be {wanted}, for scheme={scheme!r}, got {describe(loaded)}")
    elif named is not None:
        entries[f"{prefix}weight_scale"] = _stored_scale(owner, named, entries.pop(named), scale)
    return entries


def _stored_scale(owner: str, key: str, loaded: object, parameter: Tensor) -> Tensor:
    """A scale of a checkpoint in the shape and dtype of the parameter, if that loses nothing."""
    ue8m0 = torch.float8_e8m0fnu
    if not isinstance(loaded, Tensor) or loaded.dtype not in (*FLOATS, ue8m0):
        raise ContractError(f"{owner}: `{key}` must be a float32 or float8_e8m0fnu tensor, got {describe(loaded)}")
    if parameter.dim() == 1 and loaded.numel() == parameter.numel():
        loaded = loaded.reshape(-1)
    if parameter.dtype is not ue8m0:
        return loaded.float()
    stored = loaded.to(ue8m0)
    if not loaded.is_meta and not torch.equal(stored.float(), loaded.float()):
        raise ContractError(
            f"{owner}: `{key}` must be powers of two with scheme='fp8_block_ue8m0', got other values: "
            "use scheme='fp8_block'"
        )
    return stored
