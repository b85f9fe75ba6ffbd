"""What one `linear` kernel computes (`LinearSpec`), and one call of it (`LinearCall`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ...core.backend import launch_for
from ...core.layout import geometry, smallest_dimension
from ...formats import SMALLEST_EPS, Rounding, WeightScale

Activation = Literal["silu_mul", "gelu_tanh_mul", "gelu_mul"]
ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu_mul", "gelu_tanh_mul", "gelu_mul")


@dataclass(frozen=True, eq=False)
class LinearSpec:
    """Everything except sizes that affects the machine code. `linear_spec` and `changed` intern it, so identity is equality.

    Optional tensors are given by their dtypes, None if absent. ``rounding="hf"`` rounds y, the
    activation, its product with the other half and the sum with ``add`` to ``out``. ``static``: weights may be
    read before the previous kernel has ended.
    """

    x: torch.dtype
    weight: torch.dtype
    weight_scale: WeightScale
    gamma: torch.dtype | None
    residual: torch.dtype | None
    bias: torch.dtype | None
    activation: Activation | None
    add: torch.dtype | None
    out: torch.dtype
    rounding: Rounding
    static: bool


_interned: Final = cache(LinearSpec)


def linear_spec(
    x: torch.dtype,
    weight: torch.dtype,
    weight_scale: WeightScale = "none",
    gamma: torch.dtype | None = None,
    residual: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    activation: Activation | None = None,
    add: torch.dtype | None = None,
    out: torch.dtype | None = None,
    rounding: Rounding = "once",
    static: bool = False,
) -> LinearSpec:
    """The interned `LinearSpec` with these properties. Results have x's dtype unless ``out`` says otherwise."""
    return _interned(x, weight, weight_scale, gamma, residual, bias, activation, add, out or x, rounding, static)


def changed(spec: LinearSpec, **fields: object) -> LinearSpec:
    """The interned spec that differs from ``spec`` in these fields."""
    return _interned(*(vars(spec) | fields).values())


class LinearCall(NamedTuple):
    """One call of a `linear` kernel: its spec, tensors and numbers, all validated.

    ``x``, ``residual``, ``add``, ``out`` and ``residual_out`` have two dimensions, any row stride and
    contiguous rows. ``residual_out`` is None unless there is a residual. A backend may add memory for ``sums``
    and for the ``counter`` of programs that have finished theirs.
    """

    spec: LinearSpec
    x: Tensor
    weight: Tensor
    out: Tensor
    weight_scale: Tensor | None = None
    gamma: Tensor | None = None
    residual: Tensor | None = None
    bias: Tensor | None = None
    add: Tensor | None = None
    residual_out: Tensor | None = None
    eps: float = 0.0
    weight_offset: float = 0.0
    sums: Tensor | None = None
    counter: Tensor | None = None

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""
        return self.x.get_device()


class LinearArguments(Protocol):
    """Validated arguments of `linear`."""

    x: Tensor
    weight: Tensor
    gamma: Tensor | None
    residual: Tensor | None
    weight_scale: Tensor | None
    block_scale: Tensor | None
    bias: Tensor | None
    add: Tensor | None
    eps: float
    weight_offset: float
    activation: Activation | None
    rounding: Rounding
    static_weight: bool
    out: Tensor
    residual_out: Tensor | None


def run_linear(call: LinearCall) -> None:
    """Run a kernel over the rows of ``x`` [..., K], in one launch if they allow it. Without rows nothing is launched."""
    x = call.x
    if x.numel() == 0:
        return
    if x.dim() == 1:
        call = _with_rows(call, [None if t is None else t.unsqueeze(0) for t in _rows(call)])
    elif x.dim() > 2:
        rows = _rows(call)
        folded = geometry(rows)
        if folded is None or folded[0].n1 * folded[0].n2 > 1:
            dim = smallest_dimension(x.shape[:-1])
            for i in range(x.shape[dim]):
                run_linear(_with_rows(call, [None if t is None else t.select(dim, i) for t in rows]))
            return
        count, steps = folded[0].rows, folded[1]
        call = _with_rows(
            call,
            [
                None if t is None else t.as_strided((count, t.shape[-1]), (step[0], 1))
                for t, step in zip(rows, steps, strict=True)
            ],
        )
    launch_for("linear", x)(call._replace(eps=max(call.eps, SMALLEST_EPS)))


def _rows(call: LinearCall) -> list[Tensor | None]:
    """The tensors that have a row for each row of x."""
    return [call.x, call.residual, call.add, call.out, call.residual_out]


def _with_rows(call: LinearCall, rows: list[Tensor | None]) -> LinearCall:
    """The same call on other rows, in the order of `_rows`."""
    x, residual, add, out, residual_out = rows
    assert x is not None and out is not None
    return call._replace(x=x, residual=residual, add=add, out=out, residual_out=residual_out)
