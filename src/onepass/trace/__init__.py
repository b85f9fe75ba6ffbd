"""Timestamps that a GEMV kernel leaves behind (`GmemTrace`), and what they say (`Timeline`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract.declaration import describe
from ..errors import ContractError

GEMV_TRACE_EVENTS_PER_BLOCK: Final = 16
"""Slots of 8 bytes that each block owns in the buffer; `GemvEvent` names those in use."""


class GemvEvent(IntEnum):
    """What the timestamp in each of a block's slots marks, in nanoseconds. A slot never reached stays 0.

    ========  =============  ==============================================================
    slot      name           when
    ========  =============  ==============================================================
    0         ENTER          the block begins
    1         K_LOOP_START   before its K loop; on a GPU its first weights are on their way by then
    2         K_LOOP_END     after the K loop and the reduction over the block
    3         BEFORE_ARRIVE  y is stored, the fetch-add comes next (normed blocks only)
    4         AFTER_ARRIVE   the fetch-add has returned (normed blocks only)
    5         APPLY_START    it arrived last and begins to norm (5 to 8: last arriver only)
    6         LOADS_DONE     all of y that is normed is loaded
    7         REDUCE_DONE    the mean of squares is known
    8         APPLY_END      the normed output is stored
    9         EXIT           the block ends
    10 to 15                 reserved
    ========  =============  ==============================================================
    """

    ENTER = 0
    K_LOOP_START = 1
    K_LOOP_END = 2
    BEFORE_ARRIVE = 3
    AFTER_ARRIVE = 4
    APPLY_START = 5
    LOADS_DONE = 6
    REDUCE_DONE = 7
    APPLY_END = 8
    EXIT = 9


# --- where timestamps go --------------------------------------------------------------------------------------------


class TraceBuf(ABC):
    """Where the blocks of one launch leave their timestamps; slot ``e`` of block ``b`` is offset ``16 * b + e``.

    A subclass needs `store` alone. The kernel cannot call it, so the op lets the kernel write to memory of its own, waits for
    the launch to end, and then calls `store` from the host, once for each slot that was reached, in order of the offsets.
    A subclass that also has `tensors` names memory that the kernel writes to directly, and its `store` is not called.
    """

    @abstractmethod
    def store(self, offset: int, ts: int) -> None:
        """Put the timestamp ``ts`` at ``offset``."""

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """What a kernel writes: timestamps, and the SM or thread of each block. None: it does not write that."""
        return None, None

    @property
    def stored_by_host(self) -> bool:
        """Whether timestamps reach this buffer through `store`: a subclass that does not say where the kernel may write."""
        return type(self).tensors is TraceBuf.tensors


@dataclass(frozen=True)
class NullTrace(TraceBuf):
    """No tracing: the kernel's machine code is that of a kernel that cannot trace."""

    def store(self, offset: int, ts: int) -> None:
        """Do nothing."""

    def tensors(self) -> tuple[None, None]:
        """Nothing to write to."""
        return None, None


@dataclass(frozen=True, eq=False, repr=False)
class GmemTrace(TraceBuf):
    """Timestamps go to ``buffer``, int64 or uint64, with 16 slots for each block of the launch.

    ``units``, int32 with one element a block, receives the SM (GPU) or the worker thread (CPU) that ran the block.
    """

    buffer: Tensor
    units: Tensor | None = None

    def __post_init__(self) -> None:
        _check("buffer", self.buffer, torch.int64, torch.uint64)
        if self.buffer.numel() % GEMV_TRACE_EVENTS_PER_BLOCK:
            whole = f"hold {GEMV_TRACE_EVENTS_PER_BLOCK} slots for each block"
            raise ContractError(f"GmemTrace: `buffer` must {whole}, got {self.buffer.numel()} elements")
        if self.units is None:
            return
        _check("units", self.units, torch.int32)
        if self.units.numel() != self.blocks:
            one = f"have one element for each of the {self.blocks} blocks of `buffer`"
            raise ContractError(f"GmemTrace: `units` must {one}, got {self.units.numel()}")
        if self.units.device != self.buffer.device:
            where = f"be on {self.buffer.device} like `buffer`"
            raise ContractError(f"GmemTrace: `units` must {where}, got {self.units.device}")

    def __repr__(self) -> str:
        return f"GmemTrace(blocks={self.blocks}, device='{self.buffer.device}', units={self.units is not None})"

    @classmethod
    def allocate(cls, blocks: int, device: torch.device | str) -> GmemTrace:
        """Zeroed buffers for a launch of ``blocks`` blocks, units included."""
        if not isinstance(blocks, int) or isinstance(blocks, bool) or not 0 <= blocks < 2**31:
            raise ContractError(f"GmemTrace: `blocks` must be an int of at least 0, got {describe(blocks)}")
        slots = blocks * GEMV_TRACE_EVENTS_PER_BLOCK
        return cls(
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.zeros(blocks, dtype=torch.int32, device=device),
        )

    @property
    def blocks(self) -> int:
        """Blocks that the buffer has room for."""
        return self.buffer.numel() // GEMV_TRACE_EVENTS_PER_BLOCK

    def store(self, offset: int, ts: int) -> None:
        """Put the timestamp ``ts`` at ``offset``, from the host."""
        self.buffer.view(torch.int64)[offset] = ts

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """The buffer and the units."""
        return self.buffer, self.units

    def clear(self) -> None:
        """Zero everything: a kernel writes only the slots that it reaches."""
        self.buffer.view(torch.int64).zero_()
        if self.units is not None:
            self.units.zero_()

    def hand_over(self, to: TraceBuf) -> None:
        """Wait for the launch and `store` its timestamps in ``to``, in order of their offsets; slots never reached are left out."""
        for offset, ts in enumerate(self.buffer.view(torch.int64).tolist()):
            if ts:
                to.store(offset, ts)

    def events(self) -> Tensor:
        """The timestamps as int64 ``[blocks, 16]`` on the CPU: a copy, taken once the launch is over."""
        return self.buffer.view(torch.int64).view(-1, GEMV_TRACE_EVENTS_PER_BLOCK).to("cpu", copy=True)


def _check(name: str, tensor: object, *dtypes: torch.dtype) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        raise ContractError(f"GmemTrace: `{name}` must be a strided tensor, got {describe(tensor)}")
    if tensor.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ContractError(f"GmemTrace: `{name}` must be {known}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.dim() != 1:
        raise ContractError(f"GmemTrace: `{name}` must be 1-D, got shape {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ContractError(f"GmemTrace: `{name}` must be contiguous, got strides {list(tensor.stride())}")


# --- what they say --------------------------------------------------------------------------------------------------

Kind = Literal["normed", "normed, last to arrive", "tail"]


class Phase(NamedTuple):
    """A stretch between two events, and what a block does in it."""

    name: str
    begin: GemvEvent
    end: GemvEvent
    meaning: str


PHASES: Final = (
    Phase("start", GemvEvent.ENTER, GemvEvent.K_LOOP_START, "sets up; on a GPU its first weights are on their way"),
    Phase("stream", GemvEvent.K_LOOP_START, GemvEvent.K_LOOP_END, "reads its weights, reduces"),
    Phase("store", GemvEvent.K_LOOP_END, GemvEvent.BEFORE_ARRIVE, "stores its columns of y"),
    Phase("arrive", GemvEvent.BEFORE_ARRIVE, GemvEvent.AFTER_ARRIVE, "counts itself in: one fetch-add"),
    Phase("load y", GemvEvent.APPLY_START, GemvEvent.LOADS_DONE, "last arriver: reads all of y"),
    Phase("reduce", GemvEvent.LOADS_DONE, GemvEvent.REDUCE_DONE, "last arriver: mean of squares"),
    Phase("apply", GemvEvent.REDUCE_DONE, GemvEvent.APPLY_END, "last arriver: scales and stores"),
    Phase("exit", GemvEvent.APPLY_END, GemvEvent.EXIT, "what is left"),
)
"""In order. The ``store`` of a tail block lasts until it exits; unless it arrived last, a normed one's ``exit`` follows arrival."""


class Span(NamedTuple):
    """One phase of one block, in nanoseconds of the timeline."""

    phase: str
    begin: int
    end: int


@dataclass(frozen=True)
class Block:
    """One block: where it ran (-1: unknown) and when it passed each event, in nanoseconds of the timeline.

    ``marks`` holds the events that were written, and never decreases.
    """

    index: int
    unit: int
    marks: Mapping[GemvEvent, int]

    @cached_property
    def begin(self) -> int:
        """Its first event."""
        return min(self.marks.values())

    @cached_property
    def end(self) -> int:
        """Its last event."""
        return max(self.marks.values())

    @property
    def kind(self) -> Kind:
        """What its columns are for."""
        if GemvEvent.APPLY_START in self.marks:
            return "normed, last to arrive"
        return "normed" if {GemvEvent.BEFORE_ARRIVE, GemvEvent.AFTER_ARRIVE} & self.marks.keys() else "tail"

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The phases whose two ends were written, in order; they never overlap."""
        found = []
        for name, begin, end, _ in PHASES:
            if name == "store" and self.kind == "tail":
                end = GemvEvent.EXIT
            if name == "exit" and self.kind == "normed":
                begin = GemvEvent.AFTER_ARRIVE
            if begin in self.marks and end in self.marks:
                found.append(Span(name, self.marks[begin], self.marks[end]))
        return tuple(found)


@dataclass(frozen=True)
class PhaseRow:
    """One phase over all blocks, in microseconds; ``share`` is of the time of all blocks together."""

    phase: str
    count: int
    median: float
    max: float
    share: float


@dataclass(frozen=True)
class Summary:
    """A timeline in numbers, in microseconds; None where the events it needs are missing.

    ``start_spread`` is from the first block's beginning to the last one's, ``drain`` from the end of the last K loop to
    the end, ``apply_tail`` what the last arriver does from its arrival until the normed output is stored.
    """

    phases: tuple[PhaseRow, ...]
    total: float
    start_spread: float
    drain: float | None
    apply_tail: float | None
    gigabytes_a_second: float | None

    def figures(self) -> tuple[tuple[str, str, str], ...]:
        """The numbers that belong to no phase, for people: label, value, remark."""
        rows = [("total", f"{self.total:.2f} us", "first block in to last block out")]
        if self.gigabytes_a_second is not None:
            rows.append(("read", f"{self.gigabytes_a_second:,.1f} GB/s", "what must be read, over that total"))
        rows.append(("start spread", f"{self.start_spread:.2f} us", "first block in to last block in"))
        if self.drain is not None:
            rows.append(("drain", f"{self.drain:.2f} us", f"after the last K loop ends{self._of_total(self.drain)}"))
        if self.apply_tail is not None:
            remark = f"last arrival to normed output{self._of_total(self.apply_tail)}"
            rows.append(("norm", f"{self.apply_tail:.2f} us", remark))
        return tuple(rows)

    def _of_total(self, part: float) -> str:
        return f", {percent(part / self.total)} of the total" if self.total else ""


def percent(share: float) -> str:
    """With one decimal; what is there but too little for that does not become zero."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


@dataclass(frozen=True)
class Timeline:
    """One traced launch; nanoseconds count from the earliest event. ``parameters`` are words to show beside it."""

    title: str
    unit: Literal["SM", "thread"]
    machine: str
    blocks: tuple[Block, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)
    bytes_read: int = 0

    @classmethod
    def from_trace(
        cls,
        trace: GmemTrace,
        *,
        title: str,
        unit: Literal["SM", "thread"],
        machine: str,
        parameters: Mapping[str, str] | None = None,
        bytes_read: int = 0,
    ) -> Timeline:
        """The launch that ``trace`` holds, once it is over. Blocks that wrote nothing are left out.

        ``bytes_read`` is what the launch had to read; with it the summary has a bandwidth.
        """
        rows: list[list[int]] = trace.events().tolist()
        units: list[int] = [-1] * len(rows) if trace.units is None else trace.units.tolist()
        written = [ts for row in rows for ts in row[: len(GemvEvent)] if ts]
        if not written:
            raise ContractError("Timeline: `trace` must hold a launch, got timestamps that are all 0")
        zero = min(written)
        blocks = []
        for index, (row, where) in enumerate(zip(rows, units, strict=True)):
            marks: dict[GemvEvent, int] = {}
            latest = 0
            for event in GemvEvent:
                if row[event]:
                    # clocks of two cores may differ by a little: time never runs backwards within a block
                    latest = marks[event] = max(latest, row[event] - zero)
            if marks:
                blocks.append(Block(index, where, marks))
        return cls(title, unit, machine, tuple(blocks), dict(parameters or {}), bytes_read)

    @cached_property
    def total(self) -> int:
        """Nanoseconds from the first event to the last."""
        return max(block.end for block in self.blocks)

    @property
    def last_k_loop_end(self) -> int | None:
        """When the last block finished its K loop."""
        return max(
            (b.marks[GemvEvent.K_LOOP_END] for b in self.blocks if GemvEvent.K_LOOP_END in b.marks), default=None
        )

    def summary(self) -> Summary:
        """The rows of a table of phases, and the figures below it."""
        from statistics import median  # here: with it the library's import takes 3 ms longer

        lengths: dict[str, list[int]] = {phase.name: [] for phase in PHASES}
        for block in self.blocks:
            for span in block.spans:
                lengths[span.phase].append(span.end - span.begin)
        everything = sum(map(sum, lengths.values())) or 1
        phases = (
            PhaseRow(name, len(ns), median(ns) / 1e3, max(ns) / 1e3, sum(ns) / everything)
            for name, ns in lengths.items()
            if ns
        )
        begins = [block.begin for block in self.blocks]
        k_loops = self.last_k_loop_end
        tails = [
            (block.marks[GemvEvent.APPLY_END], block.marks[GemvEvent.AFTER_ARRIVE])
            for block in self.blocks
            if {GemvEvent.APPLY_END, GemvEvent.AFTER_ARRIVE} <= block.marks.keys()
        ]
        stored, arrived = max(tails, default=(0, 0))
        return Summary(
            phases=tuple(phases),
            total=self.total / 1e3,
            start_spread=(max(begins) - min(begins)) / 1e3,
            drain=None if k_loops is None else (self.total - k_loops) / 1e3,
            apply_tail=(stored - arrived) / 1e3 if tails else None,
            gigabytes_a_second=self.bytes_read / self.total if self.bytes_read and self.total else None,
        )

    def write_chrome(self, path: Path | str) -> None:
        """Write a Chrome trace, which Perfetto and chrome://tracing open."""
        from .timeline import chrome

        Path(path).write_text(chrome(self) + "\n", encoding="utf-8")

    def write_html(self, path: Path | str) -> None:
        """Write one self-contained page: the timeline as a picture, and its numbers."""
        from .timeline import page

        Path(path).write_text(page(self), encoding="utf-8")
