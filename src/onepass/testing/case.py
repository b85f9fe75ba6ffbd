"""What the cases of all ops share: naming, tables of cases, memory layouts, bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

Layout = Literal["contiguous", "sliced", "misaligned", "expanded", "transposed", "reversed", "columns"]
Values = Literal["normal", "pattern", "special", "spread"]

INTERPRETED_COLUMNS: Final = 8192
"""Longer rows take the interpreter minutes."""
GPU_ONLY: Final = ("large", "families")
"""Groups that the interpreter skips."""
_DEFAULTS: Final = ("", "contiguous", "normal", "none", "interleaved", "scale=none")
"""Parts that names omit."""


class Check(Protocol):
    """What the runner needs from a case of any op."""

    @property
    def op(self) -> str:
        """The op's name."""

    @property
    def group(self) -> str:
        """Why the case exists."""

    @property
    def name(self) -> str:
        """Readable, and unique within the op: committed evidence refers to it."""

    @property
    def interpretable(self) -> bool:
        """Whether Triton's interpreter runs it in seconds, with the kernel that a GPU would run."""


@dataclass(frozen=True, eq=False)
class Case:
    """One call of a row op: shapes, dtypes, options, memory layout and the kind of values."""

    op: str
    group: str
    lead: tuple[int, ...]
    n: int
    x: torch.dtype = torch.bfloat16
    gamma: torch.dtype | None = None
    residual: torch.dtype | None = None
    operands: tuple[str, ...] = ()
    layout: Layout = "contiguous"
    values: Values = "normal"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def interpretable(self) -> bool:
        """See `Check`."""
        return self.group not in (*GPU_ONLY, "lanes") and self.n <= INTERPRETED_COLUMNS

    @property
    def name(self) -> str:
        """See `Check`."""
        gamma = None if self.gamma == self.x else self.gamma
        dtypes = short_dtype(self.x), labelled("gamma", gamma), labelled("residual", self.residual)
        options = (f"{k}={_text(v)}" for k, v in self.options.items())
        shape = "x".join(map(str, (*self.lead, self.n)))
        return case_name(self.group, shape, *dtypes, *options, *self.operands, self.layout, self.values)


def case_name(group: str, *parts: str) -> str:
    """A case's name without the parts that are defaults."""
    return f"{group}: {' '.join(part for part in parts if part not in _DEFAULTS)}"


def labelled(label: str, value: Any) -> str:
    """``label=value``, or nothing for None."""
    return "" if value is None else f"{label}={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return short_dtype(value)
    return str(getattr(value, "key", value))


def short_dtype(dtype: torch.dtype) -> str:
    """``bf16``, ``f32``, ``f8_e4m3fn``."""
    return str(dtype).removeprefix("torch.").replace("float", "f").replace("bf", "b").replace("b16", "bf16")


# --- values and memory ----------------------------------------------------------------------------------------------


def set_special(x: Tensor, last: int = -1, large: float = 1e4) -> None:
    """Fill the first eight rows with zeros, NaN, infinities, tiny and large values, and a single value."""
    x[0] = 0.0
    x[1] = -0.0
    x[2, 5] = torch.nan
    x[3, 7] = torch.inf
    x[4, last] = -torch.inf
    x[5] *= 1e-3
    x[6] *= large
    x[7] = 0.0
    x[7, 3] = -2.0


def lay_out(values: Tensor, layout: Layout) -> Tensor:
    """The same values in strided, misaligned, expanded or transposed memory; "reversed": all leading dimensions;
    "columns": columns are contiguous.
    """
    *lead, n = values.shape
    match layout:
        case "sliced" | "misaligned":
            before, after = (16, 32) if layout == "sliced" else (1, 2)
            parent = values.new_full((*lead, before + n + after), 7.0)
            parent[..., before : before + n] = values
            return parent[..., before : before + n]
        case "expanded":
            return values[:1].expand(values.shape)
        case "transposed":
            return values.transpose(0, 1).contiguous().transpose(0, 1) if len(lead) > 1 else values
        case "columns":
            return values.mT.contiguous().mT
        case "reversed":
            order = (*reversed(range(len(lead))), len(lead))
            return values.permute(order).contiguous().permute(order)
    return values


def memory_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def poison(tensor: Tensor) -> Tensor:
    """Fill with bytes that no correct output consists of."""
    memory_of(tensor).fill_(0xFF)
    return tensor


def poisoned_like(tensor: Tensor) -> Tensor:
    """Poisoned memory with a tensor's shape, strides and dtype."""
    return poison(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN payloads included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(_in_a_row(t).view(torch.uint8) for t in (a, b)))


def _in_a_row(t: Tensor) -> Tensor:
    """All elements, with stride 1: that of a single element may be anything."""
    flat = t.contiguous().reshape(-1)
    return flat if flat.numel() != 1 or flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def moved(arguments: dict[str, Any], device: str | None = None, guard: int = 0) -> dict[str, Any]:
    """Copies on a device (None: the same) that keep strides, offsets and shared memory; also of tensors in lists.

    ``guard`` adds this many bytes of a pattern before and after each allocation.
    """
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        at = value.untyped_storage().data_ptr()
        if at not in copies:
            whole = memory_of(value)
            edge = torch.full((guard,), 0xA5, dtype=torch.uint8, device=whole.device)
            copies[at] = torch.cat((edge, whole, edge)).to(device or whole.device, non_blocking=not whole.is_cuda)
        empty = torch.empty(0, dtype=value.dtype, device=copies[at].device)
        offset = value.storage_offset() + guard // value.element_size()
        return empty.set_(copies[at].untyped_storage(), offset, value.shape, value.stride())

    return {name: copied(value) for name, value in arguments.items()}


def fetched(device: str, *groups: Iterable[Tensor]) -> list[tuple[Tensor, ...]]:
    """The tensors of each group on the CPU, with all memory that they lie in, in one transfer.

    There is one wait instead of one per comparison. A wait is slow when several processes share a GPU.
    """
    wanted = [tuple(group) for group in groups]
    if device == "cpu":
        return wanted
    memory = {t.untyped_storage().data_ptr(): memory_of(t) for group in wanted for t in group}
    whole = torch.cat(list(memory.values())).cpu() if memory else torch.empty(0, dtype=torch.uint8)
    parts = whole.split([t.numel() for t in memory.values()])
    copies = {at: part.clone().untyped_storage() for at, part in zip(memory, parts, strict=True)}

    def copied(t: Tensor) -> Tensor:
        storage = copies[t.untyped_storage().data_ptr()]
        return torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())

    return [tuple(map(copied, group)) for group in wanted]


def to_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with their tensors, also those in lists, on the CPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(v) for v in value]
        return value.cpu() if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in arguments.items()}
