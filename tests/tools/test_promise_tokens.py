"""The comparisons that the promises of the cache writes share: each accepts what keeps its promise and names what does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.promises.tokens import (
    difference_of_layouts,
    difference_of_parts,
    difference_of_threads,
    first_difference,
    moved,
    moved_heads,
)


@dataclass(frozen=True)
class Inputs:
    q: Tensor


X = Inputs(torch.arange(24.0).view(6, 2, 2))


def test_first_difference_is_about_bytes() -> None:
    zero = torch.zeros(2)
    assert first_difference([zero, zero], [zero, zero.clone()]) is None
    assert first_difference([zero, zero], [zero, -zero]) == 1


def test_results_that_depend_on_the_batch() -> None:
    whole = [X.q * 2]
    assert difference_of_parts(X, whole, lambda x, a, b: [x.q[a:b] * 2], (1, 3)) is None
    wrong = difference_of_parts(X, whole, lambda x, a, b: [x.q[a:b] * (2 if a < 3 else 3)], (1, 3))
    assert wrong == "result 0 of tokens 5 to 6 differs from the whole batch's"


def test_results_that_depend_on_the_layout() -> None:
    def changes(shift: int) -> dict[str, dict[str, Tensor]]:
        return {"q": {"q": moved(X.q, shift)}, "heads": {"q": moved_heads(X.q, shift)}}

    for change in (moved, moved_heads):
        other = change(X.q, 4)
        assert torch.equal(other, X.q) and other.storage_offset() == 4 and other.stride() != X.q.stride()
    assert difference_of_layouts(X, lambda x: [x.q + 1], changes, (1, 4)) is None
    by_offset = difference_of_layouts(X, lambda x: [x.q + (x.q.storage_offset() == 4)], changes, (1, 4))
    assert by_offset == "result 0 differs with q moved by 4 elements"
    by_stride = difference_of_layouts(X, lambda x: [x.q + (x.q.stride(0) < x.q.stride(1))], changes, (1, 4))
    assert by_stride == "result 0 differs with heads moved by 1 elements"


def test_results_that_depend_on_the_threads() -> None:
    before = torch.get_num_threads()
    assert difference_of_threads(lambda: [torch.ones(3)]) is None
    wrong = difference_of_threads(lambda: [torch.ones(3), torch.tensor(max(torch.get_num_threads(), 2))])
    assert wrong == "results [None, 1] differ" and torch.get_num_threads() == before
