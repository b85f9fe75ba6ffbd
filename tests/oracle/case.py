"""What the cases of all ops share: a protocol, and how names are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import torch

from onepass.testing.tensors import Layout, short_dtype

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
