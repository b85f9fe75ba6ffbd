"""Few combinations of options that contain every pair of their values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

Pair = tuple[int, int, Any, Any]
"""Two places and the values there."""


def pairs_of(values: Sequence[Any]) -> set[Pair]:
    """Every two of the values of one combination."""
    return {(a, b, values[a], values[b]) for a, b in itertools.combinations(range(len(values)), 2)}


def every_pair(choices: Sequence[Sequence[Any]], legal: Callable[[Pair], bool]) -> set[Pair]:
    """The legal pairs of the values of two options."""
    places = itertools.combinations(range(len(choices)), 2)
    found = ((a, b, *both) for a, b in places for both in itertools.product(choices[a], choices[b]))
    return {pair for pair in found if legal(pair)}


def covering(choices: Sequence[Sequence[Any]], legal: Callable[[Pair], bool], seed: int) -> list[tuple[Any, ...]]:
    """Random combinations, each the best of some for the pairs that are left, until all are contained.

    >>> len(covering([range(3)] * 4, lambda pair: True, seed=0)) < 20  # of 81
    True
    """
    chance = random.Random(seed)
    left, found = every_pair(choices, legal), []
    while left:
        drawn = [tuple(chance.choice(values) for values in choices) for _ in range(60)]
        possible = [values for values in drawn if all(map(legal, pairs_of(values)))]
        best = max(possible, key=lambda values: len(pairs_of(values) & left), default=())
        if pairs_of(best) & left:
            found.append(best)
            left -= pairs_of(best)
    return found
