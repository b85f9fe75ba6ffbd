"""What is drawn for every op: sizes, memory layouts, and values that are hard to round."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from random import Random
from typing import Any, Final, Literal, TypeVar, get_args

import torch
from torch import Tensor

from onepass.formats import E4M3FN
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing.tensors import memory_of

Kind = Literal[
    "normal", "spread", "subnormal", "small", "largest", "ties", "alternating", "equal", "one hot", "zero", "-zero"
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Spoil = Literal["", "nan", "inf", "-inf"]
SPOILS: Final[tuple[Spoil, ...]] = get_args(Spoil)
_POOL: Final = 1 << 16


def size(r: Random, most: int) -> int:
    """A size from 1 to ``most``: small, near a power of two, or any."""
    way = r.randrange(4)
    if way == 0:
        return r.randint(1, min(8, most))
    if way == 1:
        return max(1, min(most, (1 << r.randrange(most.bit_length())) + r.randint(-1, 1)))
    if way == 2:
        return r.randint(1, min(64, most))
    return r.randint(1, most)


def lead(r: Random, most: int) -> tuple[int, ...]:
    """Leading dimensions: none to three, rarely four or without rows."""
    way = r.randrange(16)
    if way == 0:
        return ()
    if way < 9:
        return (size(r, most),)
    if way < 12:
        return (r.randint(1, 4), r.randint(1, 5))
    if way < 15:
        return tuple(r.randint(1, 3) for _ in range(4 if way == 14 else 3))
    return (0,) if r.randrange(2) else (2, 0)


# --- places ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A tensor within a larger one: columns before and after, elements before all, order of the leading dimensions.

    ``every`` takes every other of the first leading dimension; ``expanded`` repeats its first index (inputs only).
    """

    before: int = 0
    after: int = 0
    start: int = 0
    reverse: bool = False
    every: bool = False
    expanded: bool = False

    def put(self, values: Tensor) -> Tensor:
        """The values in this layout, in memory otherwise filled with 0xFF."""
        if self == PLAIN:
            return values
        if self.expanded and values.dim() > 1 and values.shape[0]:
            return self.room(values[:1].shape, values.dtype).copy_(values[:1]).expand(values.shape)
        return self.room(values.shape, values.dtype).copy_(values)

    def room(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor in this layout that, like its surroundings, is filled with 0xFF."""
        *first, n = shape
        order = list(reversed(first)) if self.reverse else list(first)
        width = self.before + n + self.after
        skipped = self.every and bool(first)
        count = math.prod(order) * width * (2 if skipped else 1)
        memory = torch.full(((self.start + count) * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)[self.start :]
        at = -1 if self.reverse else 0
        if skipped:
            order[at] *= 2
        t = memory.view(*order, width)
        if skipped:
            t = t.narrow(0, 0, order[0])[::2] if at == 0 else t[..., ::2, :]
        t = t[..., self.before : self.before + n]
        return t.permute(*reversed(range(len(first))), len(first)) if self.reverse else t


PLAIN: Final = Place()


def place(r: Random, *, inputs: bool = True) -> Place:
    """A contiguous layout, or a random one."""
    way = r.randrange(8)
    if way < 3:
        return PLAIN
    if way == 3:
        return Place(start=r.randint(1, 17))
    return Place(
        before=r.choice((0, 1, 3, 8, 16)),
        after=r.choice((0, 1, 5, 8)),
        start=r.choice((0, 0, 1, 2, 7)),
        reverse=r.random() < 0.25,
        every=r.random() < 0.2,
        expanded=inputs and r.random() < 0.1,
    )


def spilt(before: Tensor, after: Tensor) -> bool:
    """Whether memory around ``after`` differs from that around ``before``, its copy from before the call."""
    was = memory_of(before).clone()
    mine = torch.empty(0, dtype=before.dtype).set_(
        was.untyped_storage(), before.storage_offset(), before.shape, before.stride()
    )
    mine.view(_SAME_SIZE[mine.element_size()]).copy_(after.cpu().view(_SAME_SIZE[mine.element_size()]))
    return not torch.equal(was, memory_of(after).cpu())


_SAME_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def on_device(value: Any, device: str) -> Any:
    """Move a tensor, or the tensors of a list, and keep strides and the offset within an allocation."""
    if isinstance(value, list):
        return [on_device(v, device) for v in value]
    if not isinstance(value, Tensor) or device == "cpu":
        return value
    storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device, non_blocking=True)
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def fresh(value: Any, device: str) -> Any:
    """A copy on a device that keeps strides and offset."""
    if device != "cpu":
        return on_device(value, device)
    if not isinstance(value, Tensor):
        return value
    memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).clone()
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def snapshot(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The bytes of all memory that inputs lie in."""
    return {name: memory_of(t).clone() for name, t in tensors.items() if isinstance(t, Tensor)}


def changed(tensors: dict[str, Any], before: dict[str, Tensor]) -> str | None:
    """The name of an input whose memory has changed."""
    return next((name for name, was in before.items() if not torch.equal(was, memory_of(tensors[name]))), None)


def named(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among arguments."""
    return {name: t for name, t in tensors.items() if isinstance(t, Tensor)}


# --- values ---------------------------------------------------------------------------------------------------------


@cache
def _normal() -> Tensor:
    return torch.randn(_POOL, generator=torch.Generator().manual_seed(0))


@cache
def _integers() -> Tensor:
    return torch.randint(0, 1 << 24, (_POOL,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)


def _some(pool: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers from the pool, beginning at ``start``."""
    count = math.prod(shape)
    if count > _POOL // 2:
        return pool[torch.arange(start, start + count) % _POOL].view(shape)
    start %= _POOL // 2
    return pool[start : start + count].view(shape)


@cache
def _ties(dtype: torch.dtype) -> Tensor:
    """Midpoints of neighbouring fp8 codes and the numbers next to them, then the codes."""
    table = rms_norm_reference.decode_table(E4M3FN.bias)[:127]
    middle = ((table[1:] + table[:-1]) / 2).to(dtype)
    bits = middle.view(_SAME_SIZE[dtype.itemsize])
    return torch.cat([*((bits + step).view(dtype) for step in (-1, 0, 1)), table.to(dtype)])


@dataclass(frozen=True)
class Values:
    """How a tensor is filled: a kind, another kind in some rows, one NaN or infinity, and where in the pools to begin."""

    kind: Kind = "normal"
    exponent: int = 0
    other: Kind | None = None
    spoil: Spoil = ""
    start: int = 0

    def simpler(self) -> Iterator[Values]:
        """Equal values, normal values, and these with one property removed."""
        if self != EQUAL:
            yield from (EQUAL, NORMAL)
        yield from (replace(self, other=None), replace(self, spoil=""), replace(self, exponent=0))

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of the values."""
        t = self._made(self.kind, shape, dtype)
        rows = t.view(-1, shape[-1]) if t.numel() else t
        if self.other is not None and t.numel():
            chosen = _some(_integers(), self.start + 7, (rows.shape[0], 1)) % 2 == 0
            t = torch.where(chosen, self._made(self.other, shape, dtype).view_as(rows), rows).view(shape)
        if self.spoil and t.numel():
            t.view(-1)[self.start % t.numel()] = float(self.spoil)
        return t

    def _made(self, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        limits = torch.finfo(dtype)
        start, factor = self.start, 2.0**self.exponent
        match kind:
            case "normal":
                return (_some(_normal(), start, shape) * factor).to(dtype)
            case "spread":
                reach = 8 if dtype == torch.float16 else 16
                exponents = _some(_integers(), start, shape) % (2 * reach) - reach
                return torch.ldexp(_some(_normal(), start, shape), exponents).to(dtype)
            case "subnormal":
                count = _some(_integers(), start, shape) % 255 - 127
                return (count.double() * limits.smallest_normal * limits.eps).to(dtype)
            case "small":
                return ((_some(_integers(), start, shape) % 5 - 2).float() * 2.0**-14).to(dtype)
            case "largest":
                return ((_some(_integers(), start, shape) % 3 - 1).double() * limits.max).to(dtype)
            case "ties":
                table = _ties(dtype)
                integers = _some(_integers(), start, shape)
                t = table[integers % table.shape[0]]
                t = torch.where(integers & 1024 == 0, t, -t)
                if t.numel():
                    t[..., start % shape[-1]] = 448.0  # then the scale of the row is that of the codes
                return t
            case "alternating":
                huge, tiny = (2.0**14, 2.0**-14) if dtype == torch.float16 else (2.0**40, 2.0**-100)
                return torch.where(torch.arange(shape[-1]) % 2 == 0, huge, tiny).to(dtype).expand(shape).clone()
            case "equal":
                return torch.full(shape, float(_normal()[start % _POOL]) * factor).to(dtype)
            case "one hot":
                t = torch.zeros(shape, dtype=dtype)
                if t.numel():
                    t[..., start % shape[-1]] = float(_normal()[start % _POOL]) * factor
                return t
            case "zero":
                return torch.zeros(shape, dtype=dtype)
            case "-zero":
                return torch.full(shape, -0.0, dtype=dtype)


NORMAL: Final = Values()
EQUAL: Final = Values("equal")
Case = TypeVar("Case")


def but(case: Case, **changes: Any) -> Case:
    """The case with other values of some fields."""
    changed: Case = replace(case, **changes)  # type: ignore[type-var]
    return changed


def simpler(case: Case, **plain: Any) -> Iterator[Case]:
    """The case with one of ``plain`` instead, with one tensor in plain memory, or with simpler values of one."""
    for name, value in plain.items():
        yield but(case, **{name: value})
    for field in fields(case):  # type: ignore[arg-type]
        value = getattr(case, field.name)
        items = value if isinstance(value, tuple) else (value,)
        for i, item in enumerate(items):
            for other in (PLAIN,) if isinstance(item, Place) else item.simpler() if isinstance(item, Values) else ():
                changed = (*items[:i], other, *items[i + 1 :])
                yield but(case, **{field.name: changed if isinstance(value, tuple) else other})


def values(r: Random, *, tame: bool = False) -> Values:
    """Half of the time typical activations; ``tame``: nothing that overflows an exponential."""
    kind: Kind = "normal" if r.random() < 0.4 else r.choice(KINDS[:-2])
    exponent = r.choice((0, 0, 0, -3, 2, 6, -12))
    if tame:
        kind, exponent = r.choice(("normal", "normal", "equal", "one hot", "small")), min(exponent, 2)
    other = r.choice(KINDS) if not tame and r.random() < 0.25 else None
    spoil = r.choice(SPOILS[1:]) if r.random() < 0.06 else ""
    return Values(kind, exponent, other, spoil, r.randrange(1 << 20))


def weights(r: Random) -> Values:
    """The values that `gamma` turns into weights."""
    kind: Kind = r.choice(("normal", "normal", "normal", "equal", "zero", "ties", "spread"))
    spoil: Spoil = r.choice(SPOILS[1:]) if r.random() < 0.02 else ""
    return Values(kind, 0, None, spoil, r.randrange(1 << 20))


def gamma(v: Values, n: int, dtype: torch.dtype) -> Tensor:
    """Weights around 1 (normal), all 1 (equal), all 0, of all sizes, or such that products are ties."""
    if v.kind == "normal":
        t = 1 + 0.25 * _some(_normal(), v.start, (n,))
    elif v.kind == "equal":
        t = torch.ones(n)
    elif v.kind == "ties":
        t = torch.exp2((_some(_integers(), v.start, (n,)) % 5 - 2).float())
    else:
        return v.make((n,), dtype)
    t = t.to(dtype)
    if v.spoil:
        t[v.start % n] = float(v.spoil)
    return t


def epsilon(r: Random) -> float:
    """Common values, zero, and values too small to matter."""
    return r.choice((1e-6, 1e-6, 1e-6, 1e-5, 0.0, 1e-3, 1e-12, 1e-40, 2.0**-14))


def offset(r: Random) -> float:
    """A weight offset: mostly none, 1, or any."""
    return r.choice((0.0, 0.0, 0.0, 1.0, -1.0, 0.1))
