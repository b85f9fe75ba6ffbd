"""Linear layers with the same input as one weight, and what a step of few tokens multiplies by it.

A `Projection` holds the layers of a model and one `Linear` or `MergedLinear` that shares their memory: the model's
parameters lie in the merged weight, so state dicts and `tie_weights` see what they saw before. Quantized weights are
copies, and the model keeps its own unless they are freed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import Parameter
from torch.nn import functional as F

from ...errors import ContractError
from ...formats import FLOATS, SCALE_BLOCK, Rounding
from ...nn import Linear, MergedLinear, gamma_of
from ...ops.linear.launch import Activation
from ...ops.linear.op import linear as multiply
from ...weights import Scheme, dequantize_weight, quantize_weight
from .norm import FUSED_ROWS, NormModule, is_own, is_plain, no_global_hooks, refuse_gradient

MARK: Final = "_onepass"
"""The attribute of a module that has its record."""
SPOTS: Final = 16
SHARED: Final = "a projection shares memory with another parameter"
_TENSORS: Final = ("weight", "bias", "weight_scale", "weight_scale_inv")


class _Source(NamedTuple):
    """A parameter that was merged, one of ``owner``, where it lies, and how often it was written.

    ``version`` is None for a parameter that lies in the merged tensor, and for one of inference mode, which has none.
    """

    owner: dict[str, Parameter | None]
    name: str
    tensor: Tensor
    pointer: int
    version: int | None


class Projection:
    """Layers that multiply the same input, as one layer.

    ``scheme`` quantizes float weights. Layers that are quantized already keep their codes and scales. ``codes`` is the
    merged layer once `free` has been called. The layers' own weights are then None, so that whatever reads or writes them
    raises. ``dtype`` is the dtype that they had, and ``learns`` is whether each of them required gradients.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Module], scheme: Scheme | None = None) -> None:
        self.linears: tuple[Any, ...] = tuple(linears)
        self.scheme = scheme
        self.sizes = [len(linear.weight) for linear in self.linears]
        self.layer: Linear | MergedLinear | None = None
        self.sources: list[_Source] = []
        self.pending = False
        self.spot_check: SpotCheck | None = None
        self.codes: Linear | MergedLinear | None = None
        self.dtype: torch.dtype = self.linears[0].weight.dtype
        self.learns = [linear.weight.requires_grad for linear in self.linears]
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
        self.sources = []
        for linear in self.linears:
            for name in _TENSORS:
                tensor = linear._parameters.get(name)
                if tensor is not None:
                    version = None if shares or tensor.is_inference() else tensor._version
                    self.sources.append(_Source(linear._parameters, name, tensor, tensor.data_ptr(), version))

    def current(self) -> bool:
        """Whether the merged layer has what the layers hold. If that has changed, it is merged or quantized again.

        A traced call only compares objects. `Module.to` and the like merge again by themselves (`applied`).
        """
        tracing = torch.compiler.is_compiling()
        if self.layer is None:
            return self.pending and not tracing and self._merged_again()
        if tracing:
            same = all(source.owner.get(source.name) is source.tensor for source in self.sources)
            return same and not self._has_new_weights()
        return self.unchanged() or self._merged_again()

    def unchanged(self) -> bool:
        """Whether the layers hold the parameters that were merged, where they were, not written since if they are copied.

        A write through ``weight.data`` leaves no trace here. `SpotCheck` finds it.
        """
        for owner, name, tensor, pointer, version in self.sources:
            if (
                owner.get(name) is not tensor
                or tensor.data_ptr() != pointer
                or (version is not None and tensor._version != version)
            ):
                return False
        return self.layer is not None and not self._has_new_weights()

    def _has_new_weights(self) -> bool:
        """Whether a layer was given a weight after its own was freed."""
        return self.codes is not None and any(linear._parameters["weight"] is not None for linear in self.linears)

    def free(self) -> None:
        """Free the float weights that were quantized. If there are none, nothing is done."""
        if self.layer is not None and not self.shares:
            self._drop_floats(self.layer)

    def _drop_floats(self, codes: Linear | MergedLinear) -> None:
        for linear in self.linears:
            if linear.weight is not None:
                self.dtype = linear.weight.dtype
                linear._parameters["weight"] = None
        self.codes = codes
        self._hold(codes, shares=False)

    def _merged_again(self) -> bool:
        if self.codes is not None:
            self._hold(self.codes, shares=False)
            if not self._requantized():
                raise ContractError(
                    "patch: a new weight must have the shape and device of the codes (keep_weights=False)"
                )
            self._drop_floats(self.codes)
            return True
        try:
            if not self._requantized():
                self.merge()
        except ContractError:
            self.layer, self.pending = None, False
        return self.layer is not None

    def _requantized(self) -> bool:
        """Write new codes over the old ones, which recorded graphs read. Returns False if there are none, or others fit."""
        if self.layer is None or self.shares or self.scheme is None:
            return False
        if not all(self._fits(place, linear) for place, linear in enumerate(self.linears)):
            return False
        with unset_fake_temporarily(), torch.inference_mode(self.weight.is_inference()), torch.no_grad():
            for place, linear in enumerate(self.linears):
                if linear.weight is not None:
                    self.write(place, linear.weight)
            if self.bias is not None and len(self.linears) > 1:
                self.bias.copy_(torch.cat([linear.bias for linear in self.linears]))
            elif self.layer.bias is not None:  # shared: its old memory may be somebody else's now
                self.layer.bias = nn.Parameter(self.linears[0].bias.detach(), requires_grad=False)
        self._hold(self.layer, shares=False)
        return True

    def _fits(self, place: int, linear: Any) -> bool:
        """Whether the codes of a layer's weight can be written where the old ones are."""
        weight, bias = linear._parameters.get("weight"), linear._parameters.get("bias")
        if (bias is None) != (self.bias is None):
            return False
        if bias is not None and (bias.dtype, bias.device) != (self.bias.dtype, self.bias.device):  # type: ignore[union-attr]
            return False
        if weight is None:
            return self.codes is not None
        old, _ = self.part(place)
        return weight.dtype in FLOATS and weight.shape == old.shape and weight.device == old.device

    def write(self, place: int, weight: Tensor) -> None:
        """Quantize the weight of one of the layers, and write it over the old codes."""
        assert self.scheme is not None
        with torch.inference_mode(self.weight.is_inference()), torch.no_grad():
            for old, new in zip(self.part(place), quantize_weight(weight, self.scheme), strict=True):
                cast(Tensor, old).copy_(new)

    def dequantized(self, place: int) -> Tensor:
        """The weight of one of the layers, as its codes have it, in the dtype that it had."""
        codes, scale = self.part(place)
        return dequantize_weight(codes, cast(Tensor, scale), self.dtype)

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Merge or quantize again after ``Module._apply`` of the layers; codes that are the only weights are moved."""
        if self.codes is not None:
            self._hold(self.codes._apply(fn), shares=False)
            self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        elif self.layer is None:
            self._merged_again()
        else:
            self.current()

    def refresh(self) -> None:
        """Merge again what has changed, and quantize again, changed or not."""
        if self.layer is None or not self.shares:
            self._merged_again()
        else:
            self.current()

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
        """Give the parameters memory of their own again. Weights that were freed get the values of their codes."""
        for place, linear in enumerate(self.linears) if self.codes is not None else ():
            with torch.inference_mode(False):
                linear.weight = Parameter(self.dequantized(place), requires_grad=self.learns[place])
        moved = self.sources if len(self.linears) > 1 and self.shares else ()
        for owner, name, tensor, pointer, _ in moved:
            if owner.get(name) is tensor and tensor.data_ptr() == pointer:
                with torch.inference_mode(tensor.is_inference()), unset_fake_temporarily():
                    tensor.data = tensor.data.clone()
        self.layer, self.codes, self.sources = None, None, []

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or pickle needs. It merges or quantizes what its own layers hold."""
        names = ("linears", "scheme", "sizes", "quantized", "shares", "spot_check", "codes", "dtype", "learns")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.layer, self.sources, self.pending = None, [], True
        if all("_parameters" in linear.__dict__ for linear in self.linears):  # otherwise they are being copied
            self._merged_again()


class SpotCheck:
    """Values of the weights whose codes a model uses, as they were when they were quantized.

    ``weight.data.mul_(2)`` and ``weight.data += delta``, as in adapters that are merged, change neither the address nor
    the version of a weight. Copies and pickles start without values, so their first check quantizes again.
    """

    def __init__(self, projections: Sequence[Projection]) -> None:
        self.projections = projections
        self.values = self._read()

    def run(self, x: Tensor) -> None:
        """Quantize all weights again if one of the values has changed. A GPU's stream is waited for, once."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        values = self._read()
        if values.keys() != self.values.keys() or not all(map(torch.equal, values.values(), self.values.values())):
            for projection in self.projections:
                projection.refresh()
            self.values = values

    @torch.no_grad()
    def _read(self) -> dict[torch.device, Tensor]:
        """Up to about ``SPOTS`` values of each row and column of a grid over each weight and bias, as bytes."""
        grids: dict[torch.device, list[Tensor]] = {}
        for projection in self.projections:
            for owner, name, *_ in projection.sources:
                tensor = owner.get(name)
                if tensor is not None:
                    grid = tensor.detach()[tuple(slice(None, None, max(1, n // SPOTS)) for n in tensor.shape)]
                    grids.setdefault(grid.device, []).append(grid.contiguous().view(-1).view(torch.uint8))
        return {device: torch.cat(parts) for device, parts in grids.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"projections": self.projections, "values": {}}


def applied(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``Module._apply`` of a module with projections: ``to``, ``half``, ``cuda`` and the like, then merge again."""
    result = cast(nn.Module, type(module)._apply(module, fn, recurse))
    for projection in projections_of(module):
        projection.follow(fn)
    return result


def saved(module: LinearModule, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
    """``Module._save_to_state_dict`` of a layer whose float weight was freed: what its codes stand for is saved."""
    type(module)._save_to_state_dict(module, destination, prefix, keep_vars)
    record = module._onepass
    destination[f"{prefix}weight"] = record.projection.dequantized(record.place)


def loaded(
    module: LinearModule,
    state_dict: Mapping[str, Tensor],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """``Module._load_from_state_dict`` of a layer whose float weight was freed: what is loaded is quantized."""
    (projection, place, *_), key = module._onepass, f"{prefix}weight"
    weight, (codes, _) = state_dict.get(key), projection.part(place)
    if weight is None:
        missing += [key] * strict
    elif weight.shape != codes.shape or weight.dtype not in FLOATS:
        wanted = f"bfloat16, float16 or float32 with shape {list(codes.shape)}"
        errors.append(f"`{key}` must be {wanted}, got {weight.dtype} with shape {list(weight.shape)}")
    else:
        projection.write(place, weight.to(codes.device))
    others = {name: tensor for name, tensor in state_dict.items() if name != key}
    type(module)._load_from_state_dict(module, others, prefix, metadata, strict, missing, unexpected, errors)


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
        for tensor in chain(model.parameters(), model.buffers())
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


# --- steps of few tokens --------------------------------------------------------------------------------------------


class Watch:
    """The submodules that a step skips, as they were when the step was found to be ready.

    To compare them costs a tenth of what it costs to decide again. Copies and pickles start without a record.
    """

    __slots__ = ("children", "entries")

    def __init__(self) -> None:
        self.children: dict[str, nn.Module | None] = {}
        self.entries: list[tuple[str, nn.Module, dict[str, Any], object]] = []

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()

    def keep(self, module: nn.Module, names: Iterable[str]) -> None:
        """Record the submodules of these names. None of them has hooks."""
        self.children = module._modules
        skipped = [(name, cast(nn.Module, module._modules[name])) for name in names]
        self.entries = [(name, child, child.__dict__, child.__dict__.get("forward")) for name, child in skipped]

    def holds(self, module: nn.Module) -> bool:
        """Whether no submodule was replaced since, has another forward, or a hook."""
        children = module._modules
        if children is not self.children:
            return False
        for name, child, own, forward in self.entries:
            if (
                children.get(name) is not child
                or own.get("forward") is not forward
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
            ):
                return False
        return True


class Parts(NamedTuple):
    """The submodules whose work a step of an attention or MLP does.

    ``names`` are the layers of the projections, in order; ``norms`` are patched norms, ``others`` have no weights.
    ``always`` is whether steps of any number of tokens do.
    """

    names: tuple[str, ...]
    projections: tuple[Projection, ...]
    norms: tuple[str, ...]
    others: tuple[str, ...]
    always: bool
    watch: Watch


class LinearRecord(NamedTuple):
    """A linear layer: number ``place`` of a projection's layers.

    ``projections`` are those that follow the parameters of this layer alone.
    """

    projection: Projection
    place: int
    always: bool
    projections: tuple[Projection, ...]


class LinearModule(nn.Module):
    """What is read of a patched linear layer."""

    weight: Tensor
    bias: Tensor | None
    _onepass: LinearRecord


def parts_of(module: nn.Module | None) -> Parts | None:
    """The parts of an attention or MLP that has steps of few tokens; None for others."""
    record = None if module is None else module.__dict__.get(MARK)
    return getattr(getattr(record, "step", record), "parts", None)


def projections_of(module: nn.Module) -> tuple[Projection, ...]:
    """The projections that follow the parameters of a module."""
    record = module.__dict__.get(MARK)
    if type(record) is LinearRecord:
        return record.projections
    parts = parts_of(module)
    return () if parts is None else parts.projections


def _intact(module: nn.Module, parts: Parts) -> bool:
    """Whether the layers of the projections are as `patch` left them."""
    children = module._modules
    place = 0
    for projection in parts.projections:
        for layer in projection.linears:
            if not is_own(layer, linear_forward) or children.get(parts.names[place]) is not layer:
                return False
            place += 1
        if not projection.current():
            return False
    return True


def is_ready(module: nn.Module, parts: Parts) -> bool:
    """Whether an attention's or MLP's own calls can be skipped."""
    if module.training:
        return False
    if torch.compiler.is_compiling():
        return _intact(module, parts) and _others_are_plain(module, parts)
    if parts.watch.holds(module):
        for projection in parts.projections:  # noqa: SIM110 (a generator would cost every step 300 ns)
            if not projection.unchanged() and not projection.current():
                return False
        return True
    if not _intact(module, parts) or not _others_are_plain(module, parts):
        return False
    parts.watch.keep(module, (*parts.names, *parts.norms, *parts.others))
    return True


def _others_are_plain(module: nn.Module, parts: Parts) -> bool:
    norms, others = ([getattr(module, name) for name in names] for names in (parts.norms, parts.others))
    return all(map(is_plain, norms)) and all(map(is_own, others))


def takes(projection: Projection, x: Tensor, always: bool) -> bool:
    """Whether this many rows of this dtype are computed here."""
    if not (always or projection.quantized or math.prod(x.shape[:-1]) <= FUSED_ROWS):
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    check = projection.spot_check
    if check is not None and not torch.compiler.is_compiling() and x.dim() == 3 and x.shape[1] > 1:
        check.run(x)
    if projection.layer is not None and (projection.quantized or projection.weight.dtype is x.dtype):
        return True
    return projection.current() and (projection.quantized or projection.weight.dtype is x.dtype)


def runs_step(module: nn.Module, parts: Parts, x: Tensor) -> bool:
    """Whether a call of an attention or MLP is a step of few tokens, which skips its submodules."""
    return takes(parts.projections[0], x, parts.always) and no_global_hooks() and is_ready(module, parts)


def project(
    projection: Projection,
    x: Tensor,
    norm: NormModule | None = None,
    *,
    rounding: Rounding,
    add: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """`linear` with a projection's weight, and with a patched norm before it.

    All tensors are rows [tokens, columns], or [batch, tokens, columns]. Those are passed as rows, which costs the
    host less.
    """
    options = _options(projection, norm, rounding, activation)
    y: Tensor
    if x.dim() == 2:
        y = multiply(x if x.stride(1) == 1 else x.contiguous(), projection.weight, add=add, **options)
        return y
    y = multiply(as_rows(x), projection.weight, add=None if add is None else add.flatten(0, 1), **options)
    return y.view(*x.shape[:2], y.shape[-1])


def project_sum(
    projection: Projection, x: Tensor, residual: Tensor, norm: NormModule, rounding: Rounding, activation: Activation
) -> tuple[Tensor, Tensor]:
    """`project` of ``x + residual`` [batch, tokens, columns], and this sum."""
    options = _options(projection, norm, rounding, activation)
    y, total = multiply(as_rows(x), projection.weight, residual=as_rows(residual), **options)
    return y.view(*x.shape[:2], y.shape[-1]), total.view(residual.shape)


def _options(
    projection: Projection, norm: NormModule | None, rounding: Rounding, activation: Activation | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"bias": projection.bias, "weight_scale": projection.scale, "rounding": rounding}
    if norm is not None:
        eps, weight_offset, _ = norm._onepass
        options |= {"gamma": gamma_of(norm.weight), "eps": eps, "weight_offset": weight_offset}
    options |= {"activation": activation, "static_weight": True}
    return options


def as_rows(x: Tensor) -> Tensor:
    """Tokens as rows with contiguous columns."""
    return (x if x.stride(-1) == 1 else x.contiguous()).flatten(0, 1)


def linear_forward(self: LinearModule, input: Tensor) -> Tensor:
    """A linear layer for few rows, or for any number of them if its weights are codes."""
    projection, place, always, _ = self._onepass
    if not takes(projection, input, always) or not projection.current():
        if projection.codes is None:
            return cast(Tensor, type(self).forward(self, input))
        refuse_gradient(self, input, self.weight)
        return F.linear(input, projection.dequantized(place), self.bias)
    refuse_gradient(self, input, self.weight)
    weight, scale = projection.part(place)
    x = input if input.stride(-1) == 1 else input.contiguous()
    return multiply(x, weight, weight_scale=scale, bias=self.bias, static_weight=True)
