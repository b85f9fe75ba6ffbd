"""What a call launches, noted while it is recorded, so that C can repeat it (`onepass.core.plan`).

If two calls have equal options, and tensors of the same dtype, shape, strides, device and alignment,
then everything but the addresses is the same: the kernel, the grid, every number that is passed. A
backend notes each launch (`note`). Memory that belongs to none of the call's tensors has an owner, which
knows how to take it again (`mark`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .plan import Step

Event: Any = torch._C._profiler._RecordFunctionFast
"""``with Event(name, tensors)``: an event of torch's profiler."""


class Launcher(Protocol):
    """A loaded kernel."""

    @property
    def addresses(self) -> Sequence[int]:
        """The indices of the arguments that are addresses."""

    def step(self, grid: int, arguments: Sequence[Any], /) -> Step | None:
        """The launch as C makes it; None if C cannot."""


Launch = tuple[Launcher | None, int, Sequence[Any]]
"""A launcher, its grid and its arguments."""


class Source(NamedTuple):
    """``take() -> memory, key`` for a launch, and ``discard(key)`` in case the launch fails.

    Memory that nobody reads after the launch is like ``template``, which holds no memory. With ``per_stream`` all launches
    on a stream that are not captured get the same memory, until it is discarded or `onepass.core.native.forget`.
    """

    take: Callable[[], tuple[Tensor, Any]]
    discard: Callable[[Any], None]
    template: Tensor | None = None
    per_stream: bool = False


class Tape(threading.local):
    """The launches of the call that this thread is recording."""

    on = False

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.sources: dict[int, Source] = {}


tape: Final = Tape()


class Switch:
    """Whether calls are recorded and repeated: not while something other than a backend receives the launches."""

    def __init__(self) -> None:
        self._on = True
        self.listeners: list[Callable[[bool], object]] = []

    @property
    def on(self) -> bool:
        """Whether it is on."""
        return self._on

    @on.setter
    def on(self, value: bool) -> None:
        self._on = value
        for listener in self.listeners:
            listener(value)


switch: Final = Switch()


def note(launcher: Launcher | None, grid: int, arguments: Sequence[Any]) -> None:
    """Record a launch; one without a launcher cannot be repeated."""
    tape.launches.append((launcher, grid, arguments))


def mark(address: int, source: Source) -> None:
    """Register the source of memory at ``address``, which belongs to none of the call's tensors."""
    if tape.on:
        tape.sources[address] = source


def temporary(tensor: Tensor) -> None:
    """Register memory that launches write and read, and nobody afterwards."""
    if tape.on:
        template = like(tensor)
        tape.sources[tensor.data_ptr()] = Source(lambda: (torch.empty_like(template), None), lambda key: None, template)


def like(tensor: Tensor) -> Tensor:
    """A tensor of the same dtype, shape, strides and device without memory, for `torch.empty_like`."""
    template = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    template.untyped_storage().resize_(0)
    return template


def traced(run: Callable[[], None]) -> tuple[list[Launch], dict[int, Source]]:
    """Run a call and return its launches, and the sources of the memory that it marked."""
    tape.launches, tape.sources, tape.on = [], {}, True
    try:
        run()
        return tape.launches, tape.sources
    finally:
        tape.launches, tape.sources, tape.on = [], {}, False
