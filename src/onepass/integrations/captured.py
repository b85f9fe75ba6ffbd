"""A step that is run many times: recorded in a CUDA graph on a GPU, called on a CPU; and its results on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import Unsupported

WARM_UP: Final = 3
"""Steps before the recording, in which kernels are compiled and libraries allocate their workspaces."""
STEPS_PER_LOOK: Final = 8
"""Replays between two looks at the results. The host waits for one look while the device has the next steps queued."""

Save = Callable[[], Callable[[], None]]


class Runner(Protocol):
    """Runs a step again and again. A step reads and writes the same tensors every time."""

    steps_per_look: int

    def run(self, step: Callable[[], None], save: Save) -> None:
        """Run the step once. ``save`` saves the tensors, and returns a function that restores them."""


class Eager:
    """Calls the step. The host sees every result at once, so it looks after each step."""

    steps_per_look = 1

    def run(self, step: Callable[[], None], save: Save) -> None:
        """Call the step."""
        step()


class Graph:
    """Records the step in a CUDA graph at the first call, and replays it.

    ``generator`` is the generator that the step draws from. Every replay continues its sequence.
    """

    steps_per_look = STEPS_PER_LOOK

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.device = device
        self.generator = generator
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: Callable[[], None], save: Save) -> None:
        """Replay the step, which is recorded if it was not."""
        with torch.cuda.device(self.device):
            if self.graph is None:
                self.graph = self._record(step, save)
            self.graph.replay()

    def _record(self, step: Callable[[], None], save: Save) -> torch.cuda.CUDAGraph:
        restore = save()
        state = self.generator.get_state() if self.generator is not None else None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        if self.generator is not None and state is not None:
            self.generator.set_state(state)
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        # Other threads, such as the reader of a streamer, may use the device meanwhile.
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Unsupported(
                f"generate: a step of this model cannot be recorded in a CUDA graph ({why}); leave out `custom_generate`"
            ) from error
        return graph


class Look(NamedTuple):
    """Rows that are on their way to the host."""

    rows: Tensor
    arrived: Any
    """An event of the device, or None if the rows have arrived."""

    def wait(self) -> Tensor:
        """The rows, once they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.rows


class Reader:
    """Copies rows of a tensor to the host, without waiting for them. At most ``SLOTS`` looks may be under way."""

    SLOTS: Final = 3

    def __init__(self, source: Tensor, rows: int) -> None:
        self.source = source
        self.next = 0
        self.slots: list[tuple[Tensor, Any]] = []
        if source.device.type == "cuda":
            shape = (rows, *source.shape[1:])
            for _ in range(self.SLOTS):
                self.slots.append((torch.empty(shape, dtype=source.dtype, pin_memory=True), torch.cuda.Event()))

    def send(self, begin: int, end: int) -> Look:
        """Start to copy the rows from ``begin`` to ``end``."""
        rows = self.source[begin:end]
        if not self.slots:
            return Look(rows.cpu().clone(), None)
        memory, arrived = self.slots[self.next]
        self.next = (self.next + 1) % self.SLOTS
        target = memory[: end - begin]
        target.copy_(rows, non_blocking=True)
        arrived.record()
        return Look(target, arrived)
