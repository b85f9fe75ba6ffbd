"""Tensors of cases: layouts in memory, copies that keep them, bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..rope import Rope

Layout = Literal["contiguous", "sliced", "misaligned", "expanded", "transposed", "reversed", "columns"]


def short_dtype(dtype: torch.dtype) -> str:
    """``bf16``, ``f32``, ``f8_e4m3fn``."""
    return str(dtype).removeprefix("torch.").replace("float", "f").replace("bf", "b").replace("b16", "bf16")


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


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN payloads included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(_in_a_row(t).view(torch.uint8) for t in (a, b)))


def _in_a_row(t: Tensor) -> Tensor:
    """All elements, with stride 1: that of a single element may be anything."""
    flat = t.contiguous().reshape(-1)
    return flat if flat.numel() != 1 or flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """``change(value)``; of a list or a `Rope` every part is changed."""
    if isinstance(value, list):
        return [mapped(change, part) for part in value]
    if isinstance(value, Rope):
        return replace(value, **{f.name: mapped(change, getattr(value, f.name)) for f in fields(value)})
    return change(value)


def moved(arguments: dict[str, Any], device: str | None = None, guard: int = 0) -> dict[str, Any]:
    """Copies on a device (None: the same) that keep strides, offsets and shared memory; also of tensors in lists and in a `Rope`.

    ``guard`` adds this many bytes of a pattern before and after each allocation.
    """
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
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

    return {name: mapped(copied, value) for name, value in arguments.items()}
