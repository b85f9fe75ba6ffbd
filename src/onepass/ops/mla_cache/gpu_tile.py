"""How MLA's cache write is divided into programs. Results do not depend on it.

A module of its own, because it must not import Triton.
"""

from functools import cache
from typing import NamedTuple

from ...gpu.chip import Chip, tuning
from ..qk_cache.gpu_tile import power_of_two


class MlaCut(NamedTuple):
    """What is tuned: threads per program (more for long latents), columns of its tile of q, and of
    its latents.

    Up to ``early`` programs the next kernel may start at once, otherwise after the loads.
    """

    threads: int
    q_columns: int
    kv_columns: int
    early: int = 0


class MlaConfig(NamedTuple):
    """Programs of q process ``heads`` heads (of ``pieces`` times as many) of ``q_tokens`` tokens,
    the others ``kv_tokens`` rows of kv.

    ``guard``: the last tile of a token may have fewer heads. ``block`` holds a latent. A token's
    request is found in ``levels`` steps of ``width`` candidates; ``width`` is 0 if it is not
    needed.
    """

    warps: int
    q_tokens: int
    heads: int
    pieces: int
    guard: bool
    kv_tokens: int
    block: int
    width: int
    levels: int
    early: int


def mla_cut(tokens: int, heads: int, rope: int, chip: Chip) -> MlaCut:
    """The measured cut for a call of this size: larger calls have more columns per program."""
    table = tuning(chip).mla
    q = next(columns for most, columns in table.q_columns if tokens * heads * rope <= most)
    kv = next(columns for most, columns in table.kv_columns if tokens <= most)
    return MlaCut(table.threads, q, kv, table.early_programs)


def search_width(requests: int, chip: Chip) -> tuple[int, int]:
    """Width and levels of the search among this many requests."""
    widths = tuning(chip).mla.search_widths
    width = next((w for w in widths if w >= requests), widths[-1])
    levels, reach = 1, width
    while reach < requests:
        levels, reach = levels + 1, reach * width
    return width, levels


@cache
def mla_config(cut: MlaCut, tokens: int, heads: int, latent: int, rope: int, requests: int, chip: Chip) -> MlaConfig:
    """The programs of a call of up to ``tokens`` tokens of up to ``requests`` requests (0: no
    search), both powers of two.

    Tiles never exceed the heads or tokens of the call.
    """
    table = tuning(chip).mla
    block = max(8, power_of_two(latent))
    threads = max(cut.threads, block // table.most_columns)
    most = max(1, cut.q_columns * threads // cut.threads // power_of_two(rope))
    tile = _heads(heads, min(most, power_of_two(heads)))
    pieces = -(-heads // tile)
    q_tokens = min(tokens, table.most_tokens, max(1, most // tile)) if pieces == 1 else 1
    kv_tokens = min(tokens, table.most_tokens, max(1, cut.kv_columns // block))
    width, levels = search_width(requests, chip) if requests else (0, 1)
    warps, guard = max(1, threads // chip.warp_size), heads % tile != 0
    return MlaConfig(warps, q_tokens, tile, pieces, guard, kv_tokens, block, width, levels, cut.early)


def _heads(heads: int, most: int) -> int:
    """Heads per tile: the most that leave little of the last one empty."""
    tile = most
    while tile > 8 and -heads % tile > heads // 8:
        tile //= 2
    return tile
