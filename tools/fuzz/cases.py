"""The ops to draw from, and how a case is drawn, numbered and shrunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from random import Random
from typing import Any, Final, Protocol
from zlib import crc32

from tests.gemv_norm import fuzz as gemv_norm
from tests.linear import fuzz as linear
from tests.mla_cache import fuzz as mla_cache
from tests.qk_cache import fuzz as qk_cache
from tests.qk_norm import fuzz as qk
from tests.rms_norm import fuzz as rows
from tools.fuzz.steps import finish_all, told


class Fuzzed(Protocol):
    """A case of any op."""

    @property
    def op(self) -> str:
        """The op's name."""

    def run(self, device: str) -> str | None:
        """None, or what is wrong."""

    def simpler(self) -> Iterator[Any]:
        """Cases that are simpler in one respect."""


_FAMILIES: Final[tuple[Any, ...]] = (rows, qk, gemv_norm, linear, mla_cache, qk_cache)
OPS: Final[dict[str, Any]] = {op: family for family in _FAMILIES for op in family.OPS}
TURNS: Final = (
    *(rows.OPS * 3),
    *qk.OPS,
    *(qk.OPS[2:] * 2),
    "rms_norm_fused_fp8",
    *gemv_norm.OPS,
    *(linear.OPS * 2),
    *mla_cache.OPS,
    *qk_cache.OPS,
)
"""The order of ops: more of those with many options, fewer of slow ones."""
CONFIGURATIONS: Final = 120
"""Configurations per op that a run compiles."""
FRAMES: Final = 8
"""Shapes and layouts per configuration that a bounded run draws from."""
USUAL: Final = 1500
"""Elements up to which a shape is not drawn more rarely than others."""
RAREST: Final = 0.04
"""How often the largest shapes are drawn, relative to usual ones."""
_PLACE: Final = {op: place for place, op in enumerate(OPS)}


@lru_cache(4096)
def configuration(op: str, seed: int, number: int, bounded: bool) -> Any:
    """One of the pool; ``bounded`` limits the sizes that affect machine code."""
    return OPS[op].configuration(op, Random(f"{seed} {op} {number}"), bounded)


def draw_case(op: str, r: Random, config: Any = None) -> Fuzzed:
    """Any case of an op, or any with this configuration."""
    family = OPS[op]
    case: Fuzzed = family.draw_case(config or family.configuration(op, r, False), r)
    return case


@lru_cache(1 << 16)
def _frame(op: str, seed: int, number: int, which: int) -> Any:
    """One of the FRAMES cases of a configuration, whose shapes and layouts a bounded run uses."""
    return draw_case(op, Random(f"{seed} {op} {number} {which}"), configuration(op, seed, number, True))


@lru_cache(4096)
def _weights(op: str, seed: int, number: int) -> tuple[float, ...]:
    """How often each frame is drawn: those with much to verify more rarely, so that a run has more cases."""
    frames = (_frame(op, seed, number, which) for which in range(FRAMES))
    return tuple(min(1.0, max(RAREST, USUAL / max(1, getattr(frame, "elements", 1)))) for frame in frames)


@cache
def _turns(ops: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(op for op in TURNS if op in ops)


def numbered(
    seed: int, index: int, ops: tuple[str, ...], configurations: int, bounded: bool, share: tuple[int, int] = (0, 1)
) -> Fuzzed | None:
    """The case of a number; None if its op and configuration belong to another ``share`` (mine, of how many).

    Where shapes and layouts affect machine code (``bounded``), only values are drawn for each case.
    """
    chosen = _turns(ops)
    op = chosen[index % len(chosen)]
    number = crc32(b"%d/%d" % (seed, index)) % configurations  # cheap, since most numbers belong to other shares
    if (_PLACE[op] * configurations + number) % share[1] != share[0]:
        return None
    r = Random(f"{seed}/{index}")
    case = draw_case(op, r, configuration(op, seed, number, bounded))
    if not bounded:
        return case
    which = r.choices(range(FRAMES), _weights(op, seed, number))[0]
    values = {name: getattr(case, name) for name in OPS[op].VALUES}
    frame: Fuzzed = replace(_frame(op, seed, number, which), **values)
    return frame


def run(case: Fuzzed, device: str) -> str | None:
    """None, or what is wrong, exceptions included."""
    try:
        return case.run(device)
    except Exception as error:
        return told(error)


def run_all(cases: Sequence[Fuzzed], device: str) -> list[str | None]:
    """What is wrong with each case. Those in steps share their waits for a GPU."""
    steps = [getattr(case, "steps", None) for case in cases]
    together = iter(finish_all([start(device) for start in steps if start is not None], device))
    return [run(case, device) if start is None else next(together) for case, start in zip(cases, steps, strict=True)]


def _refusal(message: str | None) -> bool:
    return message is not None and message.startswith("ContractError")


def shrink(case: Fuzzed, device: str, tries: int = 400) -> tuple[Fuzzed, str | None]:
    """The simplest failing case found, and its message."""
    message, tried = run(case, device), {repr(case)}
    progress = message is not None
    while progress and len(tried) < tries:
        progress = False
        for other in case.simpler():
            if repr(other) in tried:
                continue
            tried.add(repr(other))
            found = run(other, device)
            if found is not None and _refusal(found) == _refusal(message):
                case, message, progress = other, found, True
                break
    return case, message
