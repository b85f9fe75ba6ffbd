"""Where a GEMV kernel writes its timestamps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NoReturn

import torch
from torch import Tensor

from ..core.contract import describe
from ..errors import ContractError

GEMV_TRACE_EVENTS_PER_BLOCK: Final = 16
"""8-byte slots per block in the buffer; `GemvEvent` names those in use."""


class GemvEvent(IntEnum):
    """What the timestamp in each slot of a block marks, in nanoseconds.

    A slot that is never reached stays 0. Slots 10 to 15 are reserved. "Last arriver" is the block of a segment that finishes
    last and norms it.

    Attributes:
        ENTER: The block begins.
        K_LOOP_START: Before its K loop; on a GPU its first weights are being loaded.
        K_LOOP_END: After the K loop and the reduction over the block.
        BEFORE_ARRIVE: y is stored, the fetch-add comes next (normed blocks only).
        AFTER_ARRIVE: The fetch-add has returned (normed blocks only).
        APPLY_START: It arrived last and begins to norm (this and the next three: last arriver only).
        LOADS_DONE: All of y that is normed is loaded.
        REDUCE_DONE: The mean of squares is known.
        APPLY_END: The normed output is stored.
        EXIT: The block ends.
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


class TraceBuf(ABC):
    """Receives the timestamps of one launch; slot ``e`` of block ``b`` has offset ``16 * b + e``.

    A subclass must implement `store`. Kernels cannot call it, so the op lets the kernel write to temporary memory, waits for
    the launch to finish, and then calls `store` on the host once per slot that was reached, in order of offsets. A subclass
    that overrides `tensors` provides memory that the kernel writes directly; its `store` is not called.
    """

    @abstractmethod
    def store(self, offset: int, ts: int) -> None:
        """Store a timestamp.

        Args:
            offset: Number of the slot.
            ts: Nanoseconds.
        """

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """The tensors for a kernel to write.

        Returns:
            Timestamps, and each block's SM or thread. None: not wanted.
        """
        return None, None

    @property
    def stored_by_host(self) -> bool:
        """Whether timestamps arrive through `store`: the class does not override `tensors`."""
        return type(self).tensors is TraceBuf.tensors


@dataclass(frozen=True)
class NullTrace(TraceBuf):
    """No tracing: the kernel is compiled without any tracing code."""

    def store(self, offset: int, ts: int) -> None:
        """Do nothing."""

    def tensors(self) -> tuple[None, None]:
        """Return no tensors."""
        return None, None


@dataclass(frozen=True, eq=False, repr=False)
class GmemTrace(TraceBuf):
    """Timestamps in the device's memory.

    Args:
        buffer: int64 or uint64, 16 slots per block of the launch.
        units: int32, one element per block, receives the SM (GPU) or worker thread (CPU) that ran the block. None: not
            wanted.

    >>> import torch, onepass
    >>> act, weight, gamma = torch.ones(1, 64), torch.ones(96, 64), torch.ones(64)
    >>> trace = onepass.GmemTrace.allocate(onepass.gemv_trace_blocks(act, weight, gamma), "cpu")
    >>> normed, rest, counter = torch.empty(1, 64), torch.empty(1, 32), torch.zeros(1, dtype=torch.int32)
    >>> onepass.gemv_and_partial_norm_with_scratch(normed, rest, act, weight, gamma, 1e-6, counter, trace)
    >>> bool(trace.events()[:, onepass.GemvEvent.ENTER].all())
    True
    """

    buffer: Tensor
    units: Tensor | None = None

    def __post_init__(self) -> None:
        _check("buffer", self.buffer, torch.int64, torch.uint64)
        if self.buffer.numel() % GEMV_TRACE_EVENTS_PER_BLOCK:
            _refuse("buffer", f"hold {GEMV_TRACE_EVENTS_PER_BLOCK} slots per block", f"{self.buffer.numel()} elements")
        if self.units is None:
            return
        _check("units", self.units, torch.int32)
        if self.units.numel() != self.blocks:
            rule = f"have one element for each of the {self.blocks} blocks of `buffer`"
            _refuse("units", rule, self.units.numel())
        if self.units.device != self.buffer.device:
            _refuse("units", f"be on {self.buffer.device} like `buffer`", self.units.device)

    def __repr__(self) -> str:
        return f"GmemTrace(blocks={self.blocks}, device='{self.buffer.device}', units={self.units is not None})"

    @classmethod
    def allocate(cls, blocks: int, device: torch.device | str) -> GmemTrace:
        """Allocate zeroed buffers, units included.

        Args:
            blocks: Blocks of the launch (`gemv_trace_blocks`).
            device: Device of the launch.

        Returns:
            The trace.
        """
        if not isinstance(blocks, int) or isinstance(blocks, bool) or not 0 <= blocks < 2**31:
            _refuse("blocks", "be an int of at least 0", describe(blocks))
        slots = blocks * GEMV_TRACE_EVENTS_PER_BLOCK
        buffer = torch.zeros(slots, dtype=torch.int64, device=device)
        return cls(buffer, torch.zeros(blocks, dtype=torch.int32, device=device))

    @property
    def blocks(self) -> int:
        """Blocks that fit into the buffer."""
        return self.buffer.numel() // GEMV_TRACE_EVENTS_PER_BLOCK

    def store(self, offset: int, ts: int) -> None:
        """Store the timestamp ``ts`` at ``offset``, from the host."""
        self.buffer.view(torch.int64)[offset] = ts

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """The buffer and the units."""
        return self.buffer, self.units

    def clear(self) -> None:
        """Zero the buffers: kernels write only the slots that they reach."""
        self.buffer.view(torch.int64).zero_()
        if self.units is not None:
            self.units.zero_()

    def hand_over(self, to: TraceBuf) -> None:
        """Wait for the launch, then `store` its timestamps in another trace, in order of offsets.

        Args:
            to: The other trace.
        """
        for offset, ts in enumerate(self.buffer.view(torch.int64).tolist()):
            if ts:
                to.store(offset, ts)

    def events(self) -> Tensor:
        """Wait for the launch and copy its timestamps to the CPU.

        Returns:
            int64 [blocks, 16].
        """
        return self.buffer.view(torch.int64).view(-1, GEMV_TRACE_EVENTS_PER_BLOCK).to("cpu", copy=True)


def _check(name: str, tensor: object, *dtypes: torch.dtype) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        _refuse(name, "be a strided tensor", describe(tensor))
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        _refuse(name, f"be {allowed}", str(tensor.dtype).removeprefix("torch."))
    if tensor.dim() != 1:
        _refuse(name, "be 1-D", f"shape {list(tensor.shape)}")
    if not tensor.is_contiguous():
        _refuse(name, "be contiguous", f"strides {list(tensor.stride())}")


def _refuse(name: str, rule: str, got: object) -> NoReturn:
    raise ContractError(f"GmemTrace: `{name}` must {rule}, got {got}")
