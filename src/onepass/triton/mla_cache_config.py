"""How MLA's cache write is cut into programs. Nothing here changes a bit of any result, so it may follow every size."""

from dataclasses import dataclass
from functools import cache
from typing import Final

SEARCH_WIDTHS: Final = (1, 32, 128)
"""Requests a search looks at together: one, as many as a warp has threads, or several loads a thread. More take levels of the last."""
EARLY: Final = 16
"""Programs up to which the next kernel may start at once."""
MOST_COLUMNS: Final = 16
"""Columns of a latent that a thread holds at most."""
MOST_TOKENS: Final = 8
"""Tokens of a program: each is more code."""


@dataclass(frozen=True)
class MlaCut:
    """What is tuned: threads of a program (more for long latents), columns of its tile of q, and of its latents.

    Up to ``early`` programs the next kernel may start at once, otherwise after the loads. ``registers`` caps those of a thread.
    """

    threads: int
    q_columns: int
    kv_columns: int
    early: int = 0
    registers: int = 0


@dataclass(frozen=True)
class MlaConfig:
    """Programs of q take ``heads`` heads (of ``pieces`` times as many) of ``q_tokens`` tokens, the others ``kv_tokens`` rows of kv.

    ``guard``: the last tile of a token may lack heads. ``block`` holds a latent. A token's request is
    found in ``levels`` steps among ``width`` at a time; ``width`` 0: it is not needed.
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
    registers: int


def power_of_two(n: int) -> int:
    """The smallest that is no less than ``n``."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def mla_cut(tokens: int, heads: int, rope: int) -> MlaCut:
    """What was best for a call of this size: H200, us, from benchmarks/h200/tuning/25-mla.json.

    One warp a program always. q: 512 columns a tile for one token (0.93; 1024: 1.04), 1024 for 64 of 128 heads (1.70; 2048:
    1.90), then 2048 (2048 tokens of 128 heads: 18.6; 1024: 22.5). Rows of kv: one a program up to 1023 tokens, two (2048 of
    16 heads: 4.5; one: 4.8; four: 5.9), then four (8192 of 16: 13.4; one: 16.3). The next kernel at once up to EARLY
    programs, otherwise after the loads (64 tokens of 128 heads: 1.70; at once: 2.36).
    """
    columns = tokens * heads * rope
    q = 512 if columns <= 1 << 17 else 1024 if columns <= 1 << 20 else 2048
    kv = 512 if tokens < 1024 else 1024 if tokens < 4096 else 2048
    return MlaCut(32, q, kv, EARLY)


def search_width(requests: int) -> tuple[int, int]:
    """Width and levels of the search among so many requests."""
    width = next((w for w in SEARCH_WIDTHS if w >= requests), SEARCH_WIDTHS[-1])
    levels, reach = 1, width
    while reach < requests:
        levels, reach = levels + 1, reach * width
    return width, levels


@cache
def mla_config(
    cut: MlaCut, tokens: int, heads: int, latent: int, rope: int, requests: int, warp_size: int
) -> MlaConfig:
    """The programs of a call of up to ``tokens`` tokens of up to ``requests`` requests (0: no search), both powers of two.

    Tiles do not outgrow the call: neither its heads nor its tokens.
    """
    block = max(8, power_of_two(latent))
    threads = max(cut.threads, block // MOST_COLUMNS)
    most = max(1, cut.q_columns * threads // cut.threads // power_of_two(rope))
    tile = _heads(heads, min(most, power_of_two(heads)))
    pieces = -(-heads // tile)
    q_tokens = min(tokens, MOST_TOKENS, max(1, most // tile)) if pieces == 1 else 1
    kv_tokens = min(tokens, MOST_TOKENS, max(1, cut.kv_columns // block))
    width, levels = search_width(requests) if requests else (0, 1)
    return MlaConfig(
        max(1, threads // warp_size), q_tokens, tile, pieces, heads % tile != 0, kv_tokens, block, width, levels,
        cut.early, cut.registers,
    )  # fmt: skip


def _heads(heads: int, most: int) -> int:
    """Heads of a tile: the most that leave little of the last one empty."""
    tile = most
    while tile > 8 and -heads % tile > heads // 8:
        tile //= 2
    return tile
