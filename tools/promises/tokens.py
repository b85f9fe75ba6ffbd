"""What the promises of the two cache writes share: results of tokens, compared by parts, layouts and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from onepass.testing.tensors import same_bytes


class Tokens(Protocol):
    """A dataclass of inputs with one entry of ``q`` per token."""

    @property
    def q(self) -> Tensor:
        """The queries."""


T = TypeVar("T", bound=Tokens)


def first_difference(some: list[Tensor], others: list[Tensor]) -> int | None:
    """The number of the first result that differs."""
    found = (i for i, (a, b) in enumerate(zip(some, others, strict=True)) if not same_bytes(a, b))
    return next(found, None)


def difference_of_parts(
    x: T, whole: list[Tensor], part: Callable[[T, int, int], list[Tensor]], sizes: Iterable[int]
) -> str | None:
    """Whether some tokens at the beginning, after it or at the end have other results alone than in ``whole``."""
    for tokens in sizes:
        for begin in (0, 1, x.q.shape[0] - tokens):
            end = begin + tokens
            wrong = first_difference(part(x, begin, end), [t[begin:end] for t in whole])
            if wrong is not None:
                return f"result {wrong} of tokens {begin} to {end} differs from the whole batch's"
    return None


def moved(t: Tensor, shift: int) -> Tensor:
    """A copy with other strides, ``shift`` elements into its memory."""
    *lead, n = t.shape
    return torch.empty(*lead, n + 2 * shift, device=t.device, dtype=t.dtype)[..., shift : shift + n].copy_(t)


def moved_heads(t: Tensor, shift: int) -> Tensor:
    """As `moved`, with the heads of all tokens together."""
    return moved(t.transpose(0, 1), shift).transpose(0, 1)


def difference_of_layouts(
    x: T,
    results: Callable[[T], list[Tensor]],
    changes: Callable[[int], Mapping[str, Mapping[str, Tensor]]],
    shifts: Iterable[int],
) -> str | None:
    """Whether the results differ after one of the ``changes``, which replace inputs, or after all of them."""
    expected = results(x)
    for shift in shifts:
        each = changes(shift)
        everything = {name: t for change in each.values() for name, t in change.items()}
        for label, change in {**each, "everything": everything}.items():
            wrong = first_difference(results(replace(x, **change)), expected)  # type: ignore[type-var]
            if wrong is not None:
                return f"result {wrong} differs with {label} moved by {shift} elements"
    return None


def difference_of_threads(results: Callable[[], list[Tensor]]) -> str | None:
    """Whether two or three threads give other results than one."""
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(results())
    finally:
        torch.set_num_threads(before)
    wrong = [first_difference(some, seen[0]) for some in seen[1:]]
    return None if wrong == [None, None] else f"results {wrong} differ"
