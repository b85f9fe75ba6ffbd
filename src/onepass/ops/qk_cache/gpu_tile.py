"""How the cache write of q, k and v is divided into programs. Results do not depend on it.

A module of its own, because it must not import Triton.
"""

from functools import cache
from typing import Final, NamedTuple

from ...gpu.chip import Chip, tuning
from .launch import NormKind, Turn

FOLD: Final = 8192
"""Columns that lie this far apart are summed first; `gpu.lib.reduce.FOLD`."""


class Side(NamedTuple):
    """Programs of q, k or v: each of ``pieces`` processes ``heads`` heads of a token.

    ``exact``: the parts of a head cover a power of two of columns, so their squares are summed as they are. Otherwise
    a row is loaded again for its sum: a head, or with statistics over all heads ``row`` columns at a time. ``long``:
    one program walks more heads than its tile has.
    """

    heads: int
    pieces: int
    exact: bool = False
    long: bool = False
    row: int = 8


class QkCacheConfig(NamedTuple):
    """The programs of a token. Up to ``early`` programs the next kernel may start at once, otherwise after the loads."""

    q: Side
    k: Side
    v: Side
    warps: int
    early: int

    @property
    def programs(self) -> int:
        """Programs per token."""
        return self.q.pieces + self.k.pieces + self.v.pieces


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def columns_for(elements: int, chip: Chip) -> int:
    """The measured number of columns per program for a call with this many elements."""
    return next(columns for most, columns in tuning(chip).qk_cache.columns if elements <= most)


@cache
def qk_cache_config(
    columns: int,
    q_heads: int,
    k_heads: int,
    head: int,
    value: int,
    norm: NormKind,
    turn: Turn | None,
    chip: Chip,
    norm_v: bool = False,
) -> QkCacheConfig:
    """The programs of a call with about ``columns`` columns per program. ``value`` 0: there is no v."""
    table = tuning(chip).qk_cache
    block = power_of_two(head)
    halves = turn is not None and turn.style == "half"
    covered = block >= 16 and (not halves or (turn is not None and turn.dim == head == block))
    if norm == "whole":
        longest = min(FOLD, power_of_two(max(q_heads, k_heads) * block))
        warps = min(table.most_warps, max(1, longest // table.whole_columns))
        sides = [_whole(heads, head, block, covered and head == block) for heads in (q_heads, k_heads)]
    else:
        warps = 1
        sides = [_apart(heads, columns, block, norm == "head" and covered) for heads in (q_heads, k_heads)]
    width = power_of_two(value)
    v = _apart(k_heads, columns * warps, width, norm_v and width >= 16) if value else Side(1, 0)
    return QkCacheConfig(sides[0], sides[1], v, warps, table.early_programs)


def _apart(heads: int, columns: int, block: int, exact: bool) -> Side:
    """Programs of some heads each: the most that leave little of the last program empty."""
    tile = min(max(1, columns // block), power_of_two(heads))
    while tile > 1 and -heads % tile > heads // 8:
        tile //= 2
    return Side(tile, -(-heads // tile), exact)


def _whole(heads: int, head: int, block: int, exact: bool) -> Side:
    """One program for all heads."""
    tile = min(power_of_two(heads), max(1, FOLD // block))
    long = tile < heads or heads * head > FOLD
    row = FOLD if long else max(8, power_of_two(heads * head))
    return Side(tile, 1, exact and not long, long, row)
