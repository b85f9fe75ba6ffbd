"""Changes to the arguments of one good call, made from its `Contract`.

Some changes are legal: `tests.helpers.contract_oracle` decides from the contract.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import torch
from torch import Tensor

from onepass.core.contract import Contract, Option, short

_NAMES: Final = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e8m0fnu"
)
DTYPES: Final[tuple[torch.dtype, ...]] = tuple(getattr(torch, name) for name in _NAMES.split())


@dataclass(frozen=True)
class Mutation:
    """A label that is unique for its good call, the arguments that change, and their new values."""

    label: str
    arguments: tuple[str, ...]
    changes: dict[str, Any]


def mutations(contract: Contract, good: Mapping[str, Any], pairs: int = 0, seed: int = 0) -> Iterator[Mutation]:
    """Change every argument, option and output of a good call, alone and then ``pairs`` times two at once.

    ``good`` has every name of the contract, outputs by their argument names.
    """
    singles: list[Mutation] = []
    outs = [out.argument for out in contract.outs.values()]
    for name in (*contract.args, *outs):
        value = good[name]
        if isinstance(value, (list, tuple)):
            changes = _list_changes(value)
        elif isinstance(value, Tensor):
            changes = _tensor_changes(value)
        else:
            changes = _uncalled_for(contract, good)
        singles += [Mutation(f"{name}: {label}", (name,), {name: bad}) for label, bad in changes]
    for name, option in contract.options.items():
        singles += [
            Mutation(f"{name}: {label}", (name,), {name: bad}) for label, bad in _option_changes(option, good[name])
        ]
    written = [n for n in good if n in outs or (n in contract.args and contract.args[n].mutable)]
    for name in written:
        singles += _overlaps(name, good)
    yield from singles
    chosen = random.Random(seed)
    made: set[str] = set()
    while len(made) < pairs:
        one, two = chosen.sample(singles, 2)
        label = f"{one.label}; {two.label}"
        if one.changes.keys().isdisjoint(two.changes) and label not in made:
            made.add(label)
            yield Mutation(label, one.arguments + two.arguments, one.changes | two.changes)


# --- values of the wrong type ---------------------------------------------------------------------------------------


def _objects() -> Iterator[tuple[str, Any]]:
    yield "a string", "x"
    yield "an int", 3
    yield "a float", 2.5
    yield "a bool", True
    yield "a dict", {}
    yield "a type", Tensor
    yield "a dtype", torch.float32
    yield "an object", object()
    yield "bytes", b"\0" * 64


def _uncalled_for(contract: Contract, good: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values where the good call has none."""
    yield from _objects()
    yield "a tensor", torch.ones(7)
    yield "a tensor like the first", good[next(iter(contract.args))].clone()
    yield "a list", [torch.ones(7)]


# --- tensors --------------------------------------------------------------------------------------------------------


def _tensor_changes(value: Tensor) -> Iterator[tuple[str, Any]]:
    yield from _objects()
    yield "None", None
    yield "a list of it", [value]
    yield "a pair", (value, value)
    yield "numbers", value.double().flatten()[:3].tolist()
    yield "a numpy array", value.double().numpy()
    for dtype in DTYPES:
        if dtype != value.dtype:
            yield short(dtype), _as(value, dtype)
    yield from _sizes(value)
    yield from _layouts(value)
    yield "on meta", value.to("meta")
    yield "on another device", _elsewhere(value)
    if value.is_floating_point():
        yield "needs a gradient", value.detach().clone().requires_grad_()
        yield "a parameter", torch.nn.Parameter(value.detach().clone())
        yield "a parameter that needs none", torch.nn.Parameter(value.detach().clone(), requires_grad=False)


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    """As another dtype; torch cannot convert some integers to the smallest floats directly."""
    return value.double().abs().to(torch.float32).to(dtype)


def _elsewhere(value: Tensor) -> Tensor:
    """A tensor that claims to be on a GPU, whether or not there is one."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(value.shape, dtype=value.dtype, device="cuda:7")


def _sizes(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "one dimension more", value.unsqueeze(0).clone()
    yield "a last dimension of 1 more", value.unsqueeze(-1).clone()
    yield "two dimensions more", value[None, None].clone()
    if not value.dim():
        yield "two elements", torch.stack([value, value])
        yield "no elements", value.new_empty(0)
        return
    yield "one element", value.flatten()[0].clone()
    yield "nothing", value.new_empty(0)
    if value.dim() > 1:
        yield "flat", value.flatten().clone()
        yield "first dimension missing", value[0].clone()
        yield "last dimension missing", value[..., 0].clone()
        yield "dimensions swapped", value.transpose(0, -1).contiguous()
    for dim, size in enumerate(value.shape):
        where = f"dimension {dim}"
        yield f"{where} one longer", torch.cat([value, value.narrow(dim, 0, 1)], dim)
        yield f"{where} twice as long", torch.cat([value, value], dim)
        yield f"{where} seventeen more", torch.cat([value, *[value.narrow(dim, 0, 1)] * 17], dim)
        yield f"{where} empty", value.narrow(dim, 0, 0).clone()
        if size > 1:
            yield f"{where} one shorter", value.narrow(dim, 0, size - 1).clone()
            yield f"{where} of 1", value.narrow(dim, 0, 1).clone()
        if size > 3:
            yield f"{where} halved", value.narrow(dim, 0, size // 2).clone()


def _layouts(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same shape and dtype in other memory; some are legal for some arguments."""
    floating = value.is_floating_point() and value.element_size() > 1
    if value.dtype == torch.float32:
        yield "negated view", torch.complex(torch.zeros_like(value), -value).conj().imag
    if not value.dim():
        return
    if floating:
        yield "mkldnn", value.float().to_mkldnn()
        yield "sparse", value.to_sparse()
        if value.dim() == 2:
            yield "sparse rows", value.to_sparse_csr()
    last = value.shape[-1]
    raw = torch.uint8 if value.element_size() == 1 else value.dtype
    plain = value.view(raw) if value.element_size() == 1 else value
    yield "every other column", torch.stack([plain, plain], -1).flatten(-2).view(value.dtype)[..., ::2]
    yield "columns apart", torch.stack([plain] * 3, -1)[..., 1].view(value.dtype)
    yield "one column for all", value[..., :1].expand(value.shape)
    yield "one element for all", value.flatten()[:1].expand(value.shape)
    yield "columns slowest", plain.movedim(-1, 0).contiguous().movedim(0, -1).view(value.dtype)
    if value.dim() > 1:
        yield "one row for all", value[:1].expand(value.shape)
        wide = torch.cat([plain, plain], -1).view(value.dtype)
        yield "rows apart", wide[..., :last]
        yield "columns overlap rows", wide.flatten().as_strided(value.shape, [1] * value.dim())
        short_of = [*value.stride()[:-2], last - 1, 1]
        yield "rows overlap by one column", wide.flatten().as_strided(value.shape, short_of)
    else:
        yield "backwards in memory", torch.stack([plain, plain], -1).flatten().view(value.dtype)[::2]


def _list_changes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from _objects()
    yield "None", None
    yield "one more", [*value, torch.ones(7)]
    if not value:
        yield "something", [2.5]
        yield "a tensor", torch.ones(7)
        return
    yield "none", []
    yield "one less", list(value[:-1])
    yield "a tensor, not a list", value[0]
    yield "a dict of it", dict(enumerate(value))
    yield "a generator", (item for item in value)
    for index, item in enumerate(value):
        for label, bad in _tensor_changes(item):
            yield f"item {index} {label}", [*value[:index], bad, *value[index + 1 :]]


# --- options --------------------------------------------------------------------------------------------------------


def _option_changes(option: Option, value: Any) -> Iterator[tuple[str, Any]]:
    yield "None", None
    yield "an object", object()
    yield "a list", [value]
    yield "a tuple", (value,)
    yield "a dict", {}
    yield "a tensor", torch.ones(3)
    yield "a scalar tensor", torch.tensor(1.0)
    yield "bytes", b"once"
    for text in ("", "1", "once ", "ONCE", "nan", "bfloat16"):
        yield f"the string {text!r}", text
    yield from {f"{type(number).__name__} {str(number)[:24]}": number for number in _numbers(value)}.items()
    for dtype in DTYPES:
        yield short(dtype), dtype
    yield "the type float", float


def _numbers(value: Any) -> Iterator[Any]:
    import numpy

    yield from (True, False, 0, 1, -1, 2, 7, 2**31, -(2**63), 2**70, 10**400, -(10**400))
    yield from (0.0, 1.0, -1.0, 7.5, float("nan"), float("inf"), float("-inf"), 1e300, -1e300, 4e38, 1j)
    yield from (numpy.float32(1), numpy.int64(1), numpy.bool_(True))
    if isinstance(value, (int, float)):  # equal to the good value, but of another type
        yield from (Fraction(value), Decimal(value), complex(value), numpy.float32(value))
        if value == int(value):
            yield from (float(value), int(value), numpy.int64(int(value)))


# --- memory ---------------------------------------------------------------------------------------------------------


def _overlaps(name: str, good: Mapping[str, Any]) -> Iterator[Mutation]:
    """An output that overlaps another tensor of the call: all of it, a part, its last bytes."""
    out = good[name]
    if not isinstance(out, Tensor):
        return
    for other_name, value in good.items():
        other = value[0] if isinstance(value, (list, tuple)) and value else value
        if other_name == name or not isinstance(other, Tensor):
            continue
        last = (other.nbytes - 1) // 16 * 16
        for shift in dict.fromkeys((0, 16, last)):
            if shift and shift >= other.nbytes:
                continue
            memory = torch.full((other.nbytes + out.nbytes + 16,), 0x5A, dtype=torch.uint8)
            beneath = memory[: other.nbytes].view(other.dtype).view(other.shape).copy_(other)
            over = memory[shift : shift + out.nbytes].view(out.dtype).view(out.shape)
            changed = beneath if other is value else [beneath, *value[1:]]
            yield Mutation(
                f"{name} over {other_name} from byte {shift}", (name, other_name), {name: over, other_name: changed}
            )
        if other is value and (other.dtype, other.shape) == (out.dtype, out.shape):
            yield Mutation(f"{name} is {other_name}", (name, other_name), {name: value})
