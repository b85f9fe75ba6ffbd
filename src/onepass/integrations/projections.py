"""Linear layers with the same input as one weight: merged or quantized once, and kept in step with the model.

A `Projection` holds the layers of a model and one `Linear` or `MergedLinear` that shares their memory: the
model's parameters lie in the merged weight, so state dicts and `tie_weights` see what they
saw before. Quantized weights are copies, and the model keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import Parameter

from ..errors import ContractError
from ..formats import FLOATS
from ..nn import Linear, MergedLinear
from ..specs.gemv_norm import SCALE_BLOCK
from ..weights import Scheme

SHARED: Final = "a projection shares memory with another parameter"
_TENSORS: Final = ("weight", "bias", "weight_scale", "weight_scale_inv")


class _Shared(NamedTuple):
    """A parameter of a layer that lies in the merged tensor, and where it is."""

    linear: Any
    name: str
    tensor: Tensor
    pointer: int


class Projection:
    """Layers that multiply the same input, as one layer.

    ``scheme`` quantizes float weights. Layers that are quantized already keep their codes and scales.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Module], scheme: Scheme | None = None) -> None:
        self.linears: tuple[Any, ...] = tuple(linears)
        self.scheme = scheme
        self.sizes = [len(linear.weight) for linear in self.linears]
        self.layer: Linear | MergedLinear | None = None
        self.shared: list[_Shared] = []
        self.pending = False
        self.merge()

    def merge(self) -> None:
        """Make the merged layer of what the layers hold now, and remember where that is."""
        for linear in self.linears:
            if linear._parameters.get("weight") is None:  # FSDP's are views of one flat parameter
                raise ContractError(f"patch: the weight of a projection must be a parameter of {type(linear).__name__}")
        floats = all(linear.weight.dtype in FLOATS for linear in self.linears)
        scheme = self.scheme if floats else None
        with unset_fake_temporarily():  # fake tensors must not replace the parameters' data
            if len(self.linears) > 1:
                self._hold(MergedLinear.from_linears(self.linears, scheme), shares=scheme is None)
            else:
                self._hold(Linear.from_linear(self.linears[0], scheme), shares=scheme is None)

    def _hold(self, layer: Linear | MergedLinear, shares: bool) -> None:
        """Use this layer. ``shares`` is whether the model's parameters lie in its weight."""
        self.layer, self.shares, self.quantized = layer, shares, layer.weight_scale is not None
        self.weight, self.scale, self.bias = layer.weight, layer.weight_scale, layer.bias
        self.pending = False
        self.shared = []
        for linear in self.linears if shares else ():
            named = ((name, linear._parameters.get(name)) for name in _TENSORS)
            self.shared += [_Shared(linear, name, t, t.data_ptr()) for name, t in named if t is not None]

    def current(self) -> bool:
        """Whether the merged layer has what the layers hold. If a parameter was replaced, it is merged again.

        A traced call only compares objects. `Module.to` and the like merge again by themselves (`applied`).
        """
        if self.layer is None:
            return self.pending and not torch.compiler.is_compiling() and self._merged_again()
        tracing = torch.compiler.is_compiling()
        for linear, name, tensor, pointer in self.shared:
            if linear._parameters.get(name) is not tensor or not (tracing or tensor.data_ptr() == pointer):
                return not tracing and self._merged_again()
        return True

    def _merged_again(self) -> bool:
        try:
            self.merge()
        except ContractError:
            self.layer, self.pending = None, False
        return self.layer is not None

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Do to the merged layer what ``Module._apply`` did to the layers."""
        if self.layer is None or self.shares:
            self._merged_again()
        else:
            self._hold(self.layer._apply(fn), shares=False)

    def part(self, index: int) -> tuple[Tensor, Tensor | None]:
        """The weight of one of the layers, and its scale."""
        if len(self.linears) == 1:
            return self.weight, self.scale
        start = sum(self.sizes[:index])
        stop = start + self.sizes[index]
        scale = self.scale
        if scale is not None and scale.dim() == 2:
            scale = scale[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)]
        elif scale is not None and len(scale) > 1:
            scale = scale[start:stop]
        return self.weight[start:stop], scale

    def release(self) -> None:
        """Give the parameters memory of their own again."""
        for linear, name, tensor, pointer in self.shared if len(self.linears) > 1 else ():
            if linear._parameters.get(name) is tensor and tensor.data_ptr() == pointer:
                with torch.inference_mode(tensor.is_inference()), unset_fake_temporarily():
                    tensor.data = tensor.data.clone()
        self.layer, self.shared = None, []

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or pickle needs. It merges or quantizes what its own layers hold."""
        return {name: getattr(self, name) for name in ("linears", "scheme", "sizes", "quantized", "shares")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.layer, self.shared, self.pending = None, [], True
        if all("_parameters" in linear.__dict__ for linear in self.linears):  # otherwise they are being copied
            self._merged_again()


def applied(module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """``Module._apply`` of a module with projections: ``to``, ``half``, ``cuda`` and the like, then merge again."""
    result = type(module)._apply(module, fn, recurse)
    for projection in module._onepass_decode.projections:
        projection.follow(fn)
    return result


def mergeable(linears: Sequence[Any], shared: set[int]) -> str:
    """Why layers cannot become a projection; "" if they can. ``shared`` are the storages of several parameters."""
    for linear in linears:
        weight = linear._parameters.get("weight")
        if not _takes(type(linear)):
            return f"a projection is a {type(linear).__name__}"
        if type(weight) not in (Tensor, Parameter):
            return f"the weight of a projection is a {type(weight).__name__}"
        if weight.is_meta:
            return "the weight of a projection has no data"
        if len(linears) > 1 and weight.untyped_storage().data_ptr() in shared:
            return SHARED
        if getattr(linear, "activation_scale", None) is not None:
            return "a projection has static scales of activations"
    return ""


def _takes(cls: type) -> bool:
    """torch's Linear, or transformers' FP8Linear, which has codes and scales."""
    return cls is nn.Linear or (cls.__name__ == "FP8Linear" and cls.__module__.startswith("transformers."))


def shared_storages(model: nn.Module) -> set[int]:
    """The addresses of storages that overlap with the storage of another parameter or buffer."""
    storages = [
        tensor.untyped_storage()
        for tensor in _tensors(model)
        if type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    ]
    shared: set[int] = set()
    last = end = 0  # of those so far, the storage that ends last
    for start, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in storages):
        if start < end:
            shared |= {start, last}
        if start + size > end:
            last, end = start, start + size
    return shared


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
