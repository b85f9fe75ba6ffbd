"""Cases of products of each head with a weight of its own. Only GPUs and the interpreter have the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from onepass.ops.head_product import reference
from onepass.ops.head_product.launch import WeightOrder
from onepass.ops.head_product.op import head_product
from onepass.testing.tensors import moved, short_dtype
from tests.oracle.bounds import around
from tests.oracle.case import GPU_ONLY, Values, case_name
from tests.oracle.memory import to_cpu

OP: Final = "head_product"
OPS: Final = (OP,)
BF16, F16 = torch.bfloat16, torch.float16
ERROR: Final = 2.0**-20
"""Error of a float32 sum relative to the sum of magnitudes: tensor cores cut off what they add."""


@dataclass(frozen=True, eq=False)
class HeadCase:
    """One call: rows, heads, K, N, the dtype, which elements of a weight are neighbours in memory, and values."""

    group: str
    rows: int = 3
    heads: int = 2
    k: int = 128
    n: int = 128
    x: torch.dtype = BF16
    order: WeightOrder = "rows"
    values: Values = "normal"
    op: str = OP

    @property
    def interpretable(self) -> bool:
        """See `Check`."""
        return self.group not in GPU_ONLY

    @property
    def name(self) -> str:
        """See `Check`."""
        shape = f"{self.rows}x{self.heads}x{self.k}x{self.n}"
        return case_name(self.group, shape, short_dtype(self.x), self.order, self.values)


def inputs(case: HeadCase, device: str, seed: int = 0) -> dict[str, Any]:
    """Tensors by the names of `head_product`'s arguments. Both are parts of wider ones, as in a model."""
    generator = torch.Generator().manual_seed(seed + case.k)
    x = torch.randn(case.rows, case.heads, case.k + 64, generator=generator).to(case.x)[..., : case.k]
    height, width = (case.k, case.n) if case.order == "rows" else (case.n, case.k)
    weight = torch.randn(case.heads, height + 16, width, generator=generator).to(case.x)[:, 16:]
    if case.values == "special":
        x[0] = 0.0
        x[1, 0, 3] = torch.nan
        x[2, 1, 7] = torch.inf
        x[3] *= 1e-3
        weight[1, 5, 9] = -torch.inf
    return moved({"x": x, "weight": weight if case.order == "rows" else weight.transpose(1, 2)}, device)


def call(case: HeadCase, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The result of a call."""
    return (head_product(arguments["x"], arguments["weight"]),)


def zeroable(case: HeadCase) -> list[tuple[int, str]]:
    """Position and name of each result."""
    return [(0, "out")]


def variants(case: HeadCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    """Other calls that must give the same bytes: again, row by row, and among other rows."""
    x, weight = arguments["x"], arguments["weight"]
    yield "in another run", call(case, arguments)
    if case.rows:
        yield "for each row alone", (torch.cat([head_product(x[r : r + 1], weight) for r in range(case.rows)]),)
        others = torch.ones_like(x[:1]).expand(13, -1, -1)
        yield "among other rows", (head_product(torch.cat((others, x)), weight)[13:],)


def verify(case: HeadCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong: every value lies between bounds of the exact result."""
    host = to_cpu(arguments)
    x, weight = host["x"], host["weight"]
    exact, sizes = reference.head_product(x, weight), reference.head_product(x.abs(), weight.abs())
    return around(exact, sizes * ERROR).stored(results[0].cpu())
