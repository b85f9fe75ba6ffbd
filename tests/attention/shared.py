"""What the tests of both attentions share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tests.oracle.case import Check
from tools.evidence import proof, records


def refuses_wrong_results(module: Any, reference: Callable[..., Tensor], case: Any, **changes: Tensor) -> None:
    """Verification accepts the result by its formula, and none of other inputs: no mask, less context, other ``changes``."""
    given = module.inputs(case, "cpu")

    def exact(**other: Any) -> Tensor:
        return reference(**given | other).to(case.x)

    right = exact()
    assert module.verify(case, given, (right,)) is None
    without_last = given["mask"].clone()
    without_last[..., -30:] = -torch.inf
    for wrong in (
        torch.zeros_like(right),
        right * 1.02,
        right.flip(2),
        exact(mask=torch.zeros_like(given["mask"])),
        exact(mask=without_last),
        exact(scale=given["scale"] * 1.05),
        *(exact(**{name: value}) for name, value in changes.items()),
    ):
        assert module.verify(case, given, (wrong,)) is not None


def orders_of_products(cases: Iterable[Check]) -> set[tuple[Any, ...]]:
    """In which order tensor cores add: `kWidth` of each product decides which columns they add at once."""
    orders = set()
    for case in cases:
        (build,) = proof.builds(case, records.H200)
        lowered = records.lowered(build, records.H200, "ttgir")
        orders.add((tuple(re.findall(r"tt\.dot .*?kWidth = (\d)", lowered)), *re.findall(r"#mma\d* = .*", lowered)))
        sums = re.findall(r"arith\.addf %\w+, %\w+ : f32", lowered)
        assert not sums, "a reduction would add in the order of a layout"
    return orders
