"""The tiles of the QK-norm kernel. Sums do not depend on them.

A module of its own, because it must not import Triton.
"""

from functools import cache
from typing import Final, NamedTuple

from ...gpu.chip import Chip, tuning

QK_FOLD: Final = 8192
"""Columns of the blocks in which longer rows are walked; `gpu.lib.reduce.FOLD`."""
MAX_THREADS: Final = 1024


class Side(NamedTuple):
    """Tiles of q or of k: ``rows`` x ``block``, of which ``step`` columns are used; ``long`` rows
    are walked block by block.

    ``vec`` columns are loaded at a time: 16 bytes, or one where rows are not aligned. Where
    statistics are computed, a row that is not long comes in ``count`` tiles of ``chunk`` columns.
    """

    block: int
    rows: int
    step: int
    long: bool
    vec: int
    chunk: int
    count: int = 1  # type: ignore[assignment]


class QkConfig(NamedTuple):
    """The tiles of both tensors, which share a launch and so its number of warps.

    ``registers`` limits the registers per thread where a norm is stored. Statistics alone need half
    as many, and would use more under a limit.
    """

    q: Side
    k: Side
    warps: int
    registers: int


@cache
def qk_config(
    nq: int, nk: int, vecs: tuple[int, int], chip: Chip, given: bool, head: int, elements: int = 8
) -> QkConfig:
    """Tiles for rows of ``nq`` and ``nk`` columns, of which ``elements`` fill 16 bytes. ``given``:
    statistics are given. ``head``: columns that rotate together, or 0.

    A tile of q has about as many elements as one of k: shorter rows share a tile. With given
    statistics a row is cut into pieces that are a power of two and waste at most an eighth.
    """
    table, warp_size = tuning(chip).qk, chip.warp_size
    padded = [max(32, 1 << (n - 1).bit_length()) for n in (nq, nk)]
    one_warp = warp_size * elements
    if not given and one_warp < max(padded) <= QK_FOLD:
        return _in_chunks((nq, nk), padded, vecs, chip, head, one_warp)
    most = QK_FOLD if head else 2 * QK_FOLD
    if given:
        blocks = [_piece(n, p, head, table.pieces) for n, p in zip((nq, nk), padded, strict=True)]
        long = [False, False]
        tile = max(table.apply_tile, *blocks)
    else:
        long = [n > most for n in (nq, nk)]
        blocks = [QK_FOLD if walked else p for p, walked in zip(padded, long, strict=True)]
        tile = max(table.tile, *blocks)
    threads = MAX_THREADS if any(long) else tile // 32
    sides = []
    for block, walked, vec in zip(blocks, long, vecs, strict=True):
        at_once = max(1, threads * vec // block)
        rows = 1 if walked else min(tile // block, table.rows_per_thread * at_once)
        sides.append(Side(block, rows, _whole_heads(block, head), walked, vec, block))
    return QkConfig(sides[0], sides[1], threads // warp_size, table.registers if threads <= 512 else 0)


def _in_chunks(
    widths: tuple[int, int], padded: list[int], vecs: tuple[int, int], chip: Chip, head: int, one_warp: int
) -> QkConfig:
    """Each row in two to four chunks; the shorter rows share a program."""
    table = tuning(chip).qk
    along = [max(1, min(block // (2 * one_warp), max(2, block // (table.most_chunks * one_warp)))) for block in padded]
    warps = max(table.warps, *along)
    elements = max(widths) * warps // max(along)
    sides = []
    for n, block, vec, spread in zip(widths, padded, vecs, along, strict=True):
        chunk = min(block, one_warp * spread)
        rows = warps // spread
        most = table.rows_per_thread * rows * (one_warp * spread // chunk)
        while rows * 2 * n <= elements and rows < most:
            rows *= 2
        sides.append(Side(block, rows, _whole_heads(block, head), False, vec, chunk, -(-n // chunk)))
    return QkConfig(sides[0], sides[1], warps, 0)


def _whole_heads(block: int, head: int) -> int:
    """Columns of a block that belong to whole heads."""
    return block // head * head if head else block


def _piece(n: int, padded: int, head: int, pieces: tuple[int, ...]) -> int:
    """Columns of a piece: the most that waste little, or one row's, or one head's."""
    least = max(32, 1 << (head - 1).bit_length()) if head else 32
    for piece in pieces:
        if least <= piece <= padded and -n % _whole_heads(piece, head) <= n // 8:
            return piece
    return max(min(padded, pieces[0]), least)
