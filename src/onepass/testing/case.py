"""What a case is, and how its tensors are laid out in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Layout = Literal["contiguous", "sliced", "misaligned", "expanded", "transposed", "reversed"]
Values = Literal["normal", "pattern", "special"]


INTERPRETED_COLUMNS = 8192
"""Rows longer than this take the interpreter minutes."""


class Check(Protocol):
    """What the runner needs of a case, whatever its op."""

    @property
    def op(self) -> str:
        """The op's name."""

    @property
    def group(self) -> str:
        """Why the case exists."""

    @property
    def name(self) -> str:
        """Readable and unique within the op."""

    @property
    def interpretable(self) -> bool:
        """Whether Triton's interpreter gets through it in seconds."""


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
        """Whether Triton's interpreter gets through it in seconds, and the kernel is not another one on a GPU."""
        return self.group not in ("large", "lanes", "families") and self.n <= INTERPRETED_COLUMNS

    @property
    def name(self) -> str:
        """Readable and unique within the op."""
        shape = "x".join(map(str, (*self.lead, self.n)))
        parts = [shape, short_dtype(self.x)]
        if self.gamma is not None and self.gamma != self.x:
            parts.append(f"gamma={short_dtype(self.gamma)}")
        if self.residual is not None:
            parts.append(f"residual={short_dtype(self.residual)}")
        parts += [f"{k}={_word(v)}" for k, v in self.options.items()]
        parts += [part for part in (*self.operands, self.layout, self.values) if part not in ("contiguous", "normal")]
        return f"{self.group}: {' '.join(parts)}"


def _word(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return short_dtype(value)
    return str(getattr(value, "key", value))


def short_dtype(dtype: torch.dtype) -> str:
    """``bf16``, ``f32``, ``f8_e4m3fn``."""
    return str(dtype).removeprefix("torch.").replace("float", "f").replace("bf", "b").replace("b16", "bf16")


def lay_out(values: Tensor, layout: Layout) -> Tensor:
    """The same values in memory that is strided, misaligned, expanded, transposed, or reversed in all leading dimensions."""
    *lead, n = values.shape
    match layout:
        case "sliced":
            parent = values.new_full((*lead, n + 48), 7.0)
            parent[..., 16 : 16 + n] = values
            return parent[..., 16 : 16 + n]
        case "misaligned":
            parent = values.new_full((*lead, n + 3), 7.0)
            parent[..., 1 : 1 + n] = values
            return parent[..., 1 : 1 + n]
        case "expanded":
            return values[:1].expand(values.shape)
        case "transposed":
            return values.transpose(0, 1).contiguous().transpose(0, 1) if len(lead) > 1 else values
        case "reversed":
            order = (*reversed(range(len(lead))), len(lead))
            return values.permute(order).contiguous().permute(order)
    return values


def poison(tensor: Tensor) -> Tensor:
    """Fill with bytes that no correct output consists of."""
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    storage.fill_(0xFF)
    return tensor


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN payloads included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def on_device(tensor: Tensor, device: str) -> Tensor:
    """Move to a device with the strides and the offset within an allocation kept."""
    if device == "cpu":
        return tensor
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def to_cpu(value: Any) -> Any:
    """Tensors, also in a list, on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, list):
        return [to_cpu(v) for v in value]
    return value
