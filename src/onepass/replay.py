"""A launch remembered: what a call on a GPU came to, so that the next one like it need not find out again.

Of two calls whose tensors agree in dtype, shape, strides, device and alignment, and whose options are equal, everything
but the addresses is the same: the kernel, the grid, every number that is passed. So the first such call is recorded, and
those after it check no more than that what they write lies apart from all else where it did, allocate the same outputs
and launch the same kernel on other addresses.

Only what is sure to be the same is recorded: one launch, whose every address is that of one argument or output, or of
memory whose owner says how to ask for it (`mark`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .memory import extent

Launch = tuple[Any, int, Sequence[Any]]
"""A launcher, its grid and its arguments."""
Source = tuple[Callable[[], tuple[Tensor, Any]], Callable[[Any], None]]
"""``take() -> memory, key`` for a launch, and ``discard(key)`` should the launch fail."""
Replay = Callable[..., tuple[Tensor | None, ...] | None]
"""``replay(*tensors of the call, None where there is none)``: allocate, launch, return the outputs; None: nothing was done."""


class Tape(threading.local):
    """The launches of the call that this thread is recording."""

    on = False

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.sources: dict[int, Source] = {}


tape: Final = Tape()


class Switch:
    """Whether calls are recorded and replayed at all: not while something else than a backend takes the launches."""

    on = True


switch: Final = Switch()


def note(launcher: Any, grid: int, arguments: Sequence[Any]) -> None:
    """Write a launch down."""
    tape.launches.append((launcher, grid, arguments))


def mark(address: int, source: Source) -> None:
    """Say where memory at ``address``, which is none of the call's tensors, comes from."""
    if tape.on:
        tape.sources[address] = source


def record(
    run: Callable[[], None],
    before: Sequence[Tensor | None],
    after: Sequence[Tensor | None],
    written: Sequence[int],
    outputs: int,
) -> Replay | None:
    """Run a call and return what repeats it, or None where that cannot be told from what was launched.

    ``before`` are the caller's tensors, its outputs last, and ``after`` the same with those outputs allocated that it did not
    give; ``written`` are the places of those the kernel writes.
    """
    tape.launches, tape.sources, tape.on = [], {}, True
    try:
        run()
        launches, sources = tape.launches, tape.sources
    finally:
        tape.launches, tape.sources, tape.on = [], {}, False
    if len(launches) != 1:
        return None
    launcher, grid, arguments = launches[0]
    owners = {t.data_ptr(): i for i, t in enumerate(after) if t is not None and t.numel()}
    moved: list[tuple[int, int]] = []
    asked: list[tuple[int, Source]] = []
    for place in launcher.addresses:
        address = arguments[place]
        if address in owners:
            moved.append((place, owners[address]))
        elif address in sources:
            asked.append((place, sources[address]))
        elif address:
            return None
    given = [(i, t) for i, t in enumerate(before) if t is not None and t.numel()]
    apart, fixed = _relations(given, written)
    makers = [(i, _maker(given, t)) for i, t in enumerate(after) if t is not None and before[i] is None]
    owner = [index for _, index in moved]
    launch = launcher.prepare(grid, arguments, [place for place, _ in moved] + [place for place, _ in asked])

    def replay(*tensors: Any) -> tuple[Tensor | None, ...] | None:
        for a, b, distance in fixed:
            if tensors[b].data_ptr() - tensors[a].data_ptr() != distance:
                return None
        for a, b, size, other in apart:
            if -other < tensors[b].data_ptr() - tensors[a].data_ptr() < size:
                return None
        every = list(tensors)
        for place, make in makers:
            every[place] = make(tensors)
        addresses = [every[index].data_ptr() for index in owner]
        if asked:
            _launch_with(asked, launch, addresses)
        else:
            launch(addresses)
        return tuple(every[-outputs:])

    return replay


def _launch_with(
    asked: list[tuple[int, Source]], launch: Callable[[Sequence[int]], None], addresses: list[int]
) -> None:
    """Launch with memory taken for it, which is never used again if the launch fails."""
    taken = [(*take(), discard) for _, (take, discard) in asked]
    try:
        launch(addresses + [memory.data_ptr() for memory, _, _ in taken])
    except BaseException:
        for _, key, discard in taken:
            discard(key)
        raise


def _relations(
    given: Sequence[tuple[int, Tensor]], written: Sequence[int]
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int]]]:
    """How the caller's tensors must lie: pairs that lie apart (with their bytes), and pairs at a fixed distance.

    What was found right of the first call is right wherever these hold: tensors that meet one that is written, as slices of
    one parent or as one and the same, must do so at the same distance.
    """
    apart, fixed = [], []
    for position, (a, first) in enumerate(given):
        for b, second in given[position + 1 :]:
            (start, end), (other_start, other_end) = extent(first), extent(second)
            meet = start < other_end and other_start < end
            if start == other_start or (meet and (a in written or b in written)):
                fixed.append((a, b, other_start - start))
            elif a in written or b in written:
                apart.append((a, b, end - start, other_end - other_start))
    return apart, fixed


def _maker(given: Sequence[tuple[int, Tensor]], out: Tensor) -> Callable[[Sequence[Any]], Tensor]:
    """What allocates a tensor like ``out``: like an input where one has its shape and strides, which is cheapest."""
    shape, strides, dtype, device = out.shape, out.stride(), out.dtype, out.device
    for place, tensor in given:
        if tensor.shape == shape and tensor.stride() == strides and tensor.is_contiguous() and tensor.device == device:
            if tensor.dtype == dtype:
                return lambda tensors: torch.empty_like(tensors[place])
            return lambda tensors: torch.empty_like(tensors[place], dtype=dtype)
    return lambda tensors: torch.empty_strided(shape, strides, dtype=dtype, device=device)
