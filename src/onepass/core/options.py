"""Options that several contracts share."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, dtype

from ..formats import ROUNDINGS
from .contract import Option, Rule

MAX_COLUMNS: Final = 2**24


def eps(name: str = "eps", groups: tuple[int, ...] = ()) -> Option:
    """A norm's epsilon as an option called ``name``. One of the op's ``groups`` is a misplaced group size."""

    def hint(value: object) -> str:
        return f"; did you mean group_size={value:g}?" if isinstance(value, (int, float)) and value in groups else ""

    return Option(
        "float", 1e-6, "added to the mean of squares", where=f"0 <= {name} < 1", hint=hint if groups else None
    )


def eps_of_k(name: str, other: str) -> Option:
    """The epsilon of k, an option called ``name``, where it is not that of q."""
    return Option("float", None, f"k's {other}; None: q's", where=f"0 <= {name} < 1", optional=True)


WEIGHT_OFFSET: Final = Option("float", 0.0, "added to gamma in float32", where="-3.4e38 <= weight_offset <= 3.4e38")
ROUNDING: Final = Option("str", "once", "where values are rounded", choices=ROUNDINGS)


def columns(symbol: str, argument: str) -> Rule:
    """The rule that limits the number of columns."""
    return Rule(f"0 < {symbol} <= {MAX_COLUMNS}", argument, "have 1 to 2**24 columns")


def output_dtype(allowed: tuple[dtype, ...]) -> dict[str, Any]:
    """Scope for ``dtype_of(out, x)``: the dtype of the caller's output if results may have it, else that of x."""

    def dtype_of(out: Tensor | None, x: Tensor) -> dtype:
        return out.dtype if isinstance(out, Tensor) and out.dtype in allowed else x.dtype

    return {"dtype_of": dtype_of}
