"""What is measured: an op at a shape, the sets of inputs it is called on, and the same maths in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Call = Callable[[], object]
Stream = Literal["copy", "halve", "read"]
"""The memory stream beside a workload: what is read is written, half of it is, or none."""
DECODE = 128
"""Rows up to which a shape counts as decode; beyond it is prefill."""


@dataclass(frozen=True)
class Problem:
    """One set of inputs. Peers take ``arguments`` apart by op; ``ours`` begins with the op itself, named onepass."""

    op: str
    ours: Mapping[str, Call]
    composed: Callable[..., object]
    """The op as a user would write it in torch, called with ``arguments``."""
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Workload:
    """An op at a shape: ``make`` makes a set of inputs on a device, ``bytes`` is what an ideal kernel moves."""

    op: str
    shape: tuple[int, ...]
    bytes: int
    make: Callable[[str], Problem]
    stream: Stream = "copy"
    about: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Ops whose checks must pass; by default the op itself."""
    cold: bool = False
    """Inputs rotate through more than a cache, however many sets that takes (a GEMV's weights)."""

    @property
    def checked(self) -> tuple[str, ...]:
        """Ops whose checks must pass."""
        return self.needs or (self.op,)


@dataclass(frozen=True)
class Family:
    """Ops that share a file: their shapes by op and device, and the workloads of a shape (none where it does not fit)."""

    name: str
    ops: tuple[str, ...]
    shapes: Mapping[tuple[str, str], Sequence[tuple[int, ...]]]
    workloads: Callable[[str, tuple[int, ...]], list[Workload]]


def wanted(shapes: str, m: int) -> bool:
    """Whether M rows belong to ``decode``, ``prefill`` or ``all``."""
    return shapes == "all" or (shapes == "decode") == (m <= DECODE)


def parse_shapes(text: str) -> list[tuple[int, ...]] | None:
    """``64x4096,1x2112x7168`` as tuples; None for the words decode, prefill and all.

    >>> parse_shapes("64x4096, 1x2112x7168"), parse_shapes("decode")
    ([(64, 4096), (1, 2112, 7168)], None)
    """
    if text in ("decode", "prefill", "all"):
        return None
    found = []
    for word in text.split(","):
        try:
            found.append(tuple(int(number) for number in word.strip().lower().split("x")))
        except ValueError:
            found.append(())
        if len(found[-1]) < 2 or min(found[-1]) < 1:
            raise ValueError(f"{word.strip()!r} is neither decode, prefill, all nor a shape like 64x4096")
    return found
