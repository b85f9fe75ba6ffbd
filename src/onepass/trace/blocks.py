"""What one block of a traced launch did, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

from .buffers import GemvEvent

Kind = Literal["normed", "normed, last to arrive", "tail"]


class Phase(NamedTuple):
    """The time between two events, and what a block does in it."""

    name: str
    begin: GemvEvent
    end: GemvEvent
    meaning: str


PHASES: Final = (
    Phase("start", GemvEvent.ENTER, GemvEvent.K_LOOP_START, "sets up; on a GPU its first weights are being loaded"),
    Phase("stream", GemvEvent.K_LOOP_START, GemvEvent.K_LOOP_END, "reads its weights, reduces"),
    Phase("store", GemvEvent.K_LOOP_END, GemvEvent.BEFORE_ARRIVE, "stores its columns of y"),
    Phase("arrive", GemvEvent.BEFORE_ARRIVE, GemvEvent.AFTER_ARRIVE, "counts its arrival: one fetch-add"),
    Phase("load y", GemvEvent.APPLY_START, GemvEvent.LOADS_DONE, "last arriver: reads all of y"),
    Phase("reduce", GemvEvent.LOADS_DONE, GemvEvent.REDUCE_DONE, "last arriver: mean of squares"),
    Phase("apply", GemvEvent.REDUCE_DONE, GemvEvent.APPLY_END, "last arriver: scales and stores"),
    Phase("exit", GemvEvent.APPLY_END, GemvEvent.EXIT, "what is left"),
)
"""In order. Tail blocks ``store`` until they exit; only the last arriver loads, reduces, applies."""


class Span(NamedTuple):
    """One phase of one block, in nanoseconds from the start of the timeline."""

    phase: str
    begin: int
    end: int


@dataclass(frozen=True)
class Block:
    """One block: the unit it ran on (-1: unknown) and when it passed each event, in nanoseconds.

    ``marks`` holds the events that were written; their times never decrease.
    """

    index: int
    unit: int
    marks: Mapping[GemvEvent, int]

    @cached_property
    def begin(self) -> int:
        """When it passed its first event."""
        return min(self.marks.values())

    @cached_property
    def end(self) -> int:
        """When it passed its last event."""
        return max(self.marks.values())

    @property
    def kind(self) -> Kind:
        """What its columns are used for."""
        if GemvEvent.APPLY_START in self.marks:
            return "normed, last to arrive"
        return "normed" if {GemvEvent.BEFORE_ARRIVE, GemvEvent.AFTER_ARRIVE} & self.marks.keys() else "tail"

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The phases of which both ends were written, in order; they never overlap."""
        spans_of_block = []
        for name, begin, end, _ in PHASES:
            if name == "store" and self.kind == "tail":
                end = GemvEvent.EXIT
            if name == "exit" and self.kind == "normed":
                begin = GemvEvent.AFTER_ARRIVE
            if begin in self.marks and end in self.marks:
                spans_of_block.append(Span(name, self.marks[begin], self.marks[end]))
        return tuple(spans_of_block)


def last(event: GemvEvent, blocks: Iterable[Block]) -> int | None:
    """When the last of these blocks passed the event, None if none did."""
    return max((block.marks[event] for block in blocks if event in block.marks), default=None)
