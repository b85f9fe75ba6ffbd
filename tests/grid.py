"""Tables of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, TypeVar

C = TypeVar("C")


def grid(make: Callable[..., C], *values: Any, **named: Any) -> Iterator[C]:
    """One case per combination: a list among the arguments holds alternatives, anything else is fixed.

    >>> list(grid("{}{}{c}".format, [1, 2], "-", c=["a", "b"]))
    ['1-a', '1-b', '2-a', '2-b']
    """
    axes = [value if isinstance(value, list) else [value] for value in (*values, *named.values())]
    for chosen in product(*axes):
        yield make(*chosen[: len(values)], **dict(zip(named, chosen[len(values) :], strict=True)))
