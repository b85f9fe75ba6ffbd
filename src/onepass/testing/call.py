"""Calls as data: what `onepass check` calls, with which tensors, and how results are compared with the exact ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..formats import FLOATS, CodeFormat
from ..ops.rms_norm.reference import divided
from ..rope import Rope
from . import compare
from .tensors import Layout, lay_out, mapped, moved, set_special, short_dtype

ERROR: Final = 2e-5
"""Error of float32 arithmetic, relative to a value and to the mean of its row."""
SHARE: Final = 0.98
"""Results that are the rounded exact ones. The others are a step beside them."""


@dataclass(frozen=True)
class Random:
    """A tensor to draw: its dtype, shape and layout in memory; positive, or with rows of special values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout = "contiguous"
    positive: bool = False
    special: bool = False
    times: float = 1.0

    def __str__(self) -> str:
        words = [f"{short_dtype(self.dtype)}{list(self.shape)}".replace(", ", ",")]
        words += [self.layout] * (self.layout != "contiguous") + ["special"] * self.special
        return "-".join(words)

    def draw(self, generator: torch.Generator) -> Tensor:
        """The tensor, on the CPU."""
        values = torch.randn(self.shape, generator=generator)
        if self.positive:
            values = 0.02 + 0.01 * values.abs()
        elif self.dtype == torch.int8:
            values = (40 * values).round().clamp(-127, 127)
        values = values * self.times
        if self.special:
            set_special(values, large=1e2 if self.dtype == torch.float16 else 1e4)
        return lay_out(values.to(self.dtype), self.layout)


def _drawn(dtype: torch.dtype) -> Callable[..., Random]:
    return lambda *shape, **details: Random(dtype, shape, **details)


bf16, f16, f32 = map(_drawn, FLOATS)
e4m3fn, e4m3fnuz, int8 = map(_drawn, (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8))


class Expected(NamedTuple):
    """A result beside the exact values. Codes have a format, as bytes, and a limit if not the format's."""

    name: str
    actual: Tensor
    exact: Tensor
    error: float = ERROR
    fmt: CodeFormat | None = None
    limit: float | None = None
    share: float = SHARE

    def fault(self) -> str | None:
        """None, or what is wrong."""
        size = self.exact.abs() + _row_mean(self.exact)
        radius = torch.where(self.exact.isfinite(), size * self.error, 0.0)
        wrong = compare.between(self.actual, self.exact - radius, self.exact + radius, self.fmt, self.limit)
        if wrong is None and self.limit is None:
            wrong = compare.mostly_equal(self.actual, self.exact, self.fmt, self.share)
        return wrong and f"{self.name}: {wrong}"


def _row_mean(exact: Tensor) -> Tensor:
    sizes = torch.where(exact.isfinite(), exact.abs(), 0.0)
    return sizes.mean(-1, keepdim=True) if exact.dim() and exact.shape[-1] else sizes


def scaled_rows(
    name: str, codes: Tensor, scale: Tensor, y: Tensor, fmt: CodeFormat, error: float, share: float = SHARE
) -> Iterator[Expected]:
    """A scale per row, by which the largest value of y becomes the format's, and the codes with the scales as stored."""
    amax = y.abs().amax(-1)
    exact = torch.where(amax.isfinite(), amax, torch.nan) / fmt.max
    yield Expected(f"scale of {name}", scale, exact.view(scale.shape), error)
    yield Expected(name, codes, divided(y, scale.view(*amax.shape, 1)), error, fmt, share=share)


Verify = Callable[[str, dict[str, Any], tuple[Tensor, ...]], Iterator["Expected | str"]]
"""What to expect of an op's results, from the arguments; all on the CPU. A text names what is wrong."""


@dataclass(frozen=True, eq=False)
class Case:
    """One call of an op: its arguments are tensors, `Random` ones, lists of them, a `Rope` of them, and options."""

    op: str
    group: str
    arguments: Mapping[str, Any]
    interpretable: bool = True
    """Whether Triton's interpreter runs it in seconds, with the kernel that a GPU would run."""

    @property
    def name(self) -> str:
        """Readable, and unique within the op."""
        return f"{self.group}: {' '.join(f'{name}={_text(value)}' for name, value in self.arguments.items())}"

    def draw(self, device: str) -> dict[str, Any]:
        """The arguments on a device."""
        generator = torch.Generator().manual_seed(len(self.name))

        def drawn(value: Any) -> Any:
            return value.draw(generator) if isinstance(value, Random) else value

        return moved({name: mapped(drawn, value) for name, value in self.arguments.items()}, device)


def case(op: str, group: str, /, **arguments: Any) -> Case:
    """A case with its arguments as keywords."""
    return Case(op, group, arguments)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return short_dtype(value.dtype) + (f"{list(value.shape)}".replace(", ", ",") if value.dim() else "")
    if isinstance(value, torch.dtype):
        return short_dtype(value)
    if isinstance(value, (list, tuple)):
        return "+".join(map(_text, value)) or "none"
    if isinstance(value, Rope):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) is not None}
        parts = parts if value.sections else {name: part for name, part in parts.items() if name != "section_style"}
        return f"({','.join(f'{name}={_text(part)}' for name, part in parts.items())})"
    return str(getattr(value, "__name__", value))
